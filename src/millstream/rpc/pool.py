"""A pool of identical workers, one job at a time each, for code that may hang, crash or run out of memory.

Guarantees: a worker that dies, or that is left with an unanswered call (a timeout, a cancelled caller), is killed and replaced,
and takes no other job with it. A job that waits for a free worker waits in FIFO order. No worker outlives the pool.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from millstream.rpc.call import Remote

Start = Callable[[asyncio.AbstractEventLoop], Remote]


class WorkerPool:
    """Workers are started when first needed. They belong to the event loop that needs them: another loop has others."""

    def __init__(self, start: Start, *, size: int, start_s: float, is_eager: bool = False) -> None:
        """`size`: workers at most. `start_s`: limit from the existence of a worker's process until it is ready; the launcher
        bounds the time before (a cluster may need minutes). `is_eager`: whether the successor of a killed worker is started at
        once, and not when it is needed."""
        self._start = start
        self._size = size
        self._start_s = start_s
        self._is_eager = is_eager
        self._loop: asyncio.AbstractEventLoop | None = None
        self._all: set[Remote] = set()
        self._kill_all = weakref.finalize(self, _kill, self._all)

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Remote]:
        """A worker for one job. Raises `TimeoutError` if it is not ready in time, and why it could not be built."""
        self._use_running_loop()
        async with self._free:
            remote = await self._take()
            try:
                yield remote
            finally:
                self._put(remote)

    def _use_running_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            _kill(self._all)
            self._loop = loop
            self._free = asyncio.Semaphore(self._size)
            self._idle: list[Remote] = []

    async def _take(self) -> Remote:
        while self._idle:
            remote = self._idle.pop()
            if remote.error is None:
                break
            self._all.discard(remote)  # it died while it was idle
        else:
            remote = self._started()
        try:
            await asyncio.shield(asyncio.wrap_future(remote.launched))
            async with asyncio.timeout(self._start_s):
                await asyncio.shield(asyncio.wrap_future(remote.ready))
        except asyncio.CancelledError:
            self._idle.append(remote)  # for the next job
            raise
        except BaseException:
            self._discard(remote)
            raise
        return remote

    def _started(self) -> Remote:
        assert self._loop is not None
        remote = self._start(self._loop)
        self._all.add(remote)
        return remote

    def _put(self, remote: Remote) -> None:
        if remote.is_idle:
            self._idle.append(remote)
            return
        self._discard(remote)
        if self._is_eager:
            self._idle.append(self._started())

    def _discard(self, remote: Remote) -> None:
        self._all.discard(remote)
        remote.kill()

    async def close(self) -> None:
        """Returns when every process is gone."""
        ending = [asyncio.wrap_future(remote.exited) for remote in self._all if remote.process is not None]
        _kill(self._all)
        await asyncio.gather(*ending)


def _kill(remotes: set[Remote]) -> None:
    for remote in list(remotes):
        remote.kill()
    remotes.clear()
