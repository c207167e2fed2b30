"""What is ready for one task, in order, and which of it a claim gets.

The cost of an operation depends on the rows it touches and on the number of versions that are ready, not on the rows resident.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

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


class VersionQueue:
    """The ready units of one version."""

    __slots__ = ("entries", "num_rows", "num_tokens")

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.num_rows = 0
        self.num_tokens = 0

    def count(self, entries: Iterable[Entry], sign: int) -> None:
        for entry in entries:
            self.num_rows += sign * entry[2]
            self.num_tokens += sign * entry[3]


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
        for unit in units:
            self._insert(unit.version, (self._back, unit, unit.num_rows, unit.tokens))
            self._back += 1

    def push_front(self, units: Sequence[Unit]) -> None:
        """Before all others, in this order."""
        for unit in reversed(units):
            self._insert(unit.version, (self._front, unit, unit.num_rows, unit.tokens))
            self._front -= 1

    def _insert(self, version: int, entry: Entry) -> None:
        queue = self._queues.get(version)
        if queue is None:
            queue = self._queues[version] = VersionQueue()
        position, _, rows, tokens = entry
        if position < 0:
            queue.entries.appendleft(entry)
        else:
            queue.entries.append(entry)
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

    def in_order(self, window: tuple[int, int] | None = None) -> Iterator[Unit]:
        """All ready units. The queue must not be changed meanwhile."""
        queues = [self._queues[version].entries for version in self._within(window)]
        if len(queues) < 2:
            return (entry[1] for queue in queues for entry in queue)
        return (entry[1] for entry in sorted((e for queue in queues for e in queue), key=lambda entry: entry[0]))

    def _within(self, window: tuple[int, int] | None) -> list[int]:
        if window is None:
            return sorted(self._queues)
        return sorted(v for v in self._queues if window[0] <= v <= window[1])

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
            return self._pop(want, by_version=want.policy == "oldest_version")
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
        units = [unit for unit, _ in zip(self.in_order(want.versions), range(policies.WINDOW), strict=False)]
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

    def _pop(self, want: Want, *, by_version: bool) -> list[Unit]:
        """The first ones, up to the first limit; at least one."""
        taken: list[Unit] = []
        rows, tokens = 0, 0
        max_rows = want.rows if want.rows is not None else -1
        max_tokens = want.tokens if want.tokens is not None else -1
        max_units = (want.groups if self._by_group else None) or -1
        versions = self._within(want.versions)
        is_full = False
        while versions and not is_full:
            version, until = versions[0], None
            if len(versions) > 1 and not by_version:
                (_, version), (until, _) = sorted((self._queues[v].entries[0][0], v) for v in versions)[:2]
            queue = self._queues[version]
            entries = queue.entries
            rows_before, tokens_before = rows, tokens
            while entries and (until is None or entries[0][0] < until):
                _, unit, unit_rows, unit_tokens = entries[0]
                is_over = 0 <= max_rows < rows + unit_rows or 0 <= max_tokens < tokens + unit_tokens
                if taken and (is_over or len(taken) == max_units):
                    is_full = True
                    break
                entries.popleft()
                taken.append(unit)
                rows += unit_rows
                tokens += unit_tokens
            queue.num_rows -= rows - rows_before
            queue.num_tokens -= tokens - tokens_before
            if not entries:
                del self._queues[version]
                versions.remove(version)
        self.num_rows -= rows
        return taken

    # ---- removal -----------------------------------------------------------------------------------------------------

    def remove(self, units: Iterable[Unit]) -> list[Entry]:
        """Remove these units wherever they are: quickly if they come first, as those that were granted in order do."""
        gone = {id(unit) for unit in units}
        found: list[Entry] = []
        for version in list(self._queues) if gone else ():
            queue = self._queues[version]
            before = len(found)
            while queue.entries and len(found) < len(gone) and id(queue.entries[0][1]) in gone:
                found.append(queue.entries.popleft())
            if len(found) < len(gone) and any(id(entry[1]) in gone for entry in queue.entries):
                found += [entry for entry in queue.entries if id(entry[1]) in gone]
                queue.entries = deque(entry for entry in queue.entries if id(entry[1]) not in gone)
            queue.count(found[before:], -1)
            if not queue.entries:
                del self._queues[version]
            if len(found) == len(gone):
                break
        self.num_rows -= sum(entry[2] for entry in found)
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
            self._insert(version, (position, unit, unit.num_rows, unit.tokens))
            queue = self._queues[version]
            queue.entries = deque(sorted(queue.entries, key=lambda entry: entry[0]))
