"""A sandbox in a container of docker or podman, through its command line. NOT RUN: written against the documented options and
tested with a program in their place (`tests/support/fake_docker.sh`), because no container engine was at hand.

A container ends by itself after the sandbox's lifetime (`sleep`), and is then removed (`--rm`). One that a killed run has left
behind is removed earlier: its label names the process that owns it, and the first start in a process removes those of dead
processes on this machine."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from millstream.env.sandbox.base import WORK, Executed, Limits, checked_command
from millstream.errors import ConfigError, SandboxLost

OWNER = "millstream.owner"
CONTAINER_S = 60.0  # for a call of the container engine that runs no command of the model's
MAX_WORDS = 300  # of a message of the engine
READ = 'test -d "$1" && exit 21; test -e "$1" || exit 2; test -f "$1" || exit 22; test -r "$1" || exit 13; cat -- "$1"'
WRITE = 'mkdir -p -- "$(dirname -- "$1")" || exit 13; test -d "$1" && exit 21; cat > "$1" || exit 5'
PACK = f"tar -cf - -C {WORK} ."
EMPTY = f"find {WORK} -mindepth 1 -delete"
UNPACK = f"{EMPTY}; tar -xf - -C {WORK}"
_swept: set[str] = set()


class ContainerSandbox:
    """See `base.Sandbox`. `program`: docker, podman, or a path. `image`: with sh, tar and find. `options`: more of `run`."""

    def __init__(
        self, limits: Limits | None = None, *, image: str, program: str = "docker", options: Sequence[str] = ()
    ) -> None:
        if shutil.which(program) is None:
            raise ConfigError(
                f"sandbox.use = {program!r}: there is no program {program!r} in PATH. Install it, or use 'walls'"
            )
        self.limits = limits or Limits()
        self._program = program
        self._image = image
        self._options = tuple(options)
        self._name = f"millstream-{secrets.token_hex(8)}"
        self._is_started = False
        self._turn = asyncio.Lock()

    async def start(self, snapshot: bytes | None = None) -> None:
        async with self._turn:
            if not self._is_started:
                if self._program not in _swept:
                    _swept.add(self._program)
                    await self._sweep()
                done = await self._call(*self._run_options(), timeout_s=CONTAINER_S)
                if done.how != "ended" or done.code != 0:
                    raise SandboxLost(f"{self._program} run {self._image}: {_words(done)}")
                self._is_started = True
            else:
                await self._kill_all()
                await self._checked(await self._inside(EMPTY, timeout_s=CONTAINER_S), WORK)
            if snapshot:
                done = await self._inside(UNPACK, timeout_s=CONTAINER_S, data=snapshot)
                await self._checked(done, WORK)

    async def exec(self, command: str, *, timeout_s: float | None = None) -> Executed:
        command = checked_command(command)
        async with self._turn:
            limit_s = self.limits.wall_s if timeout_s is None else timeout_s
            done = await self._inside(command, timeout_s=limit_s, most=self.limits.output_bytes)
            if done.how != "ended" or done.code != 0:
                await self._check_running(done)
            return done

    async def read(self, path: str) -> bytes:
        async with self._turn:
            most = self.limits.file_bytes
            return await self._checked(await self._inside(READ, path, timeout_s=CONTAINER_S, most=most), path)

    async def write(self, path: str, data: bytes) -> None:
        async with self._turn:
            await self._checked(await self._inside(WRITE, path, timeout_s=CONTAINER_S, data=data), path)

    async def snapshot(self) -> bytes:
        async with self._turn:
            most = 2 * self.limits.scratch_bytes
            return await self._checked(await self._inside(PACK, timeout_s=CONTAINER_S, most=most), WORK)

    async def close(self) -> None:
        self._is_started = False
        await self._call("rm", "--force", self._name, timeout_s=CONTAINER_S)

    def _run_options(self) -> list[str]:
        limits = self.limits
        mount = f"{WORK}:rw,exec,nosuid,nodev,mode=1777,size={limits.scratch_bytes}"
        return [
            *("run", "--detach", "--rm", "--init", "--name", self._name, "--label", f"{OWNER}={_owner()}"),
            *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only"),
            *("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)),
            *("--pids-limit", str(limits.processes), "--ulimit", f"cpu={max(1, round(limits.cpu_s))}"),
            *("--ulimit", f"fsize={limits.file_bytes}", "--ulimit", f"nofile={limits.open_files}"),
            *("--tmpfs", mount, "--workdir", WORK, "--env", f"HOME={WORK}", "--env", f"TMPDIR={WORK}"),
            *self._options,
            *(self._image, "sleep", str(round(limits.lifetime_s))),
        ]

    async def _inside(
        self, script: str, *arguments: str, timeout_s: float, most: int = 1 << 16, data: bytes = b""
    ) -> Executed:
        if not self._is_started:
            raise SandboxLost("the sandbox is gone: it was not started")
        options = ["exec", *(["--interactive"] if data else []), self._name, "sh", "-c", script, "sh", *arguments]
        return await self._call(*options, timeout_s=timeout_s, most=most, data=data, is_command=True)

    async def _kill_all(self) -> None:
        """Every process in the container but the first."""
        await self._call("exec", self._name, "sh", "-c", "kill -9 -1", timeout_s=CONTAINER_S)

    async def _checked(self, done: Executed, path: str) -> bytes:
        """What an action on files printed. Raises `OSError`."""
        if done.how == "ended" and done.code == 0:
            return done.output
        await self._check_running(done)
        number = {"time": errno.ETIMEDOUT, "output": errno.EFBIG}.get(done.how, done.code or errno.EIO)
        number = number if number in errno.errorcode else errno.EIO
        raise OSError(number, os.strerror(number), path)

    async def _check_running(self, done: Executed) -> None:
        state = await self._call("inspect", "--format", "{{.State.Running}}", self._name, timeout_s=CONTAINER_S)
        if state.output.strip() != b"true":
            self._is_started = False
            raise SandboxLost(f"the sandbox is gone: container {self._name} does not run any more: {_words(done)}")

    async def _sweep(self) -> None:
        """Remove containers whose process is dead."""
        form = f'{{{{.ID}}}} {{{{.Label "{OWNER}"}}}}'
        found = await self._call("ps", "--all", "--filter", f"label={OWNER}", "--format", form, timeout_s=CONTAINER_S)
        words = [line.split() for line in found.output.decode(errors="replace").splitlines()]
        if dead := [line[0] for line in words if len(line) == 2 and _is_dead(line[1])]:
            await self._call("rm", "--force", *dead, timeout_s=CONTAINER_S)

    async def _call(
        self, *arguments: str, timeout_s: float, most: int = 1 << 16, data: bytes = b"", is_command: bool = False
    ) -> Executed:
        """Call the container engine. A command that is stopped or cancelled is killed, with all others in the container."""
        process = await asyncio.create_subprocess_exec(
            self._program,
            *arguments,
            stdin=asyncio.subprocess.PIPE if data else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = bytearray()
        feeding = asyncio.create_task(_feed(process, data))
        try:
            async with asyncio.timeout(timeout_s):
                assert process.stdout is not None
                while len(output) <= most and (piece := await process.stdout.read(1 << 16)):
                    output += piece
                if len(output) > most:
                    return Executed(how="output", output=bytes(output[:most]))
                return Executed(how="ended", code=await process.wait(), output=bytes(output))
        except TimeoutError:
            return Executed(how="time", output=bytes(output))
        finally:
            feeding.cancel()
            is_running = process.returncode is None
            if is_running:
                with suppress(ProcessLookupError):
                    process.kill()
            if is_command and (is_running or len(output) > most):
                await self._kill_all()
            if is_running:
                while process.stdout is not None and await process.stdout.read(1 << 16):
                    pass  # what it has printed before its end
            await asyncio.gather(feeding, process.wait(), return_exceptions=True)


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    if process.stdin is not None:
        with suppress(OSError):  # it need not read
            process.stdin.write(data)
            await process.stdin.drain()
            process.stdin.close()


def _words(done: Executed) -> str:
    text = done.output.decode(errors="replace").strip()[-MAX_WORDS:]
    return text or (f"exit code {done.code}" if done.how == "ended" else f"no answer after {CONTAINER_S:g} s")


def _owner() -> str:
    return f"{socket.gethostname()}/{os.getpid()}/{_start_of(os.getpid())}"


def _start_of(process: int) -> str:
    """When a process was started, which tells it from a later one with its number; empty, if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _is_dead(owner: str) -> bool:
    host, _, rest = owner.partition("/")
    process, _, start = rest.partition("/")
    return host == socket.gethostname() and process.isdecimal() and _start_of(int(process)) != start
