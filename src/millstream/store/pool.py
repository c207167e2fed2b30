"""Segments that are in use, and those that may be used again.

A segment is handed to another producer only when no row is in it and no process has a view of it. After the coordinator came
back, nobody knows who has views of what was there before: those segments are removed when they are free, never used again.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable

from millstream.store.wire import Segment

MAX_IDLE_BYTES = 1 << 30
"""What a node keeps for the next producer, and"""
IDLE_S = 10.0
"""for how long."""


class Pool:
    def __init__(self, unlink: Callable[[str, list[str]], None], now: Callable[[], float]) -> None:
        self._unlink = unlink
        self._now = now
        self._life = secrets.token_hex(4)
        self._next_number = 0
        """A coordinator that comes back does not know which names were given out last: it begins others."""
        self._used: dict[str, Segment] = {}
        self._freed: dict[str, Segment] = {}
        """No row is in them; some have readers."""
        self._readers: dict[str, Counter[str]] = {}
        self._idle: dict[tuple[str, int], list[tuple[float, Segment]]] = {}
        """With the time since when."""
        self._idle_bytes: Counter[str] = Counter()
        self._is_of_before: set[str] = set()
        self.is_recalling = False
        """A journal is being read: what was freed then has been dealt with then."""

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
        else:
            segment = Segment(node, f"{self._life}-{self._next_number}", size)
            self._next_number += 1
        self._used[segment.name] = segment
        return segment

    def adopt(self, segment: Segment) -> None:
        """Rows are in it now."""
        self._used[segment.name] = segment

    def discard(self, name: str) -> None:
        """It was taken and never filled, or by halves: its writer is gone, or has thought better of it."""
        segment = self._used.pop(name, None)
        if segment is not None:
            self._unlink(segment.node, [name])

    def free(self, segment: Segment) -> None:
        """No row is in it any more."""
        self._used.pop(segment.name, None)
        if self.is_recalling:
            return
        self._freed[segment.name] = segment
        self._reuse_if_unseen(segment.name)

    def open(self, name: str, reader: str) -> None:
        self._readers.setdefault(name, Counter())[reader] += 1

    def close(self, name: str, reader: str) -> None:
        readers = self._readers.get(name)
        if readers is None:
            return
        readers[reader] -= 1
        if readers[reader] <= 0:
            del readers[reader]
        if not readers:
            del self._readers[name]
            self._reuse_if_unseen(name)

    def forget_reader(self, reader: str) -> None:
        for name in [name for name, readers in self._readers.items() if reader in readers]:
            self._is_of_before.add(name)  # it may be alive, and come back: its views stay what they are
            self._readers[name][reader] = 1
            self.close(name, reader)

    def _reuse_if_unseen(self, name: str) -> None:
        if name in self._readers or name not in self._freed:
            return
        segment = self._freed.pop(name)
        is_kept = self._idle_bytes[segment.node] + segment.size <= MAX_IDLE_BYTES
        if name in self._is_of_before or not is_kept:
            self._is_of_before.discard(name)
            self._unlink(segment.node, [name])
            return
        self._idle.setdefault((segment.node, segment.size), []).append((self._now(), segment))
        self._idle_bytes[segment.node] += segment.size

    def trim(self) -> None:
        """Let go of what nobody has wanted for a while."""
        for (node, size), idle in self._idle.items():
            while idle and self._now() - idle[0][0] > IDLE_S:
                self._idle_bytes[node] -= size
                self._unlink(node, [idle.pop(0)[1].name])

    def trust_no_reader(self) -> None:
        """The books were read from a journal: who has views is not in it."""
        self._is_of_before = set(self._used)
        self.is_recalling = False
