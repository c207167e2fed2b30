"""Our engine: continuous batching over a Hugging Face model, on a thread of this process or in a process of its own.

A thread shares the interpreter with everything else, which costs little while a decode step is long. Where steps are short
(small models, a laptop) the interpreter's lock becomes the bottleneck, and a process of its own generates about a third
faster (docs/benchmarks.md). The promises and the bits are the same.

If a worker breaks, or its process dies, every request, now and later, gets an `EngineGone` with the reason: an
`EngineMisconfigured` if the worker's own code raised it, while it was built or in a step.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from msgspec import UNSET

from millstream.clock import Clock
from millstream.engine import EngineStats, OnSampled
from millstream.engine.base import EngineLine
from millstream.engine.native.host import ENGINE_START_S, EngineHost
from millstream.engine.native.worker import Abort, Add, Command, Load, Pause, Resume, WorkerReport, WorkerSpan
from millstream.engine.request import check_request
from millstream.errors import (
    EngineError,
    EngineGone,
    EngineMisconfigured,
    MillstreamError,
    RequestRefused,
    WeightsError,
    WorkerExited,
)
from millstream.events import DraftsChecked, EventSink, PathChosen, Span
from millstream.types import Completion, Request, RequestKey, Sampled, Weights

T = TypeVar("T")
CLOSED = "it was closed"
CHECK_S = 1.0


class TorchEngine:
    """See `millstream.engine.Engine` for the promises."""

    def __init__(
        self,
        host: EngineHost,
        *,
        slots: int,
        max_length: int | None,
        clock: Clock,
        sink: EventSink,
        answer_s: float = 300.0,
        name: str = "engine",
    ) -> None:
        self.name = name
        self.slots = slots
        self._answer_s = answer_s
        self._num_reports = 0
        self._num_drafted = 0  # of the last event
        self._num_accepted = 0
        self._way = ""
        self._is_paused = False
        self._watching: asyncio.Task[None] | None = None
        self._host = host
        self._max_length = max_length
        self._clock = clock
        self._sink = sink
        self._version = 0
        self._loading = asyncio.Lock()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._requests: dict[RequestKey, _Waiter[Completion]] = {}
        # Requests whose caller was cancelled and which the worker has not ended yet: their keys may be in use again.
        self._cancelled: Counter[RequestKey] = Counter()
        self._orders: dict[int, _Waiter[None]] = {}
        self._stats = EngineStats(running=0, waiting=0, tokens_generated=0, requests_finished=0)
        self._broken: EngineGone | None = None
        self._line: Future[EngineLine] = Future()
        host.start(self._on_report)

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        check_request(request, self._max_length, num_adapters=None, checks_tokens=False)
        waiter = _Waiter[Completion](on_sampled)
        with self._lock:
            if request.key in self._requests:
                raise EngineError(f"{request.key} is in flight already")
            self._raise_if_broken()
            self._requests[request.key] = waiter
        self._watch()
        self._host.send(Add(request, on_sampled is not None))
        try:
            return await waiter.future
        except asyncio.CancelledError:
            with self._lock:
                is_there = self._broken is None and self._requests.get(request.key) is waiter
                if is_there:
                    del self._requests[request.key]
                    self._cancelled[request.key] += 1
            if is_there:  # else it has ended, and the key may be another's by now
                self._host.send(Abort(-1, request.key))
            raise

    async def abort(self, key: RequestKey) -> None:
        await self._order(lambda number: Abort(number, key))

    async def pause(self) -> None:
        await self._order(Pause)
        self._is_paused = True

    async def resume(self) -> None:
        self._is_paused = False
        await self._order(Resume)

    async def load(self, version: int, weights: Weights) -> None:
        if version < self._version:
            raise EngineError(f"version {version} was offered to an engine at {self._version}: versions never fall")
        await self._loading.acquire()  # one at a time: a host holds one version
        loading = asyncio.create_task(self._load(version, weights))
        loading.add_done_callback(self._end_load)
        await asyncio.shield(loading)  # if the caller is cancelled, the load is still completed, and the next one waits

    async def _load(self, version: int, weights: Weights) -> None:
        self._raise_if_broken()
        try:
            self._way = await asyncio.to_thread(self._host.offer, version, weights)
        except WorkerExited as error:
            self._break(str(error))
            self._raise_if_broken()
        except WeightsError:
            self._raise_if_broken()  # that is the reason, and a retry would not help
            raise
        await self._order(lambda number: Load(number, version))
        self._version = version

    def _end_load(self, loading: asyncio.Task[None]) -> None:
        self._loading.release()
        if not loading.cancelled():
            loading.exception()  # it was raised to the caller, if it still waits

    def stats(self) -> EngineStats:
        return self._stats

    async def line(self) -> EngineLine:
        """Of a worker process that has lines: see `engine.native.lines`."""
        return await asyncio.shield(asyncio.wrap_future(self._line))

    async def close(self) -> None:
        await self._host.close()
        self._break(CLOSED)
        if self._watching is not None:
            self._watching.cancel()

    async def _order(self, make: Callable[[int], Command]) -> None:
        waiter, number = _Waiter[None](), next(self._numbers)
        with self._lock:
            self._raise_if_broken()
            self._orders[number] = waiter
        self._watch()
        try:
            self._host.send(make(number))
            await waiter.future
        finally:
            self._orders.pop(number, None)

    def _watch(self) -> None:
        """An answer is waited for: make sure that a silent worker is noticed."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch_while_busy())

    async def _watch_while_busy(self) -> None:
        """Silence is counted in checks, so that the time of a suspended machine does not count. An engine without any report
        is starting, which takes longer."""
        check_s, num_reports, silent_s = min(CHECK_S, self._answer_s / 4), self._num_reports, 0.0
        while self._requests or self._orders:
            await asyncio.sleep(check_s)
            is_due = bool(self._orders) or not self._is_paused
            silent_s = silent_s + check_s if is_due and num_reports == self._num_reports else 0.0
            num_reports = self._num_reports
            if silent_s >= (self._answer_s if num_reports else max(self._answer_s, ENGINE_START_S)):
                waiting = f"{len(self._requests)} requests and {len(self._orders)} commands wait"
                self._break(f"it has said nothing for {silent_s:.0f} s while {waiting}; engine.answer_s sets the limit")
                return

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    # ---- called on the host's thread -----------------------------------------------------------------------------------

    def _on_report(self, report: WorkerReport) -> None:
        self._num_reports += 1
        with self._lock:
            self._stats = EngineStats(
                running=report.running,
                waiting=report.waiting,
                tokens_generated=report.tokens_generated,
                requests_finished=self._stats.requests_finished + len(report.finished),
                cache_used=report.cache_used,
                swap_s=report.swap_s,
                num_preempted=report.num_preempted,
                num_drafted=report.num_drafted,
                num_accepted=report.num_accepted,
                way=self._way,
            )
            news = [(self._requests.get(key), said) for key, said in report.sampled if not self._cancelled[key]]
            answers = [(self._ended(key), completion) for key, completion in report.finished]
            refusals = [(self._ended(key), RequestRefused(reason)) for key, reason in report.refused]
            orders = [(self._orders.pop(number, None), error) for number, error in report.done]
        _report_tokens([(waiter, sampled) for waiter, sampled in news if waiter is not None])
        _deliver([(waiter, completion, None) for waiter, completion in answers if waiter is not None])
        _deliver([(waiter, None, refused) for waiter, refused in refusals if waiter is not None])
        _deliver([(w, None, None if e is None else EngineError(e)) for w, e in orders if w is not None])
        for span in report.spans:
            self._sink.emit(self._event_of(span))
        if report.spans:
            self._emit_drafts(report)
        if report.path is not None:
            at, path = self._clock.now(), report.path
            self._sink.emit(PathChosen(at=at, worker=self.name, path=path.name, why=path.why))
        if report.line is not None and not self._line.done():
            self._line.set_result(report.line)
        if report.broken is not None:
            self._break(report.broken, EngineMisconfigured if report.is_raised else EngineGone)

    def _event_of(self, span: WorkerSpan) -> Span:
        return Span(
            at=self._clock.now(),
            worker=self.name,
            what="generate",
            seconds=span.seconds,
            num_tokens=span.num_tokens,
            num_steps=UNSET if span.num_steps is None else span.num_steps,
            num_context=UNSET if span.num_context is None else span.num_context,
            num_prompt=UNSET if span.num_prompt is None else span.num_prompt,
        )

    def _emit_drafts(self, report: WorkerReport) -> None:
        num_drafted, num_accepted = report.num_drafted - self._num_drafted, report.num_accepted - self._num_accepted
        if num_drafted:
            now = self._clock.now()
            self._sink.emit(DraftsChecked(at=now, engine=self.name, num_drafted=num_drafted, num_accepted=num_accepted))
        self._num_drafted = report.num_drafted
        self._num_accepted = report.num_accepted

    def _ended(self, key: RequestKey) -> _Waiter[Completion] | None:
        """The waiter of the request that has ended: requests of one key end in the order in which they started."""
        if not self._cancelled[key]:
            del self._cancelled[key]
            return self._requests.pop(key, None)
        self._cancelled[key] -= 1
        return None

    def _break(self, reason: str, kind: type[EngineGone] = EngineGone) -> None:
        with self._lock:
            self._broken = self._broken or kind(f"{self.name} broke: {reason}")
            waiters: list[_Waiter[Any]] = [*self._requests.values(), *self._orders.values()]
            self._requests.clear()
            self._orders.clear()
        if not self._line.done():
            self._line.set_exception(self._broken)
        _deliver([(waiter, None, self._broken) for waiter in waiters])


