"""Frames over a stream socket: a length of 4 bytes, then one MessagePack message. No pickle.

Guarantee: every reader returns whole messages in the order they were sent. A frame above the reader's size bound raises
`FrameError` before its body is read. Three readers share the format: `Frames` (blocking or polling), `read_frame` (asyncio
streams) and `FrameProtocol` (asyncio transports).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from millstream.decoding import decode_msgpack

HEADER = 4
MAX_FRAME_BYTES = 1 << 30
READ_BYTES = 1 << 20
MAX_DESCRIPTORS = 64
LOST_MS = 20_000  # unacknowledged data: after this time the connection counts as lost
KEEP_ALIVE = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": LOST_MS}
T = TypeVar("T")


class FrameError(ConnectionError):
    """The other end sent a frame above the size bound."""


def frame(message: Any, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Raises `TypeError` for a message that cannot be encoded, `ValueError` for one above the reader's bound."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > max_bytes:
        raise ValueError(f"a message of {len(payload)} bytes is too large to be sent: expected at most {max_bytes}")
    return len(payload).to_bytes(HEADER, "little") + payload


def keep_alive(connection: socket.socket) -> None:
    """Detect that the other machine is gone, also when it cannot say so (power, network). For TCP sockets."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Frames:
    """The blocking reader. A socket timeout, a reset and an orderly close all read as "the other end is gone" (None)."""

    def __init__(self, source: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """`max_bytes`: of one message. Use a small bound while the other end is not authenticated."""
        self._source = source
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def first(self) -> bytes | None:
        """The next message. Waits for it. None: the other end is gone."""
        found = self._receive(block=True, most=1)
        return None if found is None else found[0]

    def first_as(self, kind: type[T]) -> T | None:
        """The next message, decoded."""
        found = self.first()
        return None if found is None else decode_msgpack(found, kind)

    def receive(self, *, block: bool) -> list[bytes] | None:
        """All messages that have arrived; with `block`, at least one. None: the other end is gone."""
        return self._receive(block=block, most=None)

    def _receive(self, *, block: bool, most: int | None) -> list[bytes] | None:
        while True:
            frames = list(itertools.islice(self._cut(), most))
            if frames:
                return frames
            try:
                data = self._source.recv(READ_BYTES, 0 if block else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return []
            except OSError:
                return None
            if not data:
                return None
            self._buffer += data

    def _cut(self) -> Iterator[bytes]:
        while len(self._buffer) >= HEADER:
            size = _checked_size(self._buffer[:HEADER], self._max_bytes)
            if len(self._buffer) < HEADER + size:
                return
            message = bytes(memoryview(self._buffer)[HEADER : HEADER + size])
            del self._buffer[: HEADER + size]
            yield message


async def read_frame(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The next message. Raises `FrameError`, or `EOFError` (`asyncio.IncompleteReadError`) if the other end is gone."""
    size = _checked_size(await reader.readexactly(HEADER), max_bytes)
    return await reader.readexactly(size)


class FrameProtocol(asyncio.Protocol):
    """The asyncio transport's reader and writer: `on_message` gets a view of each message, valid during the call."""

    def __init__(
        self,
        on_message: Callable[[memoryview], None],
        on_lost: Callable[[], None],
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self.max_bytes = max_bytes
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        connection: socket.socket = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            keep_alive(connection)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        begin, size = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while size - begin >= HEADER:
                length = int.from_bytes(view[begin : begin + HEADER], "little")
                if length > self.max_bytes:
                    self.abort()
                    return
                end = begin + HEADER + length
                if end > size:
                    break
                with view[begin + HEADER : end] as message:
                    self._on_message(message)
                if self.transport is None or self.transport.is_closing():
                    return
                begin = end
        del self._buffer[:begin]

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()

    def send(self, message: Any) -> None:
        """Messages of one turn of the event loop are written together, at its end: a write costs more than a message. A closed
        connection ignores it. Raises `FrameError` for a message that no reader would accept."""
        if self.transport is not None and not self.transport.is_closing():
            data = msgspec.msgpack.encode(message)
            _checked_size(len(data).to_bytes(8, "little"), MAX_FRAME_BYTES)
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self.flush)
            self._unsent.append(len(data).to_bytes(HEADER, "little") + data)

    def flush(self) -> None:
        """Write at once what was sent."""
        data = b"".join(self._unsent)
        self._unsent.clear()
        if data:
            self._write(data)

    def _write(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        """After what was sent."""
        self.flush()
        if self.transport is not None:
            self.transport.close()


def send_descriptors(connection: socket.socket, message: Any, descriptors: Sequence[int]) -> None:
    """A message with open descriptors, over a Unix socket."""
    data = frame(message)
    sent = socket.send_fds(connection, [data], list(descriptors))
    connection.sendall(data[sent:])


def receive_descriptors(connection: socket.socket, kind: Any) -> tuple[Any, list[int]]:
    """The next message, and the descriptors that came with it. Nothing after the message is read. Raises `OSError` if the other
    end is gone, `msgspec.MsgspecError` if it is not a message: then the descriptors are closed."""
    header, descriptors, _, _ = socket.recv_fds(connection, HEADER, MAX_DESCRIPTORS)
    try:
        data, size = bytearray(), int.from_bytes(header, "little")
        while len(data) < size and (piece := connection.recv(size - len(data))):
            data += piece
        if not header or len(data) < size:
            raise ConnectionResetError("the other end is gone")
        return decode_msgpack(data, kind), descriptors
    except (OSError, msgspec.MsgspecError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _checked_size(header: bytes | bytearray, max_bytes: int) -> int:
    size = int.from_bytes(header, "little")
    if size > max_bytes:
        raise FrameError(f"a message of {size} bytes, expected at most {max_bytes}")
    return size
