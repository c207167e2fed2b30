"""The time limit of a rollout. It can be paused: waiting for other rollouts is not the rollout's own time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType


class Limit:
    """A time limit, entered once. While one or more `paused` blocks are open it is suspended; when the last of them ends, the
    remaining time counts again."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._first = asyncio.get_running_loop().time() + seconds
        self._timeout = asyncio.timeout_at(self._first)
        self._num_pauses = 0
        self._left = 0.0

    @property
    def paused_s(self) -> float:
        """Seconds that did not count so far."""
        return (self._timeout.when() or self._first) - self._first

    async def __aenter__(self) -> Limit:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, trace)

    def is_expired(self) -> bool:
        return self._timeout.expired()

    @contextmanager
    def paused(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        if not self._num_pauses:
            self._left = (self._timeout.when() or self._first) - loop.time()
            self._reschedule(None)
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            if not self._num_pauses:
                self._reschedule(loop.time() + self._left)

    def _reschedule(self, deadline: float | None) -> None:
        with suppress(RuntimeError):  # the limit has ended, and a task that the environment started is still running
            self._timeout.reschedule(deadline)
