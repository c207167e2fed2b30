"""The sandboxes of one environment: each rollout gets one of its own, which is closed after it, whatever its fate.

Some are started ahead. What a task needs is prepared once, and every rollout of the task starts with a copy of the files. A
sandbox that died while it waited is replaced; one that dies in a rollout fails that rollout."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from millstream.decoding import to_type
from millstream.env.sandbox.base import Executed, Sandbox
from millstream.env.sandbox.config import SandboxConfig, sandbox_maker
from millstream.errors import EnvironmentFailed, SandboxLost
from millstream.types import Task

MAX_SNAPSHOT_BYTES = 256 << 20  # of snapshots that are kept for later rollouts of the same task
MAX_SHOWN_OUTPUT = 500


class TaskFiles(Struct, frozen=True, kw_only=True):
    """What a task asks for, in its fields `files` and `setup`."""

    files: dict[str, str] = {}  # text by path
    setup: str = ""  # a shell command


class SandboxPool:
    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._make = sandbox_maker(config)
        self._ready: deque[Sandbox] = deque()
        self._given: set[Sandbox] = set()
        self._filling: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._snapshots: dict[str, asyncio.Task[bytes]] = {}  # by `_key`; "": of the setup of all
        self._is_closed = False

    async def take(self, task: Task) -> Sandbox:
        """Started, with the files of this task. Give it back. Raises `EnvironmentFailed`."""
        wanted = _wanted(task)
        base = await self._base()
        if wanted is not None:
            base = await self._snapshot(_key(task, wanted), self._prepared(wanted, base))
        return await self._started(base)

    async def give_back(self, sandbox: Sandbox) -> None:
        """Close it. That is finished also if this is cancelled."""
        self._given.discard(sandbox)
        closing = asyncio.create_task(sandbox.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    async def close(self) -> None:
        self._is_closed = True
        owned = [*self._snapshots.values(), *([self._filling] if self._filling else [])]
        for task in owned:
            task.cancel()
        await asyncio.gather(*owned, return_exceptions=True)
        await asyncio.gather(*(self.give_back(one) for one in (*self._ready, *self._given)))
        await asyncio.gather(*self._closing)
        self._ready.clear()

    async def _started(self, snapshot: bytes | None) -> Sandbox:
        while self._ready:
            sandbox = self._ready.popleft()
            with suppress(SandboxLost):  # it died while it waited
                return await self._start(sandbox, snapshot)
        return await self._start(self._make(), snapshot)

    async def _start(self, sandbox: Sandbox, snapshot: bytes | None) -> Sandbox:
        self._given.add(sandbox)
        self._fill()
        try:
            await sandbox.start(snapshot)
        except OSError as error:
            await self.give_back(sandbox)
            raise SandboxLost(f"a sandbox cannot take its files: {error}") from error
        except BaseException:
            await self.give_back(sandbox)
            raise
        return sandbox

    def _fill(self) -> None:
        """Start sandboxes ahead, unless that is under way."""
        if self._is_closed or (self._filling is not None and not self._filling.done()):
            return
        if len(self._ready) < self._config.ahead:
            self._filling = asyncio.create_task(self._start_ahead())

    async def _start_ahead(self) -> None:
        while len(self._ready) < self._config.ahead:
            sandbox = self._make()
            try:
                await sandbox.start()
            except BaseException as error:
                await self.give_back(sandbox)
                if isinstance(error, SandboxLost):  # the rollout that needs one will say so
                    return
                raise
            self._ready.append(sandbox)

    async def _base(self) -> bytes | None:
        """The files that the setup of all tasks has left; None, if there is none."""
        if not self._config.setup:
            return None
        return await self._snapshot("", self._prepared(TaskFiles(setup=self._config.setup), None))

    async def _snapshot(self, key: str, making: Coroutine[Any, Any, bytes]) -> bytes:
        """Made once; all who ask meanwhile get the same."""
        if key in self._snapshots:
            making.close()
        else:
            self._snapshots[key] = asyncio.create_task(making)
        made = self._snapshots[key]
        try:
            return await asyncio.shield(made)
        finally:
            if made.done() and not _is_made(made) and self._snapshots.get(key) is made:
                del self._snapshots[key]  # the next rollout tries again
            self._forget()

    def _forget(self) -> None:
        """The oldest snapshots, if they have grown too large together; never that of all tasks."""
        done = {key: len(task.result()) for key, task in self._snapshots.items() if key and _is_made(task)}
        total = sum(done.values())
        for key, size in done.items():
            if total <= MAX_SNAPSHOT_BYTES:
                break
            total -= size
            del self._snapshots[key]

    async def _prepared(self, wanted: TaskFiles, base: bytes | None) -> bytes:
        sandbox = await self._started(base)
        try:
            for path, text in wanted.files.items():
                await sandbox.write(path, text.encode(errors="replace"))
            if wanted.setup:
                _check_setup(await sandbox.exec(wanted.setup, timeout_s=self._config.lifetime_s), wanted.setup)
            return await sandbox.snapshot()
        except OSError as error:
            raise EnvironmentFailed(f"the sandbox cannot be prepared: {error}") from error
        finally:
            await self.give_back(sandbox)


def _is_made(task: asyncio.Task[bytes]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _wanted(task: Task) -> TaskFiles | None:
    if "files" not in task.data and "setup" not in task.data:
        return None
    try:
        return to_type(task.data, TaskFiles)
    except msgspec.ValidationError as error:
        raise EnvironmentFailed(
            f"task {task.id}: {error}: expected `files`, a table of paths and texts, and `setup`, a shell command"
        ) from error


def _key(task: Task, wanted: TaskFiles) -> str:
    """Tasks of two data sets can have the same id."""
    content = repr((wanted.files, wanted.setup)).encode()
    return f"{task.id} {hashlib.sha256(content).hexdigest()}"


def _check_setup(done: Executed, command: str) -> None:
    if done.how != "ended" or done.code != 0:
        said = done.output.decode(errors="replace")[-MAX_SHOWN_OUTPUT:]
        how = f"ended with {done.code}" if done.how == "ended" else f"was stopped: more {done.how} than allowed"
        raise EnvironmentFailed(f"the setup of a sandbox {how}: {command[:MAX_SHOWN_OUTPUT]!r} printed {said!r}")
