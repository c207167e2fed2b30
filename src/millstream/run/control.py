"""The door to a run at work: a Unix socket in its folder, `control.sock`, for its owner alone.

One question a connection, one answer: messages of `millstream.rpc.frames`, no pickle, nothing that listens on a network. It is
there while the run is, replaces one that a killed run has left behind, and goes with it. A run that cannot have one says so,
and goes on without.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import overload

import msgspec
from msgspec import Struct

from millstream.errors import ConfigError, MillstreamError
from millstream.events import Status, WaitNow
from millstream.rpc.frames import FrameError, Frames, frame, read_frame
from millstream.run.folder import LOCK, RunFolder, resume_command
from millstream.serving.router import Router

SOCKET = "control.sock"
MAX_PATH = 100
"""Bytes of a socket's name: the kernel has room for 107."""
MAX_BYTES = 1 << 16
ASK_S = 10.0
"""How long a question may take to come in."""


class Scale(Struct, frozen=True, kw_only=True, tag=True):
    """Have so many engines. Answered when they have joined, or left."""

    engines: int


class Look(Struct, frozen=True, kw_only=True, tag=True):
    """What is the run doing?"""


class EngineNow(Struct, frozen=True, kw_only=True):
    name: str
    version: int | None = None
    """None: it is to come, and serves nobody yet."""
    running: int = 0
    waiting: int = 0
    slots: int = 0


class Now(Struct, frozen=True, kw_only=True, tag=True):
    version: int
    engines: list[EngineNow]
    requests_waiting: int
    """For an engine with room."""
    groups_in_flight: int
    budget: int
    rows_in_store: int
    waits: list[WaitNow]


class Scaled(Struct, frozen=True, kw_only=True, tag=True):
    joined: list[str]
    left: list[str]
    engines: list[str]


class Refused(Struct, frozen=True, kw_only=True, tag=True):
    message: str


Question = Scale | Look
Answer = Now | Scaled | Refused
Carry = Callable[[Question], Awaitable[Answer]]


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """A name that the kernel has room for, valid within the block: through a descriptor of the folder, if need be."""
    path = str(folder.absolute() / SOCKET)
    if len(os.fsencode(path)) <= MAX_PATH:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


# ---- the run's end -------------------------------------------------------------------------------------------------------


class Control:
    """`carry` does what is asked; what it refuses by an error of ours is told to whoever asked."""

    def __init__(self, folder: Path, carry: Carry) -> None:
        self._folder = folder
        self._carry = carry
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Raises `OSError` where there can be no such socket. Only one process may write to a run's folder, so that whatever
        stands in the way is of a run that is dead."""
        (self._folder / SOCKET).unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        try:
            os.fchmod(listening.fileno(), 0o600)
            with _address(self._folder) as address:
                listening.bind(address)
            (self._folder / SOCKET).chmod(0o600)
            self._server = await asyncio.start_unix_server(self._answer, sock=listening)
        except OSError:
            listening.close()
            raise

    async def close(self) -> None:
        """Whoever still waits for an answer hears that the other end is gone."""
        if self._server is None:
            return
        self._server.close()
        (self._folder / SOCKET).unlink(missing_ok=True)
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            async with asyncio.timeout(ASK_S):
                question = await read_frame(reader, MAX_BYTES)
            writer.write(frame(await self._carry_out(question)))
            await writer.drain()
        except FrameError as error:
            writer.write(frame(Refused(message=str(error))))
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # nobody listens any more, or the run ends: there is nothing left to say
        finally:
            self._answering.discard(task)
            writer.close()

    async def _carry_out(self, question: bytes) -> Answer:
        try:
            return await self._carry(msgspec.msgpack.decode(question, type=Question))
        except (MillstreamError, msgspec.DecodeError) as error:
            return Refused(message=str(error))


def now_of(status: Status, router: Router, names: list[str], version: int) -> Now:
    engines = {engine.name: engine for engine in router.engines}
    found = []
    for name in dict.fromkeys([*engines, *names]):
        if name not in engines:
            found.append(EngineNow(name=name))
            continue
        stats, engine = engines[name].stats(), engines[name]
        running, waiting = stats.running, stats.waiting
        found.append(EngineNow(name=name, version=engine.version, running=running, waiting=waiting, slots=engine.slots))
    return Now(
        version=version,
        engines=found,
        requests_waiting=router.num_waiting,
        groups_in_flight=status.groups_outstanding + status.groups_taken,
        budget=status.budget,
        rows_in_store=status.rows_in_store,
        waits=status.waits,
    )


# ---- the other end -------------------------------------------------------------------------------------------------------


def number_of(change: str) -> int:
    """From what is typed: engines=3."""
    name, _, number = change.partition("=")
    if name != "engines" or not number.isdecimal():
        raise ConfigError(f"{change!r}: expected engines=NUMBER, as in engines=3")
    return int(number)


@overload
def ask(folder: Path, question: Scale) -> Scaled: ...


@overload
def ask(folder: Path, question: Look) -> Now: ...


def ask(folder: Path, question: Question) -> Now | Scaled:
    """Waits for the answer, however long that takes. Raises `ConfigError` if the run refuses, or is not there."""
    if not RunFolder(folder).config.is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no config.toml")
    with socket.socket(socket.AF_UNIX) as line:
        try:
            with _address(folder) as address:
                line.connect(address)
        except OSError as error:
            raise ConfigError(_why_not(folder, error)) from error
        with suppress(OSError):  # the run has ended in this moment: so there is no answer
            line.sendall(frame(question))
        said = Frames(line).first()
    if said is None:
        raise ConfigError(f"the run in {folder} ended before it answered")
    answer: Answer = msgspec.msgpack.decode(said, type=Answer)
    if isinstance(answer, Refused):
        raise ConfigError(answer.message)
    return answer


def _why_not(folder: Path, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"{folder / SOCKET} is for whoever started the run: {error.strerror}"
    if (folder / "summary.json").exists():
        return f"the run in {folder} is finished: nothing of it is running"
    if _is_alive(folder):
        return f"the run in {folder} is starting or ending, and answers nobody: try again in a moment"
    return f"the run in {folder} is not running. To go on with it:\n  {resume_command(folder)}"


def _is_alive(folder: Path) -> bool:
    """Whether a process has the folder's lock."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
