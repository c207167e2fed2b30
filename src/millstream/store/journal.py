"""The coordinator's memory beyond its death: every change of the books, in order, in a file.

A change is in the file before anybody hears of it, so that a coordinator that is killed at any moment comes back as it was. The
file is not forced to the disk at every change: it survives the process, not the machine. When it has grown to several times
what it describes, it is written anew as the state it leads to.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from millstream.errors import StoreError
from millstream.store import Want
from millstream.store.wire import (
    Acknowledge,
    CloseGroups,
    Cover,
    Drop,
    DropPartition,
    Finish,
    GiveBack,
    Lost,
    Payload,
    Put,
    Restore,
    Rewind,
    Write,
)

PREFIX = 12
"""The length of a record, and its checksum."""
MIN_BYTES = 64 << 20
"""Below this size a journal is never rewritten."""


class Grant(Struct, tag=True, array_like=True):
    lease_id: int
    task: str
    units: list[int]
    """Ids of rows, or of groups."""
    partition: str
    want: Want


class LoseNode(Struct, tag=True, array_like=True):
    node: str


class RowState(Struct, array_like=True):
    id: int
    group: int
    version: int
    tokens: int
    since: float
    leased: int
    done: int
    steps: list[tuple[int, int]]
    parts: list[tuple[int, int]]


class GroupState(Struct, array_like=True):
    id: int
    is_closed: bool
    leased: int
    done: int


class BlockState(Struct, array_like=True):
    id: int
    columns: list[str]
    payload: Payload


class PartitionState(Struct, array_like=True):
    name: str
    groups: list[GroupState]
    rows: list[RowState]
    covered: int
    is_finished: bool
    turns: dict[str, list[int]]
    """By task: the ids of what is ready, in turn."""
    ranks: dict[str, dict[int, int]]
    """By task: the tokens that each rank has had."""


class LeaseState(Struct, array_like=True):
    holder: str
    number: int
    grant: Grant


class State(Struct, tag=True, array_like=True):
    """Everything, at one moment."""

    partitions: list[PartitionState]
    blocks: list[BlockState]
    leases: list[LeaseState]
    counters: tuple[int, int, int, int]
    totals: tuple[int, int, int]
    results: dict[str, dict[int, bytes]]
    lost: list[Lost]


Change = (
    Put
    | Write
    | CloseGroups
    | Grant
    | Acknowledge
    | Drop
    | GiveBack
    | Cover
    | Rewind
    | Finish
    | DropPartition
    | Restore
    | LoseNode
    | State
)


class Record(Struct, array_like=True):
    client: str
    number: int
    at: float
    change: Change


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = msgspec.msgpack.Decoder(Record)
        self._encoder = msgspec.msgpack.Encoder()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size
        self._size_of_state = 0

    def read(self) -> Iterator[Record]:
        """All that was written. A last record that was cut short is removed: nobody had heard of it."""
        with self._path.open("rb") as file:
            end = 0
            size = os.fstat(file.fileno()).st_size
            while len(prefix := file.read(PREFIX)) == PREFIX:
                length, checksum = int.from_bytes(prefix[:8], "little"), int.from_bytes(prefix[8:], "little")
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

    def append(self, record: Record) -> None:
        """Raises OSError if it cannot be written, and then nothing is."""
        data = _framed(self._encoder.encode(record))
        try:
            _write_all(self._file, data)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    @property
    def is_long(self) -> bool:
        return self._size > max(MIN_BYTES, 4 * self._size_of_state)

    def begin_anew(self, state: Record) -> None:
        """Replace what was written by the state that it leads to."""
        data, fresh = _framed(self._encoder.encode(state)), self._path.with_suffix(".new")
        number = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(number, data)
        except OSError:
            os.close(number)
            raise
        fresh.replace(self._path)
        os.close(self._file)
        self._file = number
        self._size = len(data)
        self._size_of_state = self._size

    def close(self) -> None:
        os.close(self._file)


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + zlib.crc32(data).to_bytes(4, "little") + data


def _write_all(number: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(number, view) :]
