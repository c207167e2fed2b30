"""The gate of synchronous training (max_lag = 0): makes the composition of decode batches depend on ids, never on timing.

Requests wait at the gate until every living rollout waits there and nothing else can move: no group is being settled, and
no other prompt may enter. Then all of them reach the engines at once, in the order of their keys. Rewards may take
as long as they like; retries, replacements and later turns travel with the next opening. With that, a step at max_lag = 0
is bit for bit what a plain generate-then-train loop computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from millstream.engine import Engine
from millstream.errors import EngineGone
from millstream.pipeline.notify import Notifier
from millstream.pipeline.waits import Waits
from millstream.serving.router import Router
from millstream.types import RequestKey


class Gate:
    def __init__(self, router: Router, pulse: Notifier, waits: Waits) -> None:
        self._router = router
        self._pulse = pulse
        self._waits = waits
        self._waiting: dict[RequestKey, asyncio.Future[None]] = {}

    async def pass_through(self, key: RequestKey) -> None:
        """Wait for the next opening. What the caller does up to its next suspension is done in the order of keys."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = opened
        self._pulse.notify()
        try:
            await opened
        finally:
            self._waiting.pop(key, None)

    @property
    def num_waiting(self) -> int:
        return len({(key.group_id, key.member) for key in self._waiting})

    async def keep(self, is_quiet: Callable[[], bool]) -> None:
        """Open whenever somebody waits and nothing else can move."""
        while True:
            await self._pulse.until(lambda: bool(self._waiting) and is_quiet())
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
        """One that is gone has nothing to be told: the router moves what it had, if there is another."""
        try:
            await self._waits.on("the gate", f"{engine.name} to {what}", work)
        except EngineGone as error:
            self._router.lose(engine, error)
