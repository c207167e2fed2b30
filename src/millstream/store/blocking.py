"""A store for code without `await`: its client runs on an event loop in a thread of its own.

client = BlockingClient(lambda: StoreClient.connect(address))
row_ids = client.call(client.store.put(7, {"tokens": [...]}))
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")
CLIENT_CLOSE_S = 5.0


class BlockingClient(Generic[S]):
    """`connect` is called on the thread's loop. Belongs to one process: not usable in its forked children."""

    def __init__(self, connect: Callable[[], Awaitable[S]]) -> None:
        self.pid = os.getpid()
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-client", daemon=True)
        self._thread.start()

        async def connected() -> S:
            return await connect()

        try:
            self.store = self.call(connected())
        except BaseException:  # also KeyboardInterrupt: the thread must end
            self._stop()
            raise

    def call(self, program: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        future = asyncio.run_coroutine_threadsafe(program, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:  # also KeyboardInterrupt
            future.cancel()
            raise

    def close(self) -> None:
        if self.is_closed or self.pid != os.getpid():
            return
        close: Callable[[], Coroutine[Any, Any, None]] | None = getattr(self.store, "close", None)
        if close is not None:
            self.call(close(), CLIENT_CLOSE_S)
        self._stop()

    def _stop(self) -> None:
        self.is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLIENT_CLOSE_S)
        self._loop.close()
