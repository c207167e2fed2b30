"""Stages: columns that are computed for every row (a reference policy's, a critic's values), overlapping all other work.

    put ──► [reference] ─┐                ┌─► [reference] ─┐
            [values] ────┴──► settle ─────┤                ├──► train
                                          └─► [critic], [proximal] (groups that train took)

A stage claims rows as they become ready, scores them, writes its column and acknowledges. Its position follows from who reads
the column. *Early*, before settling, where an advantage needs it: a row is scored as soon as its rollout ends, while others of
its group are still generated. *Late*, between settling and training, where only the loss needs it: filtered rows are not
scored.

No row is dropped while a stage has it on lease, because only a consumer after every such stage drops rows: settling gets a
group when all early stages are done with its rows, and late ones see it only when settling is done with it; a settled group
that is discarded is claimed as `train`, which comes after the late stages; and the critic (`pipeline.critic`), like the
proximal policy (`pipeline.proximal`), claims groups that `train` has taken, which are never dropped.

In lockstep a stage reads whole groups: what is computed together then depends on ids, never on timing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import numpy as np

from millstream.errors import RowsLost, StreamEnded
from millstream.events import Span
from millstream.learner.base import PackedScores, StoreScorer
from millstream.learner.packing import Packer
from millstream.pipeline.context import RunContext
from millstream.pipeline.grouping import row_order
from millstream.pipeline.schema import SharedColumns, Stage, num_tokens_of, rows_to_score
from millstream.store import ONE_GROUP, Lease, Want
from millstream.store.base import Columns
from millstream.types import Floats, StoredRow, TrainRow


async def run_stage(stage: Stage, context: RunContext, *, is_in_lockstep: bool) -> None:
    """Consumes rows that have the columns it reads. Produces its column. Waits for rows. Ended by: rollouts that end (early),
    groups that are settled (late)."""
    want = ONE_GROUP if is_in_lockstep else Want(tokens=stage.micro_batch_tokens, patience_s=0)
    while True:
        claim = context.store.claim(stage.name, want)
        try:
            with context.waits.idle(f"stage {stage.name}", "rows to score"):
                lease = await claim
        except StreamEnded:
            return
        await _score(stage, lease, context)


async def _score(stage: Stage, lease: Lease, context: RunContext) -> None:
    """One column for each row; zeros for rows that will not be trained."""
    order, num_tokens = row_order(lease), num_tokens_of(lease) if len(lease) else []
    rows = rows_to_score(lease, are_stored=stage.reads_store)
    vacant = {lease.row_ids[i]: num_tokens[i] for i in order if lease.group_ids[i] in context.vacant}
    ids = [lease.row_ids[i] for i in order if lease.row_ids[i] not in vacant]
    needed = [row for i, row in zip(order, rows, strict=True) if lease.row_ids[i] not in vacant]
    nothing = {stage.name: [np.broadcast_to(np.float32(0), (count,)) for count in vacant.values()]}

    async def finish() -> None:
        if vacant:
            await context.store.write(list(vacant), nothing)
        await context.store.acknowledge(lease)

    # a checkpoint may have the column without the acknowledgement, where its scorer died between two micro-batches
    await score_and_write(needed, ids, stage, context, finish, overwrite=True)


class ScoredBatch(NamedTuple):
    """A micro-batch and its column: the cells, or where its scorer has packed them."""

    cells: list[Floats]
    packed: list[PackedScores]


async def score_and_write(
    rows: Sequence[TrainRow],
    row_ids: Sequence[int],
    stage: Stage,
    context: RunContext,
    then: Callable[[], Awaitable[None]],
    *,
    more: Columns | None = None,
    overwrite: bool = False,
) -> None:
    """Score the rows, write their column, and `more`, and do `then` in the same moment. Scores that were lost with the process
    that had packed them are computed again."""
    while True:
        scored = await scores_of(rows, stage, context)
        try:
            async with context.quiesce:
                await _write(scored, row_ids, stage, context, more or {}, overwrite=overwrite)
                await then()
            return
        except RowsLost:
            overwrite = True  # some may have been written


async def _write(
    scored: Sequence[ScoredBatch],
    row_ids: Sequence[int],
    stage: Stage,
    context: RunContext,
    more: Columns,
    *,
    overwrite: bool,
) -> None:
    store = context.store
    for packed in [one for some in scored for one in some.packed]:
        assert isinstance(store, SharedColumns)
        await store.write_staged(packed.row_ids, packed.block, overwrite=overwrite)
    cells = [own for some in scored for own in some.cells]
    columns = {**more, stage.name: cells} if cells else more
    if columns:
        await store.write(row_ids, columns, overwrite=overwrite)


async def scores_of(rows: Sequence[TrainRow], stage: Stage, context: RunContext) -> list[ScoredBatch]:
    """In the order of the rows, micro-batch by micro-batch."""
    packer = Packer[TrainRow](stage.micro_batch_tokens)
    batches = [packer.add(row) for row in rows]
    found: list[ScoredBatch] = []
    for batch in [*batches, packer.flush()]:
        if batch:
            began, scoring = context.now(), _score_batch(batch, stage)
            found.append(await context.waits.on(f"stage {stage.name}", "its rows to be scored", scoring))
            emit_span(context, stage.name, "score", began, batch)
    return found


async def _score_batch(rows: Sequence[TrainRow], stage: Stage) -> ScoredBatch:
    if not stage.reads_store or not isinstance(rows[0], StoredRow):
        return ScoredBatch(await stage.scorer.score(rows), [])
    assert isinstance(stage.scorer, StoreScorer)
    return ScoredBatch([], await stage.scorer.score_stored(rows, stage.name))


def emit_span(context: RunContext, worker: str, what: str, began: float, rows: Sequence[TrainRow] = ()) -> None:
    now, num_tokens = context.now(), sum(row.num_tokens for row in rows)
    context.emit(Span(at=now, worker=worker, what=what, seconds=now - began, num_tokens=num_tokens))
