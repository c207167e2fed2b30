"""The control socket of an active run: a Unix socket in a temporary folder, which only its owner may use.

`control.json` in the run folder names it, so that the folder holds plain files alone and can be copied at any time. A copy of
the folder is another run: the socket is not that of the copy. One request a connection, one reply: messages of
`millstream.rpc.frames`, no pickle, nothing that listens on a network. The socket exists while the run has engines, and is
removed at the end; what a killed run has left is removed when the next run on this machine has one. A run that cannot have one
warns, and runs without it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import overload

import msgspec
from msgspec import Struct

from millstream import folders
from millstream.decoding import decode_json, decode_msgpack
from millstream.errors import ConfigError, MillstreamError, shown
from millstream.events import Status, WaitNow
from millstream.rpc.frames import FrameError, Frames, frame, read_frame
from millstream.run.folder import RunFolder, holder_of, resume_command
from millstream.serving.router import Router

CONTROL = "control.json"
SOCKET = "socket"
MAX_PATH = 100
"""Bytes of a socket's name: the kernel has room for 107."""
MAX_BYTES = 1 << 16
ASK_S = 10.0
"""How long a request may take to arrive."""


class ControlFile(Struct, frozen=True, kw_only=True):
    """What `control.json` says."""

    folder: str  # with the socket
    inode: int  # of the run folder


# The tags are the `type` in the output of `status --json` and `scale --json`: scripts read them.


class ScaleRequest(Struct, frozen=True, kw_only=True, tag="Scale"):
    """Change the number of engines. Answered when they have joined or left."""

    engines: int


class StatusRequest(Struct, frozen=True, kw_only=True, tag="Look"):
    """Report what the run is doing."""


class SetRequest(Struct, frozen=True, kw_only=True, tag="Set"):
    """Change settings, each as `KEY=VALUE`."""

    settings: list[str]


class EngineStatus(Struct, frozen=True, kw_only=True):
    name: str
    version: int | None = None  # None: it is being started
    running: int = 0
    waiting: int = 0
    slots: int = 0


class RunStatus(Struct, frozen=True, kw_only=True, tag="Now"):
    version: int
    engines: list[EngineStatus]
    requests_waiting: int  # for an engine with room
    groups_in_flight: int
    budget: int
    rows_in_store: int
    waits: list[WaitNow]
    lag_bound: int | None = None  # of the groups that start now; None: it does not train


class ScaleResult(Struct, frozen=True, kw_only=True, tag="Scaled"):
    joined: list[str]
    left: list[str]
    engines: list[str]


class SetResult(Struct, frozen=True, kw_only=True, tag="Changed"):
    changes: list[str]  # such as `pipeline.max_lag=3`
    version: int  # that training is at


class ControlError(Struct, frozen=True, kw_only=True, tag="Refused"):
    message: str


ControlRequest = ScaleRequest | StatusRequest | SetRequest
ControlReply = RunStatus | ScaleResult | SetResult | ControlError
ControlHandler = Callable[[ControlRequest], Awaitable[ControlReply]]


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """An address short enough for the kernel, valid within the block: through a descriptor of the folder, if need be."""
    path = str(folder.absolute() / SOCKET)
    if len(os.fsencode(path)) <= MAX_PATH:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


# ---- in the run ----------------------------------------------------------------------------------------------------------


