"""The critic's training: it learns from the groups that `train` takes, exactly those and in that order, meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from millstream.learner import Critic
from millstream.learner.base import reads_store
from millstream.learner.packing import Packer
from millstream.pipeline.context import RunContext
from millstream.pipeline.schema import CRITIC, this_one, train_rows
from millstream.pipeline.stages import emit_span
from millstream.types import Metrics, TrainRow


class CriticUpdates:
    """A batch of the critic ends with the batch of the learner, so that a checkpoint between two batches holds both."""

    def __init__(self, critic: Critic, micro_batch_tokens: int, context: RunContext) -> None:
        self._critic = critic
        self._context = context
        self._packer = Packer[TrainRow](micro_batch_tokens)
        self._taken: asyncio.Queue[int | asyncio.Future[Metrics]] = asyncio.Queue()
        self._end: asyncio.Future[Metrics] | None = None

    def take(self, group_id: int, *, is_last: bool) -> None:
        """`train` has taken this group. After the last one of a batch the critic makes its step without waiting for the
        learner's."""
        self._taken.put_nowait(group_id)
        if is_last:
            self._end_batch()

    def _end_batch(self) -> asyncio.Future[Metrics]:
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
            self._taken.put_nowait(self._end)
        return self._end

    async def finish_batch(self) -> Metrics:
        """Returns when the critic has learned from every group that was taken. The names of its metrics begin with critic_."""
        metrics = await self._end_batch()
        self._end = None
        return {f"critic_{name}": value for name, value in metrics.items()}

    async def run(self) -> None:
        """Consumes groups that were taken. Produces critic updates. Waits for a group to be taken. Ended by: `train`."""
        while True:
            with self._context.waits.idle(CRITIC, "a group to learn from"):
                taken = await self._taken.get()
            if isinstance(taken, int):
                await self._learn_from(taken)
                continue
            await self._accumulate(self._packer.flush())
            began = self._context.now()
            metrics = await self._context.waits.on(CRITIC, "its step", self._critic.step())
            emit_span(self._context, CRITIC, "step", began)
            taken.set_result(metrics)

    async def _learn_from(self, group_id: int) -> None:
        claim = self._context.store.claim(CRITIC, choose=partial(this_one, group_id))
        lease = await self._context.waits.on(CRITIC, f"group {group_id}, which train took", claim)
        if group_id not in self._context.vacant:
            for row in train_rows(lease, are_stored=reads_store(self._critic)):
                await self._accumulate(self._packer.add(row))
        async with self._context.quiesce:
            await self._context.store.acknowledge(lease)

    async def _accumulate(self, rows: Sequence[TrainRow]) -> None:
        if rows:
            began = self._context.now()
            await self._context.waits.on(CRITIC, "its gradient", self._critic.accumulate(rows))
            emit_span(self._context, CRITIC, "accumulate", began, rows)
