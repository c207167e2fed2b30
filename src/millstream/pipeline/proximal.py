"""The proximal policy: scores rows with the policy of the batch's start, for rows that are trained after an optimizer step.

    train takes a group ──► [proximal]  the first mini-batch: passed through ─────────► [learn] train continues with it
                                        the others: scored under the batch's version ──┘

Groups are taken ahead of the learner, as they become complete, so that those of later mini-batches are scored while it makes
the steps before. The stage claims the groups that `train` has taken, only those and in their order; they are never dropped.
Scores carry the version of the weights that computed them, and train uses none of another version: such a row is scored
again. Every group has passed when its batch ends, so that a checkpoint between two batches holds nothing of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from millstream.learner import Follower
from millstream.pipeline.context import RunContext
from millstream.pipeline.grouping import by_member
from millstream.pipeline.schema import LEARN, PROXIMAL, PROXIMAL_VERSION, Stage, row_to_score, this_one
from millstream.pipeline.stages import emit_span, scores_of
from millstream.types import Floats, TrainRow, Weights

OWNER = f"stage {PROXIMAL}"
NO_VERSION = -1  # of a row that was not scored


class _Taken(NamedTuple):
    group_id: int
    is_needed: bool


class _Scores(NamedTuple):
    version: int
    scores: Sequence[Floats | None]


def _nothing(num_rows: int) -> _Scores:
    return _Scores(NO_VERSION, [None] * num_rows)


class Proximal:
    """`num_first`: groups of a batch that are trained before its first step, where the proximal policy is the policy itself."""

    def __init__(self, follower: Follower, micro_batch_tokens: int, num_first: int, context: RunContext) -> None:
        self._follower = follower
        self._num_first = num_first
        self._context = context
        self._stage = Stage(PROXIMAL, follower, micro_batch_tokens, is_early=False)
        self._taken: asyncio.Queue[_Taken] = asyncio.Queue()
        self._num_taken = 0
        self._version = NO_VERSION
        self._start: Weights | None = None  # of this batch, until they are loaded
        self._loaded = NO_VERSION  # the version of the weights that are loaded

    def begin_batch(self, version: int, weights: Weights) -> None:
        """From here on rows are scored with these weights. They are loaded when the first row needs it: a batch that ends
        before costs nothing."""
        self._num_taken = 0
        self._version = version
        self._start = weights

    def take(self, group_id: int) -> None:
        """`train` has taken this group, the next of its batch."""
        self._num_taken += 1
        self._taken.put_nowait(_Taken(group_id, self._num_taken > self._num_first))

    async def run(self) -> None:
        """Consumes groups that were taken. Produces their columns. Waits for a group to be taken. Ended by: `train`."""
        while True:
            with self._context.waits.idle(OWNER, "a group to score"):
                taken = await self._taken.get()
            await self._pass(taken)

    async def _pass(self, taken: _Taken) -> None:
        claim = self._context.store.claim(PROXIMAL, choose=partial(this_one, taken.group_id))
        lease = await self._context.waits.on(OWNER, f"group {taken.group_id}, which train took", claim)
        rows = by_member(lease)
        is_needed = bool(rows) and taken.is_needed and taken.group_id not in self._context.vacant
        found = await self._scored([row_to_score(row) for row in rows]) if is_needed else _nothing(len(rows))
        columns = {PROXIMAL: found.scores, PROXIMAL_VERSION: [found.version] * len(rows)}
        async with self._context.quiesce:
            if rows:
                await self._context.store.write([row.row_id for row in rows], columns, overwrite=True)
            await self._context.store.acknowledge(lease)

    async def _scored(self, rows: Sequence[TrainRow]) -> _Scores:
        """With the weights of the batch's start, and with their version."""
        await self._load()
        return _Scores(self._loaded, await scores_of(rows, self._stage, self._context))

    async def _load(self) -> None:
        weights = self._start
        self._start = None
        if weights is not None:
            began = self._context.now()
            await self._context.waits.on(OWNER, "the weights of the batch's start", self._follower.load(weights))
            self._loaded = self._version
            emit_span(self._context, PROXIMAL, "load", began)

    async def join(self, group_id: int, rows: Sequence[TrainRow], number: int) -> list[TrainRow]:
        """The rows of the batch's group of this number, counted from 1, with the proximal policy's scores where they need them.
        Waits for `run`, whose own waits have their deadlines."""
        claim = self._context.store.claim(LEARN, choose=partial(this_one, group_id))
        lease = await self._context.waits.on(
            "train", f"the proximal policy's word on group {group_id}", claim, deadline=False
        )
        scored = by_member(lease)
        await self._context.store.acknowledge(lease)
        if number <= self._num_first or not rows:
            return list(rows)
        stale = [row for row, one in zip(rows, scored, strict=True) if one.columns[PROXIMAL_VERSION] != self._version]
        scores = (await self._scored(stale)).scores if stale else []
        again = dict(zip(map(id, stale), scores, strict=True))
        return [
            replace(row, proximal=again.get(id(row), one.columns[PROXIMAL]))
            for row, one in zip(rows, scored, strict=True)
        ]
