"""Calls of tools by a policy of `env check`: each tool once, with arguments that its schema allows, and what is wrong with it.

The tools are read from what the model is shown, so that those of any kind of environment are found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from millstream.env.config import EnvironmentConfig
from millstream.env.tools import AUTO
from millstream.types import TOOLS_ROLE

OFFERED = re.compile(rf"<\|im_start\|>{TOOLS_ROLE}\n(\[.*?\])<\|im_end\|>", re.DOTALL)
RESULT = re.compile(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", re.DOTALL)
WRITTEN = {
    AUTO: "<tool_call>{}</tool_call>",
    "hermes": "<tool_call>{}</tool_call>",
    "llama3": "{}",
    "json": "{}",
    "mistral": "[TOOL_CALLS][{}]",
}
"""How calls are written; in a format of the user's own none are."""
BROKEN = ("it took longer than", "it returned", "worker")
SAMPLES: dict[str, Any] = {
    "string": "a",
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


class ToolPolicy:
    """Says one call in each turn, of one tool after the other, and then nothing. It remembers what it saw."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._written = WRITTEN.get(config.tool_format)
        self._tools: list[dict[str, Any]] = []
        self._results: list[str] = []

    def __call__(self, turn: int, shown: str) -> str:
        self._tools = self._tools or offered_tools(shown)
        self._results = RESULT.findall(shown)
        if self._written is None or turn >= len(self._tools):
            return ""
        tool = self._tools[turn]
        return self._written.format(json.dumps({"name": tool["name"], "arguments": sample_arguments(tool)}))

    def findings(self) -> Iterator[tuple[str, str]]:
        """Names of findings, and what was seen."""
        for tool in self._tools:
            if not tool.get("description"):
                yield "tool-undocumented", f"the tool {tool['name']} has no description"
        for tool, result in zip(self._tools, self._results, strict=False):
            if result.startswith("Error: "):
                name = "tool-breaks" if any(word in result for word in BROKEN) else "tool-error"
                arguments = json.dumps(sample_arguments(tool))
                yield name, f"the tool {tool['name']}, called with {arguments}, answered {result[:200]!r}"


def offered_tools(shown: str) -> list[dict[str, Any]]:
    """The functions that the model may call, as it is shown them."""
    found = OFFERED.search(shown)
    return [tool["function"] for tool in json.loads(found[1])] if found else []


def sample_arguments(tool: dict[str, Any]) -> dict[str, Any]:
    """Values of the right types for what the tool must be given."""
    parameters = tool.get("parameters") or {}
    properties = parameters.get("properties", {})
    return {name: _sample(properties.get(name, {})) for name in parameters.get("required", ())}


def _sample(schema: dict[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("anyOf"):
        return _sample(schema["anyOf"][0])
    kind = schema.get("type", "string")
    return SAMPLES.get(kind[0] if isinstance(kind, list) else kind)
