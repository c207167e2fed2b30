"""The examiner: it runs the tests, and has never run a line of the program.

An examination takes two processes, each behind walls of its own. The *candidate* (`candidate`) runs the program and then
answers questions. The examiner asks them, and trusts no answer: the program may have written it. Guarantees:

- A test gets those names of the program that it mentions itself, but neither built-ins nor modules of the standard library
  that it uses. What else the program claims to define is ignored.
- A value that the program returns is plain data, built here from exact built-in types (`plain`). Comparisons, `len`, `in`,
  iteration, indexing and truth are computed here, on these values. The program never sees what it is compared with.
- Anything else that it returns is a `RemoteObject`: it can be called and asked for attributes, and read as a sequence of the
  values that it yields. What a test has read of it does not change, until the test passes it to the program again or calls it.
  It is not equal to plain data: comparing it fails the test, with a reason. Two of them are equal if they are the same.
- Only an object that a test itself makes from a class (`Stack()`: a name that begins with a capital letter) is examined as an
  object (`MadeObject`): there the operators are methods of the program, and these are what the test is about.
- After an answer that cannot be read, or none, every test fails.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .plain import TALK, Gone, Malformed, Talk, pack_value, unpack_value

VERDICT = 4
MAX_WHY = 300  # characters of a reason that are reported
MAX_CHUNK = 1024  # items of an iterator that are asked for at once
PLAIN = (bool, int, float, complex, str, bytes, tuple, list, set, frozenset, dict)
# An object that pretends to be plain data answers to these with whatever passes.
PLAIN_METHODS = {name for kind in PLAIN for name in dir(kind) if callable(getattr(kind, name))}


class CandidateError(Exception):
    """An error of a class that is not built into Python."""


class NotPlain(TypeError):
    """A test treats an object of the program as plain data."""


class _Own:
    """What this side knows of a remote object."""

    def __init__(self, handle: int, kind: str, talk: Talk) -> None:
        self.handle = handle
        self.kind = kind
        self.talk = talk
        self.holder: _Own | None = None  # whose attribute it is
        self.name = ""  # under which plain data has a method, too
        self.why_no_items = ""
        self.forget()

    def forget(self) -> None:
        """The test has acted on it: it may have changed."""
        self.attributes: dict[str, Any] = {}
        self.items: _Items | None = None
        self.position = 0


def _own(remote: RemoteObject) -> _Own:
    own: _Own = object.__getattribute__(remote, "_own")
    return own


class RemoteObject:
    """An object in the candidate's process, used by its handle."""

    def __init__(self, handle: int, kind: str, talk: Talk) -> None:
        object.__setattr__(self, "_own", _Own(handle, kind, talk))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        own = _own(self)
        if own.holder is not None:
            own.holder.forget()
        value = ask(self, "call", *arguments, **named)
        if own.name and not isinstance(value, RemoteObject | None):
            raise _not_plain(own.holder or own, f"the method {own.name}")
        return value

    def __getattr__(self, name: str) -> Any:
        own = _own(self)
        if name.startswith("__") and name in PLAIN_METHODS:
            raise AttributeError(name)
        if name not in own.attributes:
            value = ask(self, "get", name)
            if isinstance(value, RemoteObject):
                _own(value).holder = own
                _own(value).name = name if name in PLAIN_METHODS else ""
            elif name in PLAIN_METHODS:
                raise AttributeError(str(_not_plain(own, f"the method {name}")))
            own.attributes[name] = value
        return own.attributes[name]

    def __setattr__(self, name: str, value: Any) -> None:
        ask(self, "set", name, value)
        _own(self).forget()

    def __iter__(self) -> Iterator[Any]:
        own = _own(self)
        if own.why_no_items:
            raise TypeError(own.why_no_items)
        try:
            own.items = own.items or _Items(self)
        except TypeError as error:  # and so it stays
            own.why_no_items = str(error)
            raise
        return own.items.since(own.position)

    def __next__(self) -> Any:
        own = _own(self)
        own.items = own.items or _Items(self, is_iterator=True)
        value = next(own.items.since(own.position))
        own.position += 1
        return value

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, item: Any) -> bool:
        return any(own is item or own == item for own in self)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, int | slice):
            raise _not_plain(_own(self), f"the key {key!r:.40}")
        return list(self)[key]

    def __bool__(self) -> bool:
        try:
            return any(True for _ in self)
        except TypeError:  # it has no items
            return True

    def __str__(self) -> str:
        return str(ask(self, "str"))

    def __repr__(self) -> str:
        return str(ask(self, "repr"))

    def __enter__(self) -> Any:
        return ask(self, "enter")

    def __exit__(self, *error: object) -> None:
        ask(self, "exit")

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, RemoteObject) and ask(instance, "isinstance", self) is True

    def __eq__(self, other: object) -> Any:
        return other is not None and (_is_same(self, other) or _between("eq")(self, other))

    def __ne__(self, other: object) -> Any:
        return other is None or (not _is_same(self, other) and _between("ne")(self, other))

    def __hash__(self) -> int:
        return hash(_own(self).handle)

    def __neg__(self) -> Any:
        return ask(self, "neg")

    def __abs__(self) -> Any:
        return ask(self, "abs")


