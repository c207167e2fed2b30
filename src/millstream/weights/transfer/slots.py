"""Slots: files of shared memory that hold one version each.

A reader locks the file while it reads it, and the writer uses only files without a lock: nothing is overwritten under a reader.
The locks are the kernel's (`flock`), which releases those of a process that dies. Files that a killed writer left in the folder
are removed by the next writer that opens or closes there.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
import weakref
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from millstream.errors import WeightsError, WeightsSuperseded, WeightsUnreachable
from millstream.weights.transfer.base import WeightsRef

HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sqqq")
MAGIC = b"weights1"
OWNER_SUFFIX = ".owner"
MADV_POPULATE_READ = 22  # map all pages at once: four times as fast as one by one
NO_SERIAL = -1
MAX_SCANS = 8  # for a free slot
"""The serial number of an empty slot, which is used before all others."""


class Header(NamedTuple):
    version: int
    serial: int
    is_whole: bool


class Slot:
    """The writer's view of one file. Between `try_lock` and `unlock` no reader can lock it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.serial = NO_SERIAL
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._resize(0)

    def try_lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def begin(self, version: int, serial: int) -> None:
        """Until `finish`, the header says that the slot is incomplete, in case the writer fails or dies."""
        self.serial = NO_SERIAL
        self._write_header(Header(version, serial, is_whole=False))

    def finish(self, num_bytes: int) -> None:
        """The slot is complete and holds this many bytes."""
        if num_bytes < len(self.bytes):
            self._resize(num_bytes)
        self._write_header(self._header._replace(is_whole=True))
        self.serial = self._header.serial

    def reserve(self, num_bytes: int) -> None:
        """Allocate this many bytes; what is written stays. Raises `WeightsError` if there is no memory."""
        if num_bytes > len(self.bytes):
            try:
                self._resize(max(num_bytes, 3 * len(self.bytes) // 2))
            except WeightsError:  # there may be room for what is needed now, without the reserve
                self._resize(num_bytes)

    def close(self) -> None:
        """Remove the file; a reader that has it mapped keeps it."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self._descriptor)

    def _write_header(self, header: Header) -> None:
        self._header = header
        self._mapped[: _HEADER.size] = _HEADER.pack(MAGIC, *header)

    def _resize(self, num_bytes: int) -> None:
        size = HEADER_BYTES + num_bytes
        try:
            os.ftruncate(self._descriptor, size)
            os.posix_fallocate(self._descriptor, 0, size)
            self._mapped = mmap.mmap(self._descriptor, size)
        except OSError as error:
            raise WeightsError(_no_room(num_bytes, self.path.parent, error)) from error
        self.bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)[HEADER_BYTES:]


class Slots:
    """The slots of one writer, at most `most`. Not thread-safe."""

    def __init__(self, folder: Path, *, most: int) -> None:
        self._folder = folder.absolute()
        self._most = most
        self.name = secrets.token_hex(8)
        try:
            self._owner = _open_folder(self._folder, self.name)
        except OSError as error:
            raise WeightsError(f"cannot stage weights in {self._folder}: {error.strerror or error}") from error
        self._slots: list[Slot] = []

    def claim(self) -> Slot:
        """Lock a slot for writing: the one with the oldest content. The newest is used only if there is no other."""
        by_age = sorted(self._slots, key=lambda slot: slot.serial)
        for slot in by_age[:-1]:
            if slot.try_lock():
                return slot
        if len(self._slots) < self._most:
            self._slots.append(slot := Slot(self._folder / f"{self.name}-{len(self._slots)}"))
            slot.try_lock()
            return slot
        for slot in by_age * MAX_SCANS:  # a reader that moves meanwhile is found in two slots, and one of them is free
            if slot.try_lock():
                return slot
        raise WeightsError(
            f"all {self._most} slots in {self._folder} are in use by readers: every fetcher must release its weights"
        )

    @property
    def serials(self) -> set[int]:
        """Of the versions in the slots."""
        return {slot.serial for slot in self._slots}

    def close(self) -> None:
        """Remove all files, also those of killed writers, and the folder if it is empty."""
        for slot in self._slots:
            slot.close()
        self._slots = []
        (self._folder / f"{self.name}{OWNER_SUFFIX}").unlink(missing_ok=True)
        os.close(self._owner)
        _remove_orphans(self._folder)
        with suppress(OSError):
            self._folder.rmdir()


class LockedSlot:
    """A slot with a reader's lock, until `release`, or until the last tensor of its bytes is gone."""

    def __init__(self, descriptor: int) -> None:
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)  # all of it; a write goes to a private copy
        with suppress(OSError):  # a kernel before 5.14: its pages are mapped one by one
            mapped.madvise(MADV_POPULATE_READ)
        self.bytes: Tensor = torch.frombuffer(mapped, dtype=torch.uint8)[HEADER_BYTES:]
        self.release = weakref.finalize(mapped, os.close, descriptor)


def lock_slot(ref: WeightsRef) -> LockedSlot:
    """Lock the slot of a reference for reading. Its bytes are not verified yet; there are none if the weights are only on a
    device.

    Raises `WeightsSuperseded` if it holds another version by now, `WeightsUnreachable` if there is no such file.
    """
    try:
        descriptor = os.open(ref.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsUnreachable(
            f"{ref.path} cannot be opened ({error.strerror}): the publisher{ref.of_node} was closed, or its folder is "
            "not visible here"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:  # it is being written
            is_locked = False
        found = _header_of(descriptor)
        if not is_locked or found.serial != ref.serial:
            raise WeightsSuperseded(
                f"version {ref.version} is superseded by version {found.version}, which is in its slot {ref.path}: "
                "fetch the newest"
            )
        if not found.is_whole:
            raise WeightsUnreachable(f"{ref.path} is incomplete: its writer has died")
        return LockedSlot(descriptor)
    except BaseException:  # the descriptor holds the lock
        os.close(descriptor)
        raise


def _header_of(descriptor: int) -> Header:
    data = os.pread(descriptor, _HEADER.size, 0)
    magic, version, serial, is_whole = _HEADER.unpack(data) if len(data) == _HEADER.size else (b"", 0, 0, 0)
    if magic != MAGIC:
        raise WeightsUnreachable(f"not a slot of weights: it begins with {data[:8]!r}, expected {MAGIC!r}")
    return Header(version, serial, bool(is_whole))


def _open_folder(folder: Path, name: str) -> int:
    """Create the folder and our owner file, and remove files of killed writers. The descriptor of the owner file."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_orphans(folder)
        with suppress(FileNotFoundError):  # another writer has just removed the folder
            return _locked_file(folder, name)


def _locked_file(folder: Path, name: str) -> int:
    """A file that is locked from the moment it is visible until this process dies or closes it."""
    fresh = folder / f"{name}.new"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    fresh.rename(folder / f"{name}{OWNER_SUFFIX}")
    return descriptor


def _remove_orphans(folder: Path) -> None:
    """Remove the files of writers that are gone. A reader that has one mapped keeps it."""
    for owner in folder.glob(f"*{OWNER_SUFFIX}"):
        with suppress(OSError):  # locked by a living writer, or being removed by another process
            descriptor = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in [*folder.glob(f"{owner.name.removesuffix(OWNER_SUFFIX)}-*"), owner]:
                    path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _no_room(num_bytes: int, folder: Path, error: OSError) -> str:
    hint = "free memory there" if error.errno in (errno.ENOSPC, errno.ENOMEM) else "see the message"
    return f"no room for {num_bytes / 2**20:.0f} MiB of weights in {folder} ({error.strerror}): {hint}"
