"""What the program's process does: run_candidate a program, or be examined, or examine_candidate.

An examination takes two processes, each behind walls of its own. The *candidate* runs the program and then answers calls. The
*examiner* runs the tests, and has never run_candidate a line of the program: a function of the candidate is, for it,
something that sends arguments and gets back plain data. So there is nothing in the process of the candidate that could make a
test pass but the right values: no exit code, no output, no frame to look into, no patched built-in, no object that claims to
equal everything.

An object of a class of the candidate's own stays with the candidate. It can be called, indexed, iterated and asked for
attributes, and compared with others of its kind; it never equals plain data, and is neither ordered nor calculated with it.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import operator
import re
import socket
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

HEADER = 4
MAX_BYTES = 64 << 20
TALK, VERDICT = 3, 4
WHY = 300  # characters of a reason that are reported


def play(order: dict[str, Any]) -> int:
    """The exit code."""
    for name in [name for name in sys.modules if name.split(".")[0] == __name__.split(".")[0]]:
        del sys.modules[name]  # nothing of ours is there to be found by its name
    match order["role"]:
        case "program":
            return run_candidate(order["program"], "__main__")[0]
        case "candidate":
            return be_examined(order["program"])
        case _:
            return examine_candidate(order["tests"])


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


# ---- what passes between the two -------------------------------------------------------------------------------------------


class Gone(Exception):
    """The candidate's process has ended."""


class Talk:
    def __init__(self, descriptor: int) -> None:
        self._line = socket.socket(fileno=descriptor)

    def send(self, message: Any) -> None:
        payload = json.dumps(message).encode()
        try:
            self._line.sendall(len(payload).to_bytes(HEADER, "little") + payload)
        except OSError as error:
            raise Gone("the program has ended") from error

    def receive(self) -> Any:
        size = int.from_bytes(self._exactly(HEADER), "little")
        if size > MAX_BYTES:
            raise Gone("the program returned too much")
        return json.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._line.recv(min(1 << 20, size - len(data)))
            except OSError:
                piece = b""
            if not piece:
                raise Gone("the program has ended")
            data += piece
        return bytes(data)


