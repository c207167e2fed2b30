"""Stages: what is computed of every row beside training, each by whoever does it, overlapping everything else.

    put ──► [reference] ─┐                ┌─► [reference] ─┐
            [values] ────┴──► settle ─────┤                ├──► train
                                          └─► [critic], [proximal] (what train took)

A stage claims rows as they become ready, has them scored, writes its column and acknowledges. Where it stands follows from who
reads the column. *Early*, before settling, where an advantage needs it: a row is scored the moment its rollout ends, while
others of its group are still at work. *Late*, between settling and training, where only the loss needs it: what is filtered is
not scored.

No row is dropped while a stage has it on lease, because whoever drops has a lease that comes after every stage that could:
settling is handed a group when all early stages are done with its rows, and late ones see it only when settling is done with
it; a settled group that is discarded is claimed as `train`, which comes after the late stages; and the critic, like the
proximal policy (`pipeline.proximal`), claims groups that `train` has taken, which are never dropped.

When training is synchronous a stage reads whole groups: what is computed together then depends on ids, never on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from millstream.errors import StreamEnded
from millstream.events import Event, Span
from millstream.learner import Critic, Scorer
from millstream.learner.packing import Packer
from millstream.pipeline.notify import QuiescePoint
from millstream.pipeline.settle import TASK as SETTLE
from millstream.pipeline.settle import by_member
from millstream.pipeline.waits import Waits
from millstream.store import ONE_GROUP, Lease, Reads, Row, Store, Want
from millstream.types import Floats, Metrics, TrainRow

TRAIN, CRITIC, REFERENCE, VALUES = "train", "critic", "reference", "values"
PROXIMAL, PROXIMAL_VERSION, LEARN = "proximal", "proximal_version", "learn"
SCORED = ("member", "part", "tokens", "loss_mask", "logprobs")
"""What a stage reads."""
SETTLED = (*SCORED, "agent", "reward", "turn_rewards")


class Stage(NamedTuple):
    name: str
    """Of its task in the store, and of the column that it writes."""
    scorer: Scorer
    micro_batch_tokens: int
    is_early: bool
    """Whether settling reads its column; else only training does."""


def store_tasks(
    stages: Sequence[Stage] = (),
    *,
    has_critic: bool = False,
    has_proximal: bool = False,
    is_in_lockstep: bool = False,
) -> dict[str, Reads]:
    """What each consumer reads of the store: the columns of a `Rollout`, and those that others add."""
    names = {
        is_early: tuple(stage.name for stage in stages if stage.is_early == is_early) for is_early in (True, False)
    }
    early, late = names[True], names[False]
    tasks = {name: Reads(SCORED, by_group=is_in_lockstep) for name in early}
    tasks[SETTLE] = Reads((*SETTLED, *early), after=early)
    tasks |= {name: Reads(SCORED, after=(SETTLE,), by_group=is_in_lockstep) for name in late}
    tasks[TRAIN] = Reads((*SETTLED, "start_version", *early, *late, "advantages"), after=(SETTLE, *late))
    if has_critic:
        tasks[CRITIC] = Reads((*SCORED, VALUES, "returns", "advantages"), after=(SETTLE,))
    if has_proximal:
        tasks[PROXIMAL] = Reads(SCORED, after=(SETTLE,))
        tasks[LEARN] = Reads(("member", "part", PROXIMAL, PROXIMAL_VERSION), after=(PROXIMAL,))
    return tasks


def train_row(row: Row) -> TrainRow:
    """All that is there of it, but for what the proximal policy said: that may be of another batch (`pipeline.proximal`)."""
    names = [name for name in TrainRow.__struct_fields__ if name in row.columns and name != PROXIMAL]
    columns = {name: row.columns[name] for name in names}
    part = f", part {row.columns['part']}" if row.columns["part"] else ""
    return TrainRow(**columns, label=f"group {row.group_id}, member {row.columns['member']}{part}")


class Surroundings(NamedTuple):
    """What stages share with the rest of the run."""

    store: Store
    waits: Waits
    emit: Callable[[Event], None]
    is_vacant: Callable[[int], bool]
    """Whether nothing of this group will be trained."""
    still: QuiescePoint
    is_in_lockstep: bool


async def run_stage(stage: Stage, around: Surroundings) -> None:
    """Consumes rows that have what it reads; produces its column. Waits for rows; whoever ends a rollout (early) or settles a
    group (late) brings them."""
    want = ONE_GROUP if around.is_in_lockstep else Want(tokens=stage.micro_batch_tokens, patience_s=0)
    while True:
        claim = around.store.claim(stage.name, want)
        try:
            lease = await around.waits.idle(f"stage {stage.name}", "rows to score", claim)
        except StreamEnded:
            return
        rows = by_member(lease)
        scores = await _scored(stage, rows, around) if rows else []
        async with around.still:
            if rows:
                await around.store.write([row.row_id for row in rows], {stage.name: scores})
            await around.store.acknowledge(lease)


async def _scored(stage: Stage, rows: Sequence[Row], around: Surroundings) -> list[Floats]:
    """One column for each row; of those that will not be trained, zeros."""
    found = {row.row_id: np.zeros(len(row.columns["tokens"]), np.float32) for row in rows}
    needed = [row for row in rows if not around.is_vacant(row.group_id)]
    scores = await scores_of([unsettled(row) for row in needed], stage, around)
    found.update(zip((row.row_id for row in needed), scores, strict=True))
    return [found[row.row_id] for row in rows]


async def scores_of(rows: Sequence[TrainRow], stage: Stage, around: Surroundings) -> list[Floats]:
    """Micro-batch by micro-batch, in their order."""
    packer = Packer(stage.micro_batch_tokens)
    batches = [packer.add(row) for row in rows]
    scores: list[Floats] = []
    for batch in [*batches, packer.flush()]:
        if batch:
            began, scoring = around.waits.now(), stage.scorer.score(batch)
            scores += await around.waits.on(f"stage {stage.name}", "its rows to be scored", scoring)
            tell(around, stage.name, "score", began, batch)
    return scores


def unsettled(row: Row) -> TrainRow:
    """Of a row that has no advantages yet, or whose advantages are nobody's business."""
    nothing = np.zeros(len(row.columns["tokens"]), np.float32)
    return TrainRow(**{name: row.columns[name] for name in ("tokens", "loss_mask", "logprobs")}, advantages=nothing)


