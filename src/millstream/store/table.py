"""The store's metadata: the rows, what they have, what is ready for which task, and the leases. No payload, no waiting.

Every method checks first, then changes everything or raises `StoreError` and has changed nothing. The state depends only on the
calls before (time is an argument), so that a journal of the calls rebuilds it.

Guarantees: a row is handed to a task only when it has what the task reads; to one holder at a time; once acknowledged, never
again to that task unless the task is rewound. An id is never given to another row. A row is freed when every task is done with
it and a checkpoint covers the step it was acknowledged for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from millstream.errors import StoreError
from millstream.store.base import Choose, Reads, StoreStats, Want
from millstream.store.partition import Partition
from millstream.store.rows import UNVERSIONED, BlockSpec, GroupEntry, LeaseEntry, RowBlock, RowEntry, Unit
from millstream.store.tasks import StoreTask, TaskSet

GENERATION_SHIFT = 40
"""An id is generation << 40 | number. A restore begins a generation: ids of the history it cut off are never given again."""

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
        on_free: Callable[[RowBlock], None] = lambda block: None,
    ) -> None:
        self.tasks = TaskSet(tasks)
        self.capacity_rows = capacity_rows
        self.capacity_bytes = capacity_bytes
        self._on_free = on_free
        self.partitions: dict[str, Partition] = {}
        self.rows: dict[int, RowEntry] = {}
        self.leases: dict[int, LeaseEntry] = {}
        self.num_bytes = 0
        self.rows_put = 0
        self.rows_claimed = 0
        self.rows_freed = 0
        self.generation = 0
        self.next_row = 0
        self.num_blocks = 0
        self.num_leases = 0

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
        num_new, limit = len(set(group_ids) - part.groups.keys()), GROUPS_PER_ROW * self.capacity_rows
        if num_new and sum(len(other.groups) for other in self.partitions.values()) + num_new > limit:
            raise StoreError(
                f"the store has {limit} groups, its limit, many without rows: claim them, or drop a partition"
            )

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
        part = self.partition(partition)
        groups = part.open_groups(group_ids)
        self._check_groups(part, groups)
        num_rows = len(group_ids)
        if self.next_row + num_rows >> GENERATION_SHIFT:
            raise StoreError("the store has run out of row ids: begin a new one")
        first = self.generation << GENERATION_SHIFT | self.next_row
        self.next_row += num_rows
        ids = range(first, first + num_rows)
        part.offer(self.add(part, ids, group_ids, groups, block, versions, tokens, now))
        self.rows_put += num_rows
        return ids

    def add(
        self,
        part: Partition,
        ids: Sequence[int],
        group_ids: Sequence[int],
        groups: Mapping[int, GroupEntry],
        spec: BlockSpec,
        versions: Sequence[int] | None,
        tokens: Sequence[int] | None,
        now: float,
    ) -> list[RowEntry]:
        block = self._new_block(spec, len(ids))
        if versions is None:
            versions = [UNVERSIONED] * len(ids)
        if tokens is None:
            tokens = [1] * len(ids)
        rows = [
            RowEntry(ids[index], groups[group_id], versions[index], tokens[index], now, block.mask, (block, index))
            for index, group_id in enumerate(group_ids)
        ]
        for row in rows:
            self.rows[row.id] = row
        part.add(rows)
        return rows

    def _new_block(self, spec: BlockSpec, num_rows: int) -> RowBlock:
        self.num_blocks += 1
        self.num_bytes += spec.nbytes
        return RowBlock(self.num_blocks, spec, self.tasks.mask(spec.columns), num_rows)

    def write(self, row_ids: Sequence[int], spec: BlockSpec, *, overwrite: bool = False) -> Iterable[str]:
        """The names of the partitions that changed."""
        self.check_size(0, spec.nbytes)
        if self.capacity_bytes is not None and self.num_bytes + spec.nbytes > WRITTEN_FACTOR * self.capacity_bytes:
            found = f"{spec.nbytes} bytes to a store that has {self.num_bytes}"
            raise StoreError(f"{found}: writes may fill it to {WRITTEN_FACTOR * self.capacity_bytes}. Free rows first")
        rows, mask = [self.row(row_id) for row_id in row_ids], self.tasks.mask(spec.columns)
        if len(set(row_ids)) != len(row_ids):
            raise StoreError("a row is named twice in one write")
        for row in rows if not overwrite else ():
            if row.present & mask:
                twice = self.tasks.names_in(spec.columns, row.present)
                raise StoreError(f"row {row.id} has {', '.join(twice)} already: a cell is written once")
        block = self._new_block(spec, len(rows))
        changed: dict[str, list[RowEntry]] = {}
        for index, row in enumerate(rows):
            if row.present & mask:
                self._release_hidden(row, mask)
            row.parts += ((block, index),)
            row.present |= mask
            changed.setdefault(row.group.partition, []).append(row)
        for partition, some in changed.items():
            self.partitions[partition].offer(some)
        return changed

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
            self._on_free(block)

    def close(self, group_ids: Iterable[int], partition: str) -> None:
        part = self.partition(partition)
        group_ids = list(group_ids)
        self._check_groups(part, group_ids)
        for group_id in group_ids:
            part.close_group(group_id)

    # ---- claims ------------------------------------------------------------------------------------------------------

    def select(self, task: StoreTask, want: Want, partition: str, *, is_all: bool, choose: Choose | None) -> list[Unit]:
        """Take out of the ready queue what this claim gets; empty if it has to wait. `is_all`: waiting would not add more."""
        return self.partition(partition).ready[task.name].select(want, choose, is_all=is_all)

    def grant(self, task: StoreTask, units: list[Unit], partition: str, holder: str, want: Want) -> LeaseEntry:
        """A lease on what was selected."""
        part = self.partitions[partition]
        rows = part.lease(task, units)
        if want.policy == "balanced":
            ranks = part.ready[task.name].tokens_of_rank
            ranks[want.rank] = ranks.get(want.rank, 0) + sum(row.tokens for row in rows)
        self.rows_claimed += len(rows)
        self.num_leases += 1
        lease = self.leases[self.num_leases] = LeaseEntry(self.num_leases, task, partition, units, holder, want)
        return lease

    def give_back(self, lease_id: int) -> None:
        lease = self.lease(lease_id)
        del self.leases[lease_id]
        self.partitions[lease.partition].give_back(lease)

    def acknowledge(self, lease_id: int, step: int | None = None) -> None:
        lease = self.lease(lease_id)
        del self.leases[lease_id]
        self.forget(self.partitions[lease.partition].acknowledge(lease, step))

    def drop(self, lease_id: int) -> None:
        lease = self.lease(lease_id)
        others = [entry.id for entry in (*lease.rows, *lease.units) if entry.leased & ~lease.task.bit]
        if others:
            raise StoreError(f"{others[0]} is on lease to another task, too: it cannot be dropped")
        del self.leases[lease_id]
        self.forget(self.partitions[lease.partition].drop(lease))

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

    def stats(self, now: float) -> StoreStats:
        parts = list(self.partitions.values())
        by_version: dict[int, int] = {}
        by_stage = {}
        for part in parts:
            for version, count in part.by_version.items():
                by_version[version] = by_version.get(version, 0) + count
        for name in self.tasks.by_name:
            ready = sum(part.ready[name].num_rows for part in parts)
            leased, done = sum(part.num_leased[name] for part in parts), sum(part.num_done[name] for part in parts)
            waiting = self.num_rows - ready - leased - done
            by_stage[name] = {"waiting": waiting, "ready": ready, "leased": leased, "done": done}
        return StoreStats(
            rows=self.num_rows,
            groups=sum(len(part.groups) for part in parts),
            bytes=self.num_bytes,
            leases=len(self.leases),
            waiting_producers=0,
            waiting_consumers=dict.fromkeys(self.tasks.by_name, 0),
            by_version=by_version,
            by_stage=by_stage,
            oldest_s=max((now - next(iter(part.rows.values())).since for part in parts if part.rows), default=0.0),
            rows_put=self.rows_put,
            rows_claimed=self.rows_claimed,
            rows_freed=self.rows_freed,
        )
