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

from collections.abc import Sequence

import numpy as np

from millstream.errors import StreamEnded
from millstream.events import Span
from millstream.learner.packing import Packer
from millstream.pipeline.context import RunContext
from millstream.pipeline.grouping import by_member
from millstream.pipeline.schema import Stage, row_to_score
from millstream.store import ONE_GROUP, Row, Want
from millstream.types import Floats, TrainRow


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
        rows = by_member(lease)
        scores = await _scored(stage, rows, context) if rows else []
        async with context.quiesce:
            if rows:
                await context.store.write([row.row_id for row in rows], {stage.name: scores})
            await context.store.acknowledge(lease)


async def _scored(stage: Stage, rows: Sequence[Row], context: RunContext) -> list[Floats]:
    """One column for each row; zeros for rows that will not be trained."""
    found = {row.row_id: np.zeros(len(row.columns["tokens"]), np.float32) for row in rows}
    needed = [row for row in rows if row.group_id not in context.vacant]
    scores = await scores_of([row_to_score(row) for row in needed], stage, context)
    found.update(zip((row.row_id for row in needed), scores, strict=True))
    return [found[row.row_id] for row in rows]


async def scores_of(rows: Sequence[TrainRow], stage: Stage, context: RunContext) -> list[Floats]:
    """In the order of the rows, micro-batch by micro-batch."""
    packer = Packer[TrainRow](stage.micro_batch_tokens)
    batches = [packer.add(row) for row in rows]
    scores: list[Floats] = []
    for batch in [*batches, packer.flush()]:
        if batch:
            began, scoring = context.now(), stage.scorer.score(batch)
            scores += await context.waits.on(f"stage {stage.name}", "its rows to be scored", scoring)
            emit_span(context, stage.name, "score", began, batch)
    return scores


def emit_span(context: RunContext, worker: str, what: str, began: float, rows: Sequence[TrainRow] = ()) -> None:
    now, num_tokens = context.now(), sum(len(row.tokens) for row in rows)
    context.emit(Span(at=now, worker=worker, what=what, seconds=now - began, num_tokens=num_tokens))
