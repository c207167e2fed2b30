"""A condition variable (`Notifier`), and a moment at which no change is half done (`QuiescePoint`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Notifier:
    """A condition variable: `until` waits for a condition, code that changes the state calls `notify`. Nothing polls.

    `notify` evaluates no condition. It wakes every waiter once; each evaluates its own when it runs, so that several
    notifications within one turn of the event loop cost one evaluation."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        if not self._waiters:
            return
        waiters = self._waiters
        self._waiters = []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], T | None]) -> T:
        """The condition's value as soon as that is neither None nor False."""
        while (value := condition()) is None or value is False:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                raise
        return value


class QuiescePoint:
    """A moment at which no change is half done, for state that one change updates in several steps: in memory, in the event
    log, and in a store that may be another process.

    A change makes all of its steps within `async with quiesce:` (not nested). Between `stop` and `resume` no change is in
    progress. While it is not stopped, entering waits for nothing."""

    def __init__(self) -> None:
        self._notifier = Notifier()
        self._num_changing = 0
        self._is_stopped = False

    async def __aenter__(self) -> None:
        if self._is_stopped:
            await self._notifier.until(lambda: not self._is_stopped)
        self._num_changing += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._num_changing -= 1
        self._notifier.notify()

    async def stop(self) -> None:
        """Waits until no change is in progress; none begins before `resume`. One caller at a time."""
        self._is_stopped = True
        try:
            await self._notifier.until(lambda: not self._num_changing)
        except BaseException:  # cancelled: changes must not wait for ever
            self.resume()
            raise

    def resume(self) -> None:
        self._is_stopped = False
        self._notifier.notify()
