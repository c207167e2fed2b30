"""Config files: TOML into frozen structs, and back. An unknown key fails with the nearest name; a wrong value says where and
what.

A component's config is a struct next to the component; `run.config` puts them together. One walk along the schema checks the
names of all keys, that every number is finite and fits into 64 bits, that every time fits into a timer, and that every text
can be written (`problems`). Values of type `Any` (the `args` of environments and rewards) belong to the user's own code: only
TOML limits them.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import itertools
import math
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from millstream.decoding import to_type
from millstream.errors import MAX_SHOWN, ConfigError, shown
from millstream.paths import did_you_mean

C = TypeVar("C", bound=Struct)

REFUSED = {
    "top_p": "training needs the log-probability of the distribution that was really sampled from, and the learner does "
    "not renormalise over the kept set: sample the whole distribution, with rollout.temperature alone",
}
REFUSED["top_k"] = REFUSED["min_p"] = REFUSED["top_p"]

UNITS = ("s", "mb", "kb")  # at the end of the names of keys
OTHER_NAMES = {
    "beta": "kl_coefficient",
    "gae_lambda": "trace",
    "gamma": "discount",
    "gpu_memory_utilization": "memory",
    "grad_clip": "max_grad_norm",
    "gradient_checkpointing": "recompute",
    "kl_coef": "kl_coefficient",
    "lam": "trace",
    "lr": "learning_rate",
    "max_new_tokens": "max_tokens",
    "n": "group_size",
    "num_generations": "group_size",
    "num_steps": "steps",
    "tensor_parallel_size": "tensor_parallel",
}
"""Keys of other trainers, and what they are called here."""

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
LONG_INTEGER = re.compile(r"\d[\d_]{4000,}")  # Python reads no longer ones
DEEP_NESTING = re.compile(r"(?:[\[{][^\[\]{}]*){100}")
MAX_SECONDS = 1e9  # of a key that ends in _s: Python's timers end at 9.2e9
MAX_DEPTH = 64  # of tables and lists in `args`, and in a record of a data set
MAX_PROBLEMS = 8  # shown together
UNCHANGED = (datetime.datetime, datetime.date, datetime.time, bytes, Decimal)  # not turned into text on the way to TOML


def load(path: Path, kind: type[C], overrides: Sequence[str] = ()) -> C:
    """The config in a TOML file, with `a.b=c` overrides on top; `a.b=` leaves the key unset."""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # Windows writes a mark of the byte order
    except OSError as error:
        nearest = f".{found}" if isinstance(error, FileNotFoundError) and (found := did_you_mean(path)) else ""
        raise ConfigError(f"cannot read {path}: {error.strerror}{nearest}") from error
    except ValueError as error:  # also a path with a null character
        raise ConfigError(f"{path} is not TOML: {error}") from error
    try:
        return _overridden(text, kind, overrides, str(path))
    except ConfigError as error:
        if (place := _set_to_blame(text, kind, overrides, error)) is not None:
            _overridden(text, kind, overrides, place)
        raise


def _overridden(text: str, kind: type[C], overrides: Sequence[str], where: str) -> C:
    data = _parsed(text, where)
    for override in overrides:
        _override(data, override, kind)
    return convert(data, kind, where=where)


def _set_to_blame(text: str, kind: type[C], overrides: Sequence[str], error: ConfigError) -> str | None:
    """The override without which there is no error, or another one: first of all one whose key is in the message. None: the
    file is wrong."""

    def error_of(kept: Sequence[str]) -> str:
        try:
            _overridden(text, kind, kept, "")
        except ConfigError as other:
            return str(other)
        return ""

    found = error_of(overrides)
    changing = [one for at, one in enumerate(overrides) if error_of([*overrides[:at], *overrides[at + 1 :]]) != found]
    named = [one for one in changing if one.partition("=")[0].strip().rpartition(".")[2] in str(error)]
    return next((f"--set {shown(one)}" for one in (*named, *changing)), None)


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{where}{_line_of(LONG_INTEGER, text)}: an integer of more than 4,000 digits") from error
    except RecursionError as error:
        raise ConfigError(f"{where}{_line_of(DEEP_NESTING, text)}: tables or lists nested too deeply") from error


def _line_of(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text) if "\n" in text else None
    return "" if found is None else f", line {text.count(chr(10), 0, found.start()) + 1}"


def convert(data: Mapping[str, Any], kind: type[C], *, where: str) -> C:
    """Raises `ConfigError` for the first of its problems, with the next ones as notes."""
    found = list(itertools.islice(problems(data, kind, "", _paths(kind)), MAX_PROBLEMS))
    if found:
        refused = ConfigError(f"{where}: {found[0]}")
        for other in found[1:]:
            refused.add_note(f"And: {other}")
        raise refused
    try:
        return to_type(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_in_words(str(error))}") from error


def _in_words(message: str) -> str:
    """`Expected `int | null`, got `str` - at `$.a.b`` -> `a.b: expected `int` (or leave the key out), got `str``: TOML has no
    null."""
    text, _, place = message.replace(" | null`", "` (or leave the key out)").partition(" - at `$.")
    return f"{place.rstrip('`')}: {text[0].lower()}{text[1:]}" if place else message


# ---- overrides -------------------------------------------------------------------------------------------------------


def _override(data: dict[str, Any], override: str, kind: type[Struct]) -> None:
    path, equals, value = override.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set {shown(override)}: expected KEY=VALUE, such as --set pipeline.max_lag=2")
    keys, what = path.strip().split("."), f"--set {shown(override)}"
    if not value.strip():
        for problem in problems(_nested(keys), kind, "", _paths(kind)):
            raise ConfigError(f"{what}: {problem}")
        _unset(data, keys)
        return
    table: Any = data
    for parent, child in itertools.pairwise(keys):
        table = _inner(table, parent, [] if child.isdecimal() else {}, what)
    if not isinstance(table, dict):
        raise ConfigError(f"{what}: {_is_list('.'.join(map(_quoted, keys[:-1])), _quoted(keys[-1]))}")
    table[keys[-1]] = parse_value(value.strip(), what)


def _nested(keys: Sequence[str]) -> dict[str, Any]:
    """The tables that a path goes through, as data."""
    inner: Any = None
    for key in reversed(keys[1:]):
        inner = [inner] if key.isdecimal() else {key: inner}
    return {keys[0]: inner}


def _unset(data: dict[str, Any], keys: Sequence[str]) -> None:
    """Tables that are not there are not made."""
    table: Any = data
    for key, is_last in zip(keys, [False] * (len(keys) - 1) + [True], strict=True):
        place: Any = _index(key, table) if isinstance(table, list) else key
        if not isinstance(table, dict | list) or (place not in table if isinstance(table, dict) else place is None):
            return
        if is_last:
            del table[place]
        else:
            table = table[place]


def _index(key: str, table: Sequence[Any]) -> int | None:
    """Of an item of the list; None if there is none."""
    found = int(key) if key.isdecimal() and len(key) < 9 else len(table)
    return found if found < len(table) else None


def _inner(table: Any, key: str, default: Any, what: str) -> Any:
    """What is under a key of a table, or under a number in a list of tables. The next table of a list is made."""
    if isinstance(table, list):
        if key == str(len(table)):
            table.append({})
        if (index := _index(key, table)) is None:
            raise ConfigError(f"{what}: no table {key!r} in a list of {len(table)}; they count from 0")
        inner = table[index]
    else:
        inner = table.setdefault(key, default)
    if not isinstance(inner, dict | list):
        raise ConfigError(f"{what}: {_quoted(key)} is not a table")
    return inner


def _is_list(name: str, key: str) -> str:
    return f"{name} is a list of tables, each a [[{name}]] with two brackets; on the command line: --set {name}.0.{key}=..."


def parse_value(text: str, what: str) -> Any:
    """A TOML value, or else a string without quotes. `what` it is the value of, for an error."""
    try:
        found = _parsed(f"value = {text}", what)
    except ConfigError as error:
        if isinstance(error.__cause__, tomllib.TOMLDecodeError):
            return text
        raise
    return found["value"] if found.keys() == {"value"} else text


# ---- the walk --------------------------------------------------------------------------------------------------------


def problems(data: Any, kind: Any, place: str, paths: Sequence[str] = ()) -> Iterator[str]:
    """What is wrong with the names of keys, with numbers, texts and choices; `paths` are all keys that there are. A type that
    does not fit is found by `to_type`."""
    name = place.rstrip(".")
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if isinstance(data, list):
        item = next((get_args(one)[0] for one in kinds if get_origin(one) in (tuple, list, Sequence)), None)
        if item is None:
            yield f"{name} is not a list"
            return
        for index, value in enumerate(data):
            yield from problems(value, item, f"{name}[{index}].", paths)
    elif isinstance(data, Mapping):
        yield from _table_problems(data, kinds, place, paths)
    elif isinstance(data, float) and not math.isfinite(data):
        yield f"{name} = {data}: expected a finite number"
    elif isinstance(data, int) and not -(2**63) <= data < 2**63:
        yield f"{name} = {shown(data)}: expected a number of at most 64 bits"
    elif isinstance(data, int | float) and name.endswith("_s") and data > MAX_SECONDS:
        yield f"{name} = {data:g}: expected at most {MAX_SECONDS:g} seconds"
    elif isinstance(data, str) and not _is_text(data):
        yield f"{name} = {shown(data)}: expected text, and half of a surrogate pair is in it"
    elif isinstance(data, str) and (names := _names(kinds)) and data not in names:
        near = difflib.get_close_matches(data, names, n=1, cutoff=0.5)
        yield f"{name} = {shown(data)!r}: expected {', '.join(names)}." + (f" Did you mean {near[0]}?" if near else "")


def _table_problems(data: Mapping[str, Any], kinds: Sequence[Any], place: str, paths: Sequence[str]) -> Iterator[str]:
    name, struct = place.rstrip("."), next(_structs(kinds), None)
    if any(get_origin(one) is dict for one in kinds):
        if is_deeper(data, MAX_DEPTH):
            yield f"{name}: tables or lists nested too deeply: expected at most {MAX_DEPTH}"
        return
    if any(get_origin(one) is tuple for one in kinds) and struct not in kinds:
        yield _is_list(name, _quoted(next(iter(data), "KEY")))
        return
    if struct is None:
        yield f"{name} is not a table"
        return
    fields = {field.encode_name: field.type for field in _fields(struct)}
    for key, value in data.items():
        if key in fields:
            yield from problems(value, fields[key], f"{place}{key}.", paths)
        elif key in REFUSED:
            yield f"{place}{key} is refused: {REFUSED[key]}"
        else:
            yield f"unknown key {place}{_quoted(key)}{_suggest(key, fields, paths)}"


def _names(kinds: Sequence[Any]) -> list[str]:
    """The only texts that a key may have; empty if it may have any."""
    return [] if str in kinds else [name for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]


def is_deeper(value: Any, levels: int) -> bool:
    """Whether tables or lists are nested in it beyond that many levels."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return levels < 0 or any(is_deeper(item, levels - 1) for item in inner)


