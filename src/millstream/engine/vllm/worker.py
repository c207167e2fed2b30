"""vLLM's AsyncLLM behind the commands and reports of `engine.native.worker`, on an event loop of its own.

vLLM does not say which weights sampled a token. That every token has the right version is a matter of order, in five steps:

1. the core is paused. It says so after the last step that was on its way is out, and its messages keep their order;
2. a marker goes into the queue behind everything that has come: when vLLM takes it out, all that was sampled has reached its
   request;
3. what is there is taken, under the old version: requests have nothing left that was sampled before;
4. the weights are loaded, and what the prefix cache holds of the old ones is dropped;
5. from here on it is the new version, and the core goes on.

vLLM stamps its outputs with the time at which they were sampled. A token that is older than the weights it is about to be
recorded for breaks the engine: the order is not only argued, but checked.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from millstream.engine.base import SPAN_S
from millstream.engine.native.worker import Abort, Add, Close, Command, Load, Pause, Report, Resume
from millstream.engine.request import PartialCompletion
from millstream.engine.vllm.arguments import Plan, engine_arguments, environment, sampling_parameters
from millstream.errors import EngineError
from millstream.types import Finish, Request, RequestKey, Sampled

Tell = Callable[[Report], None]
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
DEAD = "vLLM's core ended: what it wrote last says why"
END_S = 1.0
"""What vLLM's core has to end by itself before it is killed."""


class Flight(PartialCompletion):
    """One request on its way."""

    __slots__ = ("is_watched", "num_told", "outputs", "task")

    def __init__(self, request: Request, outputs: Any, *, is_watched: bool) -> None:
        super().__init__(request)
        self.outputs = outputs
        self.is_watched = is_watched
        self.num_told = 0
        self.task: asyncio.Task[None] | None = None

    def extend(self, output: Any, version: int) -> int:
        """The tokens that are new. An output without any may bring log-probabilities again: they are not looked at."""
        tokens = output.token_ids
        if tokens:
            self.tokens += tokens
            self.logprobs += (output.logprobs[at][token].logprob for at, token in enumerate(tokens))
            self.versions += [version] * len(tokens)
        return len(tokens)

    def news(self) -> Sampled:
        begin = self.num_told
        self.num_told = len(self.tokens)
        return self.since(begin)


class Marker:
    """Stands in vLLM's queue of outputs, and says when it is looked at. It has what vLLM reads of an output."""

    engine_index, timestamp = 0, 0.0
    scheduler_stats = weight_version = None

    def __init__(self) -> None:
        self.seen: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def outputs(self) -> tuple[()]:
        if not self.seen.done():
            self.seen.set_result(None)
        return ()


