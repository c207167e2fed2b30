"""A Python function as a tool: its JSON schema for the model, and the model's arguments checked against its types."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from millstream.decoding import to_type
from millstream.errors import ConfigError

ARGUMENTS = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$", re.MULTILINE)
RETURNS = re.compile(r"^\s*(?:Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
DESCRIBED = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+?)(?=^\s*\w+\s*(?:\([^)]*\))?:|\Z)", re.MULTILINE | re.DOTALL)


class ToolFunction(Struct, frozen=True, kw_only=True, eq=False):
    """What the model sees of a function, and what checks its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    arguments: type[Struct]

    def schema(self) -> dict[str, Any]:
        """As chat templates and OpenAI's API have it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with their types. Raises `msgspec.ValidationError`, which says what was expected."""
        made = to_type(arguments, self.arguments)
        return {name: getattr(made, name) for name in self.arguments.__struct_fields__ if name in arguments}


def tool_function(function: Callable[..., Any], given: Mapping[str, Any] | None = None) -> ToolFunction:
    """Raises `ConfigError` for a function that cannot be a tool. `given`: arguments that the model does not give."""
    plain = getattr(function, "__func__", function)  # of a bound method: the same for every object
    return _tool_function(plain, plain is not function, frozenset(given or ()))


@functools.lru_cache(maxsize=1024)
def _tool_function(function: Callable[..., Any], is_bound: bool, given: frozenset[str]) -> ToolFunction:
    name = getattr(function, "__name__", type(function).__name__)
    fields: list[Any] = []
    texts = _descriptions(inspect.getdoc(function) or "")
    parameters = list(inspect.signature(function).parameters.values())[is_bound:]
    if unknown := given - {parameter.name for parameter in parameters}:
        raise ConfigError(f"the tool {name} has no argument {min(unknown)!r}")
    hints = _hints(function, name)
    for parameter in parameters:
        if parameter.name in given:
            continue
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise ConfigError(f"the tool {name} takes {parameter}: every argument of a tool has a name")
        kind = hints.get(parameter.name, Any)
        if text := texts.get(parameter.name):
            kind = typing.Annotated[kind, msgspec.Meta(description=text)]
        default = parameter.default
        if default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            fields.append((parameter.name, kind, msgspec.field(default_factory=functools.partial(_given, default))))
    try:
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        schema = msgspec.json.schema(arguments)
    except TypeError as error:
        raise ConfigError(f"the tool {name} has an argument that JSON has no type for: {error}") from error
    return ToolFunction(name=name, description=texts[""], parameters=_flat(schema), arguments=arguments)


def _given(default: Any) -> Any:
    return default


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    called = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(called, include_extras=True)
    except NameError as error:
        raise ConfigError(f"the tool {name}: {error}, in its type hints") from error


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """The object itself at the top; what else it refers to under `$defs`."""
    others = dict(schema["$defs"])
    top: dict[str, Any] = dict(others.pop(schema["$ref"].rpartition("/")[2]))
    top.pop("title", None)
    top.pop("additionalProperties", None)
    return {**top, "$defs": others} if others else top


def _descriptions(text: str) -> dict[str, str]:
    """By parameter, from the part `Args:` of a docstring; under "" what comes before it."""
    head, *rest = ARGUMENTS.split(text, maxsplit=1)
    found = {"": " ".join(RETURNS.split(head)[0].split())}
    if rest:
        described = DESCRIBED.findall(RETURNS.split(rest[0])[0])
        found |= {name: " ".join(words.split()) for name, words in described}
    return found
