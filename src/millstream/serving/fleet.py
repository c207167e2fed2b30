"""The engines of a run: started, given weights, replaced when one dies, added and removed, closed.

One engine is called "engine", several "engine-0", "engine-1" and so on. An engine that breaks is closed, so that its memory is
free, and a new one of the same name takes its place: after a back-off, within a budget, and as soon as it has the weights that
it should have. Its requests continue on other engines, or wait for it. Servers, which others restart, are tried again whatever
the budget, at last every `REPLACE_BACK_OFF.longest_s`: the run ends only when requests have waited `patience_s` without any
engine. Where an engine is the only one and runs on a thread of this process, it cannot die by itself: the run ends with its
error. An engine that is added and never comes to serve is not replaced: the caller of `scale` gets the reason.

While a run trains it adopts new engines (`Adopt`). Otherwise a new engine joins with the newest weights (`Fleet.weights`): what
was loaded last, or a channel's; where there are none, it serves as it was made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from millstream.clock import Clock
from millstream.engine import Engine
from millstream.errors import ConfigError, EngineError, EngineGone, MillstreamError
from millstream.events import EventSink, Warned
from millstream.retry import BackOff, Retry
from millstream.rpc.process import engine_names
from millstream.serving.router import ReplicaChange, Router
from millstream.types import Weights
from millstream.weights import Publication, WeightSource

MAX_REPLACED = (
    5  # of one name, without enough service between: more deaths have a cause that a new process does not remove
)
SERVED_S = 120.0  # of service without a failure that forgive one replacement
REPLACE_BACK_OFF = BackOff(first_s=1.0, longest_s=30.0)
MAX_ENGINES = 64
IN_LOCKSTEP = (
    "with pipeline.max_lag = 0 which engine gets which request depends on how many there are: the run would not repeat. Set "
    "engine.replicas and start again, or set pipeline.lockstep = false"
)
MakeEngine = Callable[[str], Engine]
Adopt = Callable[[Engine], bool]  # whether training takes the engine in
RunInThread = Callable[..., Coroutine[Any, Any, Any]]


class Replacements:
    """The engines of one name that took the place of lost ones: within a budget that service restores, `SERVED_S` for each. The
    time until an engine has joined is no service."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._retry = Retry(REPLACE_BACK_OFF, max_failures=MAX_REPLACED)
        self._joined_at: float | None = None

    def on_joined(self) -> None:
        self._joined_at = self._clock.now()

    def on_lost(self) -> None:
        if self._joined_at is not None:
            for _ in range(int((self._clock.now() - self._joined_at) / SERVED_S)):
                self._retry.succeeded()
        self._joined_at = None

    def next_wait_s(self) -> float | None:
        """Before another is made; None: the budget is used up. No more failures than the budget are remembered, so that as much
        service restores it after a long outage as after a short one."""
        wait_s = self._retry.failed(self._clock.now())
        if wait_s is None:
            self._retry.succeeded()
        return wait_s


