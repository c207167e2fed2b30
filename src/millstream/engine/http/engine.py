"""Servers as an engine: vLLM, SGLang, `millstream serve`, or anything that speaks OpenAI's API with token ids, over HTTP.

Every answer is a stream. What has come of it is kept, whatever becomes of the connection: the request then goes on behind it
(`Request.num_sampled`), on whichever server is well. A token is taken once, in order, or not at all.

Versions are exact by construction. A server that says the version of every token is believed, within what it was given. For the
others a stream lives within one version: before an update all streams are ended, and go on after it. A server that was
restarted, and so has the weights it began with, is noticed by their name or by its absence, and is given the newest again.

An update of which nothing was heard may take place later. Servers take one after the other, so when a newer one is answered,
none that had begun before it is left; and one that begins later finds nothing to load: older weights are removed before any
server is told of newer ones.

Who waits, and for what: a request for a slot, in the order of the calls; for the gate, which `pause` and `load` close and
`resume` and the end of `load` open; for a server that is well, no longer than its retries allow. A server that does not take
its weights is not used until it does; if none takes them the engine is broken, and everybody is told why.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any

from millstream.clock import Clock
from millstream.engine import EngineStats, OnSampled
from millstream.engine.http.config import HttpConfig
from millstream.engine.http.dialects import Call, Flavour, Piece, flavour_of
from millstream.engine.http.patience import back_off_s
from millstream.engine.http.server import Server, Transient, Unanswered, Unreachable, WrongWeights
from millstream.engine.http.weight_folder import Pushes
from millstream.engine.native.sequence import Answer, check_request
from millstream.errors import EngineError, EngineGone, RequestRefused
from millstream.events import EventSink, Span
from millstream.seeds import derive_seed
from millstream.types import Completion, Finish, Request, RequestKey, Weights

logger = logging.getLogger(__name__)
DRAIN_S = 1.0
"""For a stream to end by itself after its last token, so that its connection can be used again."""
ABORT_S = 2.0
"""For a server to hear that nobody waits for a request any more."""
HOLD_S = 10.0
"""For streams to end after the server was told to end them; then they are cut."""
SPAN_S = 0.25


class Flight(Answer):
    """A request on its way: what has come, and what is still to come."""

    def __init__(self, request: Request, on_sampled: OnSampled | None, *, number: int, rng: random.Random) -> None:
        super().__init__(request)
        self._on_sampled = on_sampled
        self.number = number
        self.rng = rng
        self.num_attempts = 0
        self.num_failures = 0
        """`num_failures`: in a row, without a new token."""
        self.failed_at: Server | None = None
        """Where it failed last."""
        self.task: asyncio.Task[None] | None = None
        self.stream: asyncio.Task[None] | None = None
        self.is_renewing = False
        """Its stream is none: it brings weights to a server."""

    @property
    def name(self) -> str:
        """What servers call it: no two attempts have the same."""
        return f"millstream-{self.number}-{self.num_attempts}"

    def take(self, piece: Piece, versions: Sequence[int]) -> int:
        """How many of these tokens belong to the answer: what comes behind its end does not."""
        begin = len(self.tokens)
        for token, logprob, version in zip(piece.tokens, piece.logprobs, versions, strict=True):
            if self.finish is not None:
                break
            self.append(token, logprob, version)
        if len(self.tokens) > begin:
            self.num_failures = 0
            if self._on_sampled is not None:
                self._on_sampled(self.since(begin))
        return len(self.tokens) - begin


class HttpEngine:
    """See `millstream.engine.Engine` for the promises. `pushes` None: the servers take no weights."""

    def __init__(
        self,
        config: HttpConfig,
        *,
        slots: int,
        max_length: int | None,
        pushes: Pushes | None,
        token: str | None,
        seed: int,
        clock: Clock,
        sink: EventSink,
        name: str = "engine",
    ) -> None:
        self.name = name
        self.slots = slots
        self._config = config
        self._max_length = max_length
        self._seed = seed
        self._clock = clock
        self._sink = sink
        self._flavour: Flavour = flavour_of(config)
        self._pushes = pushes
        self._servers = [Server(url, config, token=token, now=clock.now()) for url in config.urls]
        self._version = 0
        self._newest = 0
        self._flights: dict[RequestKey, Flight] = {}
        self._turns = asyncio.Semaphore(slots)
        self._gate = asyncio.Event()
        self._gate.set()
        self._is_paused = False
        self._is_loading = False
        self._is_ready = False
        self._is_closed = False
        self._changing = asyncio.Lock()
        """Held by whoever changes what the servers have, or whether they are held."""
        self._broken: EngineGone | None = None
        self._num_asked = 0
        self._num_running = 0
        self._num_tokens = 0
        self._num_finished = 0
        self._swap_s = 0.0
        self._began: float | None = None
        self._tokens_at_begin = 0

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._num_running,
            waiting=len(self._flights) - self._num_running,
            tokens_generated=self._num_tokens,
            requests_finished=self._num_finished,
            swap_s=self._swap_s,
        )

    # ---- what the pipeline calls -----------------------------------------------------------------------------------

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        self._check(request)
        key = request.key
        self._num_asked = self._num_asked + 1
        rng = random.Random(derive_seed(self._seed, "http", key.group_id, key.member, key.attempt, key.turn))
        flight = Flight(request, on_sampled, number=self._num_asked, rng=rng)
        self._flights[key] = flight
        flight.task = asyncio.create_task(self._fly(flight))
        try:
            await asyncio.wait({flight.task})
        finally:
            await _cut(flight.task)
            del self._flights[key]
        if not flight.task.cancelled():
            flight.task.result()
        self._num_finished += 1
        return flight.completion()

    async def abort(self, key: RequestKey) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is not None:
            await _cut(flight.task)

    async def pause(self) -> None:
        async with self._changing:
            if not self._is_paused:
                self._raise_if_broken()
                self._is_paused = True
                self._gate.clear()
                await self._hold()

    async def resume(self) -> None:
        async with self._changing:
            if self._is_paused:
                self._is_paused = False
                await self._release()

    async def load(self, version: int, weights: Weights) -> None:
        async with self._changing:
            self._raise_if_broken()
            if version < self._version:
                raise EngineError(f"version {version} was offered to an engine at {self._version}: versions never fall")
            if self._pushes is None:
                raise EngineError('engine.http.weights = "none": its servers take no weights. Set it to "disk"')
            await asyncio.to_thread(self._pushes.write, version, weights)
            await self._get_ready(is_updated_next=True)
            await self._swap(version)

    async def close(self) -> None:
        self._is_closed = True
        for flight in list(self._flights.values()):
            await self.abort(flight.request.key)
        if self._is_paused:
            with suppress(EngineError):
                await self.resume()
        for server in self._servers:
            await server.close()
        if self._pushes is not None:
            await asyncio.to_thread(self._pushes.remove)
        self._end_span()

    def _check(self, request: Request) -> None:
        if self._is_closed:
            raise EngineGone(f"{self.name} is closed")
        self._raise_if_broken()
        if request.key in self._flights:
            raise EngineError(f"{request.key} is in flight already")
        check_request(request, self._max_length)
        if (why := self._flavour.refuses(request.sampling)) is not None:
            raise RequestRefused(f"{request.key}: {why}")

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    # ---- one request -----------------------------------------------------------------------------------------------

    async def _fly(self, flight: Flight) -> None:
        """Until it has its answer. Cancelled by whoever aborts it: what has come is then its answer."""
        async with self._turns:
            self._num_running += 1
            self._begin_span()
            try:
                while flight.finish is None:
                    await self._gate.wait()
                    self._raise_if_broken()
                    if not self._is_ready:
                        async with self._changing:
                            await self._get_ready()
                        continue
                    found = self._choose(flight)
                    if isinstance(found, float):
                        await asyncio.sleep(found)
                    else:
                        flight.is_renewing = not found.has_weights
                        work = self._give_weights(found) if flight.is_renewing else self._stream(flight, found)
                        await self._try(flight, found, work)
            finally:
                self._num_running -= 1
                self._end_span(is_forced=not self._num_running)

    def _choose(self, flight: Flight) -> Server | float:
        """The server with the fewest streams that is well, and not the one that has just failed the request if there is
        another; else how long to wait before looking again."""
        now = self._clock.now()
        well = [server for server in self._servers if not server.breaker.wait_s(now)]
        if not well:
            return min(server.breaker.wait_s(now) for server in self._servers)
        server = min(well, key=lambda one: (one is flight.failed_at, one.num_streams))
        return (server.budget.take(now) if flight.num_failures else 0.0) or server

    async def _try(self, flight: Flight, server: Server, work: Coroutine[Any, Any, None]) -> None:
        """One attempt. Cut short by whoever closes the gate; fails the request if there is no attempt left."""
        server.breaker.sent(self._clock.now())
        server.num_streams += 1
        flight.num_attempts += 1
        flight.stream = asyncio.create_task(work)
        try:
            await asyncio.wait({flight.stream})
        finally:
            await _cut(flight.stream)
            server.num_streams -= 1
            stream = flight.stream
            flight.stream = None
            if stream.cancelled():
                server.breaker.left()
                await self._forget(server, flight.name)
        if stream.cancelled():
            return
        match stream.exception():
            case None:
                server.breaker.succeeded()
                server.budget.succeeded()
            case Transient() as trouble:
                await self._endure(flight, server, trouble)
            case wrong:
                server.breaker.left()
                raise wrong

    async def _endure(self, flight: Flight, server: Server, trouble: Transient) -> None:
        flight.num_failures = flight.num_failures + 1
        flight.failed_at = server
        if server.breaker.failed(self._clock.now()):
            logger.warning("%s: left alone for a while after %s", server.url, trouble)
        if isinstance(trouble, Unreachable | WrongWeights):
            server.has_weights = self._pushes is None
        if flight.num_failures > self._config.retries:
            raise self._break(
                f"{flight.request.key} failed {flight.num_failures} times in a row, at last with: {trouble}. Look whether the "
                "server is up; engine.http.retries and engine.http.timeout_s set the limits"
            ) from trouble
        await asyncio.sleep(max(back_off_s(flight.num_failures, flight.rng), trouble.after_s))

    async def _stream(self, flight: Flight, server: Server) -> None:
        """Take what comes, until the answer is whole."""
        version, num_before, finish = self._version, 0, None
        body = self._flavour.body(flight.request.behind(flight.tokens), model=server.model, name=flight.name)
        async with aclosing(server.events(self._flavour.path, body)) as events:
            async for event in events:
                piece = self._read(server, event, num_before)
                num_before, finish = num_before + len(piece.tokens), piece.finish
                self._num_tokens += flight.take(piece, self._versions(server, piece, version))
                if flight.finish is not None:
                    if self._flavour.stops_by_itself and finish is None:
                        await _drained(events)
                    return
                if finish is not None:
                    break
        if finish in (Finish.ABORT, None) and not self._gate.is_set():
            return  # it was told to end all requests; of one that had no token yet it may say nothing at all
        raise Transient(
            f"{server.url}{self._flavour.path}: the answer ended ({finish or 'without a reason'}) before its length and "
            "without one of the request's stop tokens"
        )

    def _read(self, server: Server, event: dict[str, object], num_before: int) -> Piece:
        try:
            piece = self._flavour.read(event, num_before)
        except (KeyError, TypeError, ValueError, IndexError) as wrong:
            where = f"{server.url}{self._flavour.path}"
            raise Transient(
                f"{where}: not an answer of {self._config.flavour} ({wrong!r}): {str(event)[:300]}"
            ) from wrong
        if len(piece.tokens) != len(piece.logprobs):
            found = f"{len(piece.tokens)} tokens with {len(piece.logprobs)} log-probabilities"
            raise Transient(f"{server.url}{self._flavour.path}: {found}, expected as many")
        return piece

    def _versions(self, server: Server, piece: Piece, version: int) -> list[int]:
        """Of each token. Raises `WrongWeights` if the server has other weights than it was given."""
        if piece.label is not None and self._pushes is not None and piece.label != self._pushes.label(version):
            raise WrongWeights(
                f"{server.url} has the weights {piece.label!r}, expected {self._pushes.label(version)!r}"
            )
        if piece.versions is None:
            return [version] * len(piece.tokens)
        versions = [served - server.base for served in piece.versions]
        if len(versions) != len(piece.tokens) or not all(version <= one <= self._newest for one in versions):
            raise WrongWeights(
                f"{server.url} has versions {versions}, expected {version} to {self._newest}, one for each token"
            )
        return versions

    async def _forget(self, server: Server, name: str) -> None:
        """A connection that we closed ends its request on the server, unless something in between hides that."""
        call = self._flavour.abort(name)
        if call is not None:
            with suppress(Transient, EngineError, RequestRefused, TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    await server.tell(call)

    # ---- the servers' weights, and holding them --------------------------------------------------------------------

    async def _get_ready(self, *, is_updated_next: bool = False) -> None:
        """Once, before anything else: the servers are there, and have the weights that the engine begins with."""
        if self._is_ready:
            return
        try:
            for server in self._servers:
                await self._insist(server, lambda one: one.greet(self._flavour, is_updated=self._pushes is not None))
                server.has_weights = self._pushes is None
            if not is_updated_next and self._pushes is not None:
                await self._each(lambda server: self._insist(server, self._renew))
        except EngineError as wrong:
            raise self._break(str(wrong)) from wrong
        self._is_ready = True

    async def _swap(self, version: int) -> None:
        """All servers to the version that was written last."""
        began = self._clock.now()
        self._newest = version
        self._is_loading = True
        self._gate.clear()
        try:
            if not self._flavour.swaps_in_flight and not self._is_paused:
                await self._hold()
            assert self._pushes is not None
            await asyncio.to_thread(self._pushes.forget_older)
            await self._each(self._push)
            self._version = version
            self._is_loading = False
            await self._release()
        except EngineError as wrong:
            raise self._break(str(wrong)) from wrong
        except asyncio.CancelledError:
            self._break("a load was cancelled halfway")
            raise
        finally:
            self._is_loading = False
            self._swap_s = self._clock.now() - began

    async def _push(self, server: Server) -> None:
        assert self._pushes is not None
        for call in self._flavour.update(self._pushes.newest(server.base)):
            await self._insist(server, lambda one, call=call: one.tell(call))  # type: ignore[misc]
        server.has_weights = True

    async def _give_weights(self, server: Server) -> None:
        """To a server that may have been restarted: the newest, while nothing of ours runs there."""
        async with self._changing:
            if not server.has_weights and self._gate.is_set():
                await self._renew(server)

    async def _renew(self, server: Server) -> None:
        """Whatever else runs there, of an earlier run perhaps, ends first."""
        assert self._pushes is not None
        around = (self._flavour.hold, *self._flavour.update(self._pushes.newest(server.base)), self._flavour.release)
        for call in around:
            if call is not None:
                await server.tell(call)
        server.has_weights = True

    async def _hold(self) -> None:
        """The gate is closed: no stream runs after this."""
        flights = [flight for flight in self._flights.values() if flight.stream is not None]
        streams = [flight.stream for flight in flights if flight.stream is not None]
        for flight in flights:
            if flight.is_renewing and flight.stream is not None:
                flight.stream.cancel()  # it may wait for whoever holds now
        try:
            if self._flavour.hold is not None and self._is_ready and self._pushes is not None:
                await self._each(lambda server: self._tell(server, self._flavour.hold))
                if streams:
                    await asyncio.wait(streams, timeout=HOLD_S)
        finally:
            for stream in streams:
                await _cut(stream)

    async def _release(self) -> None:
        if self._is_paused or self._is_loading:
            return
        if self._flavour.release is not None and self._is_ready and self._pushes is not None:
            await self._each(lambda server: self._tell(server, self._flavour.release))
        self._gate.set()

    async def _tell(self, server: Server, call: Call | None) -> None:
        await self._insist(server, lambda one: one.tell(_there(call)))

    async def _each(self, work: Callable[[Server], Awaitable[None]]) -> None:
        """All servers at once. One that fails is not used again before it was given the newest weights; if all fail, the first
        error is raised."""
        found = await asyncio.gather(*(work(server) for server in self._servers), return_exceptions=True)
        for server, error in zip(self._servers, found, strict=True):
            if error is None:
                continue
            if not isinstance(error, EngineError) or all(found) or not self._is_ready:
                raise error
            server.has_weights = False
            logger.warning("%s is not used until it has the newest weights: %s", server.url, error)

    async def _insist(self, server: Server, work: Callable[[Server], Awaitable[object]]) -> None:
        """Again and again, within the retries; but an update that was not answered in time is not asked for once more. Whatever
        it comes to is an `EngineError`."""
        rng, num_failures = random.Random(derive_seed(self._seed, "http", server.url)), 0
        while True:
            try:
                await work(server)
                return
            except RequestRefused as wrong:
                raise EngineError(str(wrong)) from wrong
            except Unanswered as unknown:
                raise EngineError(f"{unknown}. Look what the server does, or set that higher") from unknown
            except Transient as trouble:
                num_failures += 1
                if num_failures > self._config.retries:
                    raise EngineError(
                        f"{trouble}. It failed {num_failures} times in a row: look whether the server is up"
                    ) from trouble
                await asyncio.sleep(max(back_off_s(num_failures, rng), trouble.after_s))

    def _break(self, why: str) -> EngineGone:
        """For good: what the servers have is not known, or none answers. Everybody who waits at the gate is let through, to be
        told."""
        self._broken = self._broken or EngineGone(f"{self.name} broke: {why}")
        self._gate.set()
        return self._broken

    # ---- what was done, as spans -----------------------------------------------------------------------------------

    def _begin_span(self) -> None:
        if self._began is None:
            self._began = self._clock.now()
            self._tokens_at_begin = self._num_tokens

    def _end_span(self, *, is_forced: bool = True) -> None:
        now = self._clock.now()
        if self._began is None or (not is_forced and now - self._began < SPAN_S):
            return
        num_tokens = self._num_tokens - self._tokens_at_begin
        self._sink.emit(
            Span(at=now, worker=self.name, what="generate", seconds=now - self._began, num_tokens=num_tokens)
        )
        self._began = None
        if self._num_running:
            self._begin_span()


async def _cut(task: asyncio.Task[None]) -> None:
    """Cancel it, and wait until it has ended. What it raised is for whoever asks it."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _drained(events: AsyncGenerator[Any, None]) -> None:
    """Read to the end, if that comes soon."""
    with suppress(TimeoutError, Transient, RequestRefused):
        async with asyncio.timeout(DRAIN_S):
            async for _ in events:
                pass


def _there(call: Call | None) -> Call:
    assert call is not None
    return call
