"""The seam `Sandbox`: a place with files of its own in which commands of a model run. Drivers: `walled`, `container`, and
classes of the user's (`config`)."""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct

WORK = "/scratch"
"""The folder of a sandbox: commands start there, relative paths begin there, snapshots are of it."""


MAX_COMMAND_BYTES = 1 << 20


class Limits(Struct, frozen=True, kw_only=True):
    wall_s: float = 10.0  # of a program, or of one command
    lifetime_s: float = 3600.0  # of a sandbox for commands
    cpu_s: float = 10.0  # of each process
    memory_bytes: int = 1 << 30  # of all processes together; and addresses of each
    scratch_bytes: int = 32 << 20  # all files together
    file_bytes: int = 16 << 20  # one file
    processes: int = 32
    open_files: int = 64
    output_bytes: int = 1 << 20  # what it prints; past that it is stopped


class Executed(Struct, frozen=True, kw_only=True):
    """How a command ended. Unless it `ended`, all processes in the sandbox were killed; its files are as they were left."""

    how: Literal["ended", "time", "output", "memory", "processes"]
    code: int | None = None  # its exit code, or minus the number of the signal that killed it. None: we have ended it
    output: bytes = b""  # standard output and errors, in the order in which they were written


class Sandbox(Protocol):
    """One sandbox. Its methods are called one at a time, except `close`. All but `close` raise `SandboxLost` if it is gone, and
    none waits longer than the limits allow. A cancelled call ends what it has started.

    A path is one of the sandbox's own file system: relative to `WORK`, or absolute. No path leads out of it."""

    async def start(self, snapshot: bytes | None = None) -> None:
        """Ready for commands, with the files of a snapshot, or with none. A started one can be started again: its processes are
        killed, its files are removed, and its lifetime begins again where the driver can do that."""
        ...

    async def exec(self, command: str, *, timeout_s: float | None = None) -> Executed:
        """Run a shell command in `WORK`, in a shell of its own. `timeout_s` None: `Limits.wall_s`. Processes that it leaves in
        the background stay, until a limit is exceeded or the sandbox is closed. Raises `ValueError` for what
        `checked_command` refuses."""
        ...

    async def read(self, path: str) -> bytes:
        """A regular file. Raises `OSError`, also if it is longer than `Limits.file_bytes`."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, whose folders are made. Raises `OSError`: for example if the disk is full."""
        ...

    async def snapshot(self) -> bytes:
        """The files below `WORK`, as a tar archive: a copy, which later writes do not change. Processes are not a part of
        it. Raises `OSError` for files that cannot be read, or are more than `Limits.scratch_bytes`."""
        ...

    async def close(self) -> None:
        """End it: no process, file or mount of it is left. Raises nothing, and may be called twice, also at once."""
        ...


def checked_command(command: str) -> str:
    """As a driver takes it. Raises `ValueError`."""
    text = command.encode(errors="replace")  # half of a surrogate pair is no text
    if b"\0" in text:
        raise ValueError("a command with a NUL character")
    if len(text) > MAX_COMMAND_BYTES:
        raise ValueError(
            f"a command of {len(text)} bytes: expected at most {MAX_COMMAND_BYTES}. Write a file, and run it"
        )
    return text.decode()
