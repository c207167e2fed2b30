"""The store's schema for a run: its consumers, the columns that each reads, and the row that the learner trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from millstream.learner import Scorer
from millstream.pipeline.grouping import row_order
from millstream.store import Lease, Reads, Row
from millstream.types import TrainRow

SETTLE = "settle"
TRAIN = "train"
CRITIC = "critic"
REFERENCE = "reference"
VALUES = "values"
PROXIMAL = "proximal"
PROXIMAL_VERSION = "proximal_version"
LEARN = "learn"
SCORED_COLUMNS = ("member", "part", "tokens", "loss_mask", "logprobs")  # what a stage reads
SETTLED_COLUMNS = (*SCORED_COLUMNS, "agent", "reward", "turn_rewards")


class Stage(NamedTuple):
    """A column that is computed for every row: see `pipeline.stages`."""

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
    """What each consumer reads of the store: the columns of a `Rollout`, and those that stages add."""
    early = tuple(stage.name for stage in stages if stage.is_early)
    late = tuple(stage.name for stage in stages if not stage.is_early)
    tasks = {name: Reads(SCORED_COLUMNS, by_group=is_in_lockstep) for name in early}
    tasks[SETTLE] = Reads((*SETTLED_COLUMNS, *early), after=early)
    tasks |= {name: Reads(SCORED_COLUMNS, after=(SETTLE,), by_group=is_in_lockstep) for name in late}
    tasks[TRAIN] = Reads((*SETTLED_COLUMNS, "start_version", *early, *late, "advantages"), after=(SETTLE, *late))
    if has_critic:
        tasks[CRITIC] = Reads((*SCORED_COLUMNS, VALUES, "returns", "advantages"), after=(SETTLE,))
    if has_proximal:
        tasks[PROXIMAL] = Reads(SCORED_COLUMNS, after=(SETTLE,))
        tasks[LEARN] = Reads(("member", "part", PROXIMAL, PROXIMAL_VERSION), after=(PROXIMAL,))
    return tasks


TRAINED_COLUMNS = tuple(name for name in TrainRow.__struct_fields__ if name != PROXIMAL)


def train_rows(lease: Lease) -> list[TrainRow]:
    """The rows of one group, in the order of members and parts, with all columns that a learner or critic reads, but for the
    proximal policy's: those may be of another batch (`pipeline.proximal`)."""
    order = row_order(lease)
    if not order:
        return []
    group_id, members, parts = lease.group_id, lease["member"], lease["part"]
    columns = {name: lease[name] for name in TRAINED_COLUMNS if name in lease.columns}
    rows = []
    for i in order:
        part = f", part {parts[i]}" if parts[i] else ""
        label = f"group {group_id}, member {members[i]}{part}"
        rows.append(TrainRow(**{name: values[i] for name, values in columns.items()}, label=label))
    return rows


def row_to_score(row: Row) -> TrainRow:
    """What a scorer reads of a row: it may have no advantages yet, and they do not matter."""
    nothing = np.zeros(len(row.columns["tokens"]), np.float32)
    return TrainRow(**{name: row.columns[name] for name in ("tokens", "loss_mask", "logprobs")}, advantages=nothing)


def this_one(group_id: int, ready: Iterable[int]) -> int | None:
    """For `Store.claim(choose=...)`: this group and no other."""
    return group_id if group_id in set(ready) else None
