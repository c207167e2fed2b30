"""Tools: functions that the model may call while it answers.

    schema     a Python function as JSON schema and back: types from its hints, descriptions from its docstring
    parse      the calls in an answer, by format: hermes (Qwen, Hermes), llama3, mistral, json, or a function of the user's
    call       one call, under its time limit: on the event loop, on a thread, or in a worker process (`worker`: its side)
    sandboxed  tools that act in the rollout's sandbox: bash, edit
    servers    tools of MCP servers
    toolset    all of these by name, and the answer to each call
    context    a `Context` whose `ask` runs the calls until the model answers without one

What the model sampled stays as it was sampled, and is trained; what a tool says is shown, and is not. A call that cannot be
made (no such tool, wrong arguments, text that is no call), that fails, hangs or returns too much is answered with what was
wrong: the model sees it, and the rollout continues.
"""

from millstream.env.tools.config import AUTO, ToolConfig
from millstream.env.tools.context import MAX_ROUNDS, ToolContext
from millstream.env.tools.parse import (
    AssistantTurn,
    InvalidCall,
    Parser,
    ToolCall,
    format_of,
    parser_named,
    tool_call_fields,
)
from millstream.env.tools.schema import ToolFunction, tool_function
from millstream.env.tools.toolset import ToolSet, configured_tools, tools_of

__all__ = [
    "AUTO",
    "MAX_ROUNDS",
    "AssistantTurn",
    "InvalidCall",
    "Parser",
    "ToolCall",
    "ToolConfig",
    "ToolContext",
    "ToolFunction",
    "ToolSet",
    "configured_tools",
    "format_of",
    "parser_named",
    "tool_call_fields",
    "tool_function",
    "tools_of",
]
