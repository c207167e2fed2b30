"""A critic that outlives its process, by the same book as a learner (`run.replay`).

What differs: a batch begins with the first thing that is told of it, and its part of a checkpoint is in a folder of its own.
Rows may be scored while others are learned from: calls wait for their turn, as they would in the critic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from millstream.clock import Clock
from millstream.events import EventSink
from millstream.learner import RunCritic
from millstream.pipeline.state import CRITIC_FOLDER
from millstream.run.checkpoint import Sealed
from millstream.run.replay import Call, CheckpointView, Replayed
from millstream.types import Floats, Metrics, TrainRow


class CriticSeals:
    """See `millstream.run.replay.CheckpointView`: of a run's checkpoints, the critic's part."""

    def __init__(self, seals: CheckpointView) -> None:
        self._seals = seals

    @property
    def version(self) -> int | None:
        return self._seals.version

    async def newest_sealed(self) -> Sealed | None:
        sealed = await self._seals.newest_sealed()
        return None if sealed is None else Sealed(sealed.version, sealed.folder / CRITIC_FOLDER)

    def hurry(self) -> None:
        self._seals.hurry()


class ReplayedCritic(Replayed[RunCritic]):
    """See `millstream.learner.Critic` for the promises, and `Replayed` for what it is made with."""

    def __init__(
        self,
        make: Callable[[], RunCritic],
        seals: CheckpointView,
        *,
        clock: Clock,
        sink: EventSink,
        version: int = 0,
        patience_s: float = math.inf,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            make,
            CriticSeals(seals),
            who="the critic",
            clock=clock,
            sink=sink,
            version=version,
            patience_s=patience_s,
            progress=progress,
        )
        self._is_in_batch = False

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return await self._do(lambda inner: inner.score(rows))

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        self._begin_batch()
        await super().accumulate(rows)

    async def step(self) -> Metrics:
        self._begin_batch()
        metrics = await super().step()
        self._is_in_batch = False
        return metrics

    def _begin_batch(self) -> None:
        if not self._is_in_batch:
            self._cut(self._seals.version)
            self._write(Call("begin_batch"))
            self._is_in_batch = True
