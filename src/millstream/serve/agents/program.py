"""One run of an agent: a command in a folder and a process group of its own, or a function of the user's."""

from __future__ import annotations

import asyncio
import json
import numbers
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from millstream.decoding import to_type
from millstream.env import SplitReward
from millstream.env.rewards.call import is_coroutine
from millstream.errors import EnvironmentFailed, shown
from millstream.rpc.threads import DaemonThreads
from millstream.serve.agents import guard
from millstream.types import Task

MAX_OUTPUT = 1 << 20  # bytes of standard output and error that are kept, from the end
REWARD_FILE = "reward.json"
TASK_FILE = "task.json"
FOLDER_PREFIX = "millstream-agent-"
END_S = 5.0
LOOK_S = 0.02


class AgentAccess(Struct, frozen=True, kw_only=True):
    """What an agent needs to reach the model."""

    base_url: str  # of OpenAI's API
    api_key: str  # of this rollout alone
    model: str
    folder: Path  # empty, and removed with the rollout


class AgentResult(Struct, frozen=True, kw_only=True):
    """What an agent left behind."""

    value: Any  # what the function returned; of a command, its standard output
    folder: Path
    # that the agent gave itself: a number or a `SplitReward` that the function returned, or what reward.json has
    reward: float | SplitReward | None = None

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else "" if self.value is None else str(self.value)


class AgentPlaces:
    """Folders of agents, and the guard that ends what a killed run has left (`serve.agents.guard`)."""

    def __init__(self) -> None:
        self._base: Path | None = None
        self._guard: subprocess.Popen[str] | None = None

    @asynccontextmanager
    async def folder(self) -> AsyncIterator[Path]:
        """An empty folder for one rollout."""
        made = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._base or self._begin()))
        try:
            yield made
        finally:
            await asyncio.to_thread(shutil.rmtree, made, ignore_errors=True)

    def _begin(self) -> Path:
        self._base = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        command = [sys.executable, "-S", "-E", guard.__file__, str(self._base), str(os.getpid())]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        return self._base

    def started(self, pid: int) -> None:
        self._tell(f"+{pid}")

    def ended(self, pid: int) -> None:
        self._tell(f"-{pid}")

    def _tell(self, line: str) -> None:
        assert self._guard is not None and self._guard.stdin is not None
        with suppress(BrokenPipeError):  # the guard was killed: the run still ends its agents by itself
            self._guard.stdin.write(f"{line}\n")
            self._guard.stdin.flush()

    async def close(self) -> None:
        if self._guard is not None:
            self._tell("end")
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._guard.wait, END_S)
            assert self._guard.stdin is not None
            self._guard.stdin.close()


async def run_function(
    function: Callable[..., Any], task: Task, access: AgentAccess, threads: DaemonThreads
) -> AgentResult:
    """`function(task, access)`: a coroutine function, or a plain one, which is called on a thread."""
    if is_coroutine(function):
        value = await function(task, access)
    else:
        value = await threads.call(lambda: function(task, access))
    reward = float(value) if isinstance(value, numbers.Real) else value if isinstance(value, SplitReward) else None
    return AgentResult(value=value, folder=access.folder, reward=reward)


async def run_command(command: tuple[str, ...], task: Task, access: AgentAccess, places: AgentPlaces) -> AgentResult:
    """Raises `EnvironmentFailed` for a command that cannot be started, or that ends with another code than 0. Ends it, with all
    that it has started, when the rollout is cancelled."""
    (access.folder / TASK_FILE).write_bytes(msgspec.json.encode(task))
    process = await _started(command, access)
    places.started(process.pid)
    try:
        async with asyncio.TaskGroup() as reading:
            output, errors = (reading.create_task(_end_of(one)) for one in (process.stdout, process.stderr))
            while process.returncode is None:  # noqa: ASYNC110  # `wait` would wait for its output, too,
                await asyncio.sleep(LOOK_S)
            _kill_group(process.pid)  # which what it has left running may hold open
    finally:
        _kill_group(process.pid)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
        places.ended(process.pid)
    if process.returncode:
        last = shown((errors.result().strip() or output.result().strip()).rpartition("\n")[2])
        raise EnvironmentFailed(f"the agent ended with code {process.returncode}: {last}")
    return AgentResult(value=output.result(), folder=access.folder, reward=_own_reward(access.folder))


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def _started(command: tuple[str, ...], access: AgentAccess) -> asyncio.subprocess.Process:
    variables = {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": access.api_key,
        "OPENAI_MODEL": access.model,
        "MILLSTREAM_TASK": str(access.folder / TASK_FILE),
        **{name: f"127.0.0.1,{os.environ.get(name, '')}".rstrip(",") for name in ("NO_PROXY", "no_proxy")},
    }
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=access.folder,
            env={**os.environ, **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentFailed(f"the agent cannot be started: {command[0]}: {error.strerror or error}") from error


async def _end_of(stream: asyncio.StreamReader | None) -> str:
    """The last bytes of a stream, read to its end."""
    assert stream is not None
    kept = bytearray()
    while read := await stream.read(1 << 16):
        kept += read
        del kept[: max(0, len(kept) - MAX_OUTPUT)]
    return kept.decode("utf-8", "replace")


def _own_reward(folder: Path) -> SplitReward | None:
    path = folder / REWARD_FILE
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text())
        split = to_type(value if isinstance(value, dict) else {"reward": value}, SplitReward)
        if split == SplitReward():
            raise ValueError(f"it is {shown(str(value))}")
        return split
    except (OSError, ValueError) as error:
        raise EnvironmentFailed(
            f'the agent left a {REWARD_FILE} that is not {{"reward": NUMBER}}, with "turns" or "parts": {error}'
        ) from error
