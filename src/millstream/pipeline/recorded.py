"""Batches that a run has kept, trained again: they take the place of prompts, rollouts and settling. The rest is the same path.

The same rows in the same order reach the same learner, so that the weights are those of the run, bit for bit on a CPU. Events
are those of a run in which every group is complete at once. Groups are numbered in the order of training.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from millstream.events import GroupAdmitted, GroupTaken, RolloutEnded, RolloutFailed, RolloutStarted
from millstream.events.rollouts import TakenRows
from millstream.events.rollouts.reader import KeptGroup, KeptRollout, RolloutDump
from millstream.pipeline.admission import Admission
from millstream.pipeline.batch import TakenGroup
from millstream.pipeline.context import GroupInFlight, RunContext
from millstream.pipeline.schema import TRAIN, train_rows
from millstream.pipeline.settle import GroupFinalizer
from millstream.store import Reads
from millstream.store.memory import MemoryStore
from millstream.types import Fate

COLUMNS = ("member", "part", "agent", "reward", "start_version", "tokens", "loss_mask", "logprobs", "advantages")
EXTRA = ("reference", "values", "returns")


class RecordedGroup(NamedTuple):
    """A group of a batch. Without rows: its place stayed empty."""

    name: str
    fate: Fate
    rollouts: list[KeptRollout]  # those that ended, and count
    taken: TakenRows

    @property
    def columns(self) -> dict[str, list[Any]]:
        """As they were in the store."""
        parts = {(part.member, part.part): part for one in self.rollouts for part in one.parts}
        own = [parts[place] for place in self.taken.places]
        columns: dict[str, list[Any]] = {
            name: [getattr(part, name) for part in own] for name in ("member", "part", "agent", "start_version")
        }
        columns["reward"] = list(self.taken.rewards)
        for name in ("tokens", "loss_mask", "logprobs", "advantages", *EXTRA):
            values = [getattr(row, name) for row in self.taken.rows]
            if values and values[0] is not None:
                columns[name] = values
        return columns


class _TakenGroup(NamedTuple):
    version: int
    number: int  # in the batch
    kept: KeptGroup


Batches = Iterator[tuple[int, list[_TakenGroup]]]


def _read_batches(dump: RolloutDump) -> Batches:
    """Of each version that was trained, in order: the groups that it took and that have left, in the order in which they joined
    the batch."""
    left = ((group.taken, group) for group in dump.groups() if group.left is not None)
    taken = (_TakenGroup(head.version, head.number, group) for head, group in left if head is not None)
    for version, groups in itertools.groupby(taken, key=attrgetter("version")):
        yield version, sorted(groups, key=attrgetter("number"))


class RecordedBatches:
    """The finished batches of a run, read one after the other. Reading one may take a while."""

    def __init__(self, dump: RolloutDump, *, groups_per_step: int) -> None:
        self._dump = dump
        self._num = 0
        self.num_beyond_gap = 0  # batches after one that is missing or lacks groups
        is_short = False  # the last one: the data had ended
        for version, batch in _read_batches(dump):
            if not _is_finished(batch, groups_per_step):
                continue
            if is_short:  # it was not the last one
                self._num -= 1
                self.num_beyond_gap += 1
            is_next = version == self._num and [one.number for one in batch] == [*range(len(batch))]
            is_next = is_next and not self.num_beyond_gap
            self._num += is_next
            self.num_beyond_gap += not is_next
            is_short = is_next and len(batch) < groups_per_step
        self._batches = _read_batches(dump)
        self._next = 0  # the version that it is at

    def __len__(self) -> int:
        return self._num

    def read(self, number: int) -> list[RecordedGroup]:
        """In the order in which they joined the batch. None is left after the last."""
        if number >= self._num:
            return []
        if number < self._next:
            self._batches = _read_batches(self._dump)
        self._next = number + 1
        batch = next(batch for version, batch in self._batches if version == number)
        return [self._recorded(one.kept) for one in batch]

    def _recorded(self, group: KeptGroup) -> RecordedGroup:
        taken, fate = self._dump.taken_rows(group), group.fate
        assert taken is not None and fate is not None
        kept = [one for one in self._dump.rollouts(group) if one.fate == fate and not one.why]
        name = f"{group.task_id}, group {group.group_id} of {self._dump.folder.parent.name}"
        return RecordedGroup(name, Fate.TRAINED if taken.rows else Fate(fate), kept, taken)

    def new_store(self, capacity_rows: int) -> MemoryStore:
        """With the columns that were recorded."""
        trained = (one for number in range(len(self)) for one in self.read(number) if one.taken.rows)
        first = next(trained, None)
        extra = () if first is None else tuple(name for name in EXTRA if name in first.columns)
        return MemoryStore({TRAIN: Reads((*COLUMNS, *extra))}, capacity_rows=capacity_rows)


def _is_finished(batch: Sequence[_TakenGroup], groups_per_step: int) -> bool:
    """Not the batch in which the run was stopped or is."""
    return len(batch) == groups_per_step or any(one.kept.fate in ("trained", "kept") for one in batch)


class RecordedTaker:
    """In place of a `GroupTaker`: gives the groups of recorded batches, in their order. `num_members`: of every group."""

    def __init__(
        self,
        context: RunContext,
        batches: RecordedBatches,
        *,
        admission: Admission,
        finalizer: GroupFinalizer,
        num_members: int,
    ) -> None:
        self._context = context
        self._batches = batches
        self._admission = admission
        self._finalizer = finalizer
        self._num_members = num_members
        self._to_come: list[RecordedGroup] | None = None

    def begin_batch(self) -> None:
        self._to_come = None

    async def next(self) -> TakenGroup | None:
        """Waits for the batch to be read."""
        if self._to_come is None:
            reading = asyncio.to_thread(self._batches.read, self._admission.version)
            self._to_come = await self._context.waits.on("train", "a recorded batch", reading)
        return await self._take(self._to_come.pop(0)) if self._to_come else None

    async def _take(self, group: RecordedGroup) -> TakenGroup:
        context, group_id, version = self._context, self._context.next_group, self._admission.version
        starts = [part.start_version for one in group.rollouts for part in one.parts]
        self._admit(group_id, group, min(starts, default=version))
        for member in range(self._num_members):
            self._record_member(group_id, member, next((one for one in group.rollouts if one.member == member), None))
        if group.taken.rows:
            await context.store.put(group_id, group.columns)
        else:
            rewards = np.array([one.reward for one in group.rollouts])
            self._finalizer.leave(
                group_id, group.fate, rewards, refused_by=self._finalizer.refused_by(group.fate, rewards)
            )
            context.vacant.add(group_id)
        await context.store.close_groups([group_id])
        lease = await context.store.claim(TRAIN)
        self._admission.take(group_id)
        if group.taken.rows:
            context.emit(
                GroupTaken(
                    at=context.now(),
                    group_id=group_id,
                    version=version,
                    lag=version - min(starts),
                    num_rollouts=len(group.rollouts),
                )
            )
        return TakenGroup(lease, train_rows(lease))

    def _admit(self, group_id: int, group: RecordedGroup, start: int) -> None:
        context = self._context
        place = self._admission.admit(group_id, start)
        context.next_group = group_id + 1
        context.groups[group_id] = GroupInFlight(group.name, 0, prompt=group_id)
        context.emit(
            GroupAdmitted(
                at=context.now(),
                group_id=group_id,
                task_id=group.name,
                epoch=0,
                start_version=place.start,
                deadline=place.deadline,
            )
        )

    def _record_member(self, group_id: int, member: int, kept: KeptRollout | None) -> None:
        now, emit = self._context.now(), self._context.emit
        emit(RolloutStarted(at=now, group_id=group_id, member=member, attempt=0))
        if kept is None or kept.versions is None:
            message = "it is not among the recorded rollouts"
            emit(
                RolloutFailed(
                    at=now, group_id=group_id, member=member, attempt=0, error="", message=message, is_final=True
                )
            )
            return
        by_agent = {part.agent: part.reward for part in kept.parts}
        emit(
            RolloutEnded(
                at=now,
                group_id=group_id,
                member=member,
                attempt=0,
                reward=kept.reward,
                rewards=[] if len(by_agent) == 1 else list(by_agent.values()),
                num_tokens=sum(len(part.tokens) for part in kept.parts),
                num_sampled=kept.num_sampled,
                num_parts=len(kept.parts),
                start_version=min(part.start_version for part in kept.parts),
                end_version=kept.versions[1],
                finish=kept.parts[-1].finish,
                seconds=0.0,
            )
        )
