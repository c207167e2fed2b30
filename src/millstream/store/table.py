"""The store's books: which rows there are, what they have, who may have them, who has them. One place, no payload, no waiting.

Every method is one step: it checks, then changes everything or raises `StoreError` and has changed nothing. What a method does
depends on the calls before it alone (the time is passed in), so that a journal of the calls rebuilds the state.

Guarantees: a row is handed to a task only when it has what the task reads; to one holder at a time; once acknowledged, never
again to that task unless it is rewound. An id is never given to another row. A row is freed when every task is done with it
and a checkpoint covers the step it was acknowledged for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from millstream.errors import StoreError
from millstream.store import TRAIN, Choose, Reads, StoreStats, Want, policies
from millstream.store.entries import NO_VERSION, Block, GroupEntry, Ready, RowEntry, Unit

GENERATION_SHIFT = 40
"""An id is generation << 40 | number. A restore begins a generation: ids of the history it cut off are never given again."""
MAX_MASKS = 1024
"""Sets of columns whose mask is remembered."""


class Task(NamedTuple):
    name: str
    bit: int
    reads: Reads
    needs: int
    """The columns, as bits."""
    after: int
    after_groups: int
    """Of these, the tasks that read groups."""


class LeaseEntry(NamedTuple):
    id: int
    task: Task
    partition: str
    units: list[Unit]
    holder: str
    want: Want

    @property
    def rows(self) -> list[RowEntry]:
        return rows_of(self.units)


class BlockSpec(NamedTuple):
    """Some columns of some rows, as they come in."""

    columns: tuple[str, ...]
    nbytes: int
    payload: Any


class RestoredRows(NamedTuple):
    """Rows with the same columns, as a snapshot had them."""

    ids: list[int]
    group_ids: list[int]
    block: BlockSpec
    versions: list[int]
    tokens: list[int]
    steps: Sequence[Mapping[str, int]]
    """By task."""


class Partition:
    """A run, or an evaluation: rows that are put, claimed and dropped by themselves."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.rows: dict[int, RowEntry] = {}
        self.groups: dict[int, GroupEntry] = {}
        self.ready = {task.name: Ready(by_group=task.reads.by_group) for task in tasks}
        self.num_leased = {task.name: 0 for task in tasks}
        self.num_done = {task.name: 0 for task in tasks}
        self.by_version: dict[int, int] = {}
        self.kept: dict[int, list[RowEntry]] = {}
        """Rows that every task is done with, by the last step, which no checkpoint covers yet."""
        self.covered = -1
        self.is_finished = False


def rows_of(units: Sequence[Unit]) -> list[RowEntry]:
    """Of one lease, or of one task: they are all rows, or all groups."""
    found: list[RowEntry] = []
    for unit in units:
        if isinstance(unit, RowEntry):
            return list(units)  # type: ignore[arg-type]
        found.extend(unit.rows.values())
    return found


