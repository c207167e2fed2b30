"""The store of one process: hands out references, copies no cells, does not poll.

Not thread-safe: it is used on one event loop. The cost of an operation depends on the rows it touches, not on those resident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream.clock import Clock, RealClock
from millstream.errors import StoreError
from millstream.store.base import ONE_GROUP, TRAIN, Choose, Columns, Lease, Reads, Saved, StoreStats, Want
from millstream.store.rows import (
    UNVERSIONED,
    BlockSpec,
    LeaseEntry,
    RowEntry,
    contiguous_runs,
    each,
    integers,
    num_bytes_of,
    num_rows_of,
    partition_of,
    saved_columns,
    saved_of,
    token_counts,
)
from millstream.store.table import RowTable
from millstream.store.waiting import ClaimQueues, PutQueue

SMALL_LEASE = 16
"""Leases up to this many rows are read cell by cell: rows that were put one at a time are not adjacent."""


class MemoryStore:
    """See `millstream.store.Store` for the promises. A capacity of None is no bound."""

    def __init__(
        self,
        tasks: Mapping[str, Reads],
        *,
        clock: Clock | None = None,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        self._table = RowTable(tasks, capacity_rows=capacity_rows, capacity_bytes=capacity_bytes)
        self._clock = clock or RealClock()
        self._puts = PutQueue(self._table, self._clock)
        self._claims = ClaimQueues(self._table, self._clock)

    async def put(
        self,
        group_ids: int | Sequence[int],
        columns: Columns,
        *,
        versions: int | Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        partition: str = TRAIN,
        deadline_s: float | None = None,
    ) -> Sequence[int]:
        block, num_rows = block_of(columns)
        groups = each(group_ids, num_rows, "group_ids")
        row_versions = each(UNVERSIONED if versions is None else versions, num_rows, "versions")
        counts = token_counts(columns, tokens, num_rows)
        if not self._puts.has_room_now(num_rows, block.nbytes):
            await self._puts.room(num_rows, block.nbytes, who="a producer", deadline_s=deadline_s)
            self._puts.use(num_rows, block.nbytes)
        now = self._clock.now()
        try:
            ids = self._table.put(groups, block, versions=row_versions, tokens=counts, partition=partition, now=now)
        except StoreError:
            self._puts.serve()  # the room is free again
            raise
        self._claims.serve()
        return ids

    async def write(self, row_ids: Sequence[int], columns: Columns, *, overwrite: bool = False) -> None:
        block, num_rows = block_of(columns)
        if num_rows != len(row_ids):
            raise StoreError(f"columns of {num_rows} rows were written to {len(row_ids)}")
        self._table.write(integers(row_ids), block, overwrite=overwrite)
        self._serve()

    def _serve(self) -> None:
        """After a change."""
        self._puts.serve()
        self._claims.serve()

    async def close_groups(self, group_ids: Sequence[int], *, partition: str = TRAIN) -> None:
        self._table.close(integers(group_ids), partition)
        self._claims.serve()

    async def claim(
        self, task: str, want: Want = ONE_GROUP, *, choose: Choose | None = None, partition: str = TRAIN
    ) -> Lease:
        return lease_of(await self._claims.claim(self._claims.request(task, want, choose, partition, "a consumer")))

    async def renew(self, lease: Lease) -> None:
        self._claims.renew(lease.lease_id)

    async def acknowledge(self, lease: Lease, *, step: int | None = None) -> None:
        self._table.acknowledge(lease.lease_id, step)
        self._claims.stop_expiry(lease.lease_id)
        self._serve()

    async def drop(self, lease: Lease) -> None:
        self._table.drop(lease.lease_id)
        self._claims.stop_expiry(lease.lease_id)
        self._serve()

    async def give_back(self, lease: Lease) -> None:
        self._claims.give_back(lease.lease_id)

    async def cover(self, step: int, *, partition: str = TRAIN) -> None:
        self._table.cover(step, partition)
        self._puts.serve()

    async def rewind(self, task: str, step: int, *, partition: str = TRAIN) -> int:
        num_rows = self._table.rewind(task, step, partition)
        self._claims.serve()
        return num_rows

    def wake(self) -> None:
        self._claims.wake()

    async def finish(self, *, partition: str = TRAIN) -> None:
        self._table.partition(partition).is_finished = True
        self._claims.serve()

    async def drop_partition(self, partition: str) -> int:
        num_rows = self._table.drop_partition(partition)
        self._claims.end_partition(partition)
        self._puts.serve()
        return num_rows

    async def snapshot(self, *, partition: str = TRAIN, with_held: bool = True) -> Saved:
        rows = self._table.partition(partition).rows_to_save(with_held=with_held)
        return saved_of(self._table.content(partition, rows), [_cells_of(row) for row in rows])

    async def restore(self, saved: Saved, *, partition: str = TRAIN) -> None:
        blocks = [block_of(columns)[0] for columns in saved_columns(saved)]
        self._table.restore(partition_of(saved, blocks), partition, self._clock.now())
        self._claims.serve()

    async def stats(self) -> StoreStats:
        return self._table.stats(self._clock.now(), self._claims.waiters(), self._puts.waiters())


def block_of(columns: Columns) -> tuple[BlockSpec[Columns], int]:
    """The columns by reference, and their number of rows. The dictionary and its lists are copied, the cells are not."""
    num_rows = num_rows_of(columns)
    held: dict[str, Sequence[Any]] = {
        name: cells[:] if type(cells) is list else cells for name, cells in columns.items()
    }
    return BlockSpec(tuple(held), num_bytes_of(columns, num_rows), held), num_rows


def lease_of(lease: LeaseEntry) -> Lease:
    rows = lease.rows
    return Lease(
        lease_id=lease.id,
        task=lease.task.name,
        row_ids=[row.id for row in rows],
        group_ids=[row.group.id for row in rows],
        versions=[row.version for row in rows],
        columns=_columns_of(rows),
        empty_groups=lease.empty_groups,
    )


def _columns_of(rows: Sequence[RowEntry]) -> dict[str, list[Any]]:
    """The columns that all rows have."""
    if len(rows) <= SMALL_LEASE:
        return _small_columns_of(rows)
    columns: dict[str, list[Any]] = {}
    for blocks, starts, count in contiguous_runs(rows):
        found: dict[str, Sequence[Any]] = {}
        for block, start in zip(blocks, starts, strict=True):
            for name, cells in block.payload.items():
                found[name] = cells[start : start + count]
        for name, cells in found.items():
            columns.setdefault(name, []).extend(cells)
    return {name: cells for name, cells in columns.items() if len(cells) == len(rows)}


def _small_columns_of(rows: Sequence[RowEntry]) -> dict[str, list[Any]]:
    """The same, cell by cell."""
    if len({tuple([block.mask for block, _ in row.parts]) for row in rows}) > 1:
        by_row = [_cells_of(row) for row in rows]
        shared = [name for name in by_row[0] if all(name in cells for cells in by_row)]
        return {name: [cells[name] for cells in by_row] for name in shared}
    columns: dict[str, list[Any]] = {}
    for parts in zip(*(row.parts for row in rows), strict=True):
        payloads = [(block.payload, index) for block, index in parts]
        for name in parts[0][0].columns:
            columns[name] = [payload[name][index] for payload, index in payloads]
    return columns


def _cells_of(row: RowEntry) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for block, index in row.parts:
        for name, column in block.payload.items():
            cells[name] = column[index]
    return cells
