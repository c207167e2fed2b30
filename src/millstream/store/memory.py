"""The store of one process: hands out references, copies nothing, polls nothing.

Single-threaded: it lives on the event loop. The cost of an operation depends on the rows it touches, not on those resident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream.clock import Clock, RealClock
from millstream.errors import StoreError
from millstream.store import ONE_GROUP, TRAIN, Choose, Columns, Lease, Reads, Row, Saved, StoreStats, Want
from millstream.store.columns import each, integers, num_rows_of, token_counts
from millstream.store.entries import NO_VERSION, RowEntry
from millstream.store.table import BlockSpec, LeaseEntry, RestoredRows, RowTable, runs
from millstream.store.waiting import WaitQueues


class MemoryStore:
    """See `millstream.store.Store` for the promises. Capacities: None is no bound."""

    def __init__(
        self,
        tasks: Mapping[str, Reads],
        *,
        clock: Clock | None = None,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        self._catalog = RowTable(tasks, capacity_rows=capacity_rows, capacity_bytes=capacity_bytes)
        self._clock = clock or RealClock()
        self._desk = WaitQueues(self._catalog, self._clock)

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
        numbers = None if versions is None else each(versions, num_rows, "versions")
        counts = token_counts(columns, tokens, num_rows)
        await self._desk.room(num_rows, block.nbytes, who="a producer", deadline_s=deadline_s)
        self._desk.use(num_rows, block.nbytes)
        try:
            ids = self._catalog.put(
                groups, block, versions=numbers, tokens=counts, partition=partition, now=self._clock.now()
            )
        except StoreError:
            self._desk.serve_producers()  # the room is free after all
            raise
        self._desk.serve_all(partition)
        return ids

    async def write(self, row_ids: Sequence[int], columns: Columns, *, overwrite: bool = False) -> None:
        block, num_rows = block_of(columns)
        if num_rows != len(row_ids):
            raise StoreError(f"columns of {num_rows} rows were written to {len(row_ids)}")
        for partition in self._catalog.write(integers(row_ids), block, overwrite=overwrite):
            self._desk.serve_all(partition)
        if overwrite:
            self._desk.serve_producers()

    async def close_groups(self, group_ids: Sequence[int], *, partition: str = TRAIN) -> None:
        self._catalog.close(integers(group_ids), partition)
        self._desk.serve_all(partition)

    async def claim(
        self, task: str, want: Want = ONE_GROUP, *, choose: Choose | None = None, partition: str = TRAIN
    ) -> Lease:
        lease = await self._desk.claim(self._catalog.task(task), want, choose, partition, "a consumer")
        return lease_of(lease)

    async def renew(self, lease: Lease) -> None:
        self._desk.renew(lease.lease_id)

    async def acknowledge(self, lease: Lease, *, step: int | None = None) -> None:
        entry = self._catalog.lease(lease.lease_id)
        self._catalog.acknowledge(lease.lease_id, step)
        self._ended(entry)

    async def drop(self, lease: Lease) -> None:
        entry = self._catalog.lease(lease.lease_id)
        self._catalog.drop(lease.lease_id)
        self._ended(entry)

    def _ended(self, lease: LeaseEntry) -> None:
        self._desk.forget(lease.id)
        self._desk.serve_producers()
        self._desk.serve_all(lease.partition)

    async def give_back(self, lease: Lease) -> None:
        self._desk.give_back(lease.lease_id)

    async def cover(self, step: int, *, partition: str = TRAIN) -> None:
        self._catalog.cover(step, partition)
        self._desk.serve_producers()

    async def rewind(self, task: str, step: int, *, partition: str = TRAIN) -> int:
        num_rows = self._catalog.rewind(task, step, partition)
        self._desk.serve_all(partition)
        return num_rows

    def wake(self) -> None:
        self._desk.wake()

    async def finish(self, *, partition: str = TRAIN) -> None:
        self._catalog.finish(partition)
        self._desk.serve_all(partition)

    async def drop_partition(self, partition: str) -> int:
        num_rows = self._catalog.drop_partition(partition)
        self._desk.end_partition(partition)
        return num_rows

    async def snapshot(self, *, partition: str = TRAIN) -> Saved:
        part = self._catalog.partition(partition)
        rows = list(part.rows.values())
        return Saved(
            rows=tuple(
                Row(row_id=row.id, group_id=row.group.id, columns=columns)
                for row, columns in zip(rows, map(_cells_of, rows), strict=True)
            ),
            is_closed={group_id: group.is_closed for group_id, group in part.groups.items()},
            acknowledged={name: tuple(ids) for name, ids in self._catalog.acknowledged(part).items()},
            versions={row.id: row.version for row in rows if row.version != NO_VERSION},
            tokens={row.id: row.tokens for row in rows},
            steps={row.id: self._catalog.steps_of(row) for row in rows if row.steps},
            generation=self._catalog.generation,
        )

    async def restore(self, saved: Saved, *, partition: str = TRAIN) -> None:
        self._catalog.restore(
            restored(saved), saved.is_closed, saved.acknowledged, partition, saved.generation, self._clock.now()
        )
        self._desk.serve_all(partition)

    async def stats(self) -> StoreStats:
        return self._desk.stats()


def block_of(columns: Columns) -> tuple[BlockSpec, int]:
    """The columns by reference. The dictionary and its lists are copied, the cells are not."""
    num_rows = num_rows_of(columns)
    held, nbytes = dict[str, Sequence[Any]](), 0
    for name, cells in columns.items():
        held[name] = cells.copy() if isinstance(cells, list) else cells
        nbytes += _nbytes(cells)
    return BlockSpec(tuple(columns), nbytes, held), num_rows


NUMBERS = (int, float, bool)


def _nbytes(cells: Sequence[Any]) -> int:
    if type(cells) is list and type(cells[0]) in NUMBERS:
        return 8 * len(cells)
    size = getattr(cells, "nbytes", None)
    return int(size) if size is not None else sum(map(_length, cells))


def _length(cell: Any) -> int:
    size = getattr(cell, "nbytes", None)
    return int(size) if size is not None else len(cell) if isinstance(cell, (str, bytes)) else 8


def lease_of(lease: LeaseEntry) -> Lease:
    rows = lease.rows
    columns: dict[str, list[Any]] = {}
    for blocks, starts, count in runs(rows):
        found: dict[str, Sequence[Any]] = {}
        for block, start in zip(blocks, starts, strict=True):
            if start == 0 and count == len(next(iter(block.payload.values()))):
                found.update(block.payload)
                continue
            for name, cells in block.payload.items():
                found[name] = cells[start : start + count]
        for name, cells in found.items():
            columns.setdefault(name, []).extend(cells)
    names = [name for name, cells in columns.items() if len(cells) == len(rows)]
    return Lease(
        lease_id=lease.id,
        task=lease.task.name,
        row_ids=[row.id for row in rows],
        group_ids=[row.group.id for row in rows],
        versions=[row.version for row in rows],
        columns={name: columns[name] for name in names},
        empty_groups=[unit.id for unit in lease.units if not unit.num_rows],
    )


def _cells_of(row: RowEntry) -> dict[str, Any]:
    return {name: cells[index] for block, index in row.parts for name, cells in block.payload.items()}


def restored(saved: Saved) -> list[RestoredRows]:
    """The rows of a snapshot, those with the same columns together."""
    by_columns: dict[tuple[str, ...], list[Row]] = {}
    for row in saved.rows:
        by_columns.setdefault(tuple(row.columns), []).append(row)
    return [
        RestoredRows(
            ids=[row.row_id for row in rows],
            group_ids=[row.group_id for row in rows],
            block=block_of({name: [row.columns[name] for row in rows] for name in names})[0],
            versions=[saved.versions.get(row.row_id, NO_VERSION) for row in rows],
            tokens=[saved.tokens.get(row.row_id, 1) for row in rows],
            steps=[saved.steps.get(row.row_id, {}) for row in rows],
        )
        for names, rows in by_columns.items()
    ]
