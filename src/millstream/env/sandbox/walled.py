"""The sandbox behind our own walls: namespaces, an identity of its own, no rights, a seccomp filter (`inside.isolation`), and a
folder in memory of limited size. All of it is the kernel's and ends with its first process: nothing is on disk.

The first process ends when it is closed, when its lifetime is over, or when this process dies in any way, also by SIGKILL: its
keeper notices that the line is closed (`inside.forkserver`). Without namespaces there is none (`check_walls`)."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

from millstream.env.sandbox.base import Executed, Limits, checked_command
from millstream.env.sandbox.keepers import (
    GRACE_S,
    HEADER,
    Keeper,
    Keepers,
    SandboxBroken,
    Walls,
    feed,
    receive_all,
    send_all,
)
from millstream.env.sandbox.programs import PROMISES, in_thread, what_is_contained
from millstream.errors import ConfigError, SandboxLost

START_S = 60.0
FILE_S = 60.0  # for an action on files
TAR_BYTES = 1024  # of an archive, for each file
MAX_PATH = 4096  # of the kernel
MAX_SHOWN_PATH = 200
TO_TYPE = (
    "allow user namespaces (as root: `sysctl -w user.max_user_namespaces=65536`, and on Ubuntu `sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0`; in a container: start it with `--security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined`), or use containers: sandbox.use = 'docker'"
)
_keepers = Keepers()


class WalledSandbox:
    """See `base.Sandbox`. `walls` None: the best that can be had."""

    def __init__(self, limits: Limits | None = None, *, walls: Walls | None = None) -> None:
        self.limits = limits or Limits()
        self._walls = walls
        self.keeper_id: int | None = None  # of the process whose death is its end
        self._stack = AsyncExitStack()
        self._keeper: Keeper | None = None
        self._commands: socket.socket | None = None
        self._why_lost = ""
        self._turn = asyncio.Lock()
        self._ending = asyncio.Lock()

    async def start(self, snapshot: bytes | None = None) -> None:
        is_new = self._commands is None and not self._why_lost
        if is_new:
            await self._open()
        if not is_new or snapshot:
            order = {"role": "start", "has_snapshot": bool(snapshot)}
            await self._file_action(order, "its folder", data=snapshot or b"")

    async def exec(self, command: str, *, timeout_s: float | None = None) -> Executed:
        wall_s = self.limits.wall_s if timeout_s is None else timeout_s
        order = {"role": "exec", "command": checked_command(command), "wall_s": wall_s}
        return await self._run(order, self.limits.output_bytes)

    async def read(self, path: str) -> bytes:
        return await self._file_action({"role": "read", "path": _checked(path)}, path, most=self.limits.file_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._file_action({"role": "write", "path": _checked(path)}, path, data=data)

    async def snapshot(self) -> bytes:
        files = max(4096, self.limits.scratch_bytes >> 13)
        most = self.limits.scratch_bytes + TAR_BYTES * files
        return await self._file_action({"role": "snapshot"}, "its folder", most=most)

    async def close(self) -> None:
        self._why_lost = self._why_lost or "it is closed"
        async with self._ending:
            keeper = self._keeper
            self._keeper = None
            if keeper is not None:
                keeper.stop()
                with suppress(SandboxBroken, OSError):  # its keeper was killed, and everything with it
                    await keeper.ended()
            await self._stack.aclose()

    async def _open(self) -> None:
        walls = self._walls or what_is_contained().walls
        if walls == "none":
            raise SandboxLost(f"no sandbox: this machine has no namespaces. To do: {TO_TYPE}")
        try:
            ours, theirs = socket.socketpair()
            self._stack.enter_context(ours)
            self._keeper = await self._stack.enter_async_context(
                _keepers.keeper({"role": "commands"}, [theirs], self.limits, walls)
            )
            async with asyncio.timeout(START_S):
                ours.setblocking(False)
                ready = await asyncio.get_running_loop().sock_recv(ours, 1 << 10)
            if not ready:
                await self._keeper.ended()  # raises why, where it knows
                raise SandboxBroken("it was killed before it had started")
        except TimeoutError as error:
            raise SandboxLost(f"a sandbox has not started after {START_S:g} s") from error
        except (SandboxBroken, OSError) as error:
            raise SandboxLost(f"no sandbox: {error}") from error
        self.keeper_id = json.loads(ready)["keeper"]
        self._commands = ours

    async def _file_action(self, order: Mapping[str, Any], path: str, *, data: bytes = b"", most: int = 0) -> bytes:
        done = await self._run({**order, "wall_s": FILE_S}, most, data)
        if done.how == "ended" and done.code == 0:
            return done.output
        number = {"time": errno.ETIMEDOUT, "output": errno.EFBIG, "ended": done.code}.get(done.how, errno.ENOMEM)
        number = number if number and number > 0 else errno.EIO
        raise OSError(number, os.strerror(number), path)

    async def _run(self, order: Mapping[str, Any], most: int, data: bytes = b"") -> Executed:
        async with self._turn:
            done = await self._called(order, most, data)
            if (
                done.how == "output"
            ):  # it may have ended before that was seen: what it left in the background is killed too
                await self._called({"role": "stop", "wall_s": FILE_S}, 0)
            return done

    async def _called(self, order: Mapping[str, Any], most: int, data: bytes = b"") -> Executed:
        if self._commands is None or self._why_lost:
            raise SandboxLost(f"the sandbox is gone: {self._why_lost or 'it was not started'}")
        try:
            call = _Call(data, most)
        except OSError as error:  # no descriptors are left: `ulimit -n`
            raise SandboxLost(f"a command cannot be started: {error}") from error
        try:
            call.send(self._commands)
            return await call.executed(order, data)
        except SandboxBroken as error:
            self._why_lost = await self._reason(str(error))
            raise SandboxLost(f"the sandbox is gone: {self._why_lost}") from error
        finally:
            call.close()

    async def _reason(self, otherwise: str) -> str:
        """Why it died, as its keeper says."""
        if self._keeper is None:
            return "it is closed"
        self._keeper.stop()
        try:
            ended = await self._keeper.ended()
        except SandboxBroken as error:
            return str(error)
        return f"its lifetime of {self.limits.lifetime_s:g} s is over" if ended.how == "time" else otherwise


class _Call:
    """The descriptors of one command."""

    def __init__(self, data: bytes, most: int) -> None:
        self._line, line = socket.socketpair()
        self._source: socket.socket | None = None
        if data:
            self._source, source = socket.socketpair()
            self._theirs = [line.detach(), source.detach()]
        else:
            self._theirs = [line.detach(), os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
        read_end, write_end = os.pipe()
        os.fchmod(write_end, 0o666)  # a command may open it again, as /dev/stdout
        self._theirs.append(write_end)
        self._output = _Output(read_end, most)

    def send(self, commands: socket.socket) -> None:
        try:
            socket.send_fds(commands, [b"."], self._theirs)
        except OSError as error:
            raise SandboxBroken("its first process has died") from error
        self._close_theirs()

    async def executed(self, order: Mapping[str, Any], data: bytes) -> Executed:
        """Raises `SandboxBroken` if there is no report."""
        payload = json.dumps(order).encode()
        asked = len(payload).to_bytes(HEADER, "little") + payload
        reporting = asyncio.create_task(receive_all(self._line, 1 << 12))
        filling = asyncio.create_task(self._output.is_full.wait())
        feeding = [asyncio.create_task(send_all(self._line, asked))]
        if self._source is not None:
            feeding.append(asyncio.create_task(feed(self._source, data)))
        try:
            limit_s = order["wall_s"] + GRACE_S
            await asyncio.wait({reporting, filling}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            report = reporting.result()[0] if reporting.done() else b""
            if reporting.done():
                self._output.finish()
            if self._output.is_full.is_set():
                return Executed(how="output", output=self._output.kept)
            if not report:
                raise SandboxBroken("its first process " + ("has died" if reporting.done() else "does not answer"))
            return Executed(**json.loads(report), output=self._output.kept)
        finally:
            for task in (reporting, filling, *feeding):
                task.cancel()
            await asyncio.gather(reporting, filling, *feeding, return_exceptions=True)

    def close(self) -> None:
        """A command that still runs is killed."""
        self._close_theirs()
        self._output.close()
        self._line.close()
        if self._source is not None:
            self._source.close()

    def _close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())


class _Output:
    """What comes through a pipe, up to a limit."""

    def __init__(self, descriptor: int, most: int) -> None:
        self.is_full = asyncio.Event()
        self._data = bytearray()
        self._descriptor = descriptor
        self._most = most
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._take)

    @property
    def kept(self) -> bytes:
        return bytes(self._data[: self._most])

    def finish(self) -> None:
        """Take what is there already. A process in the background may hold the other end."""
        while self._take():
            pass

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _take(self) -> bool:
        """Whether there may be more."""
        try:
            piece = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return False
        self._data += piece
        if len(self._data) > self._most:
            self.is_full.set()
        if not piece or self.is_full.is_set():
            asyncio.get_running_loop().remove_reader(self._descriptor)
            return False
        return True


def _checked(path: str) -> str:
    if not path or "\0" in path:
        raise OSError(errno.EINVAL, "the path is empty, or has a NUL character", path)
    if len(path) > MAX_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), f"{path[:MAX_SHOWN_PATH]}...")
    return path.encode(errors="replace").decode()  # half of a surrogate pair is no text


@functools.cache
def check_walls() -> str:
    """What holds here, in words. Raises `ConfigError` where less holds than `programs.PROMISES`: there is no weaker sandbox."""
    try:
        contained = what_is_contained()
        if contained.walls == "none":
            what_is_contained("user")  # raises why
        if open_ := [name for name in PROMISES if not getattr(contained, name)]:
            raise SandboxBroken(f"not contained: {', '.join(open_)}")
        in_thread(_try_commands)
    except (SandboxBroken, SandboxLost) as error:
        raise ConfigError(
            f"sandbox.use = 'walls': no sandbox for commands on this machine: {error}. To do: {TO_TYPE}"
        ) from error
    return contained.words()


async def _try_commands() -> None:
    sandbox = WalledSandbox()
    try:
        await sandbox.start()
        if (await sandbox.exec("true", timeout_s=START_S)).code != 0:
            raise SandboxBroken("it has no shell")
    finally:
        await sandbox.close()
