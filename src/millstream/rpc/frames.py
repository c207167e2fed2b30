"""Messages over a stream socket: length, then MessagePack. What comes out is what went in, whole and in order. No pickle."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

HEADER = 4
T = TypeVar("T")


def frame(message: Any) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(HEADER, "little") + payload


class Frames:
    """Whole messages out of a stream of bytes."""

    def __init__(self, source: socket.socket, most_bytes: int = 0) -> None:
        """`most_bytes`: of one message, where who is at the other end is not known yet; 0: no bound."""
        self._source = source
        self._most_bytes = most_bytes
        self._buffer = bytearray()

    def first(self) -> bytes | None:
        """The next message alone, when it is there. None when the other end is gone."""
        found = self._receive(block=True, most=1)
        return None if found is None else found[0]

    def first_as(self, kind: type[T]) -> T | None:
        """What a worker is told first."""
        found = self.first()
        return None if found is None else msgspec.msgpack.decode(found, type=kind)

    def receive(self, *, block: bool) -> list[bytes] | None:
        """The messages that are there; with `block`, at least one. None when the other end is gone."""
        return self._receive(block=block, most=None)

    def _receive(self, *, block: bool, most: int | None) -> list[bytes] | None:
        while True:
            frames = list(itertools.islice(self._cut(), most))
            if frames:
                return frames
            flags = 0 if block else socket.MSG_DONTWAIT
            try:
                data = self._source.recv(1 << 20, flags)
            except BlockingIOError:
                return []
            except OSError:
                return None
            if not data or (self._most_bytes and len(self._buffer) + len(data) > self._most_bytes):
                return None
            self._buffer += data

    def _cut(self) -> Iterator[bytes]:
        while len(self._buffer) >= HEADER:
            end = HEADER + int.from_bytes(self._buffer[:HEADER], "little")
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[HEADER:end])
            del self._buffer[:end]
            yield message
