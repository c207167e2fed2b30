"""Temporary folders that are removed with their owner: when it releases them, or, if it was killed, when the next folder with
the same prefix is made.

An owner holds a lock (`flock`) on a file in its folder. The kernel releases the lock of a process that dies; a process that
gets the lock may remove the folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

OWNER = ".owner"
_locks: dict[Path, int] = {}  # descriptors, for as long as the folder is ours
OnRemoved = Callable[[Path], None]


def make(prefix: str, on_removed: OnRemoved = lambda folder: None, *, name: str = "") -> Path:
    """A folder of this process, with the name after the prefix. Those with this prefix whose owners are dead are removed, and
    passed to `on_removed`."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*/{OWNER}"):
        if _is_dead(left):
            shutil.rmtree(left.parent, ignore_errors=True)
            on_removed(left.parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{name}-" if name else prefix))
    fresh = folder / f"{OWNER}.new"
    _locks[folder] = descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    fresh.rename(folder / OWNER)  # visible only when it is locked
    return folder


def remove(folder: Path) -> None:
    """By its owner, or by any process that knows that it is not needed."""
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _locks.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def _is_dead(owner: Path) -> bool:
    with suppress(OSError):  # locked: its owner is alive, or another process is removing it
        descriptor = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(descriptor)
    return False
