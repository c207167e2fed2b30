"""The coordinator's journal: every change of the table, in order, in a file.

A change is in the file before any client hears of it, so that a coordinator that is killed at any moment restarts in the same
state. The file is not flushed to disk at every change: it survives the process, not the machine. When it has grown to several
times what it describes, it is replaced by one record of the whole state.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from millstream.decoding import msgpack_decoder
from millstream.errors import StoreError
from millstream.store import wire
from millstream.store.base import Want
from millstream.store.partition import Partition
from millstream.store.rows import BlockSpec, GroupEntry, LeaseEntry, RowBlock, RowEntry, Unit
from millstream.store.segment_pool import SegmentPool
from millstream.store.table import RowTable

RECORD_HEADER_BYTES = 12
"""The length of a record (8), and its checksum (4)."""
MIN_BYTES = 64 << 20
"""Below this size a journal is not rewritten."""
COUNTERS = ("generation", "next_row", "num_blocks", "num_leases", "rows_put", "rows_claimed", "rows_freed")
"""Of `RowTable`."""


class Grant(Struct, tag=True, array_like=True):
    lease_id: int
    task: str
    units: list[int]
    """Ids of rows, or of groups."""
    partition: str
    want: Want

    @classmethod
    def of(cls, lease: LeaseEntry) -> Grant:
        return cls(lease.id, lease.task.name, [unit.id for unit in lease.units], lease.partition, lease.want)


class LoseNode(Struct, tag=True, array_like=True):
    node: str


class RowState(Struct, array_like=True):
    """A `RowEntry`, with the ids of its group and its blocks."""

    id: int
    group: int
    version: int
    tokens: int
    since: float
    leased: int
    done: int
    steps: tuple[tuple[int, int], ...]
    parts: list[tuple[int, int]]


class PartitionState(Struct, array_like=True):
    name: str
    groups: list[GroupEntry]
    rows: list[RowState]
    covered: int
    is_finished: bool
    order: dict[str, list[int]]
    """By task: the ids of what is ready, in order."""
    ranks: dict[str, dict[int, int]]
    """By task: the tokens that each rank was granted."""


class LeaseState(Struct, array_like=True):
    holder: str
    number: int
    """The holder's request."""
    grant: Grant


class FullState(Struct, tag=True, array_like=True):
    """The whole state of the coordinator."""

    partitions: list[PartitionState]
    blocks: dict[int, wire.PackedBlock]
    leases: list[LeaseState]
    counters: dict[str, int]
    results: dict[str, dict[int, bytes]]
    lost: list[wire.LostRow]


Change = wire.PayloadChange | wire.PartitionChange | wire.LeaseChange | LoseNode


class JournalRecord(Struct, array_like=True):
    client: str
    number: int
    at: float
    change: Change | Grant | FullState


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = msgpack_decoder(JournalRecord)
        self._encoder = msgspec.msgpack.Encoder()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size
        self._size_of_state = 0

    def read(self) -> Iterator[JournalRecord]:
        """All records. An incomplete last record is removed: no client had heard of it."""
        with self._path.open("rb") as file:
            end = 0
            size = os.fstat(file.fileno()).st_size
            while len(header := file.read(RECORD_HEADER_BYTES)) == RECORD_HEADER_BYTES:
                length, checksum = int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
                data = file.read(min(length, size - file.tell()))
                is_whole = len(data) == length and zlib.crc32(data) == checksum
                if not is_whole and file.tell() >= size:
                    break
                if not is_whole:
                    raise StoreError(f"{self._path} is damaged at byte {end}: begin a new store")
                record = self._decoder.decode(data)
                end = file.tell()
                yield record
        os.ftruncate(self._file, end)
        self._size = end

    def append(self, record: JournalRecord) -> None:
        """Raises OSError if it cannot be written; the journal is then as before."""
        data = _with_header(self._encoder.encode(record))
        try:
            _write_all(self._file, data)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    @property
    def is_long(self) -> bool:
        return self._size > max(MIN_BYTES, 4 * self._size_of_state)

    def rewrite(self, state: JournalRecord) -> None:
        """Replace all records by the state that they lead to. Raises OSError if that cannot be written; the journal is then as
        before, and not long until it has doubled."""
        data, fresh = _with_header(self._encoder.encode(state)), self._path.with_suffix(".new")
        self._size_of_state = self._size // 2
        number = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(number, data)
            fresh.replace(self._path)
        except OSError:
            os.close(number)
            fresh.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = number
        self._size = len(data)
        self._size_of_state = self._size

    def close(self) -> None:
        os.close(self._file)


