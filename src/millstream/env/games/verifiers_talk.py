"""Requests that verifiers sends to a model, answered from a rollout's context. The same for all versions of verifiers.

A request that continues where the last one of its trace ended is a further turn of the same sequence, token by token; one whose
history was rewritten begins a new part. Calls of tools are read from the model's text, in the format of its chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from millstream.env.base import Context
from millstream.env.tools import AssistantTurn, InvalidCall, ToolCall, parser_named, tool_call_fields
from millstream.types import TOOLS_ROLE, Message

NO_CALL = "not_a_call"  # the name of a call that could not be read: its arguments say why


class CalledTool(NamedTuple):
    """As OpenAI's API has it: arguments are JSON."""

    id: str
    name: str
    arguments: str


class AnsweredTurn(NamedTuple):
    """The model's turn. As a message: see `_message_of`."""

    content: str
    tool_calls: list[CalledTool]
    role: str = "assistant"


class _Sequence(NamedTuple):
    context: Context
    messages: list[Message]  # that it stands for


class VerifiersTalks:
    """The sequences of one episode, by trace."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._by_trace: dict[str, _Sequence] = {}

    async def say(self, trace: str, agent: int, sent: Sequence[Any], tools: Sequence[Any] | None) -> AnsweredTurn:
        messages = [*_offered(tools), *map(_message_of, sent)]
        found = self._by_trace.get(trace)
        if found is None or messages[: len(found.messages)] != found.messages or len(messages) == len(found.messages):
            is_first = not self._by_trace and agent == 0
            found = _Sequence(self._context if is_first else self._context.part(agent), [])
        said = await found.context.ask(messages[len(found.messages) :], is_raw=bool(tools))
        turn = parser_named(self._context.text.tool_format)(said) if tools else AssistantTurn(content=said)
        calls = [_called(call, len(messages) + place) for place, call in enumerate(turn.calls)]
        answer = AnsweredTurn(turn.content, calls)
        self._by_trace[trace] = _Sequence(found.context, [*messages, _message_of(answer)])
        return answer


def _offered(tools: Sequence[Any] | None) -> list[Message]:
    """The message that says which tools there are, if there are any."""
    functions = [
        {"name": one.name, "description": one.description, "parameters": one.parameters} for one in tools or ()
    ]
    schemas = [{"type": "function", "function": function} for function in functions]
    return [Message(role=TOOLS_ROLE, content=json.dumps(schemas))] if schemas else []


def _called(call: ToolCall | InvalidCall, number: int) -> CalledTool:
    name, arguments = (NO_CALL, call.why) if isinstance(call, InvalidCall) else (call.name, json.dumps(call.arguments))
    return CalledTool(f"call{number:05d}", name, arguments)  # Mistral's templates want nine letters or digits


def _message_of(one: Any) -> Message:
    """A message of verifiers, or an answer, as a chat template reads it."""
    fields: dict[str, Any] = {}
    if calls := getattr(one, "tool_calls", None):
        fields["tool_calls"] = [tool_call_fields(call.id, call.name, _arguments(call.arguments)) for call in calls]
    if call_id := getattr(one, "tool_call_id", ""):
        name = getattr(one, "name", None)
        fields = {"tool_call_id": call_id, **({"name": name} if name else {})}
    return Message(role=one.role, content=_text_of(one.content), fields=json.dumps(fields) if fields else "")


def _text_of(content: Any) -> str:
    """The text of a message; images are left out."""
    if isinstance(content, str) or content is None:
        return content or ""
    texts = (part.get("text") if isinstance(part, dict) else getattr(part, "text", None) for part in content)
    return "\n".join(text for text in texts if text)


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError:
        return {"text": text}
    return arguments if isinstance(arguments, dict) else {"text": text}