class RowTable:
    def __init__(
        self,
        tasks: Mapping[str, Reads],
        *,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
        on_free: Callable[[Block], None] = lambda block: None,
    ) -> None:
        self._columns: dict[str, int] = {}
        self._masks: dict[tuple[str, ...] | frozenset[str], int] = {}
        self.tasks = self._number(tasks)
        self._all = sum(task.bit for task in self.tasks.values())
        self._group_tasks = [task for task in self.tasks.values() if task.reads.by_group]
        self._all_groups = sum(task.bit for task in self._group_tasks)
        self._by_state: dict[tuple[int, int, int], tuple[Task, ...]] = {}
        self.capacity_rows = capacity_rows
        self.capacity_bytes = capacity_bytes
        self._on_free = on_free
        self.partitions: dict[str, Partition] = {}
        self._partition_of: dict[int, str] = {}
        self.leases: dict[int, LeaseEntry] = {}
        self.num_rows = 0
        self.num_bytes = 0
        self.rows_put = 0
        self.rows_claimed = 0
        self.rows_freed = 0
        self._generation = 0
        self._next_row = 0
        self._next_block = 0
        self._next_lease = 0

    def _number(self, tasks: Mapping[str, Reads]) -> dict[str, Task]:
        bits = {name: 1 << number for number, name in enumerate(tasks)}
        found = {}
        for name, reads in tasks.items():
            if unknown := set(reads.after) - bits.keys():
                raise StoreError(f"task {name} comes after {', '.join(sorted(unknown))}, which the store does not have")
            after = sum(bits[other] for other in reads.after)
            after_groups = sum(bits[other] for other in reads.after if tasks[other].by_group)
            found[name] = Task(name, bits[name], reads, self._mask(reads.columns), after, after_groups)
        return found

    def _mask(self, columns: tuple[str, ...] | frozenset[str]) -> int:
        mask = self._masks.get(columns)
        if mask is None:
            mask = 0
            for column in columns:
                mask |= self._columns.setdefault(column, 1 << len(self._columns))
            if len(self._masks) < MAX_MASKS:
                self._masks[columns] = mask
        return mask

    def task(self, name: str) -> Task:
        if name not in self.tasks:
            raise StoreError(f"no task {name!r}: the store was built for {', '.join(self.tasks)}")
        return self.tasks[name]

    def partition(self, name: str) -> Partition:
        if name not in self.partitions:
            self.partitions[name] = Partition(self.tasks.values())
        return self.partitions[name]

    # ---- rows come ---------------------------------------------------------------------------------------------------

    def check_size(self, num_rows: int, nbytes: int) -> None:
        """Raises for what can never fit."""
        if self.capacity_rows is not None and num_rows > self.capacity_rows:
            raise StoreError(f"{num_rows} rows at once, and the store holds {self.capacity_rows}: put fewer at a time")
        if self.capacity_bytes is not None and nbytes > self.capacity_bytes:
            raise StoreError(f"{nbytes} bytes at once, and the store holds {self.capacity_bytes}: put less at a time")

    def has_room(self, num_rows: int, nbytes: int) -> bool:
        has_rows = self.capacity_rows is None or self.num_rows + num_rows <= self.capacity_rows
        return has_rows and (self.capacity_bytes is None or self.num_bytes + nbytes <= self.capacity_bytes)

    def put(
        self,
        group_ids: Sequence[int],
        block: BlockSpec,
        *,
        versions: Sequence[int] | None,
        tokens: Sequence[int] | None,
        partition: str,
        now: float,
    ) -> range:
        groups = self._open_groups(group_ids, partition)
        if self._next_row + len(group_ids) >> GENERATION_SHIFT:
            raise StoreError("the store has run out of row ids: begin a new one")
        first = self._generation << GENERATION_SHIFT | self._next_row
        self._next_row += len(group_ids)
        ids = range(first, first + len(group_ids))
        self._add(ids, group_ids, groups, block, versions, tokens, partition, now)
        self.rows_put += len(ids)
        return ids

    def _open_groups(self, group_ids: Iterable[int], partition: str) -> dict[int, GroupEntry]:
        part = self.partition(partition)
        if part.is_finished:
            raise StoreError(f"partition {partition!r} is finished: no row can be added to it")
        groups = {}
        for group_id in dict.fromkeys(group_ids):
            group = groups[group_id] = part.groups.get(group_id) or GroupEntry(group_id)
            if group.is_closed:
                raise StoreError(f"group {group_id} is closed: no row can be added to it")
        return groups

    def _add(
        self,
        ids: Sequence[int],
        group_ids: Sequence[int],
        groups: Mapping[int, GroupEntry],
        spec: BlockSpec,
        versions: Sequence[int] | None,
        tokens: Sequence[int] | None,
        partition: str,
        now: float,
    ) -> list[RowEntry]:
        part, present, block = self.partition(partition), self._mask(spec.columns), self._new_block(spec, len(ids))
        part.groups.update(groups)
        rows = [
            RowEntry(row_id, groups[group_id], version, count, now, present, (block, index))
            for index, (row_id, group_id, version, count) in enumerate(
                zip(
                    ids,
                    group_ids,
                    [NO_VERSION] * len(ids) if versions is None else versions,
                    [1] * len(ids) if tokens is None else tokens,
                    strict=True,
                )
            )
        ]
        part.rows.update(zip(ids, rows, strict=True))
        self._partition_of.update(dict.fromkeys(ids, partition))
        for row in rows:
            row.group.rows[row.id] = row
            part.by_version[row.version] = part.by_version.get(row.version, 0) + 1
        self.num_rows += len(rows)
        self._advance(part, rows)
        return rows

    def _new_block(self, spec: BlockSpec, num_rows: int) -> Block:
        self._next_block += 1
        self.num_bytes += spec.nbytes
        return Block(self._next_block, spec.columns, spec.payload, spec.nbytes, num_rows)

    def write(self, row_ids: Sequence[int], spec: BlockSpec, *, overwrite: bool = False) -> set[str]:
        """The partitions that changed."""
        self.check_size(0, spec.nbytes)
        rows, present = [self.row(row_id) for row_id in row_ids], self._mask(spec.columns)
        if len(set(row_ids)) != len(row_ids):
            raise StoreError("a row is named twice in one write")
        if not overwrite:
            for row in rows:
                if row.present & present:
                    twice = [name for name in spec.columns if row.present & self._columns[name]]
                    raise StoreError(f"row {row.id} has {', '.join(twice)} already: a cell is written once")
        block = self._new_block(spec, len(rows))
        changed: dict[str, list[RowEntry]] = {}
        for index, row in enumerate(rows):
            if row.present & present:
                self._forget_hidden(row, block.columns)
            row.parts += ((block, index),)
            row.present |= present
            changed.setdefault(self._partition_of[row.id], []).append(row)
        for partition, some in changed.items():
            self._advance(self.partitions[partition], some)
        return set(changed)

    def _forget_hidden(self, row: RowEntry, columns: frozenset[str]) -> None:
        """Parts of which no cell will be read any more: writing a cell again and again takes no more room than once."""
        hidden = [part for part in row.parts if part[0].columns <= columns]
        row.parts = tuple(part for part in row.parts if not part[0].columns <= columns)
        for block, _ in hidden:
            self._leave(block)

    def _leave(self, block: Block, num_rows: int = 1) -> None:
        """So many rows less need it."""
        block.num_live -= num_rows
        if not block.num_live:
            self.num_bytes -= block.nbytes
            self._on_free(block)

    def row(self, row_id: int) -> RowEntry:
        partition = self._partition_of.get(row_id)
        if partition is None:
            generation, number = row_id >> GENERATION_SHIFT, row_id & ((1 << GENERATION_SHIFT) - 1)
            is_past = (generation, number) < (self._generation, self._next_row)
            raise StoreError(f"row {row_id} is not in the store: {'freed or dropped' if is_past else 'never put'}")
        return self.partitions[partition].rows[row_id]

    def close(self, group_ids: Iterable[int], partition: str) -> None:
        part = self.partition(partition)
        for group_id in group_ids:
            group = part.groups.setdefault(group_id, GroupEntry(group_id))
            group.is_closed = True
            self._check_group(part, group)
            self._forget_group_if_done(part, group)

    def finish(self, partition: str) -> None:
        self.partition(partition).is_finished = True

    # ---- rows become ready -------------------------------------------------------------------------------------------

    def _advance(self, part: Partition, rows: Sequence[RowEntry]) -> None:
        """Offer rows that have changed to the tasks that can have them now."""
        touched: dict[int, GroupEntry] = {}
        ready: dict[str, list[Unit]] = {}
        for state, some in groupby(rows, attrgetter("present", "done", "offered")):
            tasks = self._by_state.get(state)
            if tasks is None:
                tasks = self._by_state[state] = self._newly_ready(*state)
            alike, bits = list(some), sum(task.bit for task in tasks)
            for row in alike:
                row.offered |= bits
            for task in tasks:
                if not task.reads.by_group:
                    ready.setdefault(task.name, []).extend(alike)
                    continue
                for row in alike:
                    row.group.num_ready[task.bit] = row.group.num_ready.get(task.bit, 0) + 1
            if self._group_tasks:
                touched.update((row.group.id, row.group) for row in alike)
        for name, units in ready.items():
            part.ready[name].push(units)
        for group in touched.values():
            self._check_group(part, group)

    def _newly_ready(self, present: int, done: int, offered: int) -> tuple[Task, ...]:
        return tuple(
            task
            for task in self.tasks.values()
            if not offered & task.bit and present & task.needs == task.needs and done & task.after == task.after
        )

    def _check_group(self, part: Partition, group: GroupEntry) -> None:
        if not group.is_closed:
            return
        for task in self._group_tasks:
            is_complete = group.num_ready.get(task.bit, 0) == len(group.rows)
            is_due = group.done & task.after_groups == task.after_groups
            if is_complete and is_due and not group.offered & task.bit:
                group.offered |= task.bit
                part.ready[task.name].push([group])

    # ---- who gets what -----------------------------------------------------------------------------------------------

    def select(self, task: Task, want: Want, partition: str, *, is_all: bool, choose: Choose | None) -> list[Unit]:
        """Take out of the ready ones what this claim gets; empty if it has to wait. `is_all`: it would not get more."""
        ready = self.partition(partition).ready[task.name]
        if choose is not None:
            return self._chosen(ready, choose)
        if not (ready.has_enough(want) or (is_all and ready.total(want.versions).units)):
            return []
        if want.policy in ("fifo", "oldest_version"):
            return ready.pop(want, by_version=want.policy == "oldest_version")
        return self._by_policy(ready, want)

    def _chosen(self, ready: Ready, choose: Choose) -> list[Unit]:
        units = {unit.id: unit for unit in ready.in_order(None)}
        chosen = choose(tuple(units)) if units else None
        if chosen is None:
            return []
        if chosen not in units:
            raise StoreError(f"{chosen} was chosen, and is not among those that are ready")
        ready.remove([units[chosen]])
        return [units[chosen]]

    def _by_policy(self, ready: Ready, want: Want) -> list[Unit]:
        units = [unit for unit, _ in zip(ready.in_order(want.versions), range(policies.WINDOW), strict=False)]
        if not ready.by_group:
            want = msgspec.structs.replace(want, groups=None)
        candidates = [policies.Candidate(unit.id, unit.version, unit.num_rows, unit.tokens) for unit in units]
        if want.policy == "balanced":
            ranks = {want.rank: 0, **ready.tokens_of_rank}
            lead = ranks[want.rank] - sum(ranks.values()) / len(ranks)
            indices = policies.balanced(candidates, want, lead)
        else:
            indices = policies.ask(want.policy, candidates, want)
        taken = [units[index] for index in indices]
        ready.remove(taken)
        return taken

    def grant(self, task: Task, units: list[Unit], partition: str, holder: str, want: Want) -> LeaseEntry:
        """A lease on what was selected."""
        part, rows = self.partition(partition), rows_of(units)
        for unit in units:
            unit.leased |= task.bit
        if task.reads.by_group:
            for row in rows:
                row.leased |= task.bit
        if want.policy == "balanced":
            ranks = part.ready[task.name].tokens_of_rank
            ranks[want.rank] = ranks.get(want.rank, 0) + sum(row.tokens for row in rows)
        part.num_leased[task.name] += len(rows)
        self.rows_claimed += len(rows)
        self._next_lease += 1
        lease = self.leases[self._next_lease] = LeaseEntry(self._next_lease, task, partition, units, holder, want)
        return lease

    # ---- out of a journal --------------------------------------------------------------------------------------------

    @property
    def counters(self) -> tuple[int, int, int, int]:
        return self._generation, self._next_row, self._next_block, self._next_lease

    @counters.setter
    def counters(self, values: tuple[int, int, int, int]) -> None:
        self._generation, self._next_row, self._next_block, self._next_lease = values

    def grant_again(
        self, lease_id: int, task: Task, units: list[Unit], partition: str, holder: str, want: Want
    ) -> None:
        """What was handed out then is taken out of what is ready now: nobody's turn changes."""
        self._next_lease = lease_id - 1
        self.partition(partition).ready[task.name].remove(units)
        self.grant(task, units, partition, holder, want)

    def hold(self, lease_id: int, task: Task, units: list[Unit], partition: str, holder: str, want: Want) -> None:
        """A lease whose rows say already that they are on lease."""
        self.leases[lease_id] = LeaseEntry(lease_id, task, partition, units, holder, want)

    def adopt(self, partition: str, row: RowEntry) -> None:
        """A row that has its group, its parts and its masks."""
        part = self.partition(partition)
        part.rows[row.id] = row.group.rows[row.id] = row
        self._partition_of[row.id] = partition
        part.by_version[row.version] = part.by_version.get(row.version, 0) + 1
        self.num_rows += 1
        for block, _ in row.parts:
            block.num_live += 1
            row.present |= self._mask(block.columns)

    def rebuild(self) -> None:
        """Work out from the rows alone what is ready, on lease and done."""
        for part in self.partitions.values():
            part.num_leased = dict.fromkeys(self.tasks, 0)
            part.num_done = dict.fromkeys(self.tasks, 0)
            part.kept.clear()
            for row in part.rows.values():
                for task in self.tasks.values():
                    part.num_leased[task.name] += bool(row.leased & task.bit)
                    part.num_done[task.name] += bool(row.done & task.bit)
            self._offer_again(part)

    # ---- leases end --------------------------------------------------------------------------------------------------

    def lease(self, lease_id: int) -> LeaseEntry:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise StoreError(f"lease {lease_id} has ended (acknowledged, given back, dropped, or expired)")
        return lease

    def _end(self, lease: LeaseEntry) -> tuple[Partition, list[RowEntry]]:
        del self.leases[lease.id]
        part, rows = self.partitions[lease.partition], lease.rows
        part.num_leased[lease.task.name] -= len(rows)
        for entry in (*lease.units, *(rows if lease.task.reads.by_group else ())):
            entry.leased &= ~lease.task.bit
        return part, rows

    def give_back(self, lease_id: int) -> None:
        lease = self.lease(lease_id)
        part, _ = self._end(lease)
        part.ready[lease.task.name].push_front([unit for unit in lease.units if self._is_due(lease.task, unit)])
        for unit in lease.units:
            if not self._is_due(lease.task, unit):  # a task that it comes after was rewound meanwhile
                self._withdraw(part, lease.task, rows_of([unit]))
                unit.offered &= ~lease.task.bit

    def acknowledge(self, lease_id: int, step: int | None = None) -> None:
        lease = self.lease(lease_id)
        part, rows = self._end(lease)
        bit = lease.task.bit
        part.num_done[lease.task.name] += len(rows)
        for entry in (*lease.units, *(rows if lease.task.reads.by_group else ())):
            entry.done |= bit
        if step is not None:
            for row in rows:
                row.steps = (*row.steps, (bit, step))
        self._advance(part, [row for row in rows if row.done != self._all])
        self._free_or_keep(part, [row for row in rows if row.done == self._all])
        for unit in lease.units:
            if isinstance(unit, GroupEntry):
                self._check_group(part, unit)
                self._forget_group_if_done(part, unit)

    def drop(self, lease_id: int) -> None:
        lease = self.lease(lease_id)
        others = [entry.id for entry in (*lease.rows, *lease.units) if entry.leased & ~lease.task.bit]
        if others:
            raise StoreError(f"{others[0]} is on lease to another task, too: it cannot be dropped")
        part, rows = self._end(lease)
        self._take_out(part, rows, lease.units)
        for group in lease.units:
            if isinstance(group, GroupEntry):
                part.groups.pop(group.id, None)

    def _take_out(self, part: Partition, rows: Sequence[RowEntry], units: Sequence[Unit]) -> None:
        """Remove rows that may be ready for other tasks, counted in groups, or done with by some."""
        for task in self.tasks.values():
            candidates: Sequence[Unit] = units if task.reads.by_group else rows
            part.ready[task.name].remove(
                [one for one in candidates if one.offered & ~(one.leased | one.done) & task.bit]
            )
            part.num_done[task.name] -= sum(1 for row in rows if row.done & task.bit)
        for row in rows:
            for task in self._group_tasks:
                if row.offered & task.bit:
                    row.group.num_ready[task.bit] -= 1
        self._remove(part, rows)
        gone = {unit.id for unit in units if isinstance(unit, GroupEntry)}
        groups = {row.group.id: row.group for row in rows if row.group.id not in gone}
        for task in self._group_tasks:
            part.ready[task.name].update(groups.values())
        for group in groups.values():
            self._check_group(part, group)

    # ---- rows go -----------------------------------------------------------------------------------------------------

    def _free_or_keep(self, part: Partition, rows: Iterable[RowEntry]) -> None:
        freed = []
        for row in rows:
            last = row.last_step
            if last is None or last <= part.covered:
                freed.append(row)
            else:
                part.kept.setdefault(last, []).append(row)
        for task in self.tasks.values():
            part.num_done[task.name] -= len(freed)
        self._remove(part, freed)

    def _remove(self, part: Partition, rows: Sequence[RowEntry]) -> None:
        for row in rows:
            row_id = row.id
            del part.rows[row_id], self._partition_of[row_id], row.group.rows[row_id]
        for version, count in Counter(row.version for row in rows).items():
            part.by_version[version] -= count
            if not part.by_version[version]:
                del part.by_version[version]
        for block, count in Counter(block for row in rows for block, _ in row.parts).items():
            self._leave(block, count)
        self.num_rows -= len(rows)
        self.rows_freed += len(rows)
        for group in {row.group.id: row.group for row in rows}.values():
            self._forget_group_if_done(part, group)

    def _forget_group_if_done(self, part: Partition, group: GroupEntry) -> None:
        """A group without rows that no task will be handed any more."""
        everybody = self._all_groups
        if not group.rows and group.done & everybody == everybody and (group.is_closed or not everybody):
            part.groups.pop(group.id, None)

    def cover(self, step: int, partition: str) -> None:
        part = self.partition(partition)
        part.covered = max(part.covered, step)
        for covered in [at for at in part.kept if at <= part.covered]:
            self._free_or_keep(part, part.kept.pop(covered))

    def rewind(self, name: str, step: int, partition: str) -> int:
        """Rows that the task acknowledged for a later step are ready again, as if it had never seen them."""
        part, task = self.partition(partition), self.task(name)
        rows = [row for row in part.rows.values() if any(bit == task.bit and at > step for bit, at in row.steps)]
        for row in rows:
            row.steps = tuple(one for one in row.steps if one[0] != task.bit)
            row.done &= ~task.bit
            row.offered &= ~task.bit
        part.num_done[name] -= len(rows)
        for at in list(part.kept):
            part.kept[at] = [row for row in part.kept[at] if row.done == self._all]
        groups = {row.group.id: row.group for row in rows} if task.reads.by_group else {}
        for group in groups.values():
            group.done &= ~task.bit
            group.offered &= ~task.bit
            group.num_ready[task.bit] = 0
        for other in self.tasks.values():
            if other.after & task.bit:
                self._withdraw(part, other, rows)
        self._advance(part, rows)
        return len(rows)

    def _is_due(self, task: Task, unit: Unit) -> bool:
        """Whether the tasks that this one comes after are done with it."""
        if not task.after:
            return True
        if isinstance(unit, GroupEntry) and unit.done & task.after_groups != task.after_groups:
            return False
        return all(row.done & task.after == task.after for row in rows_of([unit]))

    def _withdraw(self, part: Partition, task: Task, rows: Sequence[RowEntry]) -> None:
        """Take back what was offered to a task, and is neither with it nor done, where the task comes before its turn."""
        units: dict[int, Unit] = {}
        for row in rows:
            if row.offered & task.bit and not (row.leased | row.done) & task.bit and not self._is_due(task, row):
                row.offered &= ~task.bit
                unit: Unit = row.group if task.reads.by_group else row
                if isinstance(unit, GroupEntry):
                    unit.num_ready[task.bit] -= 1
                unit.offered &= ~task.bit
                units[unit.id] = unit
        part.ready[task.name].remove(units.values())

    def drop_partition(self, partition: str) -> int:
        part = self.partitions.pop(partition, None)
        if part is None:
            return 0
        for lease_id in [lease.id for lease in self.leases.values() if lease.partition == partition]:
            del self.leases[lease_id]
        rows = list(part.rows.values())
        self._remove(part, rows)
        return len(rows)

    def lose(self, is_lost: Callable[[Block], bool]) -> list[tuple[RowEntry, str]]:
        """Forget the rows of which some cells are gone; they, and their partitions."""
        found = []
        for name, part in self.partitions.items():
            rows = [row for row in part.rows.values() if any(is_lost(block) for block, _ in row.parts)]
            gone = set(map(id, rows))
            for lease in self.leases.values():
                if lease.partition == name:
                    part.num_leased[lease.task.name] -= sum(1 for row in lease.rows if id(row) in gone)
                    lease.units[:] = [unit for unit in lease.units if id(unit) not in gone]
            self._take_out(part, rows, rows)
            part.kept = {step: [row for row in some if id(row) not in gone] for step, some in part.kept.items()}
            found += [(row, name) for row in rows]
        return found

    # ---- what it holds -----------------------------------------------------------------------------------------------

    def restore(
        self,
        rows: Sequence[RestoredRows],
        is_closed: Mapping[int, bool],
        acknowledged: Mapping[str, Sequence[int]],
        partition: str,
        generation: int,
        now: float,
    ) -> None:
        part = self.partition(partition)
        ids = [row_id for some in rows for row_id in some.ids]
        self._check_restore(part, rows, ids, is_closed, acknowledged)
        self._generation = max([self._generation, generation, *(row_id >> GENERATION_SHIFT for row_id in ids)]) + 1
        self._next_row = 0
        part.groups = {group_id: GroupEntry(group_id) for group_id in is_closed}
        for some in rows:
            entries = self._add(
                some.ids, some.group_ids, part.groups, some.block, some.versions, some.tokens, partition, now
            )
            for row, steps in zip(entries, some.steps, strict=True):
                row.steps = tuple((self.tasks[name].bit, step) for name, step in steps.items())
        part.rows = dict(sorted(part.rows.items()))  # as they were put, whatever columns they have
        for group in part.groups.values():
            group.rows = dict(sorted(group.rows.items()))
        for name, done in acknowledged.items():
            self._mark_done(part, self.task(name), set(done))
        for group_id, is_done in is_closed.items():
            part.groups[group_id].is_closed = is_done
        self._offer_again(part)

    def _check_restore(
        self,
        part: Partition,
        rows: Sequence[RestoredRows],
        ids: Sequence[int],
        is_closed: Mapping[int, bool],
        acknowledged: Mapping[str, Sequence[int]],
    ) -> None:
        if part.groups or part.rows:
            raise StoreError("a snapshot can only be restored into an empty partition")
        if alive := [row_id for row_id in ids if row_id in self._partition_of]:
            raise StoreError(f"row {alive[0]} of the snapshot is in the store already, in another partition")
        if len(set(ids)) != len(ids):
            raise StoreError("a row is in the snapshot twice")
        if strange := {group_id for some in rows for group_id in some.group_ids} - is_closed.keys():
            raise StoreError(f"the snapshot does not say whether group {min(strange)} is closed")
        for name in {*acknowledged, *(name for some in rows for steps in some.steps for name in steps)}:
            self.task(name)

    @property
    def generation(self) -> int:
        return self._generation

    def steps_of(self, row: RowEntry) -> dict[str, int]:
        names = {task.bit: name for name, task in self.tasks.items()}
        return {names[bit]: step for bit, step in row.steps}

    def _mark_done(self, part: Partition, task: Task, done: set[int]) -> None:
        for group in part.groups.values():
            if task.reads.by_group and group.id in done:
                group.done |= task.bit
                group.offered |= task.bit
        for row in part.rows.values():
            if (row.group.id if task.reads.by_group else row.id) in done:
                row.done |= task.bit
                part.num_done[task.name] += 1

    def _offer_again(self, part: Partition) -> None:
        """Work out from nothing who may have what."""
        part.ready = {task.name: Ready(by_group=task.reads.by_group) for task in self.tasks.values()}
        for group in part.groups.values():
            group.num_ready.clear()
            group.offered = group.done | group.leased
        for row in part.rows.values():
            row.offered = row.done | row.leased
        self._advance(part, list(part.rows.values()))
        for group in list(part.groups.values()):
            for task in self._group_tasks:
                if (group.done | group.leased) & task.bit:
                    group.num_ready[task.bit] = len(group.rows)
            if not group.rows:
                self._check_group(part, group)
                self._forget_group_if_done(part, group)
        done = [row for row in part.rows.values() if row.done == self._all]
        self._free_or_keep(part, done)

    def acknowledged(self, part: Partition) -> dict[str, list[int]]:
        """By task: the ids of the rows, or of the groups for a task that reads groups, that it is done with."""
        return {
            task.name: [
                entry.id
                for entry in (part.groups if task.reads.by_group else part.rows).values()
                if entry.done & task.bit
            ]
            for task in self.tasks.values()
        }

    def may_still_come(self, task: Task, partition: str) -> bool:
        """After `finish`: whether some row or group of this partition can still be handed to the task."""
        part = self.partition(partition)
        num_over = part.num_leased[task.name] + part.num_done[task.name]
        return len(part.rows) > num_over or self._has_empty_group(part, task, lambda group: group.done | group.leased)

    def may_become_ready(self, task: Task, partition: str) -> bool:
        """After `finish`: whether some row or group can still be handed to the task that cannot be now."""
        part = self.partition(partition)
        num_over = part.num_leased[task.name] + part.num_done[task.name] + part.ready[task.name].num_rows
        return len(part.rows) > num_over or self._has_empty_group(part, task, lambda group: group.offered)

    def _has_empty_group(self, part: Partition, task: Task, seen: Callable[[GroupEntry], int]) -> bool:
        """Whether a group that was closed without a row is not among those that the task has seen."""
        return task.reads.by_group and any(
            group.is_closed and not group.rows and not seen(group) & task.bit for group in part.groups.values()
        )

    def stats(self, now: float) -> StoreStats:
        parts = list(self.partitions.values())
        by_version: dict[int, int] = {}
        by_stage = {}
        for part in parts:
            for version, count in part.by_version.items():
                by_version[version] = by_version.get(version, 0) + count
        for name in self.tasks:
            ready = sum(part.ready[name].num_rows for part in parts)
            leased, done = sum(part.num_leased[name] for part in parts), sum(part.num_done[name] for part in parts)
            by_stage[name] = {
                "waiting": self.num_rows - ready - leased - done,
                "ready": ready,
                "leased": leased,
                "done": done,
            }
        return StoreStats(
            rows=self.num_rows,
            groups=sum(len(part.groups) for part in parts),
            bytes=self.num_bytes,
            leases=len(self.leases),
            waiting_producers=0,
            waiting_consumers=dict.fromkeys(self.tasks, 0),
            by_version=by_version,
            by_stage=by_stage,
            oldest_s=max((now - next(iter(part.rows.values())).since for part in parts if part.rows), default=0.0),
            rows_put=self.rows_put,
            rows_claimed=self.rows_claimed,
            rows_freed=self.rows_freed,
        )


def runs(rows: Sequence[RowEntry]) -> list[tuple[tuple[Block, ...], list[int], int]]:
    """Stretches of rows whose cells lie side by side: (blocks, the index of the first row in each, number of rows)."""
    found: list[tuple[tuple[Block, ...], list[int], int]] = []
    blocks: tuple[Block, ...] = ()
    starts, count = list[int](), 0
    for row in rows:
        parts = row.parts
        is_next = len(parts) == len(blocks) and parts[0][0] is blocks[0] and parts[0][1] == starts[0] + count
        if is_next and len(parts) > 1:
            is_next = all(
                part[0] is block and part[1] == start + count
                for part, block, start in zip(parts, blocks, starts, strict=True)
            )
        if is_next:
            count += 1
            continue
        if count:
            found.append((blocks, starts, count))
        blocks, starts, count = tuple(part[0] for part in parts), [part[1] for part in parts], 1
    return [*found, (blocks, starts, count)] if count else found


__all__ = ["TRAIN", "BlockSpec", "LeaseEntry", "Partition", "RestoredRows", "RowTable", "Task", "rows_of", "runs"]
