"""Config files: TOML into frozen structs. An unknown key fails with the nearest name; a wrong type says where and what.

A component's config is a struct next to the component; `run.config` puts them together.
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from millstream.errors import ConfigError

C = TypeVar("C", bound=Struct)

REFUSED = {
    "top_p": "training needs the log-probability of the distribution that was really sampled from, and the learner does "
    "not renormalise over the kept set: sample the whole distribution, with rollout.temperature alone",
}
REFUSED["top_k"] = REFUSED["min_p"] = REFUSED["top_p"]


def load(path: Path, kind: type[C], overrides: Sequence[str] = ()) -> C:
    """The config in a TOML file, with `a.b=c` overrides on top; `a.b=` leaves the key unset."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _override(data, override)
    return convert(data, kind, where=str(path))


def convert(data: Mapping[str, Any], kind: type[C], *, where: str) -> C:
    for message in _unknown(data, kind, "", list(_paths(kind))):
        raise ConfigError(f"{where}: {message}")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_in_words(str(error))}") from error


def _in_words(message: str) -> str:
    """`Expected `int`, got `str` - at `$.a.b`` -> `a.b: expected `int`, got `str``."""
    text, _, place = message.partition(" - at `$.")
    return f"{place.rstrip('`')}: {text[0].lower()}{text[1:]}" if place else message


def _override(data: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {override}: expected KEY=VALUE, such as --set pipeline.max_lag=2")
    *parents, last = path.strip().split(".")
    table: Any = data
    for parent, child in itertools.pairwise([*parents, last]):
        table = _inner(table, parent, [] if child.isdecimal() else {}, override)
    if not isinstance(table, dict):
        raise ConfigError(f"--set {override}: {_is_list('.'.join(parents), last)}")
    if value.strip():
        table[last] = _value(value.strip())
    else:
        table.pop(last, None)


def _inner(table: Any, key: str, default: Any, override: str) -> Any:
    """What stands under a key of a table, or under a number in a list of tables."""
    if isinstance(table, list):
        if not key.isdecimal() or int(key) > len(table):
            raise ConfigError(f"--set {override}: no table {key!r} in a list of {len(table)}; they count from 0")
        table += [{}] if int(key) == len(table) else []
        inner = table[int(key)]
    else:
        inner = table.setdefault(key, default)
    if not isinstance(inner, dict | list):
        raise ConfigError(f"--set {override}: {key} is not a table")
    return inner


def _is_list(name: str, key: str) -> str:
    return f"{name} is a list of tables, each a [[{name}]] with two brackets; on the command line: --set {name}.0.{key}=..."


def _value(text: str) -> Any:
    """A TOML value, or else a string without quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _unknown(data: Any, kind: Any, place: str, paths: Sequence[str]) -> Iterator[str]:
    """What is wrong with the names of keys; `paths` are all that there are."""
    if get_origin(kind) is tuple and isinstance(data, Mapping):
        yield _is_list(place.rstrip("."), next(iter(data), "KEY"))
    for struct in _structs(kind):
        if isinstance(data, list):
            for index, item in enumerate(data):
                yield from _unknown(item, struct, f"{place.rstrip('.')}[{index}].", paths)
            return
        if not isinstance(data, Mapping):
            return
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
        for key, value in data.items():
            if key in fields:
                yield from _unknown(value, fields[key], f"{place}{key}.", paths)
            elif key in REFUSED:
                yield f"{place}{key} is refused: {REFUSED[key]}"
            else:
                yield f"unknown key {place}{key}{_suggest(key, fields, paths)}"


def _structs(kind: Any) -> Iterator[type[Struct]]:
    """The struct that a type stands for, through Optional and tuple."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        yield kind
    elif get_origin(kind) in (Union, types.UnionType, tuple):
        for argument in get_args(kind):
            yield from _structs(argument)


def _paths(kind: type[Struct], place: str = "") -> Iterator[str]:
    """Every key there is, as `--set` names it."""
    for field in msgspec.structs.fields(kind):
        yield f"{place}{field.name}"
        number = "0." if get_origin(field.type) is tuple else ""
        for struct in _structs(field.type):
            yield from _paths(struct, f"{place}{field.name}.{number}")


def _suggest(key: str, fields: Mapping[str, Any], paths: Sequence[str]) -> str:
    """A key of that name in another table, one of nearly that name in this table, or all of this table."""
    if elsewhere := [path for path in paths if path.endswith(f".{key}")]:
        return f". Did you mean {' or '.join(elsewhere)}?"
    near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
    known = ", ".join(sorted(fields))
    return f". Did you mean {near[0]}?" if near else f". Known here: {known}"


def to_toml(config: Struct) -> str:
    """The resolved config, as TOML that `load` reads back. Keys that are None are comments."""
    return "\n".join(_toml_lines(msgspec.to_builtins(config), "")).strip() + "\n"


def _toml_lines(table: dict[str, Any], name: str) -> Iterator[str]:
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    arrays = {key: value for key, value in table.items() if _is_array_of_tables(value)}
    for key, value in table.items():
        if value is None:
            yield f"# {key} = (unset)"
        elif key not in tables and key not in arrays:
            yield f"{key} = {msgspec.json.encode(value).decode()}"
    for key, value in tables.items():
        yield f"\n[{name}{key}]"
        yield from _toml_lines(value, f"{name}{key}.")
    for key, items in arrays.items():
        for item in items:
            yield f"\n[[{name}{key}]]"
            yield from _toml_lines(item, f"{name}{key}.")


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, dict) for item in value)