class VllmWorker:
    """Carries commands out one after the other, in their order. Everything is on one event loop; reports are told on it."""

    def __init__(self, plan: Plan, tell: Tell) -> None:
        self._plan = plan
        self._tell = tell
        self._version = 0
        self._is_paused = False
        self._loaded_at = 0.0
        self._lifeline: tuple[int, ...] = ()
        self._flights: dict[RequestKey, Flight] = {}
        self._numbers = itertools.count()
        self._running = 0
        self._cache_used = 0.0
        self._num_preempted = 0
        self._swap_s = 0.0
        self._tokens_generated = 0
        self._tokens_at_begin = 0
        self._began: float | None = None
        self._report = Report([], [])
        self._is_due = False

    async def run(self, commands: asyncio.Queue[Command]) -> None:
        """Until `Close`. A report says that it is ready; the last one, if it broke, why."""
        llm = None
        try:
            llm = await self._start()
            self._send()
            async with asyncio.TaskGroup() as self._group:
                watching = self._group.create_task(self._watch(llm))
                while not isinstance(command := await commands.get(), Close):
                    await self._obey(llm, command)
                self._end(watching)
        except Exception as error:  # the border of the worker: whoever waits must hear of it
            self._report.broken = _words(error)
        finally:
            self._send()
            if llm is not None:
                llm.output_handler.cancel()  # it would report the end as a failure
                await asyncio.to_thread(llm.shutdown, END_S)
                llm.shutdown = lambda: (
                    None
                )  # it calls it once more when it is forgotten, and the interpreter may be ending
            for end in self._lifeline:  # whoever is left of vLLM's processes ends now
                os.close(end)

    async def _start(self) -> Any:
        with environment(self._plan):
            llm = self._make()
        self._lifeline = os.pipe()
        try:
            await llm.collective_rpc("millstream_stay_while", args=(f"/proc/{os.getpid()}/fd/{self._lifeline[0]}",))
            if self._plan.memory is not None:
                await self._deliver(llm)
        except BaseException:  # whatever it is, cancelled too: its processes must not outlive it
            llm.shutdown(END_S)
            raise
        return llm

    def _make(self) -> Any:
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

        arguments = AsyncEngineArgs(**engine_arguments(self._plan))
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[Statistics])

    async def _watch(self, llm: Any) -> None:
        """vLLM's own task ends when its core has died, whether anybody waits for it or not."""
        await asyncio.wait({llm.output_handler})
        raise EngineError(DEAD)

    def _end(self, watching: asyncio.Task[None]) -> None:
        watching.cancel()
        for flight in list(self._flights.values()):
            self._finish(flight, Finish.ABORT)
        self._end_span()

    # ---- commands ------------------------------------------------------------------------------------------------------

    async def _obey(self, llm: Any, command: Command) -> None:
        match command:
            case Add():
                await self._add(llm, command)
            case Abort():
                if command.key in self._flights:
                    await self._abort(llm, self._flights[command.key])
                self._done(command.number)
            case Pause():
                await self._hold(llm)
                self._is_paused = True
                self._done(command.number)
            case Resume():
                self._is_paused = False
                await self._go_on(llm)
                self._done(command.number)
            case Load():
                await self._load(llm, command.version)
                self._done(command.number)

    async def _add(self, llm: Any, command: Add) -> None:
        from vllm.inputs import tokens_input

        request = command.request
        try:
            parameters, prompt = sampling_parameters(request), tokens_input(list(request.tokens))
            outputs = await llm.add_request(str(next(self._numbers)), prompt, parameters)
        except _refusals() as error:
            self._report.refused.append((request.key, f"vLLM refuses it: {error}"))
            self._send_soon()
            return
        flight = self._flights[request.key] = Flight(request, outputs, is_watched=command.is_watched)
        flight.task = self._group.create_task(self._follow(flight))
        self._begin_span()

    async def _abort(self, llm: Any, flight: Flight) -> None:
        """vLLM gives out what it has; then it is a matter of taking it."""
        await llm.abort(flight.outputs.request_id, internal=True)
        self._take_all(flight)
        if flight.finish is None:
            self._finish(flight, Finish.ABORT)

    async def _hold(self, llm: Any) -> None:
        """After this nothing is sampled, and all that was sampled is recorded. vLLM's `pause_generation` does the same and then
        sleeps 20 ms, in the hope that outputs come through: the marker knows."""
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        marker = Marker()
        llm.engine_core.outputs_queue.put_nowait(marker)
        await asyncio.wait({marker.seen, llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
        if not marker.seen.done():
            raise EngineError(DEAD)
        for flight in list(self._flights.values()):
            self._take_all(flight)
        self._end_span()

    async def _go_on(self, llm: Any) -> None:
        await llm.resume_generation()
        self._begin_span()

    async def _load(self, llm: Any, version: int) -> None:
        began = time.monotonic()
        await self._hold(llm)
        self._loaded_at = time.monotonic()
        await self._deliver(llm)
        if self._plan.vllm.prefix_cache and not await llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM kept keys and values of weights that are no longer there")
        self._version = version
        if not self._is_paused:
            await self._go_on(llm)
        self._swap_s = time.monotonic() - began

    async def _deliver(self, llm: Any) -> None:
        if self._plan.memory is None:
            await llm.collective_rpc("millstream_load_file", args=(self._plan.folder,))
        else:
            layout = msgspec.json.encode(self._plan.layout).decode()
            await llm.collective_rpc("millstream_load_memory", args=(self._plan.memory, layout))

    # ---- outputs -------------------------------------------------------------------------------------------------------

    async def _follow(self, flight: Flight) -> None:
        while flight.finish is None:
            self._take(flight, await flight.outputs.get())

    def _take_all(self, flight: Flight) -> None:
        while flight.finish is None and (output := flight.outputs.get_nowait()) is not None:
            self._take(flight, output)

    def _take(self, flight: Flight, output: Any) -> None:
        (part,) = output.outputs
        if part.token_ids and output.metrics is not None and output.metrics.last_token_ts < self._loaded_at:
            raise EngineError(f"{flight.request.key}: a token of weights before version {self._version} came late")
        self._tokens_generated += flight.extend(part, self._version)
        if output.finished:
            if part.finish_reason not in FINISHES:
                raise EngineError(f"{flight.request.key}: vLLM ended it with {part.finish_reason!r}")
            self._finish(flight, FINISHES[part.finish_reason])
        elif flight.is_watched:
            self._report.sampled.append((flight.request.key, flight.news()))
            self._send_soon()
        if self._began is not None and time.monotonic() - self._began >= SPAN_S:
            self._end_span()
            self._begin_span()

    def _finish(self, flight: Flight, finish: Finish) -> None:
        flight.finish = finish
        del self._flights[flight.request.key]
        if flight.task is not None and flight.task is not asyncio.current_task():
            flight.task.cancel()
        self._report.finished.append((flight.request.key, flight.completion()))
        if not self._flights:
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
        if self._began is None and self._flights and not self._is_paused:
            self._began = time.monotonic()
            self._tokens_at_begin = self._tokens_generated

    def _end_span(self) -> None:
        if self._began is not None:
            tokens = self._tokens_generated - self._tokens_at_begin
            self._report.spans.append((time.monotonic() - self._began, tokens))
            self._began = None
            self._send_soon()

    def _done(self, number: int) -> None:
        self._report.done.append((number, None))
        self._send_soon()

    def _send_soon(self) -> None:
        """What one turn of the event loop brings goes out together."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        report = self._report
        self._report = Report([], [])
        self._is_due = False
        in_flight = len(self._flights)
        report.running = min(self._running, in_flight)
        report.waiting = in_flight - report.running
        report.cache_used = self._cache_used if in_flight else 0.0
        report.tokens_generated = self._tokens_generated
        report.num_preempted = self._num_preempted
        report.swap_s = self._swap_s
        self._tell(report)


def _refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that is wrong: a ValueError, and later an error of its own."""
    from vllm import exceptions

    return ValueError, getattr(exceptions, "VLLMClientError", ValueError)


def _words(error: BaseException) -> str:
    """The first of several that ended together: the others are what it caused."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if type(error).__name__ == "EngineDeadError":
        return DEAD
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
