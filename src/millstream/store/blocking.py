"""A store for code that does not await: its client lives on an event loop in a thread of its own.

line = Line(lambda: StoreClient.connect(address))
row_ids = line.call(line.store.put(7, {"tokens": [...]}))
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")
CLOSE_S = 5.0


class Line(Generic[S]):
    """`connect` is called on the thread's loop. Of one process: not for its children."""

    def __init__(self, connect: Callable[[], Awaitable[S]]) -> None:
        self.pid = os.getpid()
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-line", daemon=True)
        self._thread.start()

        async def connected() -> S:
            return await connect()

        try:
            self.store = self.call(connected())
        except BaseException:  # whatever it is, Ctrl-C too: the thread must not outlive it
            self._stop()
            raise

    def call(self, program: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        future = asyncio.run_coroutine_threadsafe(program, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:  # whatever it is, Ctrl-C too: nobody waits for it any more
            future.cancel()
            raise

    def close(self) -> None:
        if self.is_closed or self.pid != os.getpid():
            return
        close: Callable[[], Coroutine[Any, Any, None]] | None = getattr(self.store, "close", None)
        if close is not None:
            self.call(close(), CLOSE_S)
        self._stop()

    def _stop(self) -> None:
        self.is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._loop.close()
