"""A server as an engine: vLLM, SGLang, `millstream serve`, or anything that speaks OpenAI's API with token ids, over HTTP.

One engine is one server; several servers are several engines behind the router. Every answer is a stream. The tokens that have
come are kept when the connection breaks, and the request is continued after them (`Request.num_sampled`) on the same server, or
by the router on another one. A token is taken once, in order, or not at all.

Versions are exact by construction. A server that states the version of every token is believed, within what it was given. For
the others a stream stays within one version: before an update all streams are ended, and they are continued after it. A server
that was restarted, and so has the weights it started with, is noticed by their label or by its absence, and is given its
engine's weights again before it is used.

An update without an answer may still be carried out later. Servers carry out one after the other, so when a newer one is
answered, none that started before it is left; and one that starts later finds nothing to load (`weight_folder`).

Waits: a request waits for a slot, in the order of the calls; for the gate, which `pause` and `load` close and `resume` and the
end of `load` open; and, while the server fails, for its next attempt: attempts are one back-off apart, however many requests
wait, until a token comes. After more than `retries` failures, of one request without a new token or of the server without
a success that makes up for them, or after a failed update, the engine is gone: the router moves its requests, and a new engine
uses the server when it answers again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from millstream.clock import Clock
from millstream.engine.base import EngineStats, OnSampled
from millstream.engine.failures import NOT_FORGIVEN, SharedFailures
from millstream.engine.http.config import HttpConfig
from millstream.engine.http.control import ATTEMPT_BACK_OFF, HINT, ServerControl
from millstream.engine.http.dialects import StreamedTokens, dialect_of
from millstream.engine.http.server import ServerConnection, TransientFailure, Unreachable, WrongWeights
from millstream.engine.http.weight_folder import WeightFolder
from millstream.engine.request import PartialCompletion, check_request
from millstream.engine.spans import GenerationSpans
from millstream.errors import EngineError, EngineGone, EngineMisconfigured, RequestRefused
from millstream.events import EventSink
from millstream.types import Completion, Finish, Request, RequestKey, Weights

DRAIN_S = 1.0  # for a stream to end by itself after its last token, so that its connection can be used again
ABORT_S = 2.0  # for a server to take note of an aborted request
HOLD_S = 10.0  # for streams to end after the server was asked to end them; then they are cut


class StreamedRequest(PartialCompletion):
    """A request at the server: what has come, and what is still to come."""

    def __init__(self, request: Request, on_sampled: OnSampled | None, number: int) -> None:
        super().__init__(request)
        self._on_sampled = on_sampled
        self._number = number
        self.num_attempts = 0
        self.num_failures = 0  # in a row, without a new token
        self.task: asyncio.Task[None] | None = None
        self.stream: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Its name at the server: no two attempts share one."""
        return f"millstream-{self._number}-{self.num_attempts}"

    def take(self, new: StreamedTokens, versions: Sequence[int]) -> int:
        """How many of these tokens belong to the answer: what comes after its end does not."""
        begin = len(self.tokens)
        for token, logprob, version in zip(new.tokens, new.logprobs, versions, strict=True):
            if self.finish is not None:
                break
            self.append(token, logprob, version)
        if len(self.tokens) > begin:
            self.num_failures = 0
            if self._on_sampled is not None:
                self._on_sampled(self.since(begin))
        return len(self.tokens) - begin


