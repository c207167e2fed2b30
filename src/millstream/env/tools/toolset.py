"""The tools of an environment, by name, and the answer to each call: a result, or what was wrong with the call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from millstream.env.sandbox.base import Sandbox
from millstream.env.tools.call import FunctionTool, Tool, WorkerTool, configured_tool, failure_text, result_text
from millstream.env.tools.config import ToolConfig
from millstream.env.tools.parse import InvalidCall, ToolCall
from millstream.env.tools.sandboxed import SANDBOX_TOOLS, SandboxTool
from millstream.env.tools.servers import ToolServer
from millstream.errors import ConfigError, SandboxLost
from millstream.rpc.process import Launcher
from millstream.rpc.threads import DaemonThreads


class ToolSet:
    """Functions are known at once; the tools of MCP servers when these have started, which the first `open` waits for."""

    def __init__(self, tools: Sequence[Tool | SandboxTool], servers: Sequence[ToolServer] = ()) -> None:
        self._servers = servers
        self._opening = asyncio.Lock()
        self._tools: dict[str, Tool | SandboxTool] = {}
        self._add(tools)

    def _add(self, tools: Sequence[Tool | SandboxTool]) -> None:
        for tool in tools:
            name = tool.schema["function"]["name"]
            if name in self._tools:
                raise ConfigError(f"two tools are named {name!r}: give one of them another name")
            self._tools[name] = tool

    def joined(self, others: ToolSet) -> ToolSet:
        """With these, too. Raises `ConfigError` for a name that both have."""
        return ToolSet([*self._tools.values(), *others._tools.values()])

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """In the order of the config: what the model sees."""
        return [tool.schema for tool in self._tools.values()]

    async def open(self) -> None:
        """Start the MCP servers, if that was not done. Raises `ToolFailed`."""
        async with self._opening:
            for server in self._servers:
                if not server.is_started:
                    self._add(await server.start())

    async def run(self, call: ToolCall | InvalidCall, sandbox: Sandbox | None = None) -> str:
        """What the model sees. `sandbox`: the rollout's own. Raises `SandboxLost`."""
        if isinstance(call, InvalidCall):
            return f"Error: this is not a call of a tool ({call.why})"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"Error: there is no tool {call.name!r}. Tools: {', '.join(self._tools)}"
        try:
            if isinstance(tool, SandboxTool):
                value: Any = await tool.call(call.arguments, sandbox)
            else:
                value = await tool.call(call.arguments)
            return result_text(value, tool.config.max_characters)
        except (asyncio.CancelledError, SandboxLost):
            raise
        except BaseException as error:  # user code, or its server, also if it calls sys.exit: the model sees it
            return f"Error: {call.name}: {failure_text(error, tool.config)}"

    async def close(self) -> None:
        """End the MCP servers and the worker processes."""
        for server in self._servers:
            await server.close()
        for tool in self._tools.values():
            if isinstance(tool, WorkerTool):
                await tool.close()


def configured_tools(configs: Sequence[str | ToolConfig], launcher: Launcher | None = None) -> ToolSet:
    """Those of a config. Raises `ConfigError`."""
    tables = [ToolConfig(function=one) if isinstance(one, str) else one for one in configs]
    return ToolSet(
        [
            SandboxTool(table) if table.function in SANDBOX_TOOLS else configured_tool(table, launcher)
            for table in tables
            if table.function
        ],
        [ToolServer(table) for table in tables if not table.function],
    )


def tools_of(functions: Sequence[Callable[..., Any]], threads: DaemonThreads) -> ToolSet:
    """Those of an environment's own: functions, or methods of the object that plays the episode."""
    config = ToolConfig(function="own")
    return ToolSet([FunctionTool(function, config, threads) for function in functions])