def _quoted(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) and len(key) <= MAX_SHOWN else f'"{shown(key)}"'


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _structs(kind: Any) -> Iterator[type[Struct]]:
    """The struct that a type stands for, through Optional and tuple; or that one of several types is."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        yield kind
    elif isinstance(kind, tuple) or get_origin(kind) in (Union, types.UnionType, tuple):
        for argument in kind if isinstance(kind, tuple) else get_args(kind):
            yield from _structs(argument)


@functools.cache
def _fields(kind: type[Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Of a struct. Its annotations are evaluated once."""
    return msgspec.structs.fields(kind)


@functools.cache
def _paths(kind: type[Struct]) -> tuple[str, ...]:
    """Every key there is, as `--set` names it."""
    found: list[str] = []
    for field in _fields(kind):
        number = "0." if get_origin(field.type) is tuple else ""
        inner = [path for struct in dict.fromkeys(_structs(field.type)) for path in _paths(struct)]
        found += [field.name, *(f"{field.name}.{number}{path}" for path in inner)]
    return tuple(found)


def _suggest(key: str, fields: Mapping[str, Any], paths: Sequence[str]) -> str:
    """What another trainer's name is called here, a key of this table that adds a unit, a key of that name in another table,
    one of nearly that name in this table, or all of this table."""
    meant = OTHER_NAMES.get(key, key)
    for name in (meant, *(f"{meant}_{unit}" for unit in UNITS)):
        if name in fields:
            return f". Did you mean {name}?"
    if elsewhere := [path for path in paths if path.endswith(f".{meant}")]:
        return f". Did you mean {' or '.join(elsewhere)}?"
    near = difflib.get_close_matches(key, fields, n=1, cutoff=0.6)
    known = ", ".join(sorted(fields))
    return f". Did you mean {near[0]}?" if near else f". Known here: {known}"


