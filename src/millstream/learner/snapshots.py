"""Snapshots that worker processes write: kept in the workers by number, written into one folder that all of them see.

Guarantee: a snapshot counts as written only where the process that asked for it sees every file that its writers see. So a
folder of the same name on another node's own disk does not pass for the run folder.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from millstream.errors import LearnerError

SHARED_DISK = "the run folder must be on a disk that the driver and all nodes with learner ranks or a critic see"
MAX_KEPT = 2  # one that is being written, and the next
VISIBLE_S = 5.0  # for a file on a network disk to become visible here
POLL_S = 0.2
SnapshotT = TypeVar("SnapshotT")


class KeptSnapshots(Generic[SnapshotT]):
    """In a worker: snapshots that wait to be written, by number. Only the newest `MAX_KEPT` are kept."""

    def __init__(self) -> None:
        self._kept: dict[int, SnapshotT] = {}

    def keep(self, number: int, snapshot: SnapshotT) -> None:
        self._kept[number] = snapshot
        for old in sorted(self._kept)[:-MAX_KEPT]:
            del self._kept[old]

    def pop(self, number: int) -> SnapshotT:
        return self._kept.pop(number)


def check_folder(folder: Path) -> None:
    """In the writer, before it writes: the folder was created by the process that asked for it. Raises `OSError` if this
    process does not see it."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"{socket.gethostname()} has no folder {folder}: {SHARED_DISK}")


def files_in(folder: Path) -> dict[str, int]:
    """Sizes by name, as this process sees them."""
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def check_files(folder: Path, written: Mapping[str, Mapping[str, int]]) -> None:
    """In the process that asked, after all have written. `written`: the files that each writer sees there, by the writer's
    name. Files on a network disk may become visible a little later. Raises `LearnerError` that names the first file that is
    missing here or has another size."""
    deadline = time.monotonic() + VISIBLE_S
    while (difference := _difference(folder, written)) is not None:
        if time.monotonic() >= deadline:
            raise LearnerError(f"{difference}: {SHARED_DISK}")
        time.sleep(POLL_S)


def _difference(folder: Path, written: Mapping[str, Mapping[str, int]]) -> str | None:
    here = files_in(folder)
    for writer, files in written.items():
        for name, size in files.items():
            if here.get(name) != size:
                found = f"has {here[name]} bytes" if name in here else "is not there"
                return f"{writer} wrote {size} bytes of {folder / name}; here it {found}"
    return None
