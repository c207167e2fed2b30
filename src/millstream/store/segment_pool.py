"""The coordinator's account of segments: which are in use, and which may be reused.

A file is reused for other rows (writing to fresh pages of memory is several times slower than to used ones), but only when no
row is in it and no process has a view of it. After a restart the coordinator does not know which processes have views of older
segments: those are removed when they are free, never reused.

With a bound for the memory of a node, a segment that does not fit is a file on disk: the rows that come last are there, and the
rows before them, which are claimed first, stay in memory. Nothing is moved. A segment on disk is removed when it is free.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter

from msgspec import structs

from millstream.errors import RowsLost
from millstream.store.rows import RowBlock
from millstream.store.segments import SEGMENT_NAME, SegmentServer, write_segment
from millstream.store.sessions import ClientSessions
from millstream.store.wire import DISK, PackedBlock, Payload, Segment, StoreReply, UnlinkSegments

MAX_IDLE_BYTES = 1 << 30
"""Free segments that a node keeps for the next producer, and"""
IDLE_S = 10.0
"""for how long."""
TRIM_S = 2.0


class SegmentPool:
    """`node`: that of the coordinator, whose segments `server` serves. `memory_bytes`: of each node. None: no bound."""

    def __init__(
        self, node: str, sessions: ClientSessions, server: SegmentServer, memory_bytes: int | None = None
    ) -> None:
        self._node = node
        self._sessions = sessions
        self._server = server
        self._memory_bytes = memory_bytes
        self._in_memory: Counter[str] = Counter()  # bytes by node; those in the coordinator's own memory included
        self.spilled_bytes = 0
        self.own_address: tuple[str, int] | None = None  # of the segment server of this node
        self._prefix = secrets.token_hex(4)  # of this process: after a restart, names that were given out are not known
        self._next_number = 0
        self._used: dict[str, Segment] = {}
        self._freed: dict[str, Segment] = {}  # without rows; some still have readers
        self._readers: dict[str, Counter[str]] = {}
        self._idle: dict[tuple[str, int], list[tuple[float, Segment]]] = {}  # with the time since when
        self._idle_bytes: Counter[str] = Counter()
        self._not_reusable: set[str] = set()
        self.is_replaying = False  # a journal is being read: segments that were freed then were handled then

    @property
    def names(self) -> set[str]:
        idle = {segment.name for some in self._idle.values() for _, segment in some}
        return {*self._used, *self._freed, *idle}

    def take(self, node: str, size: int) -> Segment:
        """A segment for a producer on this node."""
        idle = self._idle.get((node, size))
        if idle:
            _, segment = idle.pop()
            self._idle_bytes[node] -= size
            self._used[segment.name] = segment
        else:
            segment = self._new(node, size, is_on_disk=not self._has_memory(node, size))
        return segment

    def _new(self, node: str, size: int, *, is_on_disk: bool) -> Segment:
        name = f"{self._prefix}-{self._next_number}"
        self._next_number += 1
        segment = Segment(node, f"{name}-{DISK}" if is_on_disk else name, size)
        self._use(segment)
        return segment

    def _use(self, segment: Segment) -> None:
        self._used[segment.name] = segment
        if segment.is_on_disk:
            self.spilled_bytes += segment.size
        else:
            self._in_memory[segment.node] += segment.size

    def _has_memory(self, node: str, size: int) -> bool:
        if self._memory_bytes is None or self._in_memory[node] + size <= self._memory_bytes:
            return True
        self._trim(node, time.monotonic())
        return self._in_memory[node] + size <= self._memory_bytes

    def spill(self, block: PackedBlock) -> PackedBlock:
        """A payload that came with its request: as it is where it fits into memory, else in a segment on disk. Raises
        `StoreError` if the disk is full."""
        payload = block.payload
        if payload.data is None or self._has_memory(self._node, block.nbytes):
            return block
        segment = self._new(self._node, len(payload.data), is_on_disk=True)
        try:
            write_segment(self._server.folder, segment, payload.data)
        except BaseException:
            self.discard(segment.name)
            raise
        return structs.replace(block, payload=Payload(payload.nbytes, None, segment, payload.is_private))

    def adopt(self, block: RowBlock) -> None:
        """Rows have it now."""
        segment: Segment | None = block.payload.segment
        if segment is None:
            self._in_memory[self._node] += block.nbytes
        elif segment.name not in self._used:
            self._use(segment)

    def discard(self, name: str) -> None:
        """It was taken and not filled, or partly: its writer died or cancelled the put."""
        segment = self._used.pop(name, None)
        if segment is not None:
            self._unlink(segment)

    def free(self, block: RowBlock) -> None:
        """No row has it any more."""
        segment: Segment | None = block.payload.segment
        if segment is None:
            self._in_memory[self._node] -= block.nbytes
            return
        self._used.pop(segment.name, None)
        if self.is_replaying:
            self._uncount(segment)
            return
        self._freed[segment.name] = segment
        self._reuse_if_closed(segment.name)

    def open_view(self, name: str, reader: str) -> None:
        self._readers.setdefault(name, Counter())[reader] += 1

    def close_view(self, name: str, reader: str) -> None:
        readers = self._readers.get(name)
        if readers is None:
            return
        readers[reader] -= 1
        if readers[reader] <= 0:
            del readers[reader]
        if not readers:
            del self._readers[name]
            self._reuse_if_closed(name)

    def forget_reader(self, reader: str) -> None:
        for name in [name for name, readers in self._readers.items() if reader in readers]:
            self._not_reusable.add(name)  # the reader may be alive and reconnect: its views must not change
            self._readers[name][reader] = 1
            self.close_view(name, reader)

    def _reuse_if_closed(self, name: str) -> None:
        if name in self._readers or name not in self._freed:
            return
        segment = self._freed.pop(name)
        is_kept = self._idle_bytes[segment.node] + segment.size <= MAX_IDLE_BYTES and not segment.is_on_disk
        if name in self._not_reusable or not is_kept:
            self._not_reusable.discard(name)
            self._unlink(segment)
            return
        self._idle.setdefault((segment.node, segment.size), []).append((time.monotonic(), segment))
        self._idle_bytes[segment.node] += segment.size

    def check_exists(self, segment: Segment) -> None:
        """Raises `RowsLost` if a segment that is not reserved (since a restart, or since its producer expired) is gone."""
        is_here = segment.node == self._node
        is_ended = segment.name.startswith(f"{self._prefix}-")  # given out by this process, and not reserved any more
        is_there = (
            segment.name in self._server.names() if is_here else segment.node in self.addresses() and not is_ended
        )
        if not SEGMENT_NAME.fullmatch(segment.name) or segment.name in self.names or not is_there:
            raise RowsLost(f"the segment {segment.name} is gone, it was not filled in time: put the rows again")

    def addresses(self) -> dict[str, tuple[str, int]]:
        """By node: where its segment server listens, that of this node included."""
        found = self._sessions.addresses()
        return found if self.own_address is None else {**found, self._node: self.own_address}

    def _uncount(self, segment: Segment) -> None:
        if segment.is_on_disk:
            self.spilled_bytes -= segment.size
        else:
            self._in_memory[segment.node] -= segment.size

    def _unlink(self, segment: Segment) -> None:
        self._uncount(segment)
        node, names = segment.node, [segment.name]
        if node == self._node:
            self._server.unlink(names)
            return
        for session in self._sessions.by_name.values():
            if session.node == node and session.address is not None and session.connection is not None:
                session.connection.send(StoreReply(-1, UnlinkSegments(names)))

    def sweep(self) -> None:
        """Remove segments of this node from before a restart that hold no rows."""
        known = self.names
        self._server.unlink([name for name in self._server.names() if name not in known])

    def _trim(self, node: str | None, before: float) -> None:
        """Remove segments of a node, or of all, that have been idle since before this time."""
        for (owner, size), idle in self._idle.items():
            while node in (None, owner) and idle and idle[0][0] <= before:
                self._idle_bytes[owner] -= size
                self._unlink(idle.pop(0)[1])

    def trim_regularly(self, loop: asyncio.AbstractEventLoop) -> None:
        self._trim(None, time.monotonic() - IDLE_S)
        loop.call_later(TRIM_S, self.trim_regularly, loop)

    def finish_replay(self) -> None:
        """The journal, which does not record readers, has been read: segments in use are not reusable."""
        self._not_reusable = set(self._used)
        self.is_replaying = False