def pack_value(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Plain data as JSON with marks; `keep` encodes everything else."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    for mark, kind in (("t", tuple), ("l", list), ("s", set), ("f", frozenset)):
        if isinstance(value, kind):
            return {mark: [pack_value(item, keep) for item in value]}
    if isinstance(value, dict):
        return {"d": [[pack_value(key, keep), pack_value(item, keep)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"b": value.hex()}
    if type(value) is complex:
        return {"c": [value.real, value.imag]}
    if isinstance(value, int):  # a number of an enumeration, say
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return pack_value(value.item(), keep)
    return keep(value)


def unpack_value(packed: Any, find: Callable[[Any], Any]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((mark, value),) = packed.items()
    items: dict[str, Callable[[], Any]] = {
        "t": lambda: tuple(unpack_value(item, find) for item in value),
        "l": lambda: [unpack_value(item, find) for item in value],
        "s": lambda: {unpack_value(item, find) for item in value},
        "f": lambda: frozenset(unpack_value(item, find) for item in value),
        "d": lambda: {unpack_value(key, find): unpack_value(item, find) for key, item in value},
        "b": lambda: bytes.fromhex(value),
        "c": lambda: complex(*value),
        "o": lambda: find(value),
    }
    return items[mark]()


# ---- the candidate ---------------------------------------------------------------------------------------------------------


def be_examined(program: str) -> int:
    talk = Talk(TALK)
    code, defined = run_candidate(program, "candidate")
    if not defined:
        return code or 1
    kept: list[Any] = []

    def keep(value: Any) -> Any:
        kept.append(value)
        return {"o": len(kept) - 1}

    names = {name: keep(value)["o"] for name, value in list(defined.items()) if not name.startswith("__")}
    talk.send({"names": names, "modules": [name for name in names if isinstance(defined[name], types.ModuleType)]})
    with contextlib.suppress(Gone):
        while True:
            talk.send(_answered(talk.receive(), keep, kept.__getitem__))
    return 0


def _answered(asked: dict[str, Any], keep: Callable[[Any], Any], find: Callable[[Any], Any]) -> dict[str, Any]:
    try:
        arguments = unpack_value(asked["arguments"], find)
        named = unpack_value(asked["named"], find)
        value = OPERATIONS[asked["do"]](*arguments, **named)
        return {"value": _packed(value, keep), "arguments": _packed(arguments, keep)}
    except BaseException as error:  # reported to the examiner: an answer
        text = "(no text)"
        with contextlib.suppress(BaseException):  # its own __str__ may raise, too
            text = str(error)[:WHY]
        return {"raised": [type(error).__name__, text]}


def _packed(value: Any, keep: Callable[[Any], Any]) -> Any:
    try:
        return pack_value(value, keep)
    except RecursionError:  # it contains itself
        return keep(value)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "delete_item": operator.delitem,
    "len": len,
    "iter": list,
    "next": next,
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


# ---- the examiner ----------------------------------------------------------------------------------------------------------


class CandidateError(Exception):
    """An error of a class that is not built into Python."""


class RemoteObject:
    """An object in the candidate's process, used by its handle."""

    def __init__(self, handle: int, talk: Talk) -> None:
        object.__setattr__(self, "_handle", handle)
        object.__setattr__(self, "_talk", talk)

    def _do(self, what: str, *arguments: Any, **named: Any) -> Any:
        talk: Talk = object.__getattribute__(self, "_talk")

        def refer(value: Any) -> Any:
            if type(value) is RemoteObject:
                return {"o": object.__getattribute__(value, "_handle")}
            raise TypeError(f"a test can pass plain data to the program, and no {type(value).__name__}")

        def find(handle: Any) -> Any:
            return RemoteObject(int(handle), talk)

        whole = (self, *arguments)
        talk.send({"do": what, "arguments": pack_value(whole, refer), "named": pack_value(named, refer)})
        answer = talk.receive()
        if "raised" in answer:
            name, text = answer["raised"]
            kind = getattr(builtins, str(name), None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            raise kind(text) if is_error and kind is not None else CandidateError(f"{name}: {text}")
        value = unpack_value(answer["value"], find)
        if value is None:
            for before, after in zip(arguments, unpack_value(answer["arguments"], find)[1:], strict=True):
                _take_over(before, after)
        return value

    def _with(self, what: str, other: Any) -> Any:
        """With another object of the candidate's only: plain data must be compared here, and not there."""
        return self._do(what, other) if type(other) is RemoteObject else NotImplemented

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._do("call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._do("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do("set_item", key, value)

    def __delitem__(self, key: Any) -> None:
        self._do("delete_item", key)

    def __len__(self) -> int:
        return int(self._do("len"))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._do("iter"))

    def __next__(self) -> Any:
        return self._do("next")

    def __contains__(self, item: Any) -> bool:
        return self._do("in", item) is True

    def __bool__(self) -> bool:
        return self._do("bool") is True

    def __str__(self) -> str:
        return str(self._do("str"))

    def __repr__(self) -> str:
        return str(self._do("repr"))

    def __enter__(self) -> Any:
        return self._do("enter")

    def __exit__(self, *error: object) -> None:
        self._do("exit")

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is RemoteObject and instance._do("isinstance", self) is True

    def __eq__(self, other: object) -> Any:
        return self._with("eq", other) if type(other) is RemoteObject else False

    def __ne__(self, other: object) -> Any:
        return self._with("ne", other) if type(other) is RemoteObject else True

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_handle"))

    def __neg__(self) -> Any:
        return self._do("neg")

    def __abs__(self) -> Any:
        return self._do("abs")


def _between(what: str) -> Callable[[RemoteObject, Any], Any]:
    return lambda self, other: self._with(what, other)


for _name in (
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and_",
    "or_",
    "xor",
    "matmul",
):
    setattr(RemoteObject, f"__{_name.rstrip('_')}__", _between(_name))


def _take_over(before: Any, after: Any) -> None:
    """What a function that returns nothing has changed in a list, a dictionary or a set that a test has passed to it. (One that
    returns something could otherwise change what it is then compared with.)"""
    if type(before) is not type(after):
        return
    if isinstance(before, list):
        before[:] = after
    elif isinstance(before, dict | set):
        before.clear()
        before.update(after)


def examine_candidate(tests: list[str]) -> int:
    """One line of JSON a test, as soon as it is over."""
    with open(VERDICT, "w") as verdicts:
        talk = Talk(TALK)
        namespace: dict[str, Any] = {"__name__": "tests"}
        gone = ""
        try:
            namespace.update(_names(talk, "\n".join(tests)))
        except (Gone, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            gone = str(error) or "the program has ended"
        for test in tests:
            why = gone or _why_not(test, namespace)
            verdicts.write(json.dumps({"why": why[:WHY]}) + "\n")
            verdicts.flush()
    return 0


def _names(talk: Talk, tests: str) -> dict[str, Any]:
    """What a test may call by name. Names of Python's own are Python's own, whatever the program made of them: built-ins, and
    modules of the standard library that the tests look into."""
    names = talk.receive()
    found: dict[str, Any] = {}
    for name, handle in names["names"].items():
        if name in sys.stdlib_module_names and (name in names["modules"] or re.search(rf"\b{name}\.", tests)):
            found[name] = importlib.import_module(name)
        elif not hasattr(builtins, name):
            found[name] = RemoteObject(int(handle), talk)
    return found


def _why_not(test: str, namespace: dict[str, Any]) -> str:
    """Nothing, if it passes."""
    try:
        exec(compile(test, "test.py", "exec"), namespace)
    except BaseException as error:  # a test that raises has not passed, whatever it raises
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return ""