def _with_header(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + zlib.crc32(data).to_bytes(4, "little") + data


def _write_all(number: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]


# ---- a change, applied to the table ----------------------------------------------------------------------------------


def apply_change(table: RowTable, change: Change, now: float) -> wire.ReplyBody:
    """Carry out a change, now or while the journal is replayed. Raises `StoreError`, and then nothing has changed."""
    match change:
        case wire.PutRows(partition=partition, versions=versions, tokens=tokens):
            ids = table.put(
                change.group_ids,
                change.block,
                small=change.small,
                versions=versions,
                tokens=tokens,
                partition=partition,
                now=now,
            )
            return wire.RowsAdded(ids.start, len(ids))
        case wire.WriteCells():
            table.write(change.row_ids, change.block, overwrite=change.overwrite)
        case wire.CloseGroups():
            table.close(change.group_ids, change.partition)
        case wire.AcknowledgeLease():
            table.acknowledge(change.lease_id, change.step)
        case wire.DropLease():
            table.drop(change.lease_id)
        case wire.GiveBackLease():
            table.give_back(change.lease_id)
        case wire.CoverStep():
            table.cover(change.step, change.partition)
        case wire.FinishPartition():
            table.partition(change.partition).is_finished = True
        case wire.RewindTask():
            return wire.RowCount(table.rewind(change.task, change.step, change.partition))
        case wire.DropPartition():
            return wire.RowCount(table.drop_partition(change.partition))
        case wire.RestorePartition():
            table.restore(change.saved, change.partition, now)
        case _:
            raise StoreError(f"{type(change).__name__} is not a change of the table")
    return wire.Accepted()


def replay_grant(table: RowTable, grant: Grant, holder: str) -> None:
    """Grant again what was granted then; the order of everything else that is ready stays."""
    task, units = table.tasks.find(grant.task), _units_of(table, grant)
    table.partition(grant.partition).ready[task.name].remove(units)
    table.num_leases = grant.lease_id - 1
    table.grant(task, units, grant.partition, holder, grant.want)


def _units_of(table: RowTable, grant: Grant) -> list[Unit]:
    part = table.partition(grant.partition)
    found: Mapping[int, Unit] = part.groups if table.tasks.find(grant.task).by_group else part.rows
    return [found[unit] for unit in grant.units]


# ---- the whole state -------------------------------------------------------------------------------------------------


def state_of(
    table: RowTable, numbers: Mapping[int, int], results: dict[str, dict[int, bytes]], lost: list[wire.LostRow]
) -> FullState:
    """`numbers`: by lease, the request of its holder that it was granted for."""
    rows = [row for part in table.partitions.values() for row in part.rows.values()]
    blocks = {block.id: block for row in rows for block, _ in row.parts}
    leases = table.leases.values()
    return FullState(
        partitions=[_partition_state(part) for part in table.partitions.values()],
        blocks={block.id: BlockSpec(block.columns, block.nbytes, block.payload) for block in blocks.values()},
        leases=[LeaseState(lease.holder, numbers.get(lease.id, 0), Grant.of(lease)) for lease in leases],
        counters={name: getattr(table, name) for name in COUNTERS},
        results=results,
        lost=lost,
    )


def _partition_state(part: Partition) -> PartitionState:
    return PartitionState(
        name=part.name,
        groups=[msgspec.structs.replace(group, rows={}, num_ready={}) for group in part.groups.values()],
        rows=[_row_state(row) for row in part.rows.values()],
        covered=part.covered,
        is_finished=part.is_finished,
        order={task: [unit.id for unit in ready.in_order()] for task, ready in part.ready.items()},
        ranks={task: ready.tokens_of_rank for task, ready in part.ready.items() if ready.tokens_of_rank},
    )


def _row_state(row: RowEntry) -> RowState:
    parts = [(block.id, index) for block, index in row.parts]
    return RowState(row.id, row.group.id, row.version, row.tokens, row.since, row.leased, row.done, row.steps, parts)


def load_state(state: FullState, table: RowTable, pool: SegmentPool) -> None:
    """Into an empty table."""
    blocks = {}
    for block_id, spec in state.blocks.items():
        mask = table.tasks.mask(spec.columns)
        blocks[block_id] = RowBlock(block_id, spec.columns, spec.nbytes, spec.payload, mask, 0)
        pool.adopt(blocks[block_id])
    table.num_bytes = sum(block.nbytes for block in blocks.values())
    for saved in state.partitions:
        _load_partition(saved, table, blocks)
    for lease in state.leases:
        grant, task = lease.grant, table.tasks.find(lease.grant.task)
        table.leases[grant.lease_id] = LeaseEntry(
            grant.lease_id, task, grant.partition, _units_of(table, grant), lease.holder, grant.want
        )
    for name in COUNTERS:
        setattr(table, name, state.counters[name])


def _load_partition(saved: PartitionState, table: RowTable, blocks: Mapping[int, RowBlock]) -> None:
    part = table.partition(saved.name)
    part.covered = saved.covered
    part.is_finished = saved.is_finished
    part.groups = {group.id: group for group in saved.groups}
    for row in saved.rows:
        parts = tuple((blocks[block_id], index) for block_id, index in row.parts)
        group = part.groups[row.group]
        entry = RowEntry(row.id, group, row.version, row.tokens, row.since, 0, parts)
        entry.leased = row.leased
        entry.done = row.done
        entry.steps = row.steps
        table.adopt(entry)
    table.forget(part.rebuild())
    for name, ready in part.ready.items():
        ready.reorder(saved.order[name])
        ready.tokens_of_rank = saved.ranks.get(name, {})
