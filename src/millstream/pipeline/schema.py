"""The store's schema for a run: its consumers, the columns that each reads, and the row that the learner trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from millstream.learner import Scorer
from millstream.learner.base import reads_store
from millstream.pipeline.grouping import row_order
from millstream.store import Lease, Reads, Saved
from millstream.store.wire import PackedBlock
from millstream.types import Mask, StoredRow, Tokens, TrainRow

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
LONG_COLUMNS = ("group_id", "attempt", "finish", "turn_rewards", "tokens", "loss_mask", "logprobs", "versions")
"""Of a rollout: those that grow with it, and those that the run does not read of its rows."""
SIZES = ("num_tokens", "num_trained", "num_shared", "prompt")  # of a row whose tokens are not read
SMALL_COLUMNS = ("member", "part", "agent", "reward", "start_version", *SIZES)
NOTHING = np.zeros(0, np.float32)


class Stage(NamedTuple):
    """A column that is computed for every row: see `pipeline.stages`."""

    name: str
    """Of its task in the store, and of the column that it writes."""
    scorer: Scorer
    micro_batch_tokens: int
    is_early: bool
    """Whether settling reads its column; else only training does."""

    @property
    def reads_store(self) -> bool:
        """Whether its scorer reads the rows, and packs its column, by itself."""
        return reads_store(self.scorer)


@runtime_checkable
class SharedColumns(Protocol):
    """What a store of many processes can do besides (`store.client.StoreClient`)."""

    def open_only(self, task: str, columns: Sequence[str]) -> None: ...

    async def write_staged(self, row_ids: Sequence[int], block: PackedBlock, *, overwrite: bool = False) -> None: ...

    async def snapshot(self, *, partition: str = "train", with_held: bool = True) -> Saved: ...


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


# ---- rows as a learner, a critic or a scorer is given them -------------------------------------------------------------------


def sizes_of(tokens: Sequence[Tokens], masks: Sequence[Mask]) -> dict[str, list[Any]]:
    """The columns `SIZES` of rows."""
    rows = [
        TrainRow(tokens=own, loss_mask=mask, logprobs=NOTHING, advantages=NOTHING)
        for own, mask in zip(tokens, masks, strict=True)
    ]
    return {
        "num_tokens": [row.num_tokens for row in rows],
        "num_trained": [row.num_trained for row in rows],
        "num_shared": [row.num_shared for row in rows],
        "prompt": [blake2b(row.prompt, digest_size=16).digest() for row in rows],
    }


def num_tokens_of(lease: Lease) -> list[int]:
    return lease["num_tokens"] if "num_tokens" in lease.columns else [len(tokens) for tokens in lease["tokens"]]


def stored_rows(lease: Lease, order: Sequence[int]) -> list[TrainRow]:
    """Rows that their reader gets from the store, in this order. Their sizes are columns where a rollout worker packed them."""
    columns = lease.columns if "num_tokens" in lease.columns else sizes_of(lease["tokens"], lease["loss_mask"])
    labels, nothing = _labels(lease), [NOTHING] * len(lease)
    advantages = lease.columns.get("advantages", nothing)
    return [
        StoredRow(
            row_id=lease.row_ids[i],
            **{name: columns[name][i] for name in SIZES},
            advantages=advantages[i],
            label=labels[i],
        )
        for i in order
    ]


TRAINED_COLUMNS = tuple(name for name in TrainRow.__struct_fields__ if name not in (PROXIMAL, "label"))


def train_rows(lease: Lease, *, are_stored: bool = False) -> list[TrainRow]:
    """The rows of one group, in the order of members and parts, with all columns that a learner or critic reads, but for the
    proximal policy's: those may be of another batch (`pipeline.proximal`). `are_stored`: it reads them by itself."""
    order = row_order(lease)
    if not order or are_stored:
        return stored_rows(lease, order) if order else []
    columns, labels = {name: lease[name] for name in TRAINED_COLUMNS if name in lease.columns}, _labels(lease)
    return [TrainRow(**{name: values[i] for name, values in columns.items()}, label=labels[i]) for i in order]


def _labels(lease: Lease) -> list[str]:
    parts = [f", part {part}" if part else "" for part in lease["part"]]
    return [
        f"group {group}, member {member}{part}"
        for group, member, part in zip(lease.group_ids, lease["member"], parts, strict=True)
    ]


def rows_to_score(lease: Lease, *, are_stored: bool) -> list[TrainRow]:
    """What a scorer reads of the rows, in the order of members and parts: they may have no advantages yet, and they do not
    matter. A stage may have rows of several groups."""
    order = row_order(lease)
    if not order or are_stored:
        return stored_rows(lease, order) if order else []
    columns = {name: lease[name] for name in ("tokens", "loss_mask", "logprobs")}
    return [
        TrainRow(
            **{name: cells[i] for name, cells in columns.items()},
            advantages=np.zeros(len(lease["tokens"][i]), np.float32),
        )
        for i in order
    ]


def this_one(group_id: int, ready: Iterable[int]) -> int | None:
    """For `Store.claim(choose=...)`: this group and no other."""
    return group_id if group_id in set(ready) else None
