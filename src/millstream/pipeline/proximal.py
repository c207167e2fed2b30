"""The proximal policy beside the learner: what the policy of a batch's start says of rows that are trained after a step.

    train takes a group ──► [proximal]  the first mini-batch: passes by ──────────────► [learn] train goes on with it
                                        the others: scored under the batch's version ──┘

Groups are taken ahead of the learner, as they are complete, so that those of later mini-batches are scored while it makes the
steps before. The stage claims the groups that `train` has taken, those alone and in their order; they are never dropped. What
it says bears the version of the weights that it said it with, and train uses nothing that bears another: such a row is scored
anew. Every group has passed when its batch ends, so that a checkpoint between two batches has nothing of this in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from millstream.learner import Follower
from millstream.pipeline.settle import by_member
from millstream.pipeline.stages import (
    LEARN,
    PROXIMAL,
    PROXIMAL_VERSION,
    Stage,
    Surroundings,
    scores_of,
    tell,
    this_one,
    unsettled,
)
from millstream.store import Lease
from millstream.types import Floats, TrainRow, Weights

OWNER = f"stage {PROXIMAL}"
NO_VERSION = -1
"""Of a row that nothing was said of."""


class _Taken(NamedTuple):
    group_id: int
    is_needed: bool


class _Said(NamedTuple):
    version: int
    scores: Sequence[Floats | None]


def _nothing(num_rows: int) -> _Said:
    return _Said(NO_VERSION, [None] * num_rows)


class Proximal:
    """`num_first`: groups of a batch that are trained before its first step, where the proximal policy is the policy itself."""

    def __init__(self, follower: Follower, micro_batch_tokens: int, num_first: int, around: Surroundings) -> None:
        self._follower = follower
        self._num_first = num_first
        self._around = around
        self._stage = Stage(PROXIMAL, follower, micro_batch_tokens, is_early=False)
        self._taken: asyncio.Queue[_Taken] = asyncio.Queue()
        self._num_taken = 0
        self._version = NO_VERSION
        self._start: Weights | None = None
        """Of this batch, until they are loaded."""
        self._follows = NO_VERSION
        """The version of what is loaded."""

    def begin_batch(self, version: int, weights: Weights) -> None:
        """From here on rows are scored under these. They are loaded when the first row needs it: a batch that ends before
        costs nothing."""
        self._num_taken = 0
        self._version = version
        self._start = weights

    def take(self, group_id: int) -> None:
        """`train` has taken this group, the next of its batch."""
        self._num_taken += 1
        self._taken.put_nowait(_Taken(group_id, self._num_taken > self._num_first))

    async def run(self) -> None:
        """Consumes groups that were taken; produces their columns. Waits for `train` to take one."""
        while True:
            taking = self._taken.get()
            taken = await self._around.waits.idle(OWNER, "a group to score", taking)
            await self._pass(taken)

    async def _pass(self, taken: _Taken) -> None:
        claim = self._around.store.claim(PROXIMAL, choose=partial(this_one, taken.group_id))
        lease: Lease = await self._around.waits.on(OWNER, f"group {taken.group_id}, which train took", claim)
        rows = by_member(lease)
        is_needed = bool(rows) and taken.is_needed and not self._around.is_vacant(taken.group_id)
        found = await self._scored([unsettled(row) for row in rows]) if is_needed else _nothing(len(rows))
        columns = {PROXIMAL: found.scores, PROXIMAL_VERSION: [found.version] * len(rows)}
        async with self._around.still:
            if rows:
                await self._around.store.write([row.row_id for row in rows], columns, overwrite=True)
            await self._around.store.acknowledge(lease)

    async def _scored(self, rows: Sequence[TrainRow]) -> _Said:
        """Under the weights of the batch's start, and by what they are called."""
        await self._follow()
        return _Said(self._follows, await scores_of(rows, self._stage, self._around))

    async def _follow(self) -> None:
        weights = self._start
        self._start = None
        if weights is not None:
            began = self._around.waits.now()
            await self._around.waits.on(OWNER, "the weights of the batch's start", self._follower.load(weights))
            self._follows = self._version
            tell(self._around, PROXIMAL, "load", began)

    async def join(self, group_id: int, rows: Sequence[TrainRow], number: int) -> list[TrainRow]:
        """The rows of the batch's group of this number, counted from 1, with what they need of the proximal policy. Waits for
        `run`, whose own waits have their deadlines."""
        claim = self._around.store.claim(LEARN, choose=partial(this_one, group_id))
        lease: Lease = await self._around.waits.on(
            "train", f"the proximal policy's word on group {group_id}", claim, deadline=False
        )
        said = by_member(lease)
        await self._around.store.acknowledge(lease)
        if number <= self._num_first or not rows:
            return list(rows)
        stale = [row for row, one in zip(rows, said, strict=True) if one.columns[PROXIMAL_VERSION] != self._version]
        scores = (await self._scored(stale)).scores if stale else []
        anew = dict(zip(map(id, stale), scores, strict=True))
        return [
            replace(row, proximal=anew.get(id(row), one.columns[PROXIMAL])) for row, one in zip(rows, said, strict=True)
        ]
