"""A model's folder: what it was made with, its checkpoints, and the journal from which it is brought back after a crash.

Guarantees: a request is in the journal, on the disk, before it is acknowledged. After a crash the model is its last snapshot
and all requests since then, computed again in their order: nothing that was acknowledged is lost, and nothing counts twice.

    model.json                       what it was made with
    current                          the number of the snapshot that counts; a new one counts from the rename of this file on
    snapshot-N/                      learner.pt (none for 0: the model as it was made) and snapshot.msgpack
    journal-N                        the requests after it: length, checksum, seq_id and body of each
    weights/NAME, sampler_weights/NAME   checkpoints that the client named: learner.pt or adapters, and checkpoint.json
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from millstream.decoding import decode_json, decode_msgpack
from millstream.paths import sync_path
from millstream.serve.training.futures import Result

S = TypeVar("S", bound=Struct)
HEADER = struct.Struct("<II")  # bytes of the record, and their checksum
CURRENT, MODEL, CHECKPOINT, SNAPSHOT = "current", "model.json", "checkpoint.json", "snapshot.msgpack"


class JournalEntry(Struct, frozen=True, array_like=True):
    """A request as it came."""

    seq_id: int
    kind: str
    body: bytes


class SnapshotInfo(Struct, frozen=True, kw_only=True):
    version: int  # optimizer steps
    next_seq_id: int
    results: dict[str, Result] = {}  # of requests before, that no client has come for


class CheckpointInfo(Struct, frozen=True, kw_only=True):
    seq_id: int  # of the request that saved it: the same request, replayed, finds it
    version: int
    time: float
    expires_at: float | None = None
    user_metadata: dict[str, str] | None = None


def write_whole(path: Path, data: bytes) -> None:
    """Whole or not at all: if this raises, what was there before is there."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_synced(path: Path, data: bytes) -> None:
    """Whole or not at all, and on the disk when this returns."""
    write_whole(path, data)
    sync_path(path.parent)


def sync_files(folder: Path) -> None:
    """Those in it, not in folders within it."""
    for path in folder.iterdir():
        if path.is_file():
            sync_path(path)


def write_json(path: Path, value: Struct) -> None:
    write_synced(path, msgspec.json.encode(value))


def read_json_file(path: Path, kind: type[S]) -> S:
    return decode_json(path.read_bytes(), kind)


def write_records(file: FileIO, entries: Sequence[JournalEntry]) -> int:
    """The bytes that were written: they are on the disk when this returns."""
    records = [msgspec.msgpack.encode(entry) for entry in entries]
    data = b"".join(HEADER.pack(len(record), zlib.crc32(record)) + record for record in records)
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())
    return len(data)


class RequestJournal:
    """Called with one call at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.number = int((folder / CURRENT).read_text()) if (folder / CURRENT).exists() else 0
        self.num_bytes = 0
        self._before: int | None = None  # the number that counts on the disk, until a rename is known to be there
        self._file = self._path_of(self.number).open("ab", buffering=0)

    def _path_of(self, number: int) -> Path:
        return self._folder / f"journal-{number}"

    @property
    def snapshot_folder(self) -> Path | None:
        """None: nothing was trained before the journal."""
        return self._folder / f"snapshot-{self.number}" if self.number else None

    def append(self, entry: JournalEntry) -> None:
        """It is on the disk when this returns. Raises `OSError` if it is not; then nothing of it is."""
        try:
            self._sync_number()
            self.num_bytes += write_records(self._file, [entry])
        except OSError:
            os.ftruncate(self._file.fileno(), self.num_bytes)
            raise

    def entries(self) -> list[JournalEntry]:
        """In the order in which they came. A record that was cut off by a crash was not acknowledged: it is removed."""
        path = self._path_of(self.number)
        data, at, found = path.read_bytes(), 0, []
        while at + HEADER.size <= len(data):
            length, checksum = HEADER.unpack_from(data, at)
            record = data[at + HEADER.size : at + HEADER.size + length]
            if len(record) < length or zlib.crc32(record) != checksum:
                break
            found.append(decode_msgpack(record, JournalEntry))
            at += HEADER.size + length
        os.truncate(path, at)
        self.num_bytes = at
        return found

    def info(self) -> SnapshotInfo:
        folder = self.snapshot_folder
        if folder is None:
            return SnapshotInfo(version=0, next_seq_id=1)
        return decode_msgpack((folder / SNAPSHOT).read_bytes(), SnapshotInfo)

    def begin_next(self, write: Callable[[Path], None], info: SnapshotInfo, waiting: Sequence[JournalEntry]) -> None:
        """A new snapshot, and a new journal with the requests that are still to be computed. Raises what `write` does, or
        `OSError` if they cannot be written: then the old ones stay, and nothing of the new ones does. From the rename of the
        number on the new ones count; if that cannot be made durable, `append` tries again before it writes."""
        self._sync_number()
        before, number = self.number, self.number + 1
        self._remove(number)  # left by a crash
        file: FileIO | None = None
        try:
            self._write_snapshot(number, write, info)
            # whatever is cut off: the next record follows the last one
            file = self._path_of(number).open("ab", buffering=0)
            num_bytes = write_records(file, waiting)
            write_whole(self._folder / CURRENT, str(number).encode())
        except BaseException:
            if file is not None:
                file.close()
            self._remove(number)
            raise
        self._file.close()
        self._file = file
        self.number = number
        self.num_bytes = num_bytes
        self._before = before
        self._sync_number()

    def _write_snapshot(self, number: int, write: Callable[[Path], None], info: SnapshotInfo) -> None:
        folder = self._folder / f"snapshot-{number}"
        folder.mkdir()
        write(folder)
        sync_files(folder)
        write_synced(folder / SNAPSHOT, msgspec.msgpack.encode(info))

    def _sync_number(self) -> None:
        """What counted before is removed when the disk has the new number."""
        if self._before is not None:
            sync_path(self._folder)
            self._remove(self._before)
            self._before = None

    def _remove(self, number: int) -> None:
        shutil.rmtree(self._folder / f"snapshot-{number}", ignore_errors=True)
        self._path_of(number).unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()


def write_checkpoint(folder: Path, info: CheckpointInfo, write: Callable[[Path], None]) -> None:
    """Whole or not at all. One that is there is replaced."""
    temporary = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    sync_files(temporary)
    write_json(temporary / CHECKPOINT, info)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
    sync_path(folder.parent)


def read_checkpoint(folder: Path) -> CheckpointInfo | None:
    """None: there is none, or it has expired, and then it is removed."""
    if not (folder / CHECKPOINT).is_file():
        return None
    info = read_json_file(folder / CHECKPOINT, CheckpointInfo)
    if info.expires_at is not None and info.expires_at <= time.time():
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return info
