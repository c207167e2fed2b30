"""The engines of a run on one machine: started, given weights, replaced when one dies, closed.

One engine is called "engine", several "engine-0", "engine-1" and so on. An engine that breaks while others go on is closed, so
that its memory is free, and a new one of the same name takes its place: within a budget, and as soon as it has weights that
were published. With one engine there is nobody to go on: the run ends with its error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millstream.clock import Clock
from millstream.engine import Engine
from millstream.errors import EngineGone
from millstream.events import EventSink, Warned
from millstream.runtime.router import Router
from millstream.types import Weights

MOST_REPLACED = 4
"""Engines, in one life of a run: a machine on which more die has a fault that a new process does not mend."""
Make = Callable[[str], Engine]
Adopt = Callable[[Engine], None]


class Fleet:
    """Must be made on the event loop. `patience_s`: how long requests wait where the last of several engines is gone."""

    def __init__(
        self, make: Make, num: int, *, is_queueing: bool, patience_s: float, clock: Clock, sink: EventSink
    ) -> None:
        self._make, self._clock, self._sink = make, clock, sink
        names = ["engine"] if num == 1 else [f"engine-{number}" for number in range(num)]
        self._engines = {name: make(name) for name in names}
        self.router = Router(
            list(self._engines.values()),
            is_queueing=is_queueing,
            patience_s=patience_s if num > 1 else 0.0,
            clock=clock,
            sink=sink,
        )
        self._lost: asyncio.Queue[Engine] = asyncio.Queue()
        self._num_replaced = 0
        self._making: asyncio.Future[Engine] | None = None
        """The newest one that takes another's place."""
        if num > 1:
            self.router.on_lost = self._lost.put_nowait

    async def load(self, version: int, weights: Weights) -> None:
        """Into all of them. One that is gone is left out, unless it is the last."""

        async def one(engine: Engine) -> None:
            try:
                await engine.load(version, weights)
            except EngineGone as error:
                self.router.lose(engine, error)

        await asyncio.gather(*map(one, self.router.engines))

    async def replace(self, adopt: Adopt) -> None:
        """For ever. Waits for an engine to be lost; whoever finds it broken says so to the router."""
        while True:
            await self._replace(await self._lost.get(), adopt)

    async def _replace(self, lost: Engine, adopt: Adopt) -> None:
        await lost.close()
        if self._num_replaced >= MOST_REPLACED:
            self._warn(f"{lost.name} is not replaced: {MOST_REPLACED} engines were")
            return
        self._num_replaced += 1
        try:
            self._making = asyncio.ensure_future(asyncio.to_thread(self._make, lost.name))
            engine = self._engines[lost.name] = await asyncio.shield(self._making)
        except Exception as error:  # whatever it is (no memory on the device, say), the others go on
            self._warn(f"{lost.name} could not be replaced: {type(error).__name__}: {error}")
        else:
            adopt(engine)

    def _warn(self, message: str) -> None:
        self._sink.emit(Warned(at=self._clock.now(), message=message))

    async def close(self) -> None:
        """All of them, and one that was just being made when `replace` was cancelled."""
        made = [] if self._making is None else await asyncio.gather(self._making, return_exceptions=True)
        engines = {*self._engines.values(), *(one for one in made if not isinstance(one, BaseException))}
        await asyncio.gather(*(engine.close() for engine in engines))
