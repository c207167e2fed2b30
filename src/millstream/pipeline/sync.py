"""Weight sync: every engine of the run loads the newest published version, between two of its decode steps.

The channel owns the newest weights: what the engines start with is published to it before the run, and every version after
its step. One task per engine fetches and loads. An engine that has requests loads while fewer than half of all engines do, so
that the others keep generating; those with the fewest requests load first. One that has none need not wait for the others, as
long as one is left that serves: groups that start at the new version go to engines that have it, and of many engines most may
be idle in the moment of a publication.
Weights that do not arrive are fetched again after a back-off; an engine that never gets them is given up, like one that died.
An engine that starts during the run loads the newest version before it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import islice
from typing import Any, NoReturn

from msgspec import UNSET

from millstream.engine import Engine
from millstream.errors import (
    EngineGone,
    InvariantError,
    StallError,
    WeightsError,
    WeightsUnreachable,
)
from millstream.events import Warned, WeightsLoaded, WeightsPublished
from millstream.pipeline.context import RunContext
from millstream.pipeline.notify import Notifier
from millstream.retry import BackOff
from millstream.serving.router import Router
from millstream.types import Weights
from millstream.weights import WeightChannel

WEIGHTS_BACK_OFF = BackOff(first_s=1.0)  # after weights that did not arrive
MAX_WEIGHTS_FAILED = (
    5  # in a row, of one engine: then it is given up or, if no other serves, the run ends with the error
)


class WeightSync:
    """Publishes versions and loads them into the engines behind the router. `is_in_lockstep`: all engines load at once,
    because nothing is generated meanwhile."""

    def __init__(self, context: RunContext, channel: WeightChannel, router: Router, *, is_in_lockstep: bool) -> None:
        self._context = context
        self._channel = channel
        self._router = router
        self._is_in_lockstep = is_in_lockstep
        self._notifier = Notifier()  # when a task of an engine may have something to do, and not at every group
        router.listeners.append(lambda change: self._notify())
        self._num_requests: dict[Engine, int] = {}  # at the last notification: all compare the same numbers
        self._num_loading = 0
        self._ready: set[Engine] = set()  # that load as soon as there is a newer version and it is their turn
        self._has_warned = False
        self._tasks: dict[Engine, asyncio.Task[None]] = {}  # one for each engine, until it ends
        self._joining: list[Engine] = []
        self._is_stopped = False

    def start(self, version: int) -> None:
        """One task per engine; one that was adopted before has its own. `version`: what the engines serve now."""
        if self._channel.version < version:
            raise InvariantError(
                f"the engines start with version {version}, which has not been published (the channel is at version "
                f"{self._channel.version}): publish it before the pipeline runs"
            )
        for engine in self._router.engines:
            if engine not in self._tasks:
                self._start_task(engine, self.sync)

    async def publish(self, version: int, weights: Weights, began: float) -> None:
        """Produces a version that engines can fetch. `began`: when copying the weights began."""
        await self._context.waits.on(
            "train", f"version {version} to be published", self._channel.publish(version, weights)
        )
        now = self._context.now()
        self._context.emit(WeightsPublished(at=now, version=version, seconds=now - began))
        self._notify()
        self._context.notifier.notify()

    async def sync(self, engine: Engine) -> None:
        """Consumes published versions. Produces an engine that serves them. Waits for a version newer than the engine's, for
        the evaluation that has pinned it, and for its turn to load. Ended by: `publish`, the end of that evaluation, other
        engines that have loaded, the engine that leaves."""
        waits, until = self._context.waits, self._notifier.until
        owner, num_failed = f"sync of {engine.name}", 0
        try:
            while True:
                self._ready.add(engine)
                newer = until(lambda: self._is_behind(engine) or not self._serves(engine))
                with waits.idle(owner, "a newer version"):
                    await newer
                if not self._serves(engine):
                    return
                turn = until(lambda: self._may_load(engine) or not self._serves(engine))
                await waits.on(owner, "its turn to load", turn)
                if not self._serves(engine):
                    return
                if not self._is_behind(engine):
                    continue  # an evaluation has pinned it meanwhile
                self._ready.discard(engine)
                self._num_loading += 1
                try:
                    with self._router.pins.loading(engine):
                        await self._load(engine, owner)
                    num_failed = 0
                except WeightsError as error:
                    num_failed += 1
                    failure = error
                finally:
                    self._num_loading -= 1
                    self._notify()
                    self._context.notifier.notify()
                if num_failed:
                    await self._back_off(engine, owner, failure, num_failed)
        except EngineGone as error:
            self._router.lose(engine, error)
        finally:
            self._ready.discard(engine)
            self._notify()  # it may have been the one that others let load first

    def is_everywhere(self) -> bool:
        """Whether every engine serves the newest version."""
        return self._router.serving_versions() == [self._channel.version]

    async def until_everywhere(self) -> None:
        await self._context.notifier.until(self.is_everywhere)

    def adopt(self, engine: Engine) -> bool:
        """An engine that has started during the run serves as soon as it has loaded the newest weights. False: the run does not
        take it, because it has not begun or is over."""
        if self._context.tasks is None or self._is_stopped:
            return False
        if engine not in self._tasks:
            self._joining.append(engine)
            self._start_task(engine, self._join)
        return True

    def _start_task(self, engine: Engine, work: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        task = self._tasks[engine] = self._context.spawn(work(engine))
        task.add_done_callback(lambda _: self._tasks.pop(engine))

    def stop(self) -> None:
        """No engine is adopted any more."""
        self._is_stopped = True

    def finish(self, *, are_joining_lost: bool) -> None:
        """Training is over: the tasks end. `are_joining_lost`: engines that were adopted and have not joined are replaced."""
        self.stop()
        for task in self._tasks.values():
            task.cancel()
        for engine in self._joining if are_joining_lost else ():
            self._router.report_lost(engine, "training was over before it could join")

    async def _join(self, engine: Engine) -> None:
        """Until it has joined the router it gets no request, and does not count among the engines that load."""
        try:
            await self._load_until_it_has(engine, f"sync of {engine.name}")
        except EngineGone as error:
            self._router.raise_if_final(engine, error)
            self._context.emit(
                Warned(at=self._context.now(), message=f"{engine.name} broke before it could join: {error}")
            )
            self._joining.remove(engine)
            self._router.report_lost(engine, str(error))
            return
        self._joining.remove(engine)
        self._router.join(engine)
        await self.sync(engine)

    async def _load_until_it_has(self, engine: Engine, owner: str) -> None:
        """It may still be starting: a cluster may need longer to place it than the deadline of a wait."""
        num_failed = 0
        while True:
            try:
                await self._load(engine, owner)
                return
            except WeightsError as error:
                num_failed += 1
                await self._back_off(engine, owner, error, num_failed)
            except StallError as error:
                self._give_up(engine, error)

    async def _load(self, engine: Engine, owner: str) -> None:
        waits = self._context.waits
        version, weights = await waits.on(owner, "the weights to arrive", self._channel.fetch())
        began = self._context.now()
        await waits.on(owner, f"{engine.name} to load version {version}", engine.load(version, weights))
        now, way = self._context.now(), engine.stats().way or UNSET
        loaded = WeightsLoaded(at=now, engine=engine.name, version=version, seconds=now - began, way=way)
        self._context.emit(loaded)
        self._router.dispatch()

    async def _back_off(self, engine: Engine, owner: str, error: WeightsError, num_failed: int) -> None:
        """Weights did not arrive (they were superseded, or the process that sent them died): a newer version may, or the same
        one a little later. After `MAX_WEIGHTS_FAILED` in a row the engine is given up."""
        if num_failed > MAX_WEIGHTS_FAILED:
            self._give_up(engine, error)
        if not self._has_warned:
            self._has_warned = True
            message = f"{owner}: {error}; it is tried again, and other engines are not reported"
            self._context.emit(Warned(at=self._context.now(), message=message))
        if isinstance(error, WeightsUnreachable):
            staging = self._channel.restage()
            is_staged = await self._context.waits.on(owner, "weights to be staged again", staging) is not None
            if is_staged and num_failed == 1:  # later ones: the weights are there, and the way to them needs time
                return
        version = self._channel.version
        newer = self._notifier.until(lambda: self._channel.version > version)
        with suppress(TimeoutError):
            async with asyncio.timeout(WEIGHTS_BACK_OFF.wait_s(num_failed)):
                await self._context.waits.on(owner, "weights that arrive", newer)

    def _give_up(self, engine: Engine, error: WeightsError | StallError) -> NoReturn:
        """An engine that does not get its weights counts as gone (`EngineGone`): the fleet decides whether another takes its
        place. Raises the error itself, which ends the run, if no other engine serves."""
        if all(one is engine for one in self._router.engines):
            raise error
        raise EngineGone(f"{engine.name} does not get its weights: {error}") from error

    def _is_behind(self, engine: Engine) -> bool:
        """Whether it is to load a newer version. An engine that is pinned loads none."""
        return self._channel.version > engine.version and not self._router.pins.is_pinned(engine)

    def _notify(self) -> None:
        """An engine's own count includes the requests of rollout workers; the router's, those that were just sent."""
        stats = {engine: engine.stats() for engine in self._router.engines}
        self._num_requests = {
            engine: max(self._router.num_requests(engine), one.running + one.waiting) for engine, one in stats.items()
        }
        self._notifier.notify()

    def _may_load(self, engine: Engine) -> bool:
        if self._is_in_lockstep:
            return True
        has, num = self._num_requests.get(engine, 0), len(self._router.engines)
        places = max(1, num // 2 if has else num - 1) - self._num_loading
        if places < 1:
            return False
        before = (
            one
            for one in self._ready
            if self._num_requests.get(one, 0) < has and self._is_behind(one) and self._serves(one)
        )
        return len(list(islice(before, places))) < places

    def _serves(self, engine: Engine) -> bool:
        return self._router.serves(engine)