class HttpEngine:
    """See `millstream.engine.Engine` for the promises. `weights` None: the server takes no weights."""

    def __init__(
        self,
        url: str,
        config: HttpConfig,
        *,
        slots: int,
        max_length: int | None,
        weights: WeightFolder | None,
        token: str | None,
        clock: Clock,
        sink: EventSink,
        name: str = "engine",
    ) -> None:
        self.name = name
        self.slots = slots
        self._config = config
        self._max_length = max_length
        self._clock = clock
        self._dialect = dialect_of(config)
        self._server = ServerConnection(url, config, token)
        self._link = None if weights is None else weights.new_link(name)
        self._version = 0 if self._link is None else self._link.written.version
        self._newest = self._version  # what a server that swaps in flight may have already
        self._control = ServerControl(self._server, self._dialect, self._link, retries=config.retries, clock=clock)
        self._failures = SharedFailures(ATTEMPT_BACK_OFF, config.retries)
        self._recovered = asyncio.Event()
        self._requests: dict[RequestKey, StreamedRequest] = {}
        self._numbers = itertools.count(1)
        self._turns = asyncio.Semaphore(slots)
        self._gate = asyncio.Event()
        self._gate.set()
        self._is_paused = False
        self._is_loading = False
        self._is_closed = False
        self._changing = asyncio.Lock()  # held while the server's weights change, or whether it is held
        self._broken: EngineGone | None = None
        self._num_running = 0
        self._num_tokens = 0
        self._num_finished = 0
        self._swap_s = 0.0
        self._spans = GenerationSpans(name, clock, sink)

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._num_running,
            waiting=len(self._requests) - self._num_running,
            tokens_generated=self._num_tokens,
            requests_finished=self._num_finished,
            swap_s=self._swap_s,
        )

    # ---- the engine's methods ------------------------------------------------------------------------------------------

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        self._check(request)
        streamed = self._requests[request.key] = StreamedRequest(request, on_sampled, next(self._numbers))
        streamed.task = asyncio.create_task(self._run(streamed))
        try:
            await asyncio.wait({streamed.task})
        finally:
            await _cancel(streamed.task)
            del self._requests[request.key]
        if not streamed.task.cancelled():
            streamed.task.result()
        self._num_finished += 1
        return streamed.completion()

    async def abort(self, key: RequestKey) -> None:
        streamed = self._requests.get(key)
        if streamed is not None and streamed.task is not None:
            await _cancel(streamed.task)

    async def pause(self) -> None:
        async with self._changing:
            self._raise_if_broken()
            if not self._is_paused:
                self._is_paused = True
                self._gate.clear()
                await self._or_break(self._hold())

    async def resume(self) -> None:
        """Also waits for a new server: returns when it has answered."""
        async with self._changing:
            self._raise_if_broken()
            await self._or_break(self._control.identify())
            if self._is_paused:
                self._is_paused = False
                await self._or_break(self._release())

    async def load(self, version: int, weights: Weights) -> None:
        async with self._changing:
            self._raise_if_broken()
            if version < self._version:
                raise EngineError(f"version {version} was offered to an engine at {self._version}: versions never fall")
            if self._link is None:
                raise EngineError('engine.http.weights = "none": its server takes no weights. Set it to "disk"')
            await asyncio.to_thread(self._link.write, version, weights)
            await self._or_break(self._control.identify())
            await self._or_break(self._swap(version))

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.gather(*map(self.abort, list(self._requests)))
        if self._is_paused:
            with suppress(EngineError):
                await self.resume()
        await self._server.close()
        if self._link is not None:
            await asyncio.to_thread(self._link.close)
        self._spans.end(self._num_tokens, is_last=True)

    def _check(self, request: Request) -> None:
        if self._is_closed:
            raise EngineGone(f"{self.name} is closed")
        self._raise_if_broken()
        if request.key in self._requests:
            raise EngineError(f"{request.key} is in flight already")
        check_request(request, self._max_length)
        if (why := self._dialect.refuses(request.sampling)) is not None:
            raise RequestRefused(f"{request.key}: {why}")

    # ---- one request -----------------------------------------------------------------------------------------------

    async def _run(self, streamed: StreamedRequest) -> None:
        """Until it has its answer. `abort` cancels it: what has come is then its answer."""
        async with self._turns:
            self._num_running += 1
            self._spans.begin(self._num_tokens)
            try:
                while streamed.finish is None:
                    await self._wait_for_attempt()
                    self._raise_if_broken()
                    mark = self._failures.mark
                    self._failures.reserve(self._clock.now())
                    try:
                        if self._control.is_prepared:
                            await self._stream_in_task(streamed, mark)
                        else:
                            await self._prepare(mark)
                    except TransientFailure as failure:
                        self._fail(streamed, mark, failure)
            finally:
                self._num_running -= 1
                self._spans.end(self._num_tokens, is_last=not self._num_running)

    async def _wait_for_attempt(self) -> None:
        await self._gate.wait()
        while self._broken is None and (wait_s := self._failures.retry_at - self._clock.now()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._recovered.wait()
            await self._gate.wait()

    async def _stream_in_task(self, streamed: StreamedRequest, mark: int) -> None:
        """One attempt, in a task that `_hold` may cancel."""
        streamed.num_attempts += 1
        stream = streamed.stream = asyncio.create_task(self._stream(streamed, mark))
        try:
            await asyncio.wait({stream})
        finally:
            await _cancel(stream)
            streamed.stream = None
            if stream.cancelled() and self._broken is None:  # a broken server may not answer
                await self._abort_at_server(streamed.name)
        if not stream.cancelled():
            stream.result()

    def _fail(self, streamed: StreamedRequest, mark: int, failure: TransientFailure) -> None:
        streamed.num_failures += 1
        self._recovered.clear()
        self._failures.failed(mark, self._clock.now(), failure.after_s)
        if isinstance(failure, Unreachable | WrongWeights):
            self._control.has_weights = self._link is None
        if self._failures.is_used_up or streamed.num_failures > self._config.retries:
            num_failures = max(streamed.num_failures, self._failures.num_failures)
            why = f"{streamed.request.key} failed: {failure}. That is {num_failures} {NOT_FORGIVEN}: {HINT}"
            raise self._break(why) from failure

    def _succeed(self, mark: int) -> None:
        if not self._failures.has_failed_since(mark):
            self._failures.succeeded(mark)
            self._recovered.set()

    async def _stream(self, streamed: StreamedRequest, mark: int) -> None:
        """Take what comes, until the answer is whole."""
        version, finish = self._version, None
        rest = streamed.request.behind(streamed.tokens)
        body = self._dialect.body(rest, model=self._server.model, name=streamed.name)
        async with aclosing(self._server.tokens(self._dialect, body)) as events:
            async for new in events:
                finish = new.finish
                self._num_tokens += streamed.take(new, self._versions(new, version))
                if new.tokens:
                    self._succeed(mark)
                if streamed.finish is not None:
                    if self._dialect.stops_by_itself and finish is None:
                        await _drain(events)
                    return
                if finish is not None:
                    break
        if finish in (Finish.ABORT, None) and not self._gate.is_set():
            return  # all requests were ended by `hold`; of one without a token the server may say nothing at all
        raise TransientFailure(
            f"{self._server.url}{self._dialect.path}: the answer ended ({finish or 'without a reason'}) before its length and "
            "without one of the request's stop tokens"
        )

    def _versions(self, new: StreamedTokens, version: int) -> list[int]:
        """Of each token. Raises `WrongWeights` if the server has other weights than it was given."""
        url = self._server.url
        if self._link is not None and new.label not in (None, self._link.written.label):
            raise WrongWeights(f"{url} has the weights {new.label!r}, expected {self._link.written.label!r}")
        if new.versions is None:
            return [version] * len(new.tokens)
        versions = [served - self._control.version_offset for served in new.versions]
        if len(versions) != len(new.tokens) or not all(version <= one <= self._newest for one in versions):
            expected = f"expected {version} to {self._newest}, one for each token"
            raise WrongWeights(f"{url} has versions {versions}, {expected}")
        return versions

    async def _abort_at_server(self, name: str) -> None:
        """Closing a connection ends its request on the server, unless a proxy hides that."""
        call = self._dialect.abort(name)
        if call is not None:
            with suppress(TransientFailure, EngineError, RequestRefused, TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    await self._server.call(call)

    # ---- the server's weights, and holding it ------------------------------------------------------------------------

    async def _prepare(self, mark: int) -> None:
        async with self._changing:
            if not self._failures.has_failed_since(mark) and self._gate.is_set():  # else another request has tried
                await self._control.prepare()

    async def _swap(self, version: int) -> None:
        """The server to the version that was written last."""
        began = self._clock.now()
        self._newest = version
        self._is_loading = True
        self._gate.clear()
        try:
            if not self._dialect.swaps_in_flight and not self._is_paused:
                await self._hold()
            assert self._link is not None
            await asyncio.to_thread(self._link.move)
            await self._control.update()
            self._version = version
            self._is_loading = False
            await self._release()
        except asyncio.CancelledError:
            self._break("a load was cancelled halfway")
            raise
        finally:
            self._is_loading = False
            self._swap_s = self._clock.now() - began

    async def _hold(self) -> None:
        """The gate is closed: no stream runs after this."""
        streams = [one.stream for one in self._requests.values() if one.stream is not None]
        try:
            await self._control.hold()
            if streams and self._dialect.hold is not None and self._link is not None:
                await asyncio.wait(streams, timeout=HOLD_S)
        finally:
            for stream in streams:
                await _cancel(stream)

    async def _release(self) -> None:
        if self._is_paused or self._is_loading:
            return
        await self._control.release()
        self._gate.set()

    async def _or_break(self, work: Awaitable[None]) -> None:
        """Afterwards it is not known what the server has or does: the engine is gone."""
        try:
            await work
        except EngineMisconfigured as error:
            self._break(str(error))
            raise
        except EngineError as error:
            raise self._break(str(error)) from error

    def _break(self, why: str) -> EngineGone:
        """For good. Requests that wait are let through, and get this error."""
        self._broken = self._broken or EngineGone(f"{self.name} broke: {why}")
        self._gate.set()
        self._recovered.set()
        return self._broken

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken


async def _cancel(task: asyncio.Task[None]) -> None:
    """And wait until it has ended. What it raised is for the owner of the task."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _drain(events: AsyncGenerator[Any, None]) -> None:
    """Read to the end, if that comes soon."""
    with suppress(TimeoutError, TransientFailure, RequestRefused):
        async with asyncio.timeout(DRAIN_S):
            async for _ in events:
                pass
