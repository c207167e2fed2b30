"""GPUs that engines and the learner share: each is slower while the other works.

Decode steps take `slowdown` times as long while the learner works, and the learner has `keep` of its rate while an engine
decodes. With 1 and 1 they do not share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class GpuSharing:
    def __init__(self, *, slowdown: float = 1.0, keep: float = 1.0) -> None:
        self._slowdown = slowdown
        self._keep = keep
        self._is_training = False
        self._decoding: set[str] = set()  # names of engines
        self._changed: asyncio.Future[None] | None = None  # while the learner works
        self.listeners: list[Callable[[], None]] = []  # engines: whether the learner works has changed

    @property
    def slowdown(self) -> float:
        """How many times as long decode steps take now."""
        return self._slowdown if self._is_training else 1.0

    def set_decoding(self, engine: str, is_decoding: bool) -> None:
        was_any = bool(self._decoding)
        (self._decoding.add if is_decoding else self._decoding.discard)(engine)
        if was_any != bool(self._decoding) and self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def leave(self, engine: str, listener: Callable[[], None]) -> None:
        """The engine will decode no more."""
        if listener in self.listeners:
            self.listeners.remove(listener)
            self.set_decoding(engine, False)

    async def train(self, seconds: float) -> None:
        """Work of the learner that takes so long alone."""
        if (self._slowdown, self._keep) == (1.0, 1.0):
            await asyncio.sleep(seconds)
            return
        self._set_training(True)
        try:
            loop = asyncio.get_running_loop()
            while seconds > 0:
                began, rate = loop.time(), self._keep if self._decoding else 1.0
                self._changed = loop.create_future()
                done, _ = await asyncio.wait([self._changed], timeout=seconds / rate)
                seconds = seconds - rate * (loop.time() - began) if done else 0.0
        finally:
            self._changed = None
            self._set_training(False)

    def _set_training(self, is_training: bool) -> None:
        self._is_training = is_training
        if self._slowdown != 1.0:
            for listener in self.listeners:
                listener()
