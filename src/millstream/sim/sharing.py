"""What engines, the learner and the driver share: each is slower while others work.

A GPU: decode steps take `slowdown` times as long while the learner works, and the learner has `keep` of its rate while an
engine decodes. With 1 and 1 they do not share. A CPU: each of them takes one of its `cores`, and if there are fewer, all of
them get the same share. None: there are enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Sharing:
    def __init__(self, *, slowdown: float = 1.0, keep: float = 1.0, cores: float | None = None) -> None:
        self._slowdown = slowdown
        self._keep = keep
        self._cores = cores
        self._is_training = False
        self._is_driving = False
        self._decoding: set[str] = set()  # names of engines
        self._changed: set[asyncio.Future[None]] = set()  # of the learner and the driver, while they work
        self.listeners: list[Callable[[], None]] = []  # engines: their rate has changed

    @property
    def slowdown(self) -> float:
        """How many times as long decode steps take now."""
        return (self._slowdown if self._is_training else 1.0) / self._speed

    @property
    def _speed(self) -> float:
        """Of each of them, by the number of cores."""
        num_busy = self._is_training + self._is_driving + len(self._decoding)
        return 1.0 if self._cores is None else min(1.0, self._cores / max(1, num_busy))

    def set_decoding(self, engine: str, is_decoding: bool) -> None:
        if is_decoding == (engine in self._decoding):
            return
        was_any = bool(self._decoding)
        (self._decoding.add if is_decoding else self._decoding.discard)(engine)
        if self._cores is not None:
            self._notify()
        elif was_any != bool(self._decoding):
            self._wake()

    def leave(self, engine: str, listener: Callable[[], None]) -> None:
        """The engine will decode no more."""
        if listener in self.listeners:
            self.listeners.remove(listener)
            self.set_decoding(engine, False)

    async def train(self, seconds: float) -> None:
        """Work of the learner that takes so long alone."""
        if (self._slowdown, self._keep, self._cores) == (1.0, 1.0, None):
            await asyncio.sleep(seconds)
            return
        self._set_training(True)
        try:
            await self._advance(seconds, lambda: self._speed * (self._keep if self._decoding else 1.0))
        finally:
            self._set_training(False)

    async def drive(self, seconds: float) -> None:
        """Work of the driver that takes so long alone. It counts as busy until `stop_driving`."""
        self._set_driving(True)
        await self._advance(seconds, lambda: self._speed)

    def stop_driving(self) -> None:
        self._set_driving(False)

    async def _advance(self, seconds: float, rate: Callable[[], float]) -> None:
        loop = asyncio.get_running_loop()
        while seconds > 0:
            began, now_rate, changed = loop.time(), rate(), loop.create_future()
            self._changed.add(changed)
            try:
                done, _ = await asyncio.wait([changed], timeout=seconds / now_rate)
            finally:
                self._changed.discard(changed)
            seconds = seconds - now_rate * (loop.time() - began) if done else 0.0

    def _set_training(self, is_training: bool) -> None:
        self._is_training = is_training
        if self._slowdown != 1.0 or self._cores is not None:
            self._notify()

    def _set_driving(self, is_driving: bool) -> None:
        if is_driving != self._is_driving:
            self._is_driving = is_driving
            self._notify()

    def _notify(self) -> None:
        self._wake()
        for listener in self.listeners:
            listener()

    def _wake(self) -> None:
        for changed in self._changed:
            if not changed.done():
                changed.set_result(None)
