"""Tools of an MCP server, through the `mcp` package: started by the first rollout that needs it, one for all rollouts.

A server that was lost is started again by the next call; the call that lost it fails, and the model sees why."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from millstream.env.tools.call import ToolFailed
from millstream.env.tools.config import ToolConfig
from millstream.errors import ConfigError, shown
from millstream.rpc.threads import CallTimeout, call_limit

START_S = 60.0


class ServerTool:
    def __init__(self, server: ToolServer, schema: dict[str, Any]) -> None:
        self.config = server.config
        self.schema = schema
        self._server = server

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        return await self._server.call(self.schema["function"]["name"], arguments)


class ToolServer:
    def __init__(self, config: ToolConfig) -> None:
        """Raises `ConfigError` where the package is missing."""
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError("tools of an MCP server need the mcp package: pip install 'millstream[mcp]'")
        self.config = config
        self.is_started = False
        self._name = config.url or shlex.join(config.command)
        self._client: asyncio.Future[Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def start(self) -> list[ServerTool]:
        """Its tools. Raises `ToolFailed` if it does not start."""
        client = await self._connected()
        listed = await client.list_tools()
        found = [ServerTool(self, _schema(tool)) for tool in listed.tools]
        while listed.next_cursor is not None:
            listed = await client.list_tools(cursor=listed.next_cursor)
            found += [ServerTool(self, _schema(tool)) for tool in listed.tools]
        if not found:
            raise ToolFailed(f"the MCP server {self._name} has no tools")
        self.is_started = True
        return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

        client = await self._connected()
        try:
            async with call_limit(self.config.timeout_s):
                result = await client.call_tool(name, dict(arguments))
        except CallTimeout:
            raise
        except MCPError as error:
            if error.code not in (CONNECTION_CLOSED, INVALID_REQUEST):  # else it was lost, or has lost the connection
                raise ToolFailed(shown(error.message)) from error
            await self._disconnect()
            raise ToolFailed(f"its server: {_reason(error)}") from error
        except Exception as error:  # the server was lost: the next call starts it again
            await self._disconnect()
            raise ToolFailed(f"its server: {_reason(error)}") from error
        text = "\n".join(_text(block) for block in result.content)
        if result.is_error:
            raise ToolFailed(text)
        return text

    async def close(self) -> None:
        await self._disconnect()

    async def _connected(self) -> Any:
        if self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._closing = asyncio.Event()
            self._task = asyncio.create_task(self._serve(self._client, self._closing))
        try:
            async with asyncio.timeout(START_S):
                return await asyncio.shield(self._client)
        except TimeoutError as error:
            await self._disconnect()
            raise ToolFailed(f"the MCP server {self._name} did not start within {START_S:g} s") from error

    async def _serve(self, ready: asyncio.Future[Any], closing: asyncio.Event) -> None:
        """One task opens and closes the connection, as the package wants it."""
        from mcp import Client, StdioServerParameters

        config = self.config
        where = config.url or StdioServerParameters(
            command=config.command[0], args=list(config.command[1:]), env=dict(os.environ)
        )
        try:
            async with Client(where) as client:
                ready.set_result(client)
                await closing.wait()
        except Exception as error:  # of the package, or of the server
            if not ready.done():
                self._client = None
                ready.set_exception(ToolFailed(f"the MCP server {self._name} does not start: {_reason(error)}"))

    async def _disconnect(self) -> None:
        task = self._task
        self._client = None
        self._task = None
        self._closing.set()
        if task is not None:
            with suppress(TimeoutError, Exception):  # it was lost: what ends it does not matter
                async with asyncio.timeout(START_S):
                    await task


def _reason(error: BaseException) -> str:
    """The first error of a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return shown(f"{type(error).__name__}: {error}")


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(block: Any) -> str:
    """Text as it is; of an image or a sound, what it is."""
    text = getattr(block, "text", None)
    return str(text) if text is not None else f"[{block.type}]"