class Fleet:
    """Must be made on the event loop. `patience_s`: how long requests wait where no engine is left, but one is to come.
    `is_lone_replaced`: whether the only engine is replaced. `is_given_up` False: a name is tried again beyond the budget, too.
    `why_fixed`: why `scale` is refused, if it is."""

    def __init__(
        self,
        make: MakeEngine,
        num: int,
        *,
        is_queueing: bool,
        patience_s: float,
        clock: Clock,
        sink: EventSink,
        is_lone_replaced: bool = False,
        is_given_up: bool = True,
        why_fixed: str = "",
        in_thread: RunInThread = asyncio.to_thread,
    ) -> None:
        self._make = make
        self._clock = clock
        self._sink = sink
        self._in_thread = in_thread
        self._patience_s = patience_s
        self._is_lone_replaced = is_lone_replaced
        self._is_given_up = is_given_up
        self._why_fixed = why_fixed or ("" if is_queueing else IN_LOCKSTEP)
        engines = [make(name) for name in engine_names(num)]
        # The newest of each name, None while the first is made. A name leaves when its engine is removed, or given up.
        self._engines: dict[str, Engine | None] = {engine.name: engine for engine in engines}
        self.router = Router(engines, is_queueing=is_queueing, clock=clock, sink=sink)
        self.router.listeners.append(self._on_change)
        self._set_patience()
        self._lost: asyncio.Queue[Engine] = asyncio.Queue()
        self._scaling = asyncio.Lock()
        self._replacements: dict[str, Replacements] = {}
        self._adding: dict[str, asyncio.Future[None]] = {}  # by name: until its first engine has joined, or is lost
        self.weights: WeightSource | None = None  # a new engine loads them before it serves, unless training adopts it
        self._making: set[asyncio.Future[Engine]] = set()
        self._adopt: Adopt = lambda engine: False

    @property
    def _is_replacing(self) -> bool:
        return self._is_lone_replaced or len(self._engines) > 1

    def _set_patience(self) -> None:
        self.router.patience_s = self._patience_s if self._is_replacing else 0.0

    def _replacements_of(self, name: str) -> Replacements:
        return self._replacements.setdefault(name, Replacements(self._clock))

    def _on_change(self, change: ReplicaChange) -> None:
        if change.is_serving:
            self._join(change.engine)
        elif change.is_lost:
            self._lose(change.engine, change.why)

    def _join(self, engine: Engine) -> None:
        if self._engines.get(engine.name) is not engine:  # it was removed meanwhile
            return
        self._replacements_of(engine.name).on_joined()
        adding = self._adding.get(engine.name)
        if adding is not None and not adding.done():
            adding.set_result(None)

    def _lose(self, engine: Engine, why: str = "") -> None:
        """Another takes its place, unless it is a new one that never served. `why` "": it will say so when it is asked."""
        if self._engines.get(engine.name) is not engine:  # it was removed, and is closed
            return
        self._replacements_of(engine.name).on_lost()
        adding = self._adding.get(engine.name)
        if adding is not None and not adding.done():
            adding.set_exception(EngineError(why))
        elif self._is_replacing:
            self._lost.put_nowait(engine)

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def load(self, version: int, weights: Weights) -> None:
        """Into all of them. One that is gone, or is set up wrong, is left out, unless `Router.lose` raises its error."""
        self.weights = Publication(version, weights)

        async def one(engine: Engine) -> None:
            try:
                await engine.load(version, weights)
            except EngineGone as error:
                self.router.lose(engine, error)

        await asyncio.gather(*map(one, self.router.engines))

    # ---- replaced ----------------------------------------------------------------------------------------------------

    async def replace(self, adopt: Adopt) -> None:
        """Runs until it is cancelled. Waits for engines that the router has lost."""
        self._adopt = adopt
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._replace(await self._lost.get()))

    async def _replace(self, lost: Engine) -> None:
        name, replacements = lost.name, self._replacements_of(lost.name)
        await self._close(lost)
        while self._engines.get(name) is lost:  # else it was removed, or has been replaced
            wait_s = replacements.next_wait_s()
            if wait_s is None and self._is_given_up:
                served = f"served for less than {MAX_REPLACED * SERVED_S / 60:.0f} minutes in all"
                self._give_up(name, f"{name} is not replaced: {MAX_REPLACED} were, and {served}")
                return
            await asyncio.sleep(REPLACE_BACK_OFF.longest_s if wait_s is None else wait_s)
            if self._engines.get(name) is not lost:
                return
            try:
                await self._begin(name)
            except Exception as error:  # any reason (no memory on the device, say): the other engines continue
                self._warn(f"{name} could not be replaced: {type(error).__name__}: {error}")

    async def _close(self, lost: Engine) -> None:
        try:
            await lost.close()
        except Exception as error:  # it is gone in any case: it must be replaced all the same
            self._warn(f"{lost.name} could not be closed: {type(error).__name__}: {error}")

    def _give_up(self, name: str, why: str) -> None:
        self._forget(name)
        self._set_patience()
        self._warn(why)
        if not self._engines:
            self.router.abandon(why)

    def _forget(self, name: str) -> Engine | None:
        """A later engine of this name starts with a budget of its own."""
        self._replacements.pop(name, None)
        return self._engines.pop(name)

    async def _begin(self, name: str) -> None:
        """A new engine of this name, which joins the others as soon as it has its weights."""
        making = asyncio.ensure_future(self._in_thread(self._make, name))
        self._making.add(making)
        engine = await asyncio.shield(making)
        self._making.discard(making)
        if name not in self._engines:  # it was removed meanwhile
            await engine.close()
            return
        before, self._engines[name] = self._engines[name], engine
        if self._adopt(engine):
            return
        try:
            await self._catch_up(engine)
        except EngineGone as error:
            if self.router.is_final(engine, error) and name not in self._adding:
                await self._close(engine)
                self._give_up(name, f"{name} is not replaced: {error}")
                return
            self._warn(f"{name} broke before it could join: {error}")
            self.router.report_lost(engine, str(error))
            return
        except Exception:  # it runs, and cannot get its weights: the caller decides
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
        """Engines that serve, or are to come."""
        return list(self._engines)

    async def scale(self, num: int) -> tuple[list[str], list[str]]:
        """To `num` engines. Returns which have joined and which have left, when they have: the newest leave first, and their
        requests continue elsewhere. Raises `ConfigError` if that is not allowed, `EngineError` if one does not start."""
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
        """Returns when it serves. Raises `EngineError` if it never does: it is not tried again."""
        name = next(name for n in range(2 * MAX_ENGINES) if (name := f"engine-{n}") not in self._engines)
        self._engines[name] = None
        self._adding[name] = asyncio.get_running_loop().create_future()
        self._set_patience()
        try:
            await self._begin(name)
            await self._adding[name]
        except Exception as error:  # as in `_replace`: the other engines continue
            said = str(error) if isinstance(error, MillstreamError) else f"{type(error).__name__}: {error}"
            engine = self._engines[name]
            if engine is not None:
                said = said or await _exit_reason(engine)
                await self._close(engine)
            why = f"{name} could not be started: {said}"
            self._give_up(name, why)
            raise EngineError(
                f"{why}. It is not tried again, and the run continues with {', '.join(self._engines) or 'none'}: ask for fewer "
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
        finally:  # the caller may be cancelled, and nothing else knows of the engine any more
            if engine is not None:
                await engine.close()
        return name

    def _warn(self, message: str) -> None:
        self._sink.emit(Warned(at=self._clock.now(), message=message))

    async def close(self) -> None:
        """All of them, and those that were being made when their caller was cancelled."""
        made = await asyncio.gather(*self._making, return_exceptions=True)
        engines = {*self._engines.values(), *(one for one in made if not isinstance(one, BaseException))}
        await asyncio.gather(*(engine.close() for engine in engines if engine is not None))


async def _exit_reason(engine: Engine) -> str:
    """An engine that is gone answers every command with the reason."""
    try:
        await engine.resume()
    except EngineError as error:
        return str(error)
    return "it broke before it could join"
