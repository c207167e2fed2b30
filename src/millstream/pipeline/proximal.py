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
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from millstream.learner import Follower
from millstream.pipeline.context import RunContext
from millstream.pipeline.grouping import row_order
from millstream.pipeline.schema import LEARN, PROXIMAL, PROXIMAL_VERSION, Stage, rows_to_score, this_one
from millstream.pipeline.stages import emit_span, score_and_write, scores_of
from millstream.store import Lease
from millstream.types import StoredRow, TrainRow, Weights

OWNER = f"stage {PROXIMAL}"
NO_VERSION = -1  # of a row that was not scored


class _Taken(NamedTuple):
    group_id: int
    is_needed: bool


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
        store = self._context.store
        claim = store.claim(PROXIMAL, choose=partial(this_one, taken.group_id))
        lease = await self._context.waits.on(OWNER, f"group {taken.group_id}, which train took", claim)
        ids = [lease.row_ids[i] for i in row_order(lease)]
        if ids and taken.is_needed and taken.group_id not in self._context.vacant:
            rows = rows_to_score(lease, are_stored=self._stage.reads_store)
            await self._score(rows, ids, lambda: store.acknowledge(lease))
            return
        async with self._context.quiesce:
            if ids:
                nothing: dict[str, list[Any]] = {PROXIMAL: [None] * len(ids), PROXIMAL_VERSION: [NO_VERSION] * len(ids)}
                await store.write(ids, nothing, overwrite=True)
            await store.acknowledge(lease)

    async def _score(self, rows: Sequence[TrainRow], ids: Sequence[int], then: Callable[[], Awaitable[None]]) -> None:
        """Write scores with the weights of the batch's start, and their version."""
        await self._load()
        version = {PROXIMAL_VERSION: [self._loaded] * len(ids)}
        await score_and_write(rows, ids, self._stage, self._context, then, more=version, overwrite=True)

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
        joined = await self._joined(rows, lease) if number > self._num_first and rows else list(rows)
        await self._context.store.acknowledge(lease)
        return joined

    async def _joined(self, rows: Sequence[TrainRow], lease: Lease) -> list[TrainRow]:
        """Rows whose scores are of another version are scored again."""
        order, found = row_order(lease), lease[PROXIMAL_VERSION]
        stale = [number for number, i in enumerate(order) if found[i] != self._version]
        if isinstance(rows[0], StoredRow):
            if stale:
                again = rows_to_score(lease, are_stored=self._stage.reads_store)
                ids = [lease.row_ids[order[number]] for number in stale]
                await self._score([again[number] for number in stale], ids, _nothing_more)
            return [replace(row, is_proximal_stored=True) for row in rows]
        scores = {number: lease[PROXIMAL][i] for number, i in enumerate(order)}
        if stale:
            await self._load()
            scored = await scores_of([rows[number] for number in stale], self._stage, self._context)
            scores.update(zip(stale, (cells for some in scored for cells in some.cells), strict=True))
        return [replace(row, proximal=scores[number]) for number, row in enumerate(rows)]


async def _nothing_more() -> None: ...