class _Waiter(Generic[T]):
    """A future with the event loop that it belongs to, and the callback for tokens before it is done."""

    def __init__(self, on_sampled: OnSampled | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.on_sampled = on_sampled
        self.future: asyncio.Future[T] = self.loop.create_future()


_Result = tuple[_Waiter[Any], Any, MillstreamError | None]
_NewTokens = tuple[_Waiter[Completion], Sampled]


def _report_tokens(news: list[_NewTokens]) -> None:
    """Before the results of the same report are delivered: calls into a loop keep their order."""
    for loop in {waiter.loop for waiter, _ in news}:
        with suppress(RuntimeError):  # as below
            loop.call_soon_threadsafe(_call_back, [one for one in news if one[0].loop is loop])


def _call_back(news: list[_NewTokens]) -> None:
    for waiter, sampled in news:
        if waiter.on_sampled is not None and not waiter.future.done():
            waiter.on_sampled(sampled)


def _deliver(results: list[_Result]) -> None:
    """Wake the waiters of each loop with one call into it."""
    for loop in {waiter.loop for waiter, _, _ in results}:
        with suppress(RuntimeError):  # the loop was closed meanwhile: nothing waits any more
            loop.call_soon_threadsafe(_settle, [one for one in results if one[0].loop is loop])


def _settle(results: list[_Result]) -> None:
    for waiter, value, error in results:
        if waiter.future.done():
            continue
        if error is None:
            waiter.future.set_result(value)
        else:
            waiter.future.set_exception(error)
