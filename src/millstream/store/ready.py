"""What is ready for one task, in order, and which of it a claim gets.

The cost of an operation depends on the rows it touches and on the number of versions that are ready, not on the rows resident.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, groupby, islice
from operator import attrgetter, itemgetter
from typing import NamedTuple

import msgspec
from msgspec import Struct

from millstream.errors import StoreError
from millstream.store import policies
from millstream.store.base import Choose, Want
from millstream.store.rows import Unit

Entry = tuple[int, Unit, int, int]
"""Position in the queue (lower is earlier), unit, its rows and its tokens when it was queued."""


class ReadyTotal(NamedTuple):
    units: int
    rows: int
    tokens: int


class VersionQueue(Struct, eq=False):
    """The ready units of one version."""

    entries: deque[Entry]
    num_rows: int = 0
    num_tokens: int = 0


class ReadyQueue:
    """The longest ready first. One queue for each version, so that a window of versions is found at once."""

    def __init__(self, *, by_group: bool) -> None:
        self._by_group = by_group
        self._queues: dict[int, VersionQueue] = {}
        self._back = 0
        self._front = -1
        self.num_rows = 0
        self.tokens_of_rank: dict[int, int] = {}  # granted to each rank by the policy `balanced`

    @property
    def stamp(self) -> int:
        """Changes whenever something becomes ready."""
        return self._back - self._front

    def push(self, units: Sequence[Unit]) -> None:
        for version, same in groupby(units, attrgetter("version")):
            entries = [
                (position, unit, unit.num_rows, unit.tokens) for position, unit in enumerate(same, start=self._back)
            ]
            self._back += len(entries)
            queue = self._queue(version)
            queue.entries.extend(entries)
            self._count(queue, entries)

    def push_front(self, units: Sequence[Unit]) -> None:
        """Before all others, in this order."""
        for unit in reversed(units):
            self._insert_first(unit.version, (self._front, unit, unit.num_rows, unit.tokens))
            self._front -= 1

    def _insert_first(self, version: int, entry: Entry) -> None:
        queue = self._queue(version)
        queue.entries.appendleft(entry)
        self._count(queue, [entry])

    def _queue(self, version: int) -> VersionQueue:
        queue = self._queues.get(version)
        if queue is None:
            queue = self._queues[version] = VersionQueue(deque())
        return queue

    def _count(self, queue: VersionQueue, entries: Sequence[Entry], sign: int = 1) -> None:
        """Add entries to the totals, or subtract them."""
        rows, tokens = sign * sum([entry[2] for entry in entries]), sign * sum([entry[3] for entry in entries])
        queue.num_rows += rows
        queue.num_tokens += tokens
        self.num_rows += rows

    def total(self, window: tuple[int, int] | None) -> ReadyTotal:
        units, rows, tokens = 0, 0, 0
        for version, queue in self._queues.items():
            if window is None or window[0] <= version <= window[1]:
                units += len(queue.entries)
                rows += queue.num_rows
                tokens += queue.num_tokens
        return ReadyTotal(units, rows, tokens)

    def in_order(self) -> list[Unit]:
        """All ready units. Where all are needed, sorting takes less than the merge of `_entries`."""
        entries = chain.from_iterable(queue.entries for queue in self._queues.values())
        return [entry[1] for entry in sorted(entries, key=itemgetter(0))]

    def _entries(self, window: tuple[int, int] | None, *, by_version: bool = False) -> Iterable[Entry]:
        """One after the other, for claims that need the first ones. The queue must not be changed meanwhile."""
        versions = [version for version in self._queues if window is None or window[0] <= version <= window[1]]
        queues = [self._queues[version].entries for version in sorted(versions)]
        is_sorted = by_version or len(queues) < 2
        return chain.from_iterable(queues) if is_sorted else heapq.merge(*queues, key=itemgetter(0))

    # ---- selection ---------------------------------------------------------------------------------------------------

    def select(self, want: Want, choose: Choose | None, *, is_all: bool) -> list[Unit]:
        """Remove and return the units that this claim gets; empty if it has to wait. `is_all`: waiting would not add more."""
        if choose is not None:
            return self._choose(choose)
        if not self._queues:
            return []
        total = self.total(want.versions)
        if not (total.units if is_all else self._is_enough(total, want)):
            return []
        if want.policy in ("fifo", "oldest_version"):
            return self._first(want)
        return self._apply_policy(want)

    def _is_enough(self, total: ReadyTotal, want: Want) -> bool:
        """Whether some limit of the claim can be reached."""
        return (
            (want.rows is not None and total.rows >= want.rows)
            or (want.tokens is not None and total.tokens >= want.tokens)
            or (want.groups is not None and self._by_group and total.units >= want.groups)
        )

    def _choose(self, choose: Choose) -> list[Unit]:
        units = {unit.id: unit for unit in self.in_order()}
        chosen = choose(tuple(units)) if units else None
        if chosen is None:
            return []
        if chosen not in units:
            raise StoreError(f"`choose` returned {chosen}, which is not among the ready groups")
        self.remove([units[chosen]])
        return [units[chosen]]

    def _apply_policy(self, want: Want) -> list[Unit]:
        units = [entry[1] for entry in islice(self._entries(want.versions), policies.WINDOW)]
        if not self._by_group:
            want = msgspec.structs.replace(want, groups=None)
        candidates = [policies.Candidate(unit.id, unit.version, unit.num_rows, unit.tokens) for unit in units]
        if want.policy == "balanced":
            ranks = {want.rank: 0, **self.tokens_of_rank}
            lead = ranks[want.rank] - sum(ranks.values()) / len(ranks)
            indices = policies.balanced(candidates, want, lead)
        else:
            indices = policies.call_policy(want.policy, candidates, want)
        taken = [units[index] for index in indices]
        self.remove(taken)
        return taken

    def _first(self, want: Want) -> list[Unit]:
        """The first ones, up to the first limit; at least one."""
        taken: list[Unit] = []
        rows, tokens = 0, 0
        max_rows = math.inf if want.rows is None else want.rows
        max_tokens = math.inf if want.tokens is None else want.tokens
        max_units = want.groups if self._by_group else None
        for _, unit, unit_rows, unit_tokens in self._entries(want.versions, by_version=want.policy != "fifo"):
            rows += unit_rows
            tokens += unit_tokens
            if taken and (rows > max_rows or tokens > max_tokens or len(taken) == max_units):
                break
            taken.append(unit)
        self.remove(taken)
        return taken

    # ---- removal -----------------------------------------------------------------------------------------------------

    def remove(self, units: Iterable[Unit]) -> list[Entry]:
        """Remove these units wherever they are: quickly if they come first, as those that were granted in order do."""
        gone = {id(unit) for unit in units}
        found: list[Entry] = []
        for version, queue in list(self._queues.items()):
            if len(found) == len(gone):
                break
            entries, before = queue.entries, len(found)
            while entries and id(entries[0][1]) in gone:
                found.append(entries.popleft())
            if len(found) < len(gone) and (inside := [entry for entry in entries if id(entry[1]) in gone]):
                found += inside
                queue.entries = deque(entry for entry in entries if id(entry[1]) not in gone)
            self._count(queue, found[before:], sign=-1)
            if not queue.entries:
                del self._queues[version]
        return found

    def reorder(self, ids: Sequence[int]) -> None:
        """Set the order of the units."""
        place = {unit_id: place for place, unit_id in enumerate(ids)}
        units = sorted(self.in_order(), key=lambda unit: place.get(unit.id, len(place)))
        self.remove(units)
        self.push(units)

    def recount(self, units: Iterable[Unit]) -> None:
        """Groups have lost rows: they keep their positions, with new counts and versions."""
        self._back += 1  # a claim for a window of versions may be served now
        for position, unit, _, _ in self.remove(units):
            version = unit.version
            self._insert_first(version, (position, unit, unit.num_rows, unit.tokens))
            queue = self._queues[version]
            queue.entries = deque(sorted(queue.entries, key=lambda entry: entry[0]))
