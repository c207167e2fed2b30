"""The engine of one process: a `Batcher` on a thread of its own, so that generating never waits for the event loop.

Commands (queue a request, abort, pause, load) are carried out between two decode steps, in the order they were given.
If a step raises, the engine is broken: every request, now and later, gets an `EngineError` that says why.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from transformers import PreTrainedModel

from millstream.clock import Clock
from millstream.engine import EngineConfig, EngineStats
from millstream.engine.batching import Batcher, Finished
from millstream.errors import EngineError
from millstream.events import EventSink, Span
from millstream.types import Completion, Request, RequestKey, Weights

SPAN_S = 0.25
"""The longest span of work that is reported as one event."""


class TorchEngine:
    """See `millstream.engine.Engine` for the promises."""

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig, *, clock: Clock, sink: EventSink, name: str = "engine"
    ) -> None:
        self.name = name
        self._batcher = Batcher(model, num_slots=config.slots, prefill_tokens=config.prefill_tokens)
        self._clock, self._sink = clock, sink
        self._waiters: dict[RequestKey, tuple[asyncio.AbstractEventLoop, asyncio.Future[Completion]]] = {}
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._is_paused = False
        self._is_closed = False
        self._broken: EngineError | None = None
        self._requests_finished = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._batcher.version

    async def generate(self, request: Request) -> Completion:
        if request.key in self._waiters:
            raise EngineError(f"{request.key} is in flight already")
        loop = asyncio.get_running_loop()
        completion: asyncio.Future[Completion] = loop.create_future()
        self._batcher.check(request)
        self._waiters[request.key] = (loop, completion)
        self._post(lambda: self._batcher.add(request))
        try:
            return await completion
        except asyncio.CancelledError:
            self._post(lambda: self._deliver(self._batcher.abort(request.key)))
            raise

    async def abort(self, key: RequestKey) -> None:
        await asyncio.wrap_future(self._post(lambda: self._deliver(self._batcher.abort(key))))

    async def pause(self) -> None:
        await asyncio.wrap_future(self._post(self._set_paused))

    def _set_paused(self) -> None:
        self._is_paused = True

    async def resume(self) -> None:
        def run() -> None:
            self._is_paused = False

        await asyncio.wrap_future(self._post(run))

    async def load(self, version: int, weights: Weights) -> None:
        await asyncio.wrap_future(self._post(lambda: self._batcher.load(version, weights)))

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._batcher.running,
            waiting=self._batcher.waiting,
            tokens_generated=self._batcher.tokens_generated,
            requests_finished=self._requests_finished,
        )

    async def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _post(self, command: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        with self._changed:
            if self._broken is not None:
                raise self._broken
            if self._is_closed:
                raise EngineError(f"{self.name} is closed")
            self._commands.append((command, done))
            self._changed.notify()
        return done

    def _work(self) -> None:
        span = _OpenSpan(self._clock, self._sink, self.name)
        try:
            while self._obey(span):
                self._deliver(self._batcher.step())
                span.extend(self._batcher.tokens_generated)
            span.close()
            self._fail(EngineError(f"{self.name} was closed"), as_abort=True)
        except Exception as error:  # the border of the thread: whoever waits must hear of it
            broken = EngineError(f"{self.name} broke: {type(error).__name__}: {error}")
            broken.__cause__ = error
            self._fail(broken)

    def _obey(self, span: _OpenSpan) -> bool:
        """Carry out what was asked, and wait while there is nothing to decode; False when it is time to stop."""
        while True:
            with self._changed:
                is_idle = self._is_paused or not self._batcher.has_work
                if is_idle and not self._commands and not self._is_closed:
                    span.close()
                    self._changed.wait()
                if self._is_closed:
                    return False
                commands = list(self._commands)
                self._commands.clear()
            for command, done in commands:
                try:
                    done.set_result(command())
                except EngineError as error:
                    done.set_exception(error)
            if self._batcher.has_work and not self._is_paused:
                span.open(self._batcher.tokens_generated)
                return True

    def _deliver(self, finished: Finished) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion]]] = {}
        for key, completion in finished:
            loop, waiter = self._waiters.pop(key)
            by_loop.setdefault(loop, []).append((waiter, completion))
            self._requests_finished += 1
        for loop, answers in by_loop.items():
            loop.call_soon_threadsafe(_answer, answers)

    def _fail(self, error: EngineError, *, as_abort: bool = False) -> None:
        with self._changed:
            self._broken = error
            commands, self._commands = self._commands, deque()
        for _, done in commands:
            done.set_exception(error)
        if as_abort:
            for key in list(self._waiters):
                self._deliver(self._batcher.abort(key))
        for loop, waiter in self._waiters.values():
            loop.call_soon_threadsafe(_refuse, waiter, error)
        self._waiters.clear()


def _answer(answers: list[tuple[asyncio.Future[Completion], Completion]]) -> None:
    for waiter, completion in answers:
        if not waiter.done():
            waiter.set_result(completion)


def _refuse(waiter: asyncio.Future[Completion], error: EngineError) -> None:
    if not waiter.done():
        waiter.set_exception(error)


class _OpenSpan:
    """Reports stretches of uninterrupted decoding."""

    def __init__(self, clock: Clock, sink: EventSink, worker: str) -> None:
        self._clock, self._sink, self._worker = clock, sink, worker
        self._begin: float | None = None
        self._tokens = self._seen = 0

    def open(self, tokens: int) -> None:
        if self._begin is None:
            self._begin, self._tokens = self._clock.now(), tokens
        self._seen = tokens

    def extend(self, tokens: int) -> None:
        self._seen = tokens
        if self._begin is not None and self._clock.now() - self._begin >= SPAN_S:
            self.close()

    def close(self) -> None:
        if self._begin is None:
            return
        now = self._clock.now()
        self._sink.emit(
            Span(
                at=now,
                worker=self._worker,
                what="generate",
                seconds=now - self._begin,
                num_tokens=self._seen - self._tokens,
            )
        )
        self._begin = None
