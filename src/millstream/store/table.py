"""The store's metadata: the rows, what they have, what is ready for which task, and the leases. No payload, no waiting.

Every method checks first, then changes everything or raises `StoreError` and has changed nothing. The state depends only on the
calls before (time is an argument), so that a journal of the calls rebuilds it.

Guarantees: a row is handed to a task only when it has what the task reads; to one holder at a time; once acknowledged, never
again to that task unless the task is rewound. An id is never given to another row. A row is freed when every task is done with
it and a checkpoint covers the step it was acknowledged for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from millstream.errors import StoreError
from millstream.store.base import Reads, StoreStats, StoreWaiter, Want
from millstream.store.partition import STATES, Partition
from millstream.store.rows import (
    BlockSpec,
    GroupEntry,
    LeaseEntry,
    PartitionContent,
    RowBlock,
    RowEntry,
    SavedPartition,
    StoreTask,
    TaskSet,
    Unit,
)

MAX_WAITERS_SHOWN = 20
GENERATION_SHIFT = 40
"""An id is generation << 40 | number. A restore begins a generation: ids of the history it cut off are never given again."""
SHARD_SHIFT = 56
"""The first generation of a store of several coordinators (`sharded`) is the coordinator's number << 16."""

GROUPS_PER_ROW = 2
"""Of a store with a capacity in rows: as many groups without rows fit as rows."""
WRITTEN_FACTOR = 2
"""Writes do not wait for room, and may fill a store to this many times its capacity in bytes."""