def _between(what: str) -> Callable[[RemoteObject, Any], Any]:
    """An operator between two objects of the program, of which the test has made at least one. Plain data is never sent there
    to be compared or calculated with. Two results would otherwise compare as it is needed."""

    def operate(one: RemoteObject, other: Any) -> Any:
        if (isinstance(one, MadeObject) and isinstance(other, RemoteObject)) or isinstance(other, MadeObject):
            return ask(one, what, other)
        if isinstance(other, RemoteObject) and what in ("eq", "ne"):
            return what == "ne"
        raise _not_plain(_own(one), f"a comparison or a calculation with {type(other).__name__}")

    return operate


def _is_same(one: RemoteObject, other: object) -> bool:
    return isinstance(other, RemoteObject) and _own(one).handle == _own(other).handle


def _not_plain(own: _Own, what: str) -> NotPlain:
    return NotPlain(f"the program returned an object ({own.kind}), and {what} is for plain data")


OPERATORS = (
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
)
for _name in OPERATORS:
    setattr(RemoteObject, f"__{_name.rstrip('_')}__", _between(_name))


class MadeObject(RemoteObject):
    """A class of the program that a test names, or an object that a test has made from it: it is examined as an object, and its
    operators are methods of the program. It never equals plain data."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _as_made(ask(self, "call", *arguments, **named))

    def __getattr__(self, name: str) -> Any:
        value = ask(self, "get", name)
        return _as_made(value) if _is_capital(name) else value

    def __getitem__(self, key: Any) -> Any:
        return ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        ask(self, "set_item", key, value)

    def __delitem__(self, key: Any) -> None:
        ask(self, "delete_item", key)

    def __iter__(self) -> Iterator[Any]:
        return _Items(self).since(0)

    def __next__(self) -> Any:
        return next(_Items(self, is_iterator=True).since(0))

    def __enter__(self) -> Any:
        return _as_made(ask(self, "enter"))

    def __len__(self) -> int:
        return int(ask(self, "len"))

    def __contains__(self, item: Any) -> bool:
        return ask(self, "in", item) is True

    def __bool__(self) -> bool:
        return ask(self, "bool") is True

    def __eq__(self, other: object) -> Any:
        return isinstance(other, RemoteObject) and ask(self, "eq", other)

    def __ne__(self, other: object) -> Any:
        return not isinstance(other, RemoteObject) or ask(self, "ne", other)

    def __hash__(self) -> int:
        return hash(_own(self).handle)


def _as_made(value: Any) -> Any:
    return (
        MadeObject(_own(value).handle, _own(value).kind, _own(value).talk) if isinstance(value, RemoteObject) else value
    )


class _Items:
    """The values that an iterable of the program yields, asked for as they are needed. What was yielded stays."""

    def __init__(self, source: RemoteObject, *, is_iterator: bool = False) -> None:
        self._iterator = source if is_iterator else ask(source, "iter")
        if not isinstance(self._iterator, RemoteObject):
            raise NotPlain("the program's object yields no items")
        self._values: list[Any] = []
        self._is_over = False
        self._error: Exception | None = None

    def since(self, position: int) -> Iterator[Any]:
        chunk = 1
        while position < len(self._values) or not self._is_over:
            if position == len(self._values):
                self._read(chunk)
                chunk = min(2 * chunk, MAX_CHUNK)
            else:
                yield self._values[position]
                position += 1

    def _read(self, number: int) -> None:
        if self._error is not None:
            raise self._error
        try:
            answer = ask(self._iterator, "more", number)
        except Exception as error:  # and so it stays
            self._error = error
            raise
        match answer:
            case (list(values), bool(is_over)) if values or is_over:
                self._values += values
                self._is_over = is_over
            case _:
                raise _own(self._iterator).talk.broken("the program sent what is no answer: no items")


# ---- questions and answers ---------------------------------------------------------------------------------------------------


def ask(remote: RemoteObject, what: str, *arguments: Any, **named: Any) -> Any:
    """The value that the candidate answers with. Raises the error that it reports, or `Gone`."""

    def refer(value: Any) -> Any:
        if not isinstance(value, RemoteObject):
            raise TypeError(f"a test can pass plain data to the program, and no {type(value).__name__}")
        if what == "call":
            _own(value).forget()
        return {"o": [_own(value).handle, ""]}

    talk = _own(remote).talk
    whole = {"t": [{"o": [_own(remote).handle, ""]}, *(pack_value(one, refer) for one in arguments)]}
    value, after = _answer(talk, {"do": what, "arguments": whole, "named": pack_value(named, refer)})
    if value is None and what == "call":
        _take_over(talk, arguments, after)
    return value


def _answer(talk: Talk, question: dict[str, Any]) -> tuple[Any, Any]:
    """The value, and the arguments as they are after the call."""
    talk.send(question)
    answer = talk.receive()

    def find(handle: Any) -> RemoteObject:
        match handle:
            case [int(number), str(kind)] if type(number) is int and number >= 0:
                return RemoteObject(number, "".join(filter(str.isprintable, kind))[:40], talk)
        raise Malformed("no handle")

    match answer:
        case {"raised": [str(name), str(text)]}:
            raise _error(name, text)
        case {"value": value, "arguments": after}:
            try:
                return unpack_value(value, find), unpack_value(after, find)
            except (Malformed, RecursionError) as error:
                raise talk.broken(f"the program sent what is no answer: {error}") from error
    raise talk.broken("the program sent what is no answer")


def _error(name: str, text: str) -> Exception:
    """Python's own error of that name, if there is one that says no more than that a call has failed. `StopIteration` would end
    a loop of the test as if everything in it had passed."""
    kind = getattr(builtins, name, None)
    if (
        isinstance(kind, type)
        and issubclass(kind, Exception)
        and not issubclass(kind, StopIteration | StopAsyncIteration)
    ):
        try:
            return kind(text)
        except TypeError:  # it takes other arguments
            pass
    return CandidateError(f"{name}: {text}")


def _take_over(talk: Talk, arguments: tuple[Any, ...], after: Any) -> None:
    """What a function that returns nothing has changed in a list, a dictionary or a set that a test has passed to it. (One that
    returns something could otherwise change what it is then compared with.)"""
    if type(after) is not tuple or len(after) != 1 + len(arguments):
        raise talk.broken("the program sent what is no answer: no arguments")
    for one, other in zip(arguments, after[1:], strict=True):
        if type(one) is not type(other):
            continue
        if isinstance(one, list):
            one[:] = other
        elif isinstance(one, dict | set):
            one.clear()
            one.update(other)


# ---- tests -----------------------------------------------------------------------------------------------------------------


def examine_candidate(tests: list[str]) -> int:
    """One line of JSON a test, as soon as it is over."""
    with open(VERDICT, "w") as verdicts:
        talk = Talk(TALK)
        namespace: dict[str, Any] = {"__name__": "tests"}
        try:
            namespace.update(_names(talk, "\n".join(tests)))
        except (Gone, Exception) as error:
            talk.gone = talk.gone or f"the program's names are unknown: {error}"
        for test in tests:
            why = talk.gone or _why_not(test, namespace, talk)
            verdicts.write(json.dumps({"why": why[:MAX_WHY]}) + "\n")
            verdicts.flush()
    return 0


def _names(talk: Talk, tests: str) -> dict[str, Any]:
    """What the tests may use by name: of the words in them, those that the program defines. Names of Python's own are Python's
    own, whatever the program made of them: built-ins, and modules of the standard library that the tests look into."""
    words = {
        word for word in re.findall(r"[^\W\d]\w*", tests) if not word.startswith("__") and not hasattr(builtins, word)
    }
    found, _ = _answer(talk, {"do": "names", "arguments": {"t": sorted(words)}, "named": {"d": []}})
    if type(found) is not dict:
        raise talk.broken("the program sent what is no answer: no names")
    return {name: _named(name, found[name], tests) for name in sorted(words) if name in found}


def _named(name: str, value: Any, tests: str) -> Any:
    if name in sys.stdlib_module_names and re.search(rf"\b{name}\.", tests):
        return importlib.import_module(name)
    return _as_made(value) if _is_capital(name) else value


def _is_capital(name: str) -> bool:
    """Whether a test that uses this name means a class, or a constant of one."""
    return name.lstrip("_")[:1].isupper()


def _why_not(test: str, namespace: dict[str, Any], talk: Talk) -> str:
    """Nothing, if it passes."""
    try:
        exec(compile(test, "test.py", "exec"), namespace)
    except BaseException as error:  # a test that raises has not passed, whatever it raises
        text = "(no text)"
        with contextlib.suppress(BaseException):  # the message may be an object of the program, whose __str__ raises
            text = str(error)
        return talk.gone or (f"{type(error).__name__}: {text}" if text else type(error).__name__)
    return talk.gone
