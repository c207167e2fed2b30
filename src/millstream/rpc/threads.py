"""Daemon threads for calls that may take long or never return: they block neither the event loop nor the program's exit.

The standard library's pool joins its threads when the interpreter exits; these are not joined.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any, TypeVar

T = TypeVar("T")
Job = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]
CLOSE_S = 10.0


class CallTimeout(TimeoutError):
    """A call took longer than its limit. A `TimeoutError` that the call itself raises is none."""


@asynccontextmanager
async def call_limit(timeout_s: float | None) -> AsyncIterator[None]:
    """Raises `CallTimeout` when the time is up."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise CallTimeout(f"longer than {timeout_s:g} s") from error


class DaemonThreads:
    """Runs at most `most` calls at a time; others wait in FIFO order. A call that exceeded its timeout keeps its thread until
    it returns, and another thread takes its place. `within`: a context that each call runs in."""

    def __init__(
        self, name: str, *, most: int, within: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._name = name
        self._within = within
        self._free = asyncio.Semaphore(most)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._lock = threading.Lock()

    async def call(self, function: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Returns what the function returns, raises what it raises; `CallTimeout` if it takes longer, from its start."""
        async with self._free:
            loop = asyncio.get_running_loop()
            done: asyncio.Future[T] = loop.create_future()
            with self._lock:
                is_thread_needed = not self._num_idle
                self._num_idle -= not is_thread_needed
            if is_thread_needed:
                self._threads.append(threading.Thread(target=self._work, daemon=True, name=self._name))
                self._threads[-1].start()
            self._jobs.put((function, done, loop))
            async with call_limit(timeout_s):
                return await done

    async def close(self) -> None:
        """Let running calls finish, for `CLOSE_S` at most: a daemon thread that is inside a library when the interpreter exits
        may crash it."""
        self.let_go()
        await asyncio.to_thread(self._join)

    def let_go(self) -> None:
        """Threads end when their calls do; this does not wait for them."""
        for _ in self._threads:
            self._jobs.put(None)

    def _join(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, done, loop = job
            value, error = None, None
            try:
                with self._within():
                    value = function()
            except BaseException as raised:  # thread boundary: raised in the caller
                error = raised
            with self._lock:
                self._num_idle += 1
            with suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(_settle, done, value, error)


async def on_a_thread(name: str, function: Callable[[], T]) -> T:
    """One call on a new thread, which ends with the call. Not for one that starts processes which end with their thread."""
    threads = DaemonThreads(name, most=1)
    try:
        value: T = await threads.call(function)
        return value
    finally:
        threads.let_go()


def _settle(done: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(value)
    else:  # a future refuses StopIteration
        done.set_exception(RuntimeError(f"raised {error!r}") if isinstance(error, StopIteration) else error)