def tell(around: Surroundings, worker: str, what: str, began: float, rows: Sequence[TrainRow] = ()) -> None:
    now, num_tokens = around.waits.now(), sum(len(row.tokens) for row in rows)
    around.emit(Span(at=now, worker=worker, what=what, seconds=now - began, num_tokens=num_tokens))


class Updates:
    """The critic learns from the groups that `train` takes, exactly those and in that order, beside it. A batch of the one ends
    with a batch of the other, so that a checkpoint between two batches holds both."""

    def __init__(self, critic: Critic, micro_batch_tokens: int, around: Surroundings) -> None:
        self._critic = critic
        self._around = around
        self._packer = Packer(micro_batch_tokens)
        self._taken: asyncio.Queue[int | asyncio.Future[Metrics]] = asyncio.Queue()
        self._end: asyncio.Future[Metrics] | None = None

    def take(self, group_id: int, *, is_last: bool) -> None:
        """`train` has taken this group; after the last one of a batch the critic need not wait for the learner."""
        self._taken.put_nowait(group_id)
        if is_last:
            self._end_batch()

    def _end_batch(self) -> asyncio.Future[Metrics]:
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
            self._taken.put_nowait(self._end)
        return self._end

    async def finish_batch(self) -> Metrics:
        """Returns when the critic has learned from every group that was taken. What it says of itself begins with critic_."""
        metrics = await self._end_batch()
        self._end = None
        return {f"critic_{name}": value for name, value in metrics.items()}

    async def update(self) -> None:
        """Consumes groups that were taken; produces a better critic. Waits for `train` to take one."""
        while True:
            taking = self._taken.get()
            taken = await self._around.waits.idle(CRITIC, "a group to learn from", taking)
            if isinstance(taken, int):
                await self._learn_from(taken)
                continue
            await self._accumulate(self._packer.flush())
            began = self._around.waits.now()
            metrics = await self._around.waits.on(CRITIC, "its step", self._critic.step())
            tell(self._around, CRITIC, "step", began)
            taken.set_result(metrics)

    async def _learn_from(self, group_id: int) -> None:
        claim = self._around.store.claim(CRITIC, choose=partial(this_one, group_id))
        lease: Lease = await self._around.waits.on(CRITIC, f"group {group_id}, which train took", claim)
        if not self._around.is_vacant(group_id):
            for row in by_member(lease):
                await self._accumulate(self._packer.add(train_row(row)))
        async with self._around.still:
            await self._around.store.acknowledge(lease)

    async def _accumulate(self, rows: Sequence[TrainRow]) -> None:
        if rows:
            began = self._around.waits.now()
            await self._around.waits.on(CRITIC, "its gradient", self._critic.accumulate(rows))
            tell(self._around, CRITIC, "accumulate", began, rows)


def this_one(group_id: int, ready: Iterable[int]) -> int | None:
    return group_id if group_id in set(ready) else None
