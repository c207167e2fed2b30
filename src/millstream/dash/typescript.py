"""Writes `front/src/api.ts` from `api.py`: `python -m millstream.dash.typescript`. A test compares them."""

from __future__ import annotations

import inspect
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Struct

from millstream.dash import api

API_TYPES = Path(__file__).parent / "front" / "src" / "api.ts"
_HEAD = "// Written from api.py by `python -m millstream.dash.typescript`: do not edit.\n"
_PLAIN: dict[Any, str] = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def api_types() -> str:
    """The structs of `api.py` as TypeScript, in their order."""
    own = [one for one in vars(api).values() if inspect.isclass(one) and issubclass(one, Struct)]
    return _HEAD + "".join(f"\n{_declared(one)}" for one in own if one.__module__ == api.__name__)


def _declared(struct: type[Struct]) -> str:
    hints = get_type_hints(struct)
    fields = [(name, _type(hints[name])) for name in struct.__struct_fields__]
    if struct.__struct_config__.array_like:
        inside = ", ".join(f"{name}: {kind}" for name, kind in fields)
        return f"export type {struct.__name__} = readonly [{inside}];\n"
    inside = "".join(f"  readonly {name}: {kind};\n" for name, kind in fields)
    return f"export interface {struct.__name__} {{\n{inside}}}\n"


def _type(hint: Any) -> str:
    if hint in _PLAIN:
        return _PLAIN[hint]
    args = get_args(hint)
    match get_origin(hint):
        case None:
            assert issubclass(hint, Struct), hint
            return str(hint.__name__)
        case origin if origin is Literal:
            return " | ".join(f'"{one}"' for one in args)
        case origin if origin in (Union, types.UnionType):
            return " | ".join(map(_type, args))
        case origin if origin is list:
            inside = _type(args[0])
            return f"readonly ({inside})[]" if "|" in inside else f"readonly {inside}[]"
        case origin if origin is dict:
            return f"Readonly<Record<string, {_type(args[1])}>>"
    raise TypeError(f"{hint}: api.py has no such type yet")


if __name__ == "__main__":
    API_TYPES.write_text(api_types())
