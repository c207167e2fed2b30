"""The `tools` of an `[[environment]]` table."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

AUTO = "auto"
SANDBOX_TOOL_NAMES = ("bash", "edit")


class ToolConfig(Struct, frozen=True, kw_only=True):
    """One function, or all tools of an MCP server. A string instead of a table is a `function`."""

    # `file.py:name` or `package.module:name`: a function with type hints and a docstring. Or of the sandbox: bash, edit
    function: str = ""
    args: dict[str, Any] = {}  # arguments of the function that the model does not give
    command: tuple[str, ...] = ()  # starts an MCP server, which is spoken to over its standard input and output
    url: str = ""  # of an MCP server over HTTP
    timeout_s: float = 30.0  # of one call
    max_characters: int = 8192  # of a result; the model sees how many more there were
    process: bool = False  # call the function in a worker process, which is killed past the limit
    workers: int | None = None  # the most worker processes. None: the number of cores, at most 8

    def __post_init__(self) -> None:
        if sum(map(bool, (self.function, self.command, self.url))) != 1:
            raise ValueError("a tool is one of function, command (of an MCP server) and url (of an MCP server)")
        if self.timeout_s <= 0 or self.max_characters < 1:
            raise ValueError("timeout_s and max_characters must be above 0")
        if self.workers is not None and self.workers < 1:
            raise ValueError("workers must be at least 1")
        if self.function in SANDBOX_TOOL_NAMES and (self.process or self.args):
            raise ValueError(f"{self.function} runs in the sandbox: it takes neither process nor args")
        if not self.function and (self.process or self.args):
            raise ValueError(
                "process and args are of a function: an MCP server is a process, and has its own arguments"
            )
