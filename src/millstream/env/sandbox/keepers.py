"""The zygote of this process and its keepers: see `inside.forkserver`, the other side."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from millstream.decoding import decode_json
from millstream.env.sandbox.base import Limits
from millstream.errors import MillstreamError

Walls = Literal["root", "user", "none"]
WALLS: tuple[Walls, ...] = ("root", "user", "none")
HEADER = 4
GRACE_S = 30.0  # past the time limit, after which the keeper is taken for dead
BOOT = (
    "import sys, socket; sys.path.insert(0, sys.argv[1]); from inside import forkserver; del sys.path[0]; "
    "forkserver.serve_forks(socket.socket(fileno=int(sys.argv[2])))"
)
# All that a program finds in its environment, with HOME and TMPDIR.
VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
}


class SandboxBroken(MillstreamError):
    """The sandbox itself has failed, and not the program in it."""


class Keepers:
    """Starts process trees, each with a keeper of its own, from one zygote. The first one starts the zygote."""

    def __init__(self) -> None:
        self._zygote: _Zygote | None = None

    @asynccontextmanager
    async def keeper(
        self,
        order: dict[str, Any],
        descriptors: Sequence[socket.socket | int],
        limits: Limits,
        walls: Walls,
    ) -> AsyncIterator[Keeper]:
        """One process tree, which gets these descriptors. It is gone when this is left."""
        given = [one if isinstance(one, int) else one.detach() for one in descriptors]
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            try:
                with theirs:
                    self._send([theirs.fileno(), *given])
            finally:
                for descriptor in given:
                    os.close(descriptor)
            payload = json.dumps({**order, "walls": walls, "limits": msgspec.to_builtins(limits)}).encode()
            await send_all(ours, len(payload).to_bytes(HEADER, "little") + payload)
            yield Keeper(ours, limits.wall_s)

    def _send(self, descriptors: Sequence[int]) -> None:
        for _ in range(2):  # a zygote that was killed is started again, once
            if self._zygote is None:
                self._zygote = _Zygote()
            try:
                socket.send_fds(self._zygote.line, [b"."], list(descriptors))
                return
            except OSError:
                self._zygote = None
        raise SandboxBroken("the sandbox's first process dies as soon as it is started")


class _Zygote:
    """See `env.sandbox.inside.forkserver`. It ends when we do, or let go of it."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair()
        folder = str(Path(__file__).parent)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", BOOT, folder, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=VARIABLES,
                cwd="/",
                start_new_session=True,
            )
        weakref.finalize(self, _let_go, self.line, self.process)


def _let_go(line: socket.socket, process: subprocess.Popen[bytes]) -> None:
    line.close()
    with suppress(RuntimeError):  # the interpreter ends, and with it everything
        threading.Thread(target=process.wait, name="sandbox reaper", daemon=True).start()


class ProgramEnd(Struct, frozen=True, kw_only=True):
    how: Literal["ended", "time", "memory", "disk", "processes", "stopped", "broken"]
    code: int | None = None
    why: str = ""


class Keeper:
    """Our side of a keeper."""

    def __init__(self, control: socket.socket, wall_s: float) -> None:
        self._control = control
        self._answer = bytearray()
        self._listening = asyncio.Lock()
        self.wall_s = wall_s

    async def ended(self) -> ProgramEnd:
        """How it ended, when everything of it is gone. May be called twice, also at once."""
        try:
            async with asyncio.timeout(self.wall_s + GRACE_S), self._listening:
                answer, _ = await receive_all(self._control, 1 << 16, self._answer)
        except TimeoutError as error:
            raise SandboxBroken("the keeper of a program does not answer") from error
        if not answer:
            raise SandboxBroken("the keeper of a program was killed")
        ended = decode_json(answer, ProgramEnd)
        if ended.how == "broken":
            raise SandboxBroken(f"the sandbox cannot be set up: {ended.why}")
        return ended

    def stop(self) -> None:
        """End everything; `ended` then says when it is gone."""
        with suppress(OSError):  # the keeper is gone
            self._control.shutdown(socket.SHUT_WR)


async def send_all(target: socket.socket, data: bytes) -> None:
    """Also if the other end is gone: that shows as a missing answer."""
    target.setblocking(False)
    with suppress(OSError):
        await asyncio.get_running_loop().sock_sendall(target, data)


async def feed(target: socket.socket, data: bytes) -> None:
    """All that there is."""
    await send_all(target, data)
    with suppress(OSError):  # it need not read
        target.shutdown(socket.SHUT_WR)


async def receive_all(source: socket.socket, most: int, data: bytearray | None = None) -> tuple[bytes, bool]:
    """All that comes until the other end closes, and whether that was all: past the limit it is not read any more. `data` has
    what came so far."""
    source.setblocking(False)
    loop, data = asyncio.get_running_loop(), bytearray() if data is None else data
    while len(data) <= most:
        try:
            piece = await loop.sock_recv(source, 1 << 16)
        except ConnectionResetError:  # it has died with something unread
            piece = b""
        if not piece:
            return bytes(data), True
        data += piece
    return bytes(data[:most]), False
