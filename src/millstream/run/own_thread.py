"""A run in a thread of its own, where the caller's thread has a running event loop: in a notebook, or in a coroutine.

The run has an event loop of its own there. Only the main thread gets signals: it passes them on (`RunThread.stop`). The
cancellation of a task that awaits the run stops it as Ctrl-C would.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
WAKE_S = 0.5  # a waiting caller wakes up this often: a kernel's interrupt is noticed by a thread or a loop that runs


class RunThread(threading.Thread, Generic[T]):
    """Calls `work`; then `then`, from this thread."""

    def __init__(self, work: Callable[[], T], then: Callable[[], object] = lambda: None) -> None:
        super().__init__(name="run", daemon=True)
        self._work = work
        self._then = then
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.is_over = threading.Event()  # `join` and `is_alive` are wrong after an interrupted `join`
        self._lock = threading.Lock()
        self._asked: list[signal.Signals] = []  # before the run listens
        self._stop_run: Callable[[signal.Signals], object] | None = None

    def run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:  # raised to the caller, who waits
            self._error = error
        finally:
            self.is_over.set()
            self._then()

    def outcome(self) -> T:
        """Of the finished thread. Raises what the work raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """The first time, the run ends after its current batch, with a checkpoint; the second time, now."""
        with self._lock:
            if self._stop_run is None:
                self._asked.append(number)
            else:
                self._stop_run(number)

    def listen(self, stop_run: Callable[[signal.Signals], object] | None) -> None:
        """Called by the run: what stops it from now on; None: it is over."""
        with self._lock:
            self._stop_run = stop_run
            for number in self._asked if stop_run is not None else ():
                assert stop_run is not None
                stop_run(number)
            self._asked = []


def outside_loop(function: Callable[P, T]) -> Callable[P, T]:
    """The function, called in a thread where this one has a running event loop. That loop stands still meanwhile."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return function(*args, **kwargs)
        thread = RunThread(functools.partial(function, *args, **kwargs))
        with _signals_to(thread):
            thread.start()
            while not thread.is_over.is_set():
                try:
                    thread.is_over.wait(WAKE_S)
                except KeyboardInterrupt:  # which a debugger or a notebook may raise here without a signal
                    thread.stop()
            thread.join()
        return thread.outcome()

    return called


@contextmanager
def _signals_to(thread: RunThread[Any]) -> Iterator[None]:
    """Signals stop the run, if this is the main thread: no other gets any."""
    handlers: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError):
            handlers[number] = signal.signal(number, lambda number, frame: thread.stop(signal.Signals(number)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def as_coroutine(function: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The function as one to be awaited: it is called in a thread, and the caller's event loop continues. A task that is
    cancelled meanwhile stops the run, and ends when the run has ended."""

    @functools.wraps(function)
    async def called(*args: P.args, **kwargs: P.kwargs) -> T:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        thread = RunThread(
            functools.partial(function, *args, **kwargs), then=lambda: loop.call_soon_threadsafe(done.set)
        )
        thread.start()
        cancelled: asyncio.CancelledError | None = None
        while not done.is_set():
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(done.wait(), WAKE_S)
            except asyncio.CancelledError as error:
                cancelled = error
                thread.stop()
        thread.join()
        if cancelled is not None:
            raise cancelled
        return thread.outcome()

    return called
