"""What a program uses, over all its processes: memory, processes, and files in its folder. The kernel limits each process; sums
are counted here, by the keeper, who kills a program that is above its limit.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any

WATCH_S = 0.05  # between two looks at what a program uses
WATCH_SHARE = 0.1  # of one core at most, for looking
NUM_OURS = 1  # the init
PAGE = os.sysconf("SC_PAGE_SIZE")
KIB = 1024


class Processes:
    """The processes of a program. In a namespace that has a /proc of its own: all in it; elsewhere those below the keeper."""

    def __init__(self) -> None:
        self._keeper = os.getpid()
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._is_own = False

    def find(self) -> list[int]:
        if not self._is_own:
            self._look_for_own()
        names = [int(name) for name in os.listdir(self._proc) if name.isdecimal()]
        return names if self._is_own else self._below(names)

    def excess(self, limits: Mapping[str, Any]) -> str:
        """Of what the program uses more than it may; empty, if of nothing."""
        found = self.find()
        if len(found) > limits["processes"] + NUM_OURS:
            return "processes"
        return "memory" if self.num_bytes(found, limits["memory_bytes"]) > limits["memory_bytes"] else ""

    def num_bytes(self, processes: list[int], limit: int) -> int:
        """Resident memory. Shared pages count once if the plain sum, which counts them for each process, is above the limit."""
        resident = sum(self._resident(process) for process in processes)
        return resident if resident <= limit else sum(self._proportional(process) for process in processes)

    def num_deleted_bytes(self, processes: list[int]) -> int:
        """Files that have no name any more and are open."""
        found: dict[tuple[int, int], int] = {}
        for process in processes:
            with contextlib.suppress(OSError):
                folder = os.open(f"{process}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
                for name in os.listdir(folder):
                    with contextlib.suppress(OSError):
                        file = os.stat(name, dir_fd=folder)
                        if stat.S_ISREG(file.st_mode) and not file.st_nlink:
                            found[file.st_dev, file.st_ino] = file.st_size
                os.close(folder)
        return sum(found.values())

    def _look_for_own(self) -> None:
        with contextlib.suppress(OSError):
            mounted = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._is_own = os.fstat(mounted).st_dev != os.fstat(self._proc).st_dev and "1" in os.listdir(mounted)
            if self._is_own:
                os.dup2(mounted, self._proc, inheritable=False)
            os.close(mounted)

    def _below(self, names: list[int]) -> list[int]:
        parents = {
            name: int(text.rpartition(")")[2].split()[1]) for name in names if (text := self._text(f"{name}/stat"))
        }
        found, new = set[int](), {self._keeper}
        while new:
            new = {process for process, parent in parents.items() if parent in new}
            found |= new
        return list(found)

    def _resident(self, process: int) -> int:
        return PAGE * int((self._text(f"{process}/statm") or "0 0").split()[1])

    def _proportional(self, process: int) -> int:
        lines = (line.split() for line in self._text(f"{process}/smaps_rollup").splitlines())
        sizes = [int(line[1]) for line in lines if line[0] in ("Pss:", "SwapPss:")]
        return KIB * sum(sizes) if sizes else self._resident(process)  # a program can forbid to look

    def _text(self, path: str) -> str:
        """Nothing, if the process has ended."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return ""
        try:
            return os.read(file, 1 << 13).decode(errors="replace")
        except OSError:
            return ""
        finally:
            os.close(file)


def pause_after(began: float) -> float:
    """Until the next look, after one that `began` then."""
    return max(WATCH_S, (time.monotonic() - began) / WATCH_SHARE)


def folder_usage(folder: str, most_files: int) -> tuple[int, int]:
    """Bytes and files below a folder; not all, if there are more than `most_files`."""
    total = number = 0
    for entry in _entries(folder):
        number += 1
        with contextlib.suppress(OSError):
            total += entry.stat(follow_symlinks=False).st_size
        if number > most_files:
            break
    return total, number


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    waiting = [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as found:
            for entry in found:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def remove_folder(folder: str) -> None:
    """Everything below it, and the folder itself, however deep it is and whatever rights its folders have. Nothing of the
    program runs any more."""
    os.chmod(folder, 0o700)
    empty_folder(folder)
    os.rmdir(folder)


def empty_folder(folder: str) -> None:
    """Everything below it."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while names := os.listdir(place):
            for name in names:
                if _is_folder(name, place):
                    _remove_one(name, place)
                else:
                    os.unlink(name, dir_fd=place)
    finally:
        os.close(place)


def _remove_one(name: str, place: int) -> None:
    """One folder; the folders in it are moved one level up."""
    os.chmod(name, 0o700, dir_fd=place)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
    try:
        for entry in os.listdir(inner):
            if _is_folder(entry, inner):
                os.chmod(entry, 0o700, dir_fd=inner)  # it is written to when it moves
                os.rename(entry, os.urandom(16).hex(), src_dir_fd=inner, dst_dir_fd=place)
            else:
                os.unlink(entry, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=place)


def _is_folder(name: str, place: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode)
