"""One function that the model may call: on the event loop, on a thread, or in a worker process.

A call past its limit on a thread keeps that thread, and another takes its place; a worker process is killed (`rpc.pool`)."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import Struct, structs

from millstream import imports
from millstream.env.rewards.call import is_coroutine
from millstream.env.tools.config import ToolConfig
from millstream.env.tools.schema import ToolFunction, tool_function
from millstream.errors import EnvironmentFailed, WorkerExited
from millstream.rpc.call import Remote
from millstream.rpc.pool import WorkerPool
from millstream.rpc.process import Launcher, LocalLauncher
from millstream.rpc.threads import CallTimeout, DaemonThreads, call_limit

TOOL_WORKER = "millstream.env.tools.worker:serve_tool"
MAX_THREADS = 128
MAX_WORKERS = 8
START_S = 60.0  # for a worker to import the function and its libraries


class ToolFailed(EnvironmentFailed):
    """A call that gave no result: its message is what the model sees."""


class Tool(Protocol):
    """One tool. `config` has its limits."""

    config: ToolConfig

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates have it: `{"type": "function", "function": {"name": ..., ...}}`."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """The result, as the function returns it. Raises whatever it raises, and `ToolFailed`."""
        ...


class FunctionTool:
    """A Python function in this process."""

    def __init__(self, function: Callable[..., Any], config: ToolConfig, threads: DaemonThreads | None = None) -> None:
        self.config = config
        self._known = tool_function(function, config.args)
        self.schema = self._known.schema()
        self._function = functools.partial(function, **config.args) if config.args else function
        is_async = is_coroutine(function)
        self._threads = None if is_async else threads or DaemonThreads("tool", most=MAX_THREADS)

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        bound = functools.partial(self._function, **bound_arguments(self._known, arguments))
        if self._threads is not None:
            return await self._threads.call(bound, timeout_s=self.config.timeout_s)
        async with call_limit(self.config.timeout_s):
            return await bound()


class WorkerTool:
    """A Python function in worker processes, one call at a time in each."""

    def __init__(self, function: Callable[..., Any], config: ToolConfig, launcher: Launcher | None = None) -> None:
        self.config = config
        self._known = tool_function(function, config.args)
        self.schema = self._known.schema()
        name = f"a worker of the tool {config.function}"
        launch = functools.partial((launcher or LocalLauncher()).launch, "environment", TOOL_WORKER, name=name)
        setup = ToolSetup(config=structs.replace(config, process=False), path=sys.path)
        size = config.workers or min(MAX_WORKERS, os.cpu_count() or 1)
        self._pool = WorkerPool(lambda loop: Remote(launch, setup, name=name, loop=loop), size=size, start_s=START_S)

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        bound_arguments(self._known, arguments)  # raises here what is wrong with them
        try:
            async with self._pool.worker() as worker, call_limit(self.config.timeout_s):
                reply: ToolReply = await asyncio.wrap_future(worker.call(ToolRequest(dict(arguments)), ToolReply))
        except CallTimeout:
            raise
        except TimeoutError as error:
            raise ToolFailed(f"its worker was not ready within {START_S:g} s") from error
        except WorkerExited as error:
            raise ToolFailed(str(error)) from error
        if reply.failure:
            raise ToolFailed(reply.failure)
        return reply.text

    async def close(self) -> None:
        await self._pool.close()


class ToolSetup(Struct, frozen=True, kw_only=True):
    config: ToolConfig
    path: list[str]  # sys.path of the run: a worker finds the same modules


class ToolRequest(Struct, frozen=True):
    arguments: dict[str, Any]


class ToolReply(Struct, frozen=True, kw_only=True):
    text: str = ""
    failure: str = ""  # empty: `text` is the result


def bound_arguments(known: ToolFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Raises `ToolFailed` for arguments that do not fit."""
    try:
        return known.bind(arguments)
    except msgspec.ValidationError as error:
        raise ToolFailed(f"wrong arguments: {error}") from error


def configured_tool(config: ToolConfig, launcher: Launcher | None = None) -> FunctionTool | WorkerTool:
    """Raises `ConfigError`."""
    function = imports.load_function(config.function)
    return WorkerTool(function, config, launcher) if config.process else FunctionTool(function, config)


def result_text(value: Any, max_characters: int) -> str:
    """What the model sees of a result: text as it is, anything else as JSON. Raises `ToolFailed` for what is neither."""
    if isinstance(value, bytes | bytearray):
        raise ToolFailed(f"it returned {len(value):,} bytes, and not text")
    if not isinstance(value, str):
        try:
            value = msgspec.json.encode(value, enc_hook=_plain).decode() if value is not None else ""
        except (TypeError, ValueError) as error:
            raise ToolFailed(f"it returned a {type(value).__name__}, which is not text or plain data") from error
    more = len(value) - max_characters
    text = value if more <= 0 else f"{value[:max_characters]}\n[{more:,} more characters were cut off]"
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(type(value).__name__)


def failure_text(error: BaseException, config: ToolConfig) -> str:
    """What the model sees of a call that failed."""
    if isinstance(error, ToolFailed):
        return str(error)
    if isinstance(error, CallTimeout):
        return f"it took longer than {config.timeout_s:g} s"
    text = f"{type(error).__name__}: {str(error)[: config.max_characters]}"
    return text.encode("utf-8", "replace").decode()
