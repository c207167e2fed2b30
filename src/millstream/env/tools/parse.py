"""The calls in an answer of the model, by the format that its chat template teaches.

    hermes     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, as often as needed      Qwen, Hermes
    llama3     {"name": "add", "parameters": {"a": 1}}, after <|python_tag|> or alone, several with ;  Llama 3
    mistral    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or [TOOL_CALLS]add[ARGS]{"a": 1}  Mistral
    json       an answer that is one such object, or a list of them, in a ```json fence or not         anything else

Text that means to be a call and is none is an `InvalidCall`: the model sees why. Another format is a function of the
answer's text, special tokens included but for the end of the turn, that returns an `AssistantTurn`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from millstream import imports
from millstream.errors import shown

HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FENCE = re.compile(r"^\s*```(?:json)?\s*\n(.*?)\n?```\s*$", re.DOTALL)
PYTHON_TAG, TOOL_CALLS, ARGS, CALL_ID = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
SPECIAL = re.compile(r"<\|[^|<>]*\|>")


class ToolCall(Struct, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}


class InvalidCall(Struct, frozen=True, kw_only=True):
    """Text that means to be a call, and what is wrong with it."""

    text: str
    why: str


class AssistantTurn(Struct, frozen=True, kw_only=True):
    content: str  # what is not a call
    calls: tuple[ToolCall | InvalidCall, ...] = ()


Parser = Callable[[str], AssistantTurn]


def _hermes(text: str) -> AssistantTurn:
    calls = []
    for found in HERMES.finditer(text):
        if found[0].endswith("</tool_call>"):
            calls.append(_call(found[1]))
        else:
            calls.append(InvalidCall(text=found[1], why="the call has no end: </tool_call>"))
    return AssistantTurn(content=_plain(HERMES.sub("", text)), calls=tuple(calls))


def _llama3(text: str) -> AssistantTurn:
    content, tag, calls = text.partition(PYTHON_TAG)
    body = (calls if tag else content).strip()
    if not tag and not (body.startswith("{") and '"name"' in body):
        return AssistantTurn(content=_plain(text))
    return AssistantTurn(content=_plain(content) if tag else "", calls=tuple(_several(body, separator=";")))


def _mistral(text: str) -> AssistantTurn:
    content, *calls = text.split(TOOL_CALLS)
    found: list[ToolCall | InvalidCall] = []
    for one in calls:
        name, args, arguments = one.partition(ARGS)
        if args:
            found.append(
                _call(f'{{"name": {json.dumps(name.partition(CALL_ID)[0].strip())}, "arguments": {arguments}}}')
            )
        else:
            found += _several(one)
    return AssistantTurn(content=_plain(content), calls=tuple(found))


def _json(text: str) -> AssistantTurn:
    fenced = FENCE.match(text)
    body = _plain(fenced[1] if fenced else text)
    if not body.startswith(("{", "[")) or '"name"' not in body:
        return AssistantTurn(content=_plain(text))
    return AssistantTurn(content="", calls=tuple(_several(body)))


PARSERS: dict[str, Parser] = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral, "json": _json}


def format_of(template: str) -> str:
    """The format that a chat template teaches."""
    if "<tool_call>" in template:
        return "hermes"
    if TOOL_CALLS in template:
        return "mistral"
    return "llama3" if PYTHON_TAG in template or "ipython" in template else "json"


def parser_named(name: str) -> Parser:
    """Raises `ConfigError`."""
    if name in PARSERS:
        return PARSERS[name]
    parser: Parser = imports.load_part("tool_format", name, ["auto", *PARSERS])
    return parser


def call_text(name: str, **arguments: Any) -> str:
    """A call in the format hermes: a turn of a perfect player."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tool_call_fields(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """One of the `tool_calls` of a message, as chat templates have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _plain(text: str) -> str:
    return SPECIAL.sub("", text).strip()


def _several(text: str, *, separator: str = "") -> Iterator[ToolCall | InvalidCall]:
    """Objects one after the other, or in a list."""
    decoder, rest = json.JSONDecoder(), _plain(text)
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            yield InvalidCall(text=rest, why=f"not JSON: {error}")
            return
        yield from map(_call_of, value if isinstance(value, list) else [value])
        rest = rest[end:].lstrip().removeprefix(separator).lstrip()


def _call(text: str) -> ToolCall | InvalidCall:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return InvalidCall(text=text.strip(), why=f"not JSON: {error}")
    return _call_of(value)


def _call_of(value: Any) -> ToolCall | InvalidCall:
    """Arguments may be an object, or, as OpenAI has it, that object as a string."""
    text = json.dumps(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return InvalidCall(text=text, why='a call is an object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return InvalidCall(text=text, why=f"its arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return InvalidCall(text=text, why=f"its arguments are {shown(json.dumps(arguments))}, and not an object")
    return ToolCall(name=value["name"], arguments=arguments)
