"""Time, passed in. The real clock runs on the machine's; the virtual clock jumps to the next timer and repeats exactly.

On the virtual clock a coroutine that uses only asyncio (sleep, timeout, futures) takes no real time, and the same program
gives the same schedule, byte for byte. When nothing can ever happen again it raises `Deadlock` instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from millstream.errors import Deadlock

T = TypeVar("T")


class Clock(Protocol):
    """Seconds since the start of the run. May be called from any thread; never goes backwards."""

    def now(self) -> float: ...


class RealClock:
    def __init__(self, start: float = 0.0) -> None:
        self._origin = time.monotonic() - start

    def now(self) -> float:
        return time.monotonic() - self._origin


class VirtualClock:
    """Reads the time of the virtual loop that runs it (see `run_virtual`)."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


class _Jump(selectors.SelectSelector):
    """A selector that never sleeps: it moves the clock by the time that it was asked to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("every task waits and no timer is set: nothing can ever happen again")
        self.now += max(timeout, 0.0)
        return super().select(0) if len(self.get_map()) > 1 else []  # the first is the loop's own pipe


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run_virtual(program: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the virtual clock to its end. Raises what it raises, or `Deadlock`. Ctrl-C cancels it, and is raised
    when it has ended."""
    runner = asyncio.Runner(loop_factory=_VirtualLoop)
    loop = runner.get_loop()
    try:
        return runner.run(program)
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Unwind what was left behind, so that its coroutines do not warn on their way out."""
    pending = asyncio.all_tasks(loop)
    for task in pending:
        task.cancel()
    if pending:
        with suppress(Deadlock):  # a task that refuses to be cancelled is dropped with its loop
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
