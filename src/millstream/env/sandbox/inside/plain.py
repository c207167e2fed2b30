"""Plain data between the candidate and the examiner: None, bool, int, float, complex, str, bytes, tuple, list, set, frozenset
and dict, of exactly these types. Everything else is a handle: a number, and the name of a type that serves messages only.

What arrives may have been written by the program and not by `pack_value`. `unpack_value` builds exact built-in types or raises
`Malformed`. Size, depth and the form of every value are checked by the side that reads.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

TALK = 3  # the descriptor of the connection, in both processes
HEADER = 4
MAX_BYTES = 32 << 20  # of one message
MAX_DEPTH = 200  # of nested values
MAX_JSON_INT = 1 << 63  # integers above it travel in hexadecimal: decimal takes quadratic time
SEQUENCES: dict[str, type[tuple[Any, ...]] | type[list[Any]] | type[set[Any]] | type[frozenset[Any]]] = {
    "t": tuple,
    "l": list,
    "s": set,
    "f": frozenset,
}

Refer = Callable[[Any], Any]


class Gone(BaseException):
    """The candidate's process has ended, or has sent what cannot be read. Not an `Exception`: a test that expects an error of
    the program must not take this for one."""


class Malformed(ValueError):
    """A message that no `pack_value` has made."""


class Talk:
    """One end of the connection. After the first failure every call raises `Gone` with the same reason."""

    def __init__(self, descriptor: int) -> None:
        self._line = socket.socket(fileno=descriptor)
        self.gone = ""

    def send(self, message: Any) -> None:
        payload = json.dumps(message).encode()
        if self.gone:
            raise self.broken(self.gone)
        try:
            self._line.sendall(len(payload).to_bytes(HEADER, "little") + payload)
        except OSError as error:
            raise self.broken("the program has ended") from error

    def receive(self) -> Any:
        size = int.from_bytes(self._exactly(HEADER), "little")
        if size > MAX_BYTES:
            raise self.broken(f"the program returned {size} bytes, more than {MAX_BYTES}")
        try:
            return json.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise self.broken(f"the program sent what is no answer: {error}") from error

    def broken(self, why: str) -> Gone:
        """The error to raise. Nothing is sent or received any more."""
        self.gone = self.gone or why
        with contextlib.suppress(OSError):
            self._line.close()
        return Gone(self.gone)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._line.recv(min(1 << 20, size - len(data)))
            except OSError:
                piece = b""
            if not piece:
                raise self.broken("the program has ended")
            data += piece
        return bytes(data)


def pack_value(value: Any, keep: Refer, depth: int = 0) -> Any:
    """Plain data as JSON with marks; `keep` encodes everything else. Subclasses become the plain type that they extend. Raises
    `RecursionError` past `MAX_DEPTH`."""
    own = type(value)  # whatever it says itself that it is
    if value is None or own in (bool, float, str):
        return value
    if depth > MAX_DEPTH:
        raise RecursionError(f"nested more than {MAX_DEPTH} deep")
    if issubclass(own, int):  # also a number of an enumeration
        number = int.__int__(value)
        return number if abs(number) < MAX_JSON_INT else {"i": hex(number)}
    for mark, kind in SEQUENCES.items():
        if issubclass(own, kind):
            return {mark: [pack_value(item, keep, depth + 1) for item in value]}
    if issubclass(own, dict):
        pairs = value.items()
        return {"d": [[pack_value(key, keep, depth + 1), pack_value(item, keep, depth + 1)] for key, item in pairs]}
    if issubclass(own, bytes | bytearray):
        return {"b": value.hex()}
    if own is complex:
        return {"c": [value.real, value.imag]}
    if issubclass(own, float):
        return float.__float__(value)
    if issubclass(own, str):
        return str.__str__(value)
    if own.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return pack_value(value.item(), keep, depth + 1)
    return keep(value)


def unpack_value(packed: Any, find: Refer, depth: int = 0) -> Any:
    """The plain value. `find` decodes handles, and checks them. Raises `Malformed`."""
    if packed is None or type(packed) in (bool, int, float, str):
        return packed
    if type(packed) is not dict or len(packed) != 1:
        raise Malformed(f"no value: {str(packed)[:40]}")
    if depth > MAX_DEPTH:
        raise Malformed(f"nested more than {MAX_DEPTH} deep")
    ((mark, value),) = packed.items()
    try:
        if mark == "o":
            return find(value)
        if mark == "i":
            return int(value, 16)
        if mark == "b":
            return bytes.fromhex(value)
        if type(value) is not list:
            raise Malformed(f"no list after the mark {mark[:8]!r}")
        if mark == "c":
            return complex(*map(float, value))
        if mark == "d":
            return {unpack_value(key, find, depth + 1): unpack_value(item, find, depth + 1) for key, item in value}
        return SEQUENCES[mark]([unpack_value(item, find, depth + 1) for item in value])
    except (TypeError, ValueError, KeyError, OverflowError) as error:  # a key that cannot be hashed, an unknown mark
        raise error if isinstance(error, Malformed) else Malformed(f"{type(error).__name__}: {error}"[:200]) from error