class RowTable:
    def __init__(
        self,
        tasks: Mapping[str, Reads],
        *,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
        shard: int = 0,
        on_new: Callable[[RowBlock], None] = lambda block: None,
        on_free: Callable[[RowBlock], None] = lambda block: None,
    ) -> None:
        self.tasks = TaskSet(tasks)
        self.capacity_rows = capacity_rows
        self.capacity_bytes = capacity_bytes
        self._on_new = on_new
        self._on_free = on_free
        self.partitions: dict[str, Partition] = {}
        self.rows: dict[int, RowEntry] = {}
        self.leases: dict[int, LeaseEntry] = {}
        self.num_bytes = 0
        self.operations: Counter[str] = Counter()
        self.rows_put = 0
        self.rows_claimed = 0
        self.rows_freed = 0
        self.generation = shard << SHARD_SHIFT - GENERATION_SHIFT
        self.next_row = 0
        self.num_blocks = 0
        self.num_leases = shard << SHARD_SHIFT

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def partition(self, name: str) -> Partition:
        part = self.partitions.get(name)
        if part is None:
            part = self.partitions[name] = Partition(name, self.tasks)
        return part

    def row(self, row_id: int) -> RowEntry:
        row = self.rows.get(row_id)
        if row is None:
            generation, number = row_id >> GENERATION_SHIFT, row_id & ((1 << GENERATION_SHIFT) - 1)
            is_past = (generation, number) < (self.generation, self.next_row)
            raise StoreError(f"row {row_id} is not in the store: {'freed or dropped' if is_past else 'never put'}")
        return row

    def lease(self, lease_id: int) -> LeaseEntry:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise StoreError(f"lease {lease_id} has ended (acknowledged, given back, dropped, or expired)")
        return lease

    # ---- rows are added ----------------------------------------------------------------------------------------------

    def check_size(self, num_rows: int, nbytes: int) -> None:
        """Raises for what can never fit."""
        if self.capacity_rows is not None and num_rows > self.capacity_rows:
            raise StoreError(f"{num_rows} rows at once, and the store holds {self.capacity_rows}: put fewer at a time")
        if self.capacity_bytes is not None and nbytes > self.capacity_bytes:
            raise StoreError(f"{nbytes} bytes at once, and the store holds {self.capacity_bytes}: put less at a time")

    def has_room(self, num_rows: int, nbytes: int) -> bool:
        has_rows = self.capacity_rows is None or len(self.rows) + num_rows <= self.capacity_rows
        return has_rows and (self.capacity_bytes is None or self.num_bytes + nbytes <= self.capacity_bytes)

    def _check_groups(self, part: Partition, group_ids: Iterable[int]) -> None:
        """Raises for more groups than rows fit, as there are when groups without rows are not claimed."""
        if self.capacity_rows is None:
            return
        num_new = len({group_id for group_id in group_ids if group_id not in part.groups})
        limit = GROUPS_PER_ROW * self.capacity_rows
        if num_new and sum(len(other.groups) for other in self.partitions.values()) + num_new > limit:
            raise StoreError(
                f"the store has {limit} groups, its limit, many without rows: claim them, or drop a partition"
            )

    def put(
        self,
        group_ids: Sequence[int],
        block: BlockSpec[Any],
        *,
        versions: Sequence[int],
        tokens: Sequence[int],
        partition: str,
        now: float,
        small: BlockSpec[Any] | None = None,
    ) -> range:
        """`small`: further columns of these rows. Raises `StoreError`: then nothing has changed."""
        part = self.partition(partition)
        groups = part.open_groups(group_ids)
        self._check_groups(part, groups)
        num_rows = len(group_ids)
        if self.next_row + num_rows >> GENERATION_SHIFT:
            raise StoreError("the store has run out of row ids: begin a new one")
        if small is not None:
            self._check_written(small, block)
        first = self.generation << GENERATION_SHIFT | self.next_row
        self.next_row += num_rows
        ids = range(first, first + num_rows)
        lines = zip(ids, group_ids, versions, tokens, strict=True)
        part.offer(self._add(part, groups, lines, self._new_block(block, num_rows, partition), now))
        self.rows_put += num_rows
        self.operations["put"] += 1
        if small is not None and num_rows:
            self.write(ids, small)
        return ids

    def _add(
        self,
        part: Partition,
        groups: Mapping[int, GroupEntry],
        lines: Iterable[tuple[int, int, int, int]],
        block: RowBlock,
        now: float,
    ) -> list[RowEntry]:
        """`lines`: the id, the group, the version and the tokens of each row of the block."""
        rows = [
            RowEntry(row_id, groups[group_id], version, tokens, now, block.mask, ((block, index),))
            for index, (row_id, group_id, version, tokens) in enumerate(lines)
        ]
        for row in rows:
            self.rows[row.id] = row
        part.add(rows)
        return rows

    def _new_block(self, spec: BlockSpec[Any], num_rows: int, partition: str) -> RowBlock:
        self.num_blocks += 1
        columns, nbytes = spec.columns, spec.nbytes
        self.num_bytes += nbytes
        self.partitions[partition].num_bytes += nbytes
        block = RowBlock(self.num_blocks, columns, nbytes, spec.payload, self.tasks.mask(columns), num_rows, partition)
        self._on_new(block)
        return block

    def adopt(self, row: RowEntry) -> None:
        """Add a row that has its group, its parts and its masks. Call `Partition.rebuild` afterwards."""
        part = self.partition(row.group.partition)
        self.rows[row.id] = row
        part.add([row])
        for block, _ in row.parts:
            if not block.num_live:
                block.partition = part.name
                part.num_bytes += block.nbytes
            block.num_live += 1
            row.present |= block.mask

    def _check_written(self, spec: BlockSpec[Any], put: BlockSpec[Any] | None = None) -> None:
        """Raises for columns that the store has no room for, or that the put before them has."""
        self.check_size(0, spec.nbytes)
        held = self.num_bytes + (0 if put is None else put.nbytes)
        if self.capacity_bytes is not None and held + spec.nbytes > WRITTEN_FACTOR * self.capacity_bytes:
            found = f"{spec.nbytes} bytes to a store that has {held}"
            raise StoreError(f"{found}: writes may fill it to {WRITTEN_FACTOR * self.capacity_bytes}. Free rows first")
        if put is not None and (twice := set(spec.columns) & set(put.columns)):
            raise StoreError(f"a put has {', '.join(sorted(twice))} twice: a cell is written once")

    def write(self, row_ids: Sequence[int], spec: BlockSpec[Any], *, overwrite: bool = False) -> None:
        self._check_written(spec)
        rows, mask = [self.row(row_id) for row_id in row_ids], self.tasks.mask(spec.columns)
        if len(set(row_ids)) != len(row_ids) or not rows:
            raise StoreError("a row is named twice in one write, or none is")
        for row in rows if not overwrite else ():
            if row.present & mask:
                twice = self.tasks.names_in(spec.columns, row.present)
                raise StoreError(f"row {row.id} has {', '.join(twice)} already: a cell is written once")
        self.operations["write"] += 1
        block = self._new_block(spec, len(rows), rows[0].group.partition)
        changed: dict[str, list[RowEntry]] = {}
        for index, row in enumerate(rows):
            if row.present & mask:
                self._release_hidden(row, mask)
            row.parts += ((block, index),)
            row.present |= mask
            changed.setdefault(row.group.partition, []).append(row)
        for partition, some in changed.items():
            self.partitions[partition].offer(some)

    def _release_hidden(self, row: RowEntry, mask: int) -> None:
        """Release blocks whose columns are all overwritten: writing a cell repeatedly takes no more room than once."""
        hidden = [block for block, _ in row.parts if not block.mask & ~mask]
        row.parts = tuple(part for part in row.parts if part[0].mask & ~mask)
        for block in hidden:
            self._release(block)

    def _release(self, block: RowBlock) -> None:
        """One row less needs the block."""
        block.num_live -= 1
        if not block.num_live:
            self.num_bytes -= block.nbytes
            part = self.partitions.get(block.partition)
            if part is not None:
                part.num_bytes -= block.nbytes
            self._on_free(block)

    def close(self, group_ids: Iterable[int], partition: str) -> None:
        part = self.partition(partition)
        group_ids = list(group_ids)
        self._check_groups(part, group_ids)
        for group_id in group_ids:
            part.close_group(group_id)
        self.operations["close"] += 1

    # ---- claims ------------------------------------------------------------------------------------------------------

    def grant(self, task: StoreTask, units: list[Unit], partition: str, holder: str, want: Want) -> LeaseEntry:
        """A lease on what was selected."""
        part = self.partitions[partition]
        rows = part.lease(task, units)
        if want.policy == "balanced":
            ranks = part.ready[task.name].tokens_of_rank
            ranks[want.rank] = ranks.get(want.rank, 0) + sum(row.tokens for row in rows)
        self.rows_claimed += len(rows)
        self.operations["claim"] += 1
        self.num_leases += 1
        lease = self.leases[self.num_leases] = LeaseEntry(self.num_leases, task, partition, units, holder, want)
        return lease

    def give_back(self, lease_id: int) -> None:
        lease = self.lease(lease_id)
        del self.leases[lease_id]
        self.partitions[lease.partition].give_back(lease)
        self.operations["give_back"] += 1

    def acknowledge(self, lease_id: int, step: int | None = None) -> None:
        lease = self.lease(lease_id)
        del self.leases[lease_id]
        self.forget(self.partitions[lease.partition].acknowledge(lease, step))
        self.operations["acknowledge"] += 1

    def drop(self, lease_id: int) -> None:
        lease = self.lease(lease_id)
        others = [entry.id for entry in (*lease.rows, *lease.units) if entry.leased & ~lease.task.bit]
        if others:
            raise StoreError(f"{others[0]} is on lease to another task, too: it cannot be dropped")
        del self.leases[lease_id]
        self.forget(self.partitions[lease.partition].drop(lease))
        self.operations["drop"] += 1

    # ---- rows are removed --------------------------------------------------------------------------------------------

    def forget(self, rows: Sequence[RowEntry]) -> None:
        """Rows that their partition has removed."""
        for row in rows:
            del self.rows[row.id]
            for block, _ in row.parts:
                self._release(block)
        self.rows_freed += len(rows)

    def cover(self, step: int, partition: str) -> None:
        self.forget(self.partition(partition).cover(step))
        self.operations["cover"] += 1

    def rewind(self, name: str, step: int, partition: str) -> int:
        return self.partition(partition).rewind(self.tasks.find(name), step)

    def drop_partition(self, partition: str) -> int:
        part = self.partitions.pop(partition, None)
        if part is None:
            return 0
        for lease_id in [lease.id for lease in self.leases.values() if lease.partition == partition]:
            del self.leases[lease_id]
        rows = list(part.rows.values())
        self.forget(rows)
        return len(rows)

    def lose(self, is_lost: Callable[[RowBlock], bool]) -> list[RowEntry]:
        """Remove the rows of which some cells are lost."""
        found = []
        for name, part in self.partitions.items():
            rows = [row for row in part.rows.values() if any(is_lost(block) for block, _ in row.parts)]
            gone = set(map(id, rows))
            for lease in self.leases.values():
                if lease.partition == name:
                    part.num_leased[lease.task.name] -= sum(1 for row in lease.rows if id(row) in gone)
                    lease.units[:] = [unit for unit in lease.units if id(unit) not in gone]
            part.take_out(rows, rows)
            self.forget(rows)
            part.uncovered = {
                step: [row for row in some if id(row) not in gone] for step, some in part.uncovered.items()
            }
            found += rows
        return found

    # ---- whole partitions --------------------------------------------------------------------------------------------

    def content(self, partition: str, rows: Sequence[RowEntry]) -> PartitionContent:
        """Of these rows, and without groups that have others only."""
        part = self.partition(partition)
        kept = {row.group.id for row in rows}
        names = {task.bit: task.name for task in self.tasks.all}
        return PartitionContent(
            row_ids=[row.id for row in rows],
            group_ids=[row.group.id for row in rows],
            versions=[row.version for row in rows],
            tokens=[row.tokens for row in rows],
            steps=[{names[bit]: step for bit, step in row.steps} for row in rows],
            is_closed={id_: group.is_closed for id_, group in part.groups.items() if id_ in kept or not group.rows},
            acknowledged=part.acknowledged(),
            generation=self.generation,
        )

    def restore(self, saved: SavedPartition[Any], partition: str, now: float) -> None:
        part, content = self.partition(partition), saved.content
        self._check_restore(part, content)
        generations = [row_id >> GENERATION_SHIFT for row_id in content.row_ids]
        self.generation = max([self.generation, content.generation, *generations]) + 1
        self.next_row = 0
        part.groups = {group_id: GroupEntry(group_id, partition) for group_id in content.is_closed}
        lines = list(zip(content.row_ids, content.group_ids, content.versions, content.tokens, strict=True))
        for places, block in saved.blocks:
            new_block = self._new_block(block, len(places), partition)
            rows = self._add(part, part.groups, [lines[place] for place in places], new_block, now)
            for row, place in zip(rows, places, strict=True):
                row.steps = tuple((self.tasks.find(name).bit, step) for name, step in content.steps[place].items())
        part.rows = dict(sorted(part.rows.items()))  # in the order of the puts, whatever columns they have
        for group in part.groups.values():
            group.rows = dict(sorted(group.rows.items()))
            group.is_closed = content.is_closed[group.id]
        part.mark_done(content.acknowledged)
        self.forget(part.rebuild())

    def _check_restore(self, part: Partition, content: PartitionContent) -> None:
        ids = content.row_ids
        if part.groups or part.rows:
            raise StoreError("a snapshot can only be restored into an empty partition")
        if alive := [row_id for row_id in ids if row_id in self.rows]:
            raise StoreError(f"row {alive[0]} of the snapshot is in the store already, in another partition")
        if len(set(ids)) != len(ids):
            raise StoreError("a row is in the snapshot twice")
        if strange := set(content.group_ids) - content.is_closed.keys():
            raise StoreError(f"the snapshot does not say whether group {min(strange)} is closed")
        for name in {*content.acknowledged, *(name for steps in content.steps for name in steps)}:
            self.tasks.find(name)

    def stats(
        self, now: float, consumers: Sequence[tuple[str, StoreWaiter]], producers: Sequence[StoreWaiter]
    ) -> StoreStats:
        """`consumers`: with their tasks."""
        parts = [part for part in self.partitions.values() if part.rows or part.groups]
        by_version = Counter[int]()
        by_stage = {name: dict.fromkeys(STATES, 0) for name in self.tasks.by_name}
        by_partition = {part.name: part.stats() for part in parts}
        for part in parts:
            by_version.update(part.by_version)
            for name, states in by_partition[part.name].by_stage.items():
                for state, count in states.items():
                    by_stage[name][state] += count
        waiters = sorted([*(waiter for _, waiter in consumers), *producers], key=lambda waiter: -waiter.seconds)
        return StoreStats(
            rows=self.num_rows,
            groups=sum(len(part.groups) for part in parts),
            bytes=self.num_bytes,
            leases=len(self.leases),
            waiting_producers=len(producers),
            waiting_consumers={name: sum(task == name for task, _ in consumers) for name in self.tasks.by_name},
            waiting=waiters[:MAX_WAITERS_SHOWN],
            by_version=dict(by_version),
            by_stage=by_stage,
            oldest_s=max((now - next(iter(part.rows.values())).since for part in parts if part.rows), default=0.0),
            rows_put=self.rows_put,
            rows_claimed=self.rows_claimed,
            rows_freed=self.rows_freed,
            operations=dict(self.operations),
            by_partition=by_partition,
        )
