"""The gate of lockstep (max_lag = 0): makes the composition of decode batches depend on ids, never on timing.

Requests wait at the gate until every rollout in flight waits there and nothing else can move: no group is being settled, and
no other prompt may start. Then all of them reach the engines at once, in the order of their keys. Rewards may take as long as
they like; retries, replacements and later turns pass with the next opening. With that, a step at max_lag = 0 is bit for bit
what a plain generate-then-train loop computes.

All that `PipelineConfig.is_in_lockstep` changes:
- Requests: the gate (`policy.gate_for`); seeds are functions of ids in every run (`seeds.py`). The router keeps no queue and
  uses no measurements (`Router.is_queueing`).
- Versions: no group starts before every engine has the newest one (`SchedulingPolicy.may_start`), and all engines load at once
  (`WeightSync`). Evaluations have the engines to themselves (`run/evaluate.py`).
- Batches: groups are taken and set aside in the order of their ids (`admission_for`, `GroupFinalizer.set_aside_in_order`);
  stages read whole groups (`stages.py`, `schema.py`).
- Passes: sizes are kept by resumes (`run/sizes.py`) and never lowered (`is_fixed`), no speculative tokens (`run/config.py`).
- Refused: engines that do not repeat, adding and removing engines, `max_concurrent` below a batch (`run/check.py`,
  `serving/fleet.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from millstream.engine import Engine
from millstream.errors import EngineGone
from millstream.pipeline.context import RunContext
from millstream.serving.router import Router
from millstream.types import RequestKey


class Gate:
    def __init__(self, router: Router, context: RunContext) -> None:
        self._router = router
        self._context = context
        self._waiting: dict[RequestKey, asyncio.Future[None]] = {}

    async def pass_through(self, key: RequestKey) -> None:
        """Wait for the next opening. What the caller does up to its next suspension is done in the order of keys."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = opened
        self._context.notifier.notify()
        try:
            await opened
        finally:
            self._waiting.pop(key, None)

    @property
    def num_waiting(self) -> int:
        return len({(key.group_id, key.member) for key in self._waiting})

    async def run(self, is_quiet: Callable[[], bool]) -> None:
        """Consumes requests that wait. Produces requests on the engines, in the order of their keys. Waits until some request
        waits and nothing else can move (`is_quiet`). Ended by: rollouts that wait or leave, groups that are settled."""
        while True:
            await self._context.notifier.until(lambda: bool(self._waiting) and is_quiet())
            for engine in self._router.engines:
                await self._tell(engine, "pause", engine.pause())
            for key in sorted(self._waiting):
                if not self._waiting[key].done():
                    self._waiting[key].set_result(None)
            self._waiting.clear()
            await asyncio.sleep(0)  # every caller runs once, in that order, and queues its request
            for engine in self._router.engines:
                await self._tell(engine, "resume", engine.resume())

    async def _tell(self, engine: Engine, what: str, work: Awaitable[None]) -> None:
        """The requests of an engine that is gone are moved by the router, if there is another."""
        try:
            await self._context.waits.on("the gate", f"{engine.name} to {what}", work)
        except EngineGone as error:
            self._router.lose(engine, error)
