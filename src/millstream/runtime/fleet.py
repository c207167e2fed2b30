"""The engines of a run on one machine: started, given weights, replaced when one dies, added and removed, closed.

One engine is called "engine", several "engine-0", "engine-1" and so on. An engine that breaks is closed, so that its memory is
free, and a new one of the same name takes its place: within a budget, and as soon as it has the weights that it should have.
What it was asked goes on elsewhere, or waits for it. Where an engine stands alone and lives on a thread of this process, there
is nothing that could die by itself: the run ends with its error.

Whoever trains takes new engines in (`Adopt`). While nobody does, they get what was loaded last, or serve as they were made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from millstream.clock import Clock
from millstream.engine import Engine
from millstream.errors import ConfigError, EngineError, EngineGone
from millstream.events import EventSink, Warned
from millstream.runtime.router import Router
from millstream.runtime.waits import Pulse
from millstream.types import Weights
from millstream.workers import engine_names

MOST_REPLACED = 5
"""Of one name, within `WINDOW_S`: where more die there is a fault that a new process does not mend."""
WINDOW_S = 600.0
BACK_OFF_S = 1.0
"""Before a replacement; twice as long before the next, unless the last has served for `SERVED_S`."""
SERVED_S = 120.0
MOST_ENGINES = 64
IN_LOCKSTEP = (
    "with pipeline.max_lag = 0 which engine gets which request depends on how many there are: the run would not repeat. Set "
    "engine.replicas and begin anew, or set pipeline.lockstep = false"
)
Make = Callable[[str], Engine]
Adopt = Callable[[Engine], bool]
"""Whether it is taken in."""
InThread = Callable[..., Coroutine[Any, Any, Any]]


class Fleet:
    """Must be made on the event loop. `patience_s`: how long requests wait where no engine is left, but one is to come.
    `is_lone_replaced`: whether an engine is replaced that has no other beside it.

    `why_fixed`: why `scale` is refused, if it is."""

    def __init__(
        self,
        make: Make,
        num: int,
        *,
        is_queueing: bool,
        patience_s: float,
        clock: Clock,
        sink: EventSink,
        is_lone_replaced: bool = False,
        why_fixed: str = "",
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        self._make, self._clock, self._sink, self._in_thread = make, clock, sink, in_thread
        self._patience_s, self._is_lone_replaced = patience_s, is_lone_replaced
        self._why_fixed = why_fixed or ("" if is_queueing else IN_LOCKSTEP)
        engines = [make(name) for name in engine_names(num)]
        self._engines: dict[str, Engine | None] = {engine.name: engine for engine in engines}
        """The newest of each name, None while the first is made. A name leaves when its engine is removed, or given up."""
        self.router = Router(engines, is_queueing=is_queueing, clock=clock, sink=sink)
        self.router.on_lost = self._lose
        self.router.on_joined = lambda engine: self._pulse.notify()
        self._set_patience()
        self._lost: asyncio.Queue[Engine] = asyncio.Queue()
        self._pulse, self._scaling = Pulse(), asyncio.Lock()
        self._replaced_at: dict[str, deque[float]] = {}
        self._loaded: tuple[int, Weights] | None = None
        self._making: set[asyncio.Future[Engine]] = set()
        self._adopt: Adopt = lambda engine: False

    @property
    def _is_replacing(self) -> bool:
        return self._is_lone_replaced or len(self._engines) > 1

    def _set_patience(self) -> None:
        self.router.patience_s = self._patience_s if self._is_replacing else 0.0

    def _lose(self, engine: Engine) -> None:
        if self._is_replacing:
            self._lost.put_nowait(engine)

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def load(self, version: int, weights: Weights) -> None:
        """Into all of them. One that is gone is left out, unless it is the last and not replaced."""
        self.remember(version, weights)

        async def one(engine: Engine) -> None:
            try:
                await engine.load(version, weights)
            except EngineGone as error:
                self.router.lose(engine, error)

        await asyncio.gather(*map(one, self.router.engines))

    def remember(self, version: int, weights: Weights) -> None:
        """What an engine gets that comes while nobody trains. They must not be changed afterwards."""
        self._loaded = version, weights

    def forget(self) -> None:
        """Whoever trains has the weights from now on."""
        self._loaded = None

    # ---- replaced ----------------------------------------------------------------------------------------------------

    async def replace(self, adopt: Adopt) -> None:
        """For ever. Waits for an engine to be lost; whoever finds it broken says so to the router."""
        self._adopt = adopt
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._replace(await self._lost.get()))

    async def _replace(self, lost: Engine) -> None:
        name = lost.name
        try:
            await lost.close()
        except Exception as error:  # it is gone anyway: whoever comes after it must come
            self._warn(f"{name} could not be closed: {type(error).__name__}: {error}")
        while self._engines.get(name) is lost:  # else somebody has removed it, or replaced it
            if not self._may_replace(name):
                self._give_up(name, f"{name} is not replaced: {MOST_REPLACED} were within {WINDOW_S / 60:.0f} minutes")
                return
            await asyncio.sleep(self._back_off_s(name))
            if self._engines.get(name) is not lost:
                return
            self._replaced_at[name].append(self._clock.now())
            try:
                await self._begin(name)
            except Exception as error:  # whatever it is (no memory on the device, say), the others go on
                self._warn(f"{name} could not be replaced: {type(error).__name__}: {error}")

    def _may_replace(self, name: str) -> bool:
        times = self._replaced_at.setdefault(name, deque())
        while times and times[0] <= self._clock.now() - WINDOW_S:
            times.popleft()
        return len(times) < MOST_REPLACED

    def _back_off_s(self, name: str) -> float:
        """By how many have followed each other so closely that none has served for a while."""
        num, later = 0, self._clock.now()
        for at in reversed(self._replaced_at[name]):
            if later - at >= SERVED_S:
                break
            num, later = num + 1, at
        return float(BACK_OFF_S * 2**num)

    def _give_up(self, name: str, why: str) -> None:
        del self._engines[name]
        self._set_patience()
        self._warn(why)
        if not self._engines:
            self.router.abandon(why)
        self._pulse.notify()

    async def _begin(self, name: str) -> None:
        """A new engine of this name, which joins the others as soon as it has its weights."""
        making = asyncio.ensure_future(self._in_thread(self._make, name))
        self._making.add(making)
        engine = await asyncio.shield(making)
        self._making.discard(making)
        if name not in self._engines:  # somebody has removed it meanwhile
            await engine.close()
            return
        before, self._engines[name] = self._engines[name], engine
        if self._adopt(engine):
            return
        try:
            if self._loaded is not None:
                await engine.load(*self._loaded)
        except EngineGone as error:
            self._warn(f"{name} broke before it could join: {error}")
            self._lose(engine)
            return
        except Exception:  # it lives, and cannot have its weights: whoever asked for it decides what then
            self._engines[name] = before
            await engine.close()
            raise
        if not self._adopt(engine):  # training may have begun meanwhile
            self.router.join(engine)

    # ---- added and removed -------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Those that serve, or are to come."""
        return list(self._engines)

    async def scale(self, num: int) -> tuple[list[str], list[str]]:
        """To so many engines. Returns which have joined and which have left, when they have: the newest go first, and what they
        had goes on elsewhere. Raises `ConfigError` if that is not allowed, `EngineError` if one does not start."""
        if self._why_fixed:
            raise ConfigError(self._why_fixed)
        if not 1 <= num <= MOST_ENGINES:
            raise ConfigError(f"engines={num}: expected a number from 1 to {MOST_ENGINES}")
        async with self._scaling:
            left = [await self._take_out() for _ in range(len(self._engines) - num)]
            wanted = [self._new_name() for _ in range(num - len(self._engines))]
            joined = [name for name in wanted if await self._put_in(name)]
            self._set_patience()
            if missing := sorted(set(wanted) - set(joined)):
                raise EngineError(f"{', '.join(missing)} could not be started: the run's events say why")
            return joined, left

    def _new_name(self) -> str:
        """It is taken at once."""
        name = next(name for n in range(2 * MOST_ENGINES) if (name := f"engine-{n}") not in self._engines)
        self._engines[name] = None
        return name

    async def _put_in(self, name: str) -> bool:
        self._set_patience()
        try:
            await self._begin(name)
        except Exception as error:  # as in `_replace`: who is there goes on
            del self._engines[name]
            self._warn(f"{name} could not be started: {type(error).__name__}: {error}")
            return False
        await self._pulse.until(lambda: self._serves(name) or name not in self._engines)
        return self._serves(name)

    def _serves(self, name: str) -> bool:
        return any(engine.name == name for engine in self.router.engines)

    async def _take_out(self) -> str:
        name = list(self._engines)[-1]
        engine = self._engines.pop(name)
        try:
            if self._serves(name):
                await self.router.drain(name)
        finally:  # whoever asked may be gone, and nobody else knows of it any more
            if engine is not None:
                await engine.close()
        return name

    def _warn(self, message: str) -> None:
        self._sink.emit(Warned(at=self._clock.now(), message=message))

    async def close(self) -> None:
        """All of them, and those that were just being made when whoever waited for them was cancelled."""
        made = await asyncio.gather(*self._making, return_exceptions=True)
        engines = {*self._engines.values(), *(one for one in made if not isinstance(one, BaseException))}
        await asyncio.gather(*(engine.close() for engine in engines if engine is not None))