# ---- back to TOML ----------------------------------------------------------------------------------------------------


def to_toml(config: Struct) -> str:
    """The resolved config as TOML that `load` reads back as the same config. Keys that are None are comments. Raises
    `ConfigError` for a config that TOML cannot hold, and names the key."""
    where = "the config cannot be written as TOML"
    try:
        data = msgspec.to_builtins(config, builtin_types=UNCHANGED)
        text = _written(data, where)
    except (TypeError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from error
    again = convert(_parsed(text, where), type(config), where=where)
    for place in _differences(data, msgspec.to_builtins(again, builtin_types=UNCHANGED), ""):
        raise ConfigError(f"{where}: {place} would not be read back as it is (TOML has no None: give it a value)")
    return text


def _written(data: dict[str, Any], where: str) -> str:
    from tomlkit.exceptions import TOMLKitError  # a tenth of a second, and most commands write no config
    from tomlkit.items import SingleKey, item

    def fill(values: Mapping[str, Any], header: str, place: str) -> Iterator[str]:
        for key, value in sorted(values.items(), key=lambda entry: _is_table(entry[1])):  # tables come last in TOML
            if not isinstance(key, str) or not _is_text(key):
                raise ConfigError(f"{where}: {place}{shown(key)}: expected a text as the key")
            name = key if BARE_KEY.fullmatch(key) else SingleKey(key).as_string()
            if isinstance(value, dict):
                yield f"\n[{header}{name}]"
                yield from fill(value, f"{header}{name}.", f"{place}{key}.")
            elif _is_table(value):
                for index, table in enumerate(value):
                    yield f"\n[[{header}{name}]]"
                    yield from fill(table, f"{header}{name}.", f"{place}{key}[{index}].")
            elif value is None:
                yield f"# {name} = (unset)"
            else:
                try:
                    text = item(value).as_string()
                    text.encode()
                except (ValueError, TOMLKitError) as error:
                    raise ConfigError(f"{where}: {place}{_quoted(key)} = {shown(value)}: {error}") from error
                yield f"{name} = {text}"

    return "\n".join(fill(data, "", "")).strip() + "\n"


def _is_table(value: Any) -> bool:
    """A table, or a list of nothing but tables."""
    is_list = isinstance(value, list | tuple) and bool(value)
    return isinstance(value, dict) or (is_list and all(isinstance(item, dict) for item in value))


def _differences(one: Any, other: Any, place: str) -> Iterator[str]:
    """The keys whose values differ. NaN is equal to itself here."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            inner = f"{place}.{_quoted(key)}".strip(".")
            yield from _differences(one[key], other[key], inner) if key in one and key in other else (inner,)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _differences(left, right, f"{place}[{index}]")
    elif one != other and not (one != one and other != other):
        yield place
