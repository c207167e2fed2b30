"""What clients and the coordinator say to each other: length-prefixed MessagePack, requests that are answered in any order.

A request that changes something may be sent twice (the coordinator came back, and nobody knows what it had done): it has a
number of its client's, and is carried out once. Small payloads travel along; of others, the segment of shared memory is named.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from millstream.errors import StoreError
from millstream.store import StoreStats, Want

PREFIX = 4
MAX_BYTES = 1 << 30
GREETING_BYTES = 16 << 10
"""What a stranger may say."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
INLINE_BYTES = 32 << 10
"""Up to here a payload travels with its request."""


class Segment(Struct, frozen=True, array_like=True):
    """A file of shared memory on a node."""

    node: str
    name: str
    size: int


class Payload(Struct, frozen=True, array_like=True):
    """One packed block: its bytes, or where they are."""

    nbytes: int
    data: bytes | None = None
    segment: Segment | None = None
    is_private: bool = False
    """It holds tensors, which cannot be made read-only: whoever maps it does so for himself."""


class Hello(Struct, tag=True, array_like=True):
    client: str
    token: str
    node: str
    address: tuple[str, int] | None = None
    """Where a holder serves the segments of its node; None for others."""
    waiting: list[int] = []
    """Requests that this client waits for: answers to all others have arrived."""


class Reserve(Struct, tag=True, array_like=True):
    """Room for rows whose payload is not small, and a segment to put it in; without rows (a write, a restore), at once."""

    num_rows: int
    nbytes: int
    deadline_s: float | None


class Release(Struct, tag=True, array_like=True):
    name: str


class Put(Struct, tag=True, array_like=True):
    group_ids: list[int]
    columns: list[str]
    payload: Payload
    versions: list[int] | None
    tokens: list[int] | None
    partition: str
    deadline_s: float | None


class Write(Struct, tag=True, array_like=True):
    row_ids: list[int]
    columns: list[str]
    payload: Payload
    overwrite: bool


class CloseGroups(Struct, tag=True, array_like=True):
    group_ids: list[int]
    partition: str


class ClaimRows(Struct, tag=True, array_like=True):
    task: str
    want: Want
    partition: str
    group_id: int | None = None
    """This group, if it is ready; else an empty answer."""


class ReadyGroups(Struct, tag=True, array_like=True):
    """Waits until the groups that are ready differ from those that were `seen`."""

    task: str
    partition: str
    seen: int


class Acknowledge(Struct, tag=True, array_like=True):
    lease_id: int
    step: int | None


class Drop(Struct, tag=True, array_like=True):
    lease_id: int


class GiveBack(Struct, tag=True, array_like=True):
    lease_id: int


class Renew(Struct, tag=True, array_like=True):
    lease_id: int


class Cover(Struct, tag=True, array_like=True):
    step: int
    partition: str


class Rewind(Struct, tag=True, array_like=True):
    task: str
    step: int
    partition: str


class Finish(Struct, tag=True, array_like=True):
    partition: str


class DropPartition(Struct, tag=True, array_like=True):
    partition: str


class Look(Struct, tag=True, array_like=True):
    """All rows of a partition, to be saved."""

    partition: str


class SavedRows(Struct, array_like=True):
    ids: list[int]
    group_ids: list[int]
    columns: list[str]
    payload: Payload
    versions: list[int]
    tokens: list[int]
    steps: list[dict[str, int]]


class Restore(Struct, tag=True, array_like=True):
    rows: list[SavedRows]
    is_closed: dict[int, bool]
    acknowledged: dict[str, list[int]]
    partition: str
    generation: int


class Stats(Struct, tag=True, array_like=True): ...


class LostRows(Struct, tag=True, array_like=True): ...


class Cancel(Struct, tag=True, array_like=True):
    """Nobody waits for this request any more."""

    number: int


class Closed(Struct, tag=True, array_like=True):
    """Views of these segments are gone: a name for each."""

    names: list[str]


Body = (
    Hello
    | Reserve
    | Release
    | Put
    | Write
    | CloseGroups
    | ClaimRows
    | ReadyGroups
    | Acknowledge
    | Drop
    | GiveBack
    | Renew
    | Cover
    | Rewind
    | Finish
    | DropPartition
    | Look
    | Restore
    | Stats
    | LostRows
    | Cancel
    | Closed
)


class Request(Struct, array_like=True):
    number: int
    heard: list[int]
    """Requests whose answers have arrived since the last one was sent."""
    body: Body


class Welcome(Struct, tag=True, array_like=True): ...


class Reserved(Struct, tag=True, array_like=True):
    segment: Segment


class Done(Struct, tag=True, array_like=True): ...


class Rows(Struct, tag=True, array_like=True):
    """Rows that were put: their ids are consecutive."""

    first: int
    count: int


class Count(Struct, tag=True, array_like=True):
    count: int


class Run(Struct, array_like=True):
    """A stretch of rows whose cells lie side by side: in which blocks, from where, how many."""

    blocks: list[int]
    starts: list[int]
    count: int


class Granted(Struct, tag=True, array_like=True):
    lease_id: int
    row_ids: list[int]
    group_ids: list[int]
    versions: list[int]
    runs: list[Run]
    blocks: dict[int, Payload]
    empty_groups: list[int]
    addresses: dict[str, tuple[str, int]]
    """Where the holders of the nodes listen."""


class Groups(Struct, tag=True, array_like=True):
    change: int
    group_ids: list[int]
    is_over: bool


class Looked(Struct, tag=True, array_like=True):
    granted: Granted
    is_closed: dict[int, bool]
    acknowledged: dict[str, list[int]]
    tokens: list[int]
    steps: list[dict[str, int]]
    generation: int


class Told(Struct, tag=True, array_like=True):
    stats: StoreStats


class Lost(Struct, array_like=True):
    row_id: int
    group_id: int
    partition: str
    node: str


class LostNow(Struct, tag=True, array_like=True):
    rows: list[Lost]


class Failed(Struct, tag=True, array_like=True):
    kind: str
    message: str


class Unlink(Struct, tag=True, array_like=True):
    """To a holder: these segments are not needed any more."""

    names: list[str]


Answer = Welcome | Reserved | Done | Rows | Count | Granted | Groups | Looked | Told | LostNow | Failed | Unlink


class Reply(Struct, array_like=True):
    number: int
    body: Answer


class Frames(asyncio.Protocol):
    """Messages over a stream. `on_message` gets the bytes of each."""

    def __init__(
        self, on_message: Callable[[memoryview], None], on_lost: Callable[[], None], most_bytes: int = MAX_BYTES
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self.most_bytes = most_bytes
        self._buffer = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        line: socket.socket = transport.get_extra_info("socket")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that lost its power says nothing
        for option, value in KEEP_ALIVE.items():
            if hasattr(socket, option):
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        begin, size = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while size - begin >= PREFIX:
                length = int.from_bytes(view[begin : begin + PREFIX], "little")
                if length > self.most_bytes:
                    self.abort()
                    return
                end = begin + PREFIX + length
                if end > size:
                    break
                with view[begin + PREFIX : end] as message:
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
        if self.transport is not None and not self.transport.is_closing():
            data = msgspec.msgpack.encode(message)
            if len(data) > MAX_BYTES:
                raise StoreError(f"a message of {len(data)} bytes is too large: ask for less at a time")
            self.transport.write(len(data).to_bytes(PREFIX, "little") + data)
