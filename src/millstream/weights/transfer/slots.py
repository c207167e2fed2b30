"""Files of shared memory that hold a version each.

A reader has a lock on the file while it looks at it, and the writer takes only files that nobody has a lock on: nothing is
ever overwritten under a reader. The locks are the kernel's (`flock`), so one who dies gives them back. What a killed writer
left in the folder is removed by the next one who comes there, or goes.
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
from millstream.weights.transfer import WeightsRef

HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sqqq")
MAGIC = b"weights1"
OWNER = ".owner"
MADV_POPULATE_READ = 22  # map all pages at once: four times as fast as one by one
NOTHING = -1
"""In place of a serial number: such a slot is used before all others."""


class Header(NamedTuple):
    version: int
    serial: int
    is_whole: bool


class Slot:
    """One file, as its writer sees it. Between `try_lock` and `unlock` nobody else looks at it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.serial = NOTHING
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
        """From here to `finish` its header says that it is not whole, in case that we fail or die in between."""
        self.serial = NOTHING
        self._say(Header(version, serial, is_whole=False))

    def finish(self, num_bytes: int) -> None:
        """It holds so many bytes, no more, and they are all there."""
        if num_bytes < len(self.bytes):
            self._resize(num_bytes)
        self._say(self._header._replace(is_whole=True))
        self.serial = self._header.serial

    def reserve(self, num_bytes: int) -> None:
        """Room for so many bytes, which is really there; what is written stays. Raises `WeightsError` if there is none."""
        if num_bytes > len(self.bytes):
            try:
                self._resize(max(num_bytes, 3 * len(self.bytes) // 2))
            except WeightsError:  # perhaps there is room for what is needed, if not for what comes next
                self._resize(num_bytes)

    def close(self) -> None:
        """The file is removed; a reader that has it keeps what it has."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self._descriptor)

    def _say(self, header: Header) -> None:
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
    """Those of one writer, at most so many. Not for several threads."""

    def __init__(self, folder: Path, *, most: int) -> None:
        self._folder = folder.absolute()
        self._most = most
        self.name = secrets.token_hex(8)
        try:
            self._owner = _move_in(self._folder, self.name)
        except OSError as error:
            raise WeightsError(f"cannot stage weights in {self._folder}: {error.strerror or error}") from error
        self._slots: list[Slot] = []

    def claim(self) -> Slot:
        """A slot with the writer's lock, the one with the oldest content. The newest is left alone while there is another."""
        by_age = sorted(self._slots, key=lambda slot: slot.serial)
        for slot in by_age[:-1]:
            if slot.try_lock():
                return slot
        if len(self._slots) < self._most:
            self._slots.append(slot := Slot(self._folder / f"{self.name}-{len(self._slots)}"))
            slot.try_lock()
            return slot
        if by_age[-1].try_lock():
            return by_age[-1]
        raise WeightsError(
            f"all {self._most} slots in {self._folder} are in use by readers: every one that takes weights must release them"
        )

    @property
    def serials(self) -> set[int]:
        """Of what is in the slots."""
        return {slot.serial for slot in self._slots}

    def close(self) -> None:
        """No file is left, nor any of writers that were killed; and no folder, if it is empty."""
        for slot in self._slots:
            slot.close()
        self._slots = []
        (self._folder / f"{self.name}{OWNER}").unlink(missing_ok=True)
        os.close(self._owner)
        _remove_orphans(self._folder)
        with suppress(OSError):
            self._folder.rmdir()


class Held:
    """A slot with a reader's lock. The lock goes with `release`, or with the last tensor that shows its bytes."""

    def __init__(self, descriptor: int) -> None:
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)  # all of it; who writes, writes a copy
        with suppress(OSError):  # a kernel before 5.14: its pages are mapped one by one
            mapped.madvise(MADV_POPULATE_READ)
        self.bytes: Tensor = torch.frombuffer(mapped, dtype=torch.uint8)[HEADER_BYTES:]
        self.release = weakref.finalize(mapped, os.close, descriptor)


def hold(parcel: WeightsRef) -> Held:
    """The slot of a parcel. Its bytes are not verified yet; they are none where the weights are on a device.

    Raises `WeightsSuperseded` if it holds something else by now, `WeightsUnreachable` if there is no such file.
    """
    try:
        descriptor = os.open(parcel.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsUnreachable(
            f"{parcel.path} cannot be opened ({error.strerror}): the outbox of node {parcel.node} was closed, or its folder is "
            "another one here"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:  # it is being overwritten
            is_locked = False
        found = _header_of(descriptor)
        if not is_locked or found.serial != parcel.serial:
            raise WeightsSuperseded(
                f"version {parcel.version} is superseded by version {found.version}, which is in its slot {parcel.path}: "
                "fetch the newest"
            )
        if not found.is_whole:
            raise WeightsUnreachable(f"{parcel.path} is half written: whoever wrote it has died")
        return Held(descriptor)
    except BaseException:  # whatever it is, nobody else has the descriptor, and with it the lock
        os.close(descriptor)
        raise


def _header_of(descriptor: int) -> Header:
    said = os.pread(descriptor, _HEADER.size, 0)
    magic, version, serial, is_whole = _HEADER.unpack(said) if len(said) == _HEADER.size else (b"", 0, 0, 0)
    if magic != MAGIC:
        raise WeightsUnreachable(f"no slot of weights: it begins with {said[:8]!r}, expected {MAGIC!r}")
    return Header(version, serial, bool(is_whole))


def _move_in(folder: Path, name: str) -> int:
    """The folder is there and has our owner's file; what others left is gone. The descriptor of that file."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_orphans(folder)
        with suppress(FileNotFoundError):  # whoever moved out just now took the folder with it
            return _locked_file(folder, name)


def _locked_file(folder: Path, name: str) -> int:
    """A file that whoever sees it sees locked, for as long as this process lives or has it open."""
    fresh = folder / f"{name}.new"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    fresh.rename(folder / f"{name}{OWNER}")
    return descriptor


def _remove_orphans(folder: Path) -> None:
    """The files of writers that are gone. A reader that has one mapped keeps it."""
    for owner in folder.glob(f"*{OWNER}"):
        with suppress(OSError):  # locked, so it lives; or somebody else is removing it
            descriptor = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in [*folder.glob(f"{owner.name.removesuffix(OWNER)}-*"), owner]:
                    path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _no_room(num_bytes: int, folder: Path, error: OSError) -> str:
    hint = "free memory there" if error.errno in (errno.ENOSPC, errno.ENOMEM) else "see the message"
    return f"no room for {num_bytes / 2**20:.0f} MiB of weights in {folder} ({error.strerror}): {hint}"
