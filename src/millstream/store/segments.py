"""Shared memory by name: files in a folder of the node's memory, written once by a producer and mapped by whoever reads.

A file outlives the process that wrote it. One that is removed stays readable for those who have it mapped: nobody ever sees
bytes change under a view. Files are used again for other rows (fresh pages of memory are several times as slow to write as used
ones), but only when no process has a view of them.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from millstream.errors import StoreError
from millstream.store.wire import Segment

SHARED_MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 256 << 20
MAX_IDLE_BYTES = 256 << 20
"""What a process keeps mapped for the next time."""
SEGMENT_NAME = re.compile(r"[0-9a-f]+-[0-9]+")
STEPS = 8
"""Sizes of segments per doubling: at most an eighth of one is unused."""


def memory_folder(store: str, node: str) -> Path:
    """Where the segments of a node are: in memory, or, where a container has next to none for sharing, on disk."""
    name = f"millstream-{store}-{node}"
    is_there = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    if is_there and ((SHARED_MEMORY / name).is_dir() or shutil.disk_usage(SHARED_MEMORY).free >= MIN_FREE_BYTES):
        return SHARED_MEMORY / name
    return Path(tempfile.gettempdir()) / name


def memory_folders(store: str) -> list[Path]:
    """Those of a store that are on this machine."""
    places = {SHARED_MEMORY, Path(tempfile.gettempdir())}
    return [folder for place in places for folder in place.glob(f"millstream-{store}-*")]


def size_class(nbytes: int) -> int:
    """The size of the segment for so many bytes."""
    step = max(mmap.PAGESIZE, (1 << max(nbytes - 1, 1).bit_length()) // (2 * STEPS))
    return (nbytes + step - 1) // step * step


class Segments:
    """The segments of one node, as one process sees them. `on_closed` is told of every view that is gone."""

    def __init__(self, folder: Path, on_closed: Callable[[str], None]) -> None:
        self._folder = folder
        self._on_closed = on_closed
        self._mapped: dict[str, mmap.mmap] = {}
        self._written: dict[str, mmap.mmap] = {}
        self._views: dict[str, int] = {}
        self._lock = threading.RLock()

    def writable(self, segment: Segment) -> memoryview:
        """The whole segment, made if it is new."""
        found = self._written.get(segment.name)
        if found is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._folder / segment.name
            try:
                number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.posix_fallocate(number, 0, segment.size)
                    found = self._written[segment.name] = mmap.mmap(number, segment.size)
                finally:
                    os.close(number)
            except OSError as error:
                raise _no_room(error, segment, self._folder) from error
        return memoryview(found)

    def forget_written(self, name: str) -> None:
        self._written.pop(name, None)

    def view(self, segment: Segment, *, is_private: bool) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Its bytes. Arrays that are made of it keep it; when the last of them is gone, the view is closed."""
        mapped = None if is_private else self._mapped.get(segment.name)
        if mapped is None:
            mapped = self._map(segment, is_private=is_private)
        array = np.frombuffer(mapped, np.uint8)
        with self._lock:
            self._views[segment.name] = self._views.get(segment.name, 0) + 1
        weakref.finalize(array, self._close, segment.name).atexit = False
        return array

    def _map(self, segment: Segment, *, is_private: bool) -> mmap.mmap:
        path = self._folder / segment.name
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"the segment {path} is gone: {error.strerror}") from error
        try:
            if is_private:
                return mmap.mmap(number, segment.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._mapped[segment.name] = mapped = mmap.mmap(number, segment.size, flags, mmap.PROT_READ)
            return mapped
        finally:
            os.close(number)

    def _close(self, name: str) -> None:
        with self._lock:  # whichever thread has let go of the last array
            self._views[name] -= 1
            if not self._views[name]:
                del self._views[name]
        self._on_closed(name)

    def trim(self) -> None:
        """Forget mappings that nobody has a view of, the oldest first: they hold memory, even of files that are gone."""
        for cache in (self._mapped, self._written):
            held = sum(len(mapped) for mapped in cache.values())
            for name in list(cache):
                if held <= MAX_IDLE_BYTES:
                    break
                if cache is self._written or name not in self._views:
                    held -= len(cache.pop(name))


def unlink(folder: Path, names: list[str]) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            (folder / name).unlink()


def _no_room(error: OSError, segment: Segment, folder: Path) -> StoreError:
    hint = "set the store's capacity_bytes lower" if error.errno in (errno.ENOSPC, errno.ENOMEM) else "see the message"
    return StoreError(f"no segment of {segment.size} bytes in {folder}: {error.strerror}; {hint}")