class Control:
    """Answers requests by `handler`. A `MillstreamError` that it raises is the reply."""

    def __init__(self, folder: Path, handler: ControlHandler) -> None:
        self._folder = folder
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._own: Path | None = None  # the temporary folder
        self._answering: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Raises `OSError` where no socket can be made. Only one process may write to a run's folder, so that a `control.json`
        that is there was left by a dead one."""
        own = folders.make("millstream-control-")
        listening = socket.socket(socket.AF_UNIX)
        try:
            os.fchmod(listening.fileno(), 0o600)
            with _address(own) as address:
                listening.bind(address)
            (own / SOCKET).chmod(0o600)
            said = ControlFile(folder=str(own), inode=self._folder.stat().st_ino)
            (self._folder / CONTROL).write_bytes(msgspec.json.encode(said))
            self._server = await asyncio.start_unix_server(self._answer, sock=listening)
        except OSError:
            listening.close()
            folders.remove(own)
            raise
        self._own = own

    async def close(self) -> None:
        """Clients that still wait for a reply see the end of the connection."""
        if self._server is None:
            return
        self._server.close()
        if self._own is not None:
            (self._folder / CONTROL).unlink(missing_ok=True)
            folders.remove(self._own)
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            async with asyncio.timeout(ASK_S):
                request = await read_frame(reader, MAX_BYTES)
            writer.write(frame(await self._reply_to(request)))
            await writer.drain()
        except FrameError as error:
            writer.write(frame(ControlError(message=str(error))))
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the client is gone, or the run ends: there is no reply
        finally:
            self._answering.discard(task)
            writer.close()

    async def _reply_to(self, request: bytes) -> ControlReply:
        try:
            return await self._handler(decode_msgpack(request, ControlRequest))
        except (MillstreamError, msgspec.DecodeError) as error:
            return ControlError(message=str(error))


def run_status(
    status: Status, router: Router, names: list[str], version: int, lag_bound: int | None = None
) -> RunStatus:
    engines = {engine.name: engine for engine in router.engines}
    found = []
    for name in dict.fromkeys([*engines, *names]):
        if name not in engines:
            found.append(EngineStatus(name=name))
            continue
        stats, engine = engines[name].stats(), engines[name]
        running, waiting = stats.running, stats.waiting
        found.append(
            EngineStatus(name=name, version=engine.version, running=running, waiting=waiting, slots=engine.slots)
        )
    return RunStatus(
        version=version,
        engines=found,
        requests_waiting=router.num_waiting,
        groups_in_flight=status.groups_outstanding + status.groups_taken,
        budget=status.budget,
        rows_in_store=status.rows_in_store,
        waits=status.waits,
        lag_bound=lag_bound,
    )


# ---- in other processes --------------------------------------------------------------------------------------------------


def parse_scale(change: str) -> int:
    """The number in `engines=3`."""
    name, _, number = change.partition("=")
    if name != "engines" or not number.isdecimal() or len(number) > 9:
        raise ConfigError(f"{shown(change)}: expected engines=NUMBER, as in engines=3")
    return int(number)


@overload
def ask_run(folder: Path, request: ScaleRequest) -> ScaleResult: ...


@overload
def ask_run(folder: Path, request: StatusRequest) -> RunStatus: ...


@overload
def ask_run(folder: Path, request: SetRequest) -> SetResult: ...


def ask_run(folder: Path, request: ControlRequest) -> RunStatus | ScaleResult | SetResult:
    """Waits for the reply, however long that takes. Raises `ConfigError` if the run refuses, or is not active."""
    RunFolder.of_run(folder)
    with socket.socket(socket.AF_UNIX) as line:
        try:
            with _address(_socket_folder(folder)) as address:
                line.connect(address)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(_why_not(folder, error)) from error
        with suppress(OSError):  # the run has just ended: there will be no reply
            line.sendall(frame(request))
        frames = Frames(line).receive(block=True)
    if not frames:
        raise ConfigError(f"the run in {folder} ended before it answered")
    reply: ControlReply = decode_msgpack(frames[0], ControlReply)
    if isinstance(reply, ControlError):
        raise ConfigError(reply.message)
    return reply


def _socket_folder(folder: Path) -> Path:
    """Raises `OSError` or `msgspec.DecodeError` if no process has said that it listens for this very folder."""
    said = decode_json((folder / CONTROL).read_bytes(), ControlFile)
    if said.inode != folder.stat().st_ino:
        raise FileNotFoundError(f"{folder} is a copy")
    return Path(said.folder)


def _why_not(folder: Path, error: Exception) -> str:
    if isinstance(error, PermissionError):
        return f"the run in {folder} answers its owner only: {error.strerror}"
    if (folder / "summary.json").exists():
        return f"the run in {folder} is finished: nothing of it is running"
    if holder_of(folder) is not None:
        return f"the run in {folder} is starting or ending, and does not answer: try again in a moment"
    return f"the run in {folder} is not running. To resume it:\n  {resume_command(folder)}"
