"""The program's process: it runs the program and, in an examination, answers the examiner's questions about what it defined.

Nothing here is trusted by the examiner: the program shares this process, and can answer in its place.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from .plain import TALK, Gone, Talk, pack_value, unpack_value

MAX_TEXT = 300  # characters of an error's text that are sent
MAX_GLOBAL = 1000  # items or characters of a global variable that is sent


def run_candidate(program: str, name: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and what it defined."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(program, "program.py", "exec"), module.__dict__)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
        return (error.code or 0) if isinstance(error.code, int | None) else 1, {}
    except BaseException:  # the candidate's code may raise anything: it has failed
        with contextlib.suppress(BaseException):  # its own __str__ may raise, too
            traceback.print_exc()
        return 1, {}
    return 0, module.__dict__


def be_examined(program: str) -> int:
    """Run the program, then answer until the examiner has gone."""
    talk = Talk(TALK)
    code, defined = run_candidate(program, "candidate")
    if not defined:
        return code or 1
    kept: list[Any] = []
    places: dict[int, int] = {}

    def keep(value: Any) -> Any:
        value = value.value if type(value) is _Large else value
        place = places.setdefault(id(value), len(kept))
        if place == len(kept):
            kept.append(value)
        return {"o": [place, type(value).__name__]}

    def names(*asked: str) -> dict[str, Any]:
        found = {name: defined[name] for name in asked if name in defined}
        return {name: _Large(value) if _is_large(value) else value for name, value in found.items()}

    operations: dict[str, Callable[..., Any]] = {**OPERATIONS, "names": names, "more": _more({})}
    with contextlib.suppress(Gone):
        while True:
            talk.send(_answered(talk.receive(), operations, keep, lambda handle: kept[handle[0]]))
    return 0


class _Large:
    """A global variable that is not sent: a test that mentions the name may mean another."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_large(value: Any) -> bool:
    return type(value) in (tuple, list, set, frozenset, dict, str, bytes) and len(value) > MAX_GLOBAL


def _answered(
    asked: dict[str, Any],
    operations: dict[str, Callable[..., Any]],
    keep: Callable[[Any], Any],
    find: Callable[[Any], Any],
) -> dict[str, Any]:
    try:
        arguments = unpack_value(asked["arguments"], find)
        named = unpack_value(asked["named"], find)
        value = operations[asked["do"]](*arguments, **named)
        return {"value": _packed(value, keep), "arguments": _packed(arguments, keep)}
    except BaseException as error:  # reported to the examiner: an answer
        text = "(no text)"
        with contextlib.suppress(BaseException):  # its own __str__ may raise, too
            text = str(error)[:MAX_TEXT]
        return {"raised": [type(error).__name__, text]}


def _packed(value: Any, keep: Callable[[Any], Any]) -> Any:
    try:
        return pack_value(value, keep)
    except RecursionError:  # too deep, or it contains itself
        return keep(value)


def _more(errors: dict[int, BaseException]) -> Callable[[Iterator[Any], int], tuple[list[Any], bool]]:
    """Up to `number` more items of an iterator, and whether it is over. An error waits until the items before it are read."""

    def more(items: Iterator[Any], number: int) -> tuple[list[Any], bool]:
        if id(items) in errors:
            raise errors.pop(id(items))
        found: list[Any] = []
        try:
            while len(found) < number:
                found.append(next(items))
        except StopIteration:
            return found, True
        except BaseException as error:  # the program's own code: raised in its turn, after the values before it
            if not found:
                raise
            errors[id(items)] = error
        return found, False

    return more


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "delete_item": operator.delitem,
    "len": len,
    "iter": iter,
    "in": lambda holder, item: item in holder,
    "bool": bool,
    "str": str,
    "repr": repr,
    "isinstance": isinstance,
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager: manager.__exit__(None, None, None),
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv")},
    **{
        name: getattr(operator, name)
        for name in ("floordiv", "mod", "pow", "and_", "or_", "xor", "matmul", "neg", "abs")
    },
}
