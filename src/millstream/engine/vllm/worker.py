"""The worker process of a vLLM engine: AsyncLLM behind the commands and reports of `engine.native.worker`, on an event loop.

vLLM does not report which weights sampled a token. That every token has the right version follows from the order of five steps:

1. the core is paused. It confirms after the last step that was running is out, and its messages keep their order;
2. a marker is put into vLLM's output queue behind everything that has come: when vLLM takes it out, all that was sampled has
   reached its request;
3. these outputs are recorded under the old version: no request has anything left that was sampled before;
4. the weights, which vLLM's workers have fetched before, are loaded;
5. from here on it is the new version, and the core is resumed.

Keys and values of requests in flight are kept, or dropped and computed again (`engine.on_update`). Kept ones are shared with no
request of a later version: the version is part of what the prefix cache looks for, and a request without a token yet begins
again.

vLLM stamps its outputs with the time at which they were sampled. A token that is older than the weights it is about to be
recorded for breaks the engine: the order is also checked.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from millstream import folders
from millstream.decoding import decode_json
from millstream.engine.base import SPAN_S
from millstream.engine.native.process import ChannelLink
from millstream.engine.native.strings import DecodeTokens, ends_with_one
from millstream.engine.native.worker import Abort, Add, Close, Command, Load, Pause, Resume, WorkerReport, WorkerSpan
from millstream.engine.request import PartialCompletion, check_request
from millstream.engine.vllm.arguments import VllmSetup, engine_arguments, sampling_parameters, set_environment
from millstream.errors import EngineError, RequestRefused
from millstream.model.adapters import is_adapter
from millstream.model.load import decoder_of, load_tokenizer
from millstream.model.spec import has_own_code
from millstream.rpc.call import ErrorInfo, error_from
from millstream.types import Finish, Request, RequestKey, Sampled
from millstream.weights.transfer import WeightsRef

_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
CORE_EXITED = "vLLM's core ended: its last lines on stderr say why"
CORE_EXIT_S = 1.0  # for vLLM's core to exit by itself before it is killed


Commands = asyncio.Queue[Command | Exception]
"""An exception breaks the worker."""


def serve_vllm(connection: socket.socket) -> None:
    """The life of a worker: until it is closed, or its connection is."""
    link = ChannelLink(connection)
    setup = link.first(VllmSetup)
    if setup is not None:
        asyncio.run(_serve(link, VllmWorker(setup, link.send), has_lines=setup.has_lines))
        link.drain()


async def _serve(link: ChannelLink, worker: VllmWorker, *, has_lines: bool) -> None:
    try:
        if has_lines:
            link.open_lines()  # a client hears where with the first report, when vLLM has started
        await worker.start()
    except Exception as error:  # process boundary: the engine gets the reason
        link.refuse(error)
        return
    commands: Commands = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        is_open = True
        while is_open:
            received: Sequence[Command | Exception]
            try:
                received = link.receive(block=True)
            except Exception as error:  # this thread must not end unheard
                received = [error]
            for command in received:
                is_open = is_open and not isinstance(command, Close | Exception)
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(commands.put_nowait, command)

    link.begin(worker.offer)
    threading.Thread(target=read, name="commands", daemon=True).start()
    await worker.run(commands)


class VllmRequest(PartialCompletion):
    """One request that vLLM is computing."""

    __slots__ = ("has_stop_string", "is_watched", "num_reported", "outputs", "task")

    def __init__(self, request: Request, outputs: Any, *, is_watched: bool) -> None:
        super().__init__(request)
        self.outputs = outputs
        self.is_watched = is_watched
        self.has_stop_string = False
        self.num_reported = 0
        self.task: asyncio.Task[None] | None = None

    def extend(self, output: Any, version: int, decode: DecodeTokens | None = None) -> int:
        """The number of new tokens, up to the one that completes a stop string. An output without tokens may repeat
        log-probabilities: they are not read."""
        before, strings = len(self.tokens), self.request.sampling.stop_strings
        for at, token in enumerate(output.token_ids):
            self.tokens.append(token)
            self.logprobs.append(output.logprobs[at][token].logprob)
            self.versions.append(version)
            if strings and decode is not None and ends_with_one(self.tokens, strings, decode):
                self.has_stop_string = True
                break
        return len(self.tokens) - before

    def take_unreported(self) -> Sampled:
        begin = self.num_reported
        self.num_reported = len(self.tokens)
        return self.since(begin)


class QueueMarker:
    """An entry without outputs for vLLM's output queue: `seen` is done when vLLM reads it, after everything that was put
    before. It has the attributes that vLLM reads of an entry."""

    engine_index = 0
    timestamp = 0.0
    scheduler_stats = None
    weight_version = None

    def __init__(self) -> None:
        self.seen: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def outputs(self) -> tuple[()]:
        if not self.seen.done():
            self.seen.set_result(None)
        return ()


class VllmWorker:
    """Executes commands one after the other, in their order. Everything is on one event loop; `send` is called on it."""

    def __init__(self, setup: VllmSetup, send: Callable[[WorkerReport], None]) -> None:
        self._setup = setup
        self._send_report = send
        self._folder: Path | None = None
        self._decode: DecodeTokens | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._llm: Any = None
        self._version = 0
        self._is_paused = False
        self._loaded_at = 0.0
        self._exit_pipe: tuple[int, ...] = ()
        self._fetched: IO[bytes] | None = None  # a line of every rank of vLLM for every offer
        self._fetched_pipe: tuple[int, ...] = ()
        self._requests: dict[RequestKey, VllmRequest] = {}
        self._numbers = itertools.count()
        self._running = 0
        self._cache_used = 0.0
        self._num_preempted = 0
        self._swap_s = 0.0
        self._tokens_generated = 0
        self._tokens_at_begin = 0
        self._began: float | None = None
        self._report = WorkerReport([], [])
        self._is_due = False

    async def start(self) -> None:
        """Start vLLM with the first weights. Raises what went wrong."""
        set_environment(self._setup)
        self._loop = asyncio.get_running_loop()
        self._folder = folders.make("millstream-vllm-")
        for name, data in self._setup.files.items():
            (self._folder / name).write_bytes(data)
        if self._setup.has_tokenizer:
            self._decode = decoder_of(load_tokenizer(self._folder, trust_remote_code=has_own_code(self._folder)))
        self._llm = self._make(self._folder)
        try:
            self._exit_pipe = os.pipe()
            await self._llm.collective_rpc("millstream_exit_with", args=(_path_of(self._exit_pipe[0]),))
            self._fetched_pipe = os.pipe()
            self._fetched = os.fdopen(self._fetched_pipe[0], "rb")
            await asyncio.to_thread(self._fetch, self._setup.first)
            await self._llm.collective_rpc("millstream_begin", args=(self._setup.scaling,))
        except BaseException:  # also a cancellation: its processes must not outlive it
            await self._shut_down()
            raise

    async def run(self, commands: Commands) -> None:
        """Until `Close`. If it breaks, or is given an exception, the last report has the reason."""
        self._commands = commands
        try:
            self._send()  # the version, and where it takes requests
            async with asyncio.TaskGroup() as self._group:
                watching = self._group.create_task(self._watch())
                while not isinstance(command := await commands.get(), Close):
                    if isinstance(command, Exception):
                        raise command
                    await self._execute(command)
                self._end(watching)
        except Exception as error:  # the border of the worker: the engine must fail what waits
            self._report.broken = _words(error)
        finally:
            self._send()
            await self._shut_down()

    async def _shut_down(self) -> None:
        llm = self._llm
        llm.output_handler.cancel()  # it would report the end as a failure
        await asyncio.to_thread(llm.shutdown, CORE_EXIT_S)
        llm.shutdown = lambda: None  # vLLM calls it again in its destructor, when the interpreter may be exiting
        for end in self._exit_pipe:  # processes of vLLM that are left exit now
            os.close(end)
        if self._folder is not None:
            folders.remove(self._folder)

    def _make(self, folder: Path) -> Any:
        """Blocks until vLLM's core is ready."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase

        worker = self

        class Statistics(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                worker._note(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None: ...

        arguments = AsyncEngineArgs(**engine_arguments(self._setup, folder))
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[Statistics])

    async def _watch(self) -> None:
        """vLLM's own task ends when its core has died, whether a request waits for it or not."""
        await asyncio.wait({self._llm.output_handler})
        raise EngineError(CORE_EXITED)

    def _end(self, watching: asyncio.Task[None]) -> None:
        watching.cancel()
        for request in list(self._requests.values()):
            self._finish(request, Finish.ABORT)
        self._end_span()

    # ---- commands ------------------------------------------------------------------------------------------------------

    def offer(self, ref: WeightsRef) -> str:
        """vLLM's workers fetch the weights of the next `Load`, while decoding continues. Not on the event loop: returns when
        they are there, the ways by which they came. Raises `EngineError` if they do not fit, and what the fetch raised."""
        found, expected = ({(name, shape) for name, _, shape in one.layout.tensors} for one in (ref, self._setup.first))
        if self._setup.scaling is not None:
            expected = {(name, shape) for name, shape in expected if is_adapter(name)}
        if differing := found ^ expected:
            raise EngineError(f"the weights do not fit: {sorted({name for name, _ in differing})[:4]}")
        return self._fetch(ref)

    def _fetch(self, ref: WeightsRef) -> str:
        assert self._loop is not None and self._fetched is not None, "it has started"
        arguments = (msgspec.json.encode(ref).decode(), _path_of(self._fetched_pipe[1]))
        fetching = self._llm.collective_rpc("millstream_fetch", args=arguments)
        asyncio.run_coroutine_threadsafe(fetching, self._loop).result()
        lines = [self._fetched.readline() for _ in range(self._setup.vllm.tensor_parallel)]
        ways = dict[str, None]()
        for said in (decode_json(line, str | ErrorInfo) for line in lines):
            if isinstance(said, ErrorInfo):
                raise error_from(said)
            ways[said] = None
        return ", ".join(ways)

    async def _execute(self, command: Command) -> None:
        match command:
            case Add():
                await self._add(command)
            case Abort():
                if command.key in self._requests:
                    await self._abort(self._requests[command.key])
                self._done(command.number)
            case Pause():
                await self._pause_core()
                self._is_paused = True
                self._done(command.number)
            case Resume():
                self._is_paused = False
                await self._resume_core()
                self._done(command.number)
            case Load():
                await self._load(command.version)
                self._done(command.number)

    async def _add(self, command: Add) -> None:
        request = command.request
        if any(key == request.key for key, *_ in (*self._report.finished, *self._report.refused)):
            self._send()  # the end of its last request is reported before the start of the new one
        if request.sampling.stop_strings and self._decode is None:
            self._refuse(request, "stop strings need a tokenizer, and this engine was built without one")
            return
        try:
            check_request(request, self._setup.max_length, num_words=self._setup.num_words, num_adapters=None)
            outputs = await self._queue(request)
        except RequestRefused as error:
            self._refuse(request, str(error))
            return
        except _refusals() as error:
            self._refuse(request, f"vLLM refuses it: {error}")
            return
        added = self._requests[request.key] = VllmRequest(request, outputs, is_watched=command.is_watched)
        added.task = self._group.create_task(self._follow(added))
        self._begin_span()

    def _refuse(self, request: Request, why: str) -> None:
        self._report.refused.append((request.key, why))
        self._send_soon()

    async def _queue(self, request: Request) -> Any:
        """Its outputs. Its prefix is looked for among keys and values of this version only."""
        from vllm.inputs import tokens_input

        prompt = tokens_input(list(request.tokens))
        prompt["cache_salt"] = str(self._version)
        return await self._llm.add_request(str(next(self._numbers)), prompt, sampling_parameters(request))

    async def _begin_again(self, request: VllmRequest) -> None:
        """It has no token yet: its prompt may have been computed in part, under older weights."""
        if request.task is not None:
            request.task.cancel()
        await self._llm.abort(request.outputs.request_id, internal=True)
        request.outputs = await self._queue(request.request)
        request.task = self._group.create_task(self._follow(request))

    async def _abort(self, request: VllmRequest) -> None:
        """vLLM hands out what it has; then it is recorded."""
        await self._llm.abort(request.outputs.request_id, internal=True)
        self._take_all(request)
        if request.finish is None:
            self._finish(request, Finish.ABORT)

    async def _pause_core(self) -> None:
        """After this nothing is sampled, and all that was sampled is recorded. vLLM's `pause_generation` does the same and then
        sleeps 20 ms, in the hope that outputs have come through; the marker makes it certain."""
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        marker = QueueMarker()
        self._llm.engine_core.outputs_queue.put_nowait(marker)
        await asyncio.wait({marker.seen, self._llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
        if not marker.seen.done():
            raise EngineError(CORE_EXITED)
        for request in list(self._requests.values()):
            self._take_all(request)
        self._end_span()

    async def _resume_core(self) -> None:
        await self._llm.resume_generation()
        self._begin_span()

    async def _load(self, version: int) -> None:
        began = time.monotonic()
        await self._pause_core()
        self._loaded_at = time.monotonic()
        await self._llm.collective_rpc("millstream_load")
        self._version = version
        if self._setup.on_update == "keep":
            for request in [one for one in self._requests.values() if not one.tokens]:
                await self._begin_again(request)
        elif not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM kept keys and values of the weights before")
        if not self._is_paused:
            await self._resume_core()
        self._swap_s = time.monotonic() - began

    # ---- outputs -------------------------------------------------------------------------------------------------------

    async def _follow(self, request: VllmRequest) -> None:
        while request.finish is None:
            self._take(request, await request.outputs.get())

    def _take_all(self, request: VllmRequest) -> None:
        while request.finish is None and (output := request.outputs.get_nowait()) is not None:
            self._take(request, output)

    def _take(self, request: VllmRequest, output: Any) -> None:
        (part,) = output.outputs
        if part.token_ids and output.metrics is not None and output.metrics.last_token_ts < self._loaded_at:
            raise EngineError(f"{request.request.key}: a token of weights before version {self._version} came late")
        self._tokens_generated += request.extend(part, self._version, self._decode)
        if request.has_stop_string:
            if not output.finished:
                self._group.create_task(self._llm.abort(request.outputs.request_id, internal=True))
            self._finish(request, Finish.STOP)
        elif output.finished:
            if part.finish_reason not in _FINISHES:
                raise EngineError(f"{request.request.key}: vLLM ended it with {part.finish_reason!r}")
            self._finish(request, _FINISHES[part.finish_reason])
        elif request.is_watched:
            self._report.sampled.append((request.request.key, request.take_unreported()))
            self._send_soon()
        if self._began is not None and time.monotonic() - self._began >= SPAN_S:
            self._end_span()
            self._begin_span()

    def _finish(self, request: VllmRequest, finish: Finish) -> None:
        request.finish = finish
        del self._requests[request.request.key]
        if request.task is not None and request.task is not asyncio.current_task():
            request.task.cancel()
        self._report.finished.append((request.request.key, request.completion()))
        if not self._requests:
            self._end_span()
        self._send_soon()

    def _note(self, scheduler: Any, iteration: Any) -> None:
        if scheduler is not None:
            self._running = scheduler.num_running_reqs
            self._cache_used = scheduler.kv_cache_usage
        if iteration is not None:
            self._num_preempted += iteration.num_preempted_reqs

    # ---- reports -------------------------------------------------------------------------------------------------------

    def _begin_span(self) -> None:
        if self._began is None and self._requests and not self._is_paused:
            self._began = time.monotonic()
            self._tokens_at_begin = self._tokens_generated

    def _end_span(self) -> None:
        if self._began is not None:
            tokens = self._tokens_generated - self._tokens_at_begin
            self._report.spans.append(WorkerSpan(time.monotonic() - self._began, tokens))
            self._began = None
            self._send_soon()

    def _done(self, number: int) -> None:
        self._report.done.append((number, None))
        self._send_soon()

    def _send_soon(self) -> None:
        """Everything of one turn of the event loop is one report."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send_or_break)

    def _send_or_break(self) -> None:
        try:
            self._send()
        except Exception as error:  # the event loop would only log it, and what was in the report is lost
            self._commands.put_nowait(error)

    def _send(self) -> None:
        report = self._report
        self._report = WorkerReport([], [])
        self._is_due = False
        in_flight = len(self._requests)
        report.version = self._version
        report.running = min(self._running, in_flight)
        report.waiting = in_flight - report.running
        report.cache_used = self._cache_used if in_flight else 0.0
        report.tokens_generated = self._tokens_generated
        report.num_preempted = self._num_preempted
        report.swap_s = self._swap_s
        self._send_report(report)


def _path_of(descriptor: int) -> str:
    """By which other processes of this machine open it."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for an invalid request: a ValueError, and in later versions an error of its own."""
    from vllm import exceptions

    return ValueError, getattr(exceptions, "VLLMClientError", ValueError)


def _words(error: BaseException) -> str:
    """Of the first of several: the others are its consequences."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if type(error).__name__ == "EngineDeadError":
        return CORE_EXITED
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
