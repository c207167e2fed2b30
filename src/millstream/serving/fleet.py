"""The engines of a run: started, given weights, replaced when one dies, added and removed, closed.

One engine is called "engine", several "engine-0", "engine-1" and so on. An engine that breaks is closed, so that its memory is
free, and a new one of the same name takes its place: within a budget, and as soon as it has the weights that it should have.
What it was asked goes on elsewhere, or waits for it. Where an engine stands alone and lives on a thread of this process, there
is nothing that could die by itself: the run ends with its error. One that is added and never comes to serve is not replaced:
whoever asked for it is told why.

While a run trains it adopts new engines (`Adopt`). Otherwise a new engine joins with the newest weights (`Fleet.weights`): what
was loaded last, or a channel's; where there are none, it serves as it was made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from millstream.clock import Clock
from millstream.engine import Engine
from millstream.errors import ConfigError, EngineError, EngineGone, MillstreamError
from millstream.events import EventSink, Warned
from millstream.rpc.process import engine_names
from millstream.serving.router import ReplicaChange, Router
from millstream.types import Weights
from millstream.weights import Publication, WeightSource

MAX_REPLACED = 5
"""Of one name, within `WINDOW_S` of service: where more die there is a fault that a new process does not mend."""
WINDOW_S = 600.0
BACK_OFF_S = 1.0
"""Before a replacement; twice as long before the next, unless the last has served for `SERVED_S`."""
SERVED_S = 120.0
MAX_ENGINES = 64
IN_LOCKSTEP = (
    "with pipeline.max_lag = 0 which engine gets which request depends on how many there are: the run would not repeat. Set "
    "engine.replicas and begin anew, or set pipeline.lockstep = false"
)
Make = Callable[[str], Engine]
Adopt = Callable[[Engine], bool]
"""Whether it is taken in."""
InThread = Callable[..., Coroutine[Any, Any, Any]]


class Tries:
    """Engines that were begun in the place of lost ones of one name, within their budget. Time is that of service: what an
    engine waits for its start does not count, and those who never served are forgiven when others have."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: deque[float] = deque()
        """By how much service there had been."""
        self._served_s = 0.0
        self._joined_at: float | None = None

    def begin(self) -> None:
        self._began.append(self._served_s)

    def join(self) -> None:
        self._joined_at = self._clock.now()

    def lose(self) -> None:
        if self._joined_at is not None:
            self._served_s += self._clock.now() - self._joined_at
        self._joined_at = None

    def may_begin(self) -> bool:
        while self._began and self._began[0] <= self._served_s - WINDOW_S:
            self._began.popleft()
        return len(self._began) < MAX_REPLACED

    def back_off_s(self) -> float:
        """By how many have followed each other so closely that none has served for a while."""
        num, later = 0, self._served_s
        for began in reversed(self._began):
            if later - began >= SERVED_S:
                break
            num, later = num + 1, began
        return float(BACK_OFF_S * 2**num)


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
        self._make = make
        self._clock = clock
        self._sink = sink
        self._in_thread = in_thread
        self._patience_s = patience_s
        self._is_lone_replaced = is_lone_replaced
        self._why_fixed = why_fixed or ("" if is_queueing else IN_LOCKSTEP)
        engines = [make(name) for name in engine_names(num)]
        self._engines: dict[str, Engine | None] = {engine.name: engine for engine in engines}
        """The newest of each name, None while the first is made. A name leaves when its engine is removed, or given up."""
        self.router = Router(engines, is_queueing=is_queueing, clock=clock, sink=sink)
        self.router.listeners.append(self._on_change)
        self._set_patience()
        self._lost: asyncio.Queue[Engine] = asyncio.Queue()
        self._scaling = asyncio.Lock()
        self._tries: dict[str, Tries] = {}
        self._adding: dict[str, asyncio.Future[None]] = {}
        """By name: until the first engine of it has joined, or is lost."""
        self.weights: WeightSource | None = (
            None  # what a new engine loads before it serves, while no training adopts it
        )
        self._making: set[asyncio.Future[Engine]] = set()
        self._adopt: Adopt = lambda engine: False

    @property
    def _is_replacing(self) -> bool:
        return self._is_lone_replaced or len(self._engines) > 1

    def _set_patience(self) -> None:
        self.router.patience_s = self._patience_s if self._is_replacing else 0.0

    def _tries_of(self, name: str) -> Tries:
        return self._tries.setdefault(name, Tries(self._clock))

    def _on_change(self, change: ReplicaChange) -> None:
        if change.is_serving:
            self._join(change.engine)
        elif change.is_lost:
            self._lose(change.engine, change.why)

    def _join(self, engine: Engine) -> None:
        if self._engines.get(engine.name) is not engine:  # it was removed meanwhile
            return
        self._tries_of(engine.name).join()
        adding = self._adding.get(engine.name)
        if adding is not None and not adding.done():
            adding.set_result(None)

    def _lose(self, engine: Engine, why: str = "") -> None:
        """Another takes its place, unless it is a new one that never served. `why` "": it will say so when it is asked."""
        if self._engines.get(engine.name) is not engine:  # it was removed, and is closed
            return
        self._tries_of(engine.name).lose()
        adding = self._adding.get(engine.name)
        if adding is not None and not adding.done():
            adding.set_exception(EngineError(why))
        elif self._is_replacing:
            self._lost.put_nowait(engine)

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def load(self, version: int, weights: Weights) -> None:
        """Into all of them. One that is gone is left out, unless it is the last and not replaced."""
        self.weights = Publication(version, weights)

        async def one(engine: Engine) -> None:
            try:
                await engine.load(version, weights)
            except EngineGone as error:
                self.router.lose(engine, error)

        await asyncio.gather(*map(one, self.router.engines))

    # ---- replaced ----------------------------------------------------------------------------------------------------

    async def replace(self, adopt: Adopt) -> None:
        """For ever. Waits for an engine to be lost; whoever finds it broken says so to the router."""
        self._adopt = adopt
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._replace(await self._lost.get()))

    async def _replace(self, lost: Engine) -> None:
        name, tries = lost.name, self._tries_of(lost.name)
        await self._close(lost)
        while self._engines.get(name) is lost:  # else somebody has removed it, or replaced it
            if not tries.may_begin():
                served = f"served for less than {WINDOW_S / 60:.0f} minutes in all"
                self._give_up(name, f"{name} is not replaced: {MAX_REPLACED} were, and {served}")
                return
            await asyncio.sleep(tries.back_off_s())
            if self._engines.get(name) is not lost:
                return
            tries.begin()
            try:
                await self._begin(name)
            except Exception as error:  # whatever it is (no memory on the device, say), the others go on
                self._warn(f"{name} could not be replaced: {type(error).__name__}: {error}")

    async def _close(self, lost: Engine) -> None:
        try:
            await lost.close()
        except Exception as error:  # it is gone anyway: whoever comes after it must come
            self._warn(f"{lost.name} could not be closed: {type(error).__name__}: {error}")

    def _give_up(self, name: str, why: str) -> None:
        self._forget(name)
        self._set_patience()
        self._warn(why)
        if not self._engines:
            self.router.abandon(why)

    def _forget(self, name: str) -> Engine | None:
        """Whoever bears the name later begins with a budget of its own."""
        self._tries.pop(name, None)
        return self._engines.pop(name)

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
            await self._catch_up(engine)
        except EngineGone as error:
            self._warn(f"{name} broke before it could join: {error}")
            self._lose(engine, str(error))
            return
        except Exception:  # it lives, and cannot have its weights: whoever asked for it decides what then
            self._engines[name] = before
            await engine.close()
            raise
        if not self._adopt(engine):  # training may have begun meanwhile
            self.router.join(engine)

    async def _catch_up(self, engine: Engine) -> None:
        """Returns when it has started, and has what was loaded last."""
        await engine.resume()  # it answers as soon as it has started
        loaded: WeightSource | None = None
        while self.weights is not None and self.weights is not loaded:
            loaded = self.weights
            await engine.load(*await loaded.fetch())

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
        if not 1 <= num <= MAX_ENGINES:
            raise ConfigError(f"engines={num}: expected a number from 1 to {MAX_ENGINES}")
        async with self._scaling:
            left = [await self._take_out() for _ in range(len(self._engines) - num)]
            self._set_patience()
            joined = [await self._put_in() for _ in range(num - len(self._engines))]
            return joined, left

    async def _put_in(self) -> str:
        """Returns when it serves. Raises `EngineError` if it does not come to that: it is not tried again."""
        name = next(name for n in range(2 * MAX_ENGINES) if (name := f"engine-{n}") not in self._engines)
        self._engines[name], self._adding[name] = None, asyncio.get_running_loop().create_future()
        self._set_patience()
        try:
            await self._begin(name)
            await self._adding[name]
        except Exception as error:  # as in `_replace`: who is there goes on
            said = str(error) if isinstance(error, MillstreamError) else f"{type(error).__name__}: {error}"
            engine = self._engines[name]
            if engine is not None:
                said = said or await _last_words(engine)
                await self._close(engine)
            why = f"{name} could not be started: {said}"
            self._give_up(name, why)
            raise EngineError(
                f"{why}. It is not tried again, and the run goes on with {', '.join(self._engines) or 'none'}: ask for fewer "
                "engines, or make room for more and ask again"
            ) from error
        finally:
            del self._adding[name]
        return name

    def _serves(self, name: str) -> bool:
        return any(engine.name == name for engine in self.router.engines)

    async def _take_out(self) -> str:
        name = list(self._engines)[-1]
        engine = self._forget(name)
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


async def _last_words(engine: Engine) -> str:
    """Whoever is gone answers every command with why."""
    try:
        await engine.resume()
    except EngineError as error:
        return str(error)
    return "it broke before it could join"
