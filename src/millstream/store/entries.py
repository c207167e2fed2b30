"""What the store knows of a row, a group, a block of payload, and which of them are ready for a task.

Everything here is metadata: payloads are opaque. Costs depend on what is touched, never on how much is resident.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, ClassVar

from msgspec import Struct

from millstream.store import Want

NO_VERSION = -1


class Block:
    """What one put or write brought: some columns of some rows, held together until none of these rows is left."""

    __slots__ = ("columns", "id", "nbytes", "num_live", "payload")

    def __init__(self, block_id: int, columns: Iterable[str], payload: Any, nbytes: int, num_rows: int) -> None:
        self.id = block_id
        self.columns = frozenset(columns)
        self.payload = payload
        self.nbytes = nbytes
        self.num_live = num_rows


class RowEntry:
    """The masks have one bit a column (`present`) or a task."""

    num_rows: ClassVar[int] = 1
    __slots__ = ("done", "group", "id", "leased", "offered", "parts", "present", "since", "steps", "tokens", "version")

    def __init__(
        self, row_id: int, group: GroupEntry, version: int, tokens: int, since: float, present: int, part: Any
    ) -> None:
        self.id = row_id
        self.group = group
        self.version = version
        self.tokens = tokens
        self.since = since
        self.present = present
        self.offered = 0
        self.leased = 0
        self.done = 0
        self.parts: tuple[tuple[Block, int], ...] = (part,)
        self.steps: tuple[tuple[int, int], ...] = ()
        """The bit of a task, and the step that it acknowledged this row for."""

    @property
    def last_step(self) -> int | None:
        """What a checkpoint has to cover before the row is freed."""
        return max(step for _, step in self.steps) if self.steps else None


class GroupEntry:
    __slots__ = ("done", "id", "is_closed", "leased", "num_ready", "offered", "rows")

    def __init__(self, group_id: int) -> None:
        self.id = group_id
        self.is_closed = False
        self.offered = 0
        self.leased = 0
        self.done = 0
        self.rows: dict[int, RowEntry] = {}
        self.num_ready: dict[int, int] = {}
        """By the bit of a task that reads groups: rows that are ready for it."""

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows.values())

    @property
    def version(self) -> int:
        """The oldest of its rows'."""
        return min((row.version for row in self.rows.values()), default=NO_VERSION)


Unit = RowEntry | GroupEntry
"""What a task is handed: rows, or whole groups."""


class Tally(Struct):
    units: int = 0
    rows: int = 0
    tokens: int = 0

    def add(self, units: int, rows: int, tokens: int) -> None:
        self.units += units
        self.rows += rows
        self.tokens += tokens


Entry = tuple[int, Unit, int, int]
"""Its turn, the unit, its rows and its tokens when it came."""


class Ready:
    """What is ready for one task, the longest ready first; by version, so that a window of versions is found at once."""

    def __init__(self, *, by_group: bool) -> None:
        self.by_group = by_group
        self._queues: dict[int, deque[Entry]] = {}
        self._tallies: dict[int, Tally] = {}
        self._back = 0
        self._front = -1
        self.num_rows = 0
        self.tokens_of_rank: dict[int, int] = {}
        """What each rank has been given by the policy `balanced`."""

    @property
    def stamp(self) -> int:
        """Another one whenever something has become ready."""
        return self._back - self._front

    def push(self, units: Iterable[Unit]) -> None:
        for version, alike in groupby(units, attrgetter("version")):
            entries = [(turn, unit, unit.num_rows, unit.tokens) for turn, unit in enumerate(alike, self._back)]
            self._queue(version).extend(entries)
            self._back += len(entries)
            self._count(version, entries, 1)

    def push_front(self, units: Sequence[Unit]) -> None:
        """Before all others, in this order."""
        for unit in reversed(units):
            entry = (self._front, unit, unit.num_rows, unit.tokens)
            self._queue(unit.version).appendleft(entry)
            self._front -= 1
            self._count(unit.version, [entry], 1)

    def _queue(self, version: int) -> deque[Entry]:
        if version not in self._queues:
            self._queues[version], self._tallies[version] = deque(), Tally()
        return self._queues[version]

    def _count(self, version: int, entries: Sequence[Entry], sign: int) -> None:
        rows, tokens = sum(entry[2] for entry in entries), sum(entry[3] for entry in entries)
        self._tallies[version].add(sign * len(entries), sign * rows, sign * tokens)
        self.num_rows += sign * rows

    def total(self, window: tuple[int, int] | None) -> Tally:
        total = Tally()
        for version in self._within(window):
            tally = self._tallies[version]
            total = Tally(total.units + tally.units, total.rows + tally.rows, total.tokens + tally.tokens)
        return total

    def _within(self, window: tuple[int, int] | None) -> list[int]:
        return sorted(v for v in self._queues if window is None or window[0] <= v <= window[1])

    def has_enough(self, want: Want) -> bool:
        """Whether some limit of what is wanted can be reached."""
        total = self.total(want.versions)
        num_groups = total.units if self.by_group else 0
        limits = ((want.rows, total.rows), (want.tokens, total.tokens), (want.groups, num_groups))
        return any(limit is not None and found >= limit for limit, found in limits)

    def in_order(self, window: tuple[int, int] | None, *, by_version: bool = False) -> Iterator[Unit]:
        """Everything that is ready, by turn or by version first. Nothing may be taken meanwhile."""
        queues = [self._queues[version] for version in self._within(window)]
        if by_version or len(queues) < 2:
            return (entry[1] for queue in queues for entry in queue)
        return (entry[1] for entry in sorted((e for queue in queues for e in queue), key=lambda entry: entry[0]))

    def pop(self, want: Want, *, by_version: bool) -> list[Unit]:
        """The first ones, up to the first limit; at least one."""
        taken: list[Unit] = []
        rows, tokens = 0, 0
        is_full = False
        most_rows = want.rows if want.rows is not None else -1
        most_tokens = want.tokens if want.tokens is not None else -1
        most_units = (want.groups if self.by_group else None) or -1
        queues = {version: self._queues[version] for version in self._within(want.versions)}
        while queues and not is_full:
            version = next(iter(queues)) if by_version else min(queues, key=lambda v: queues[v][0][0])
            queue, before, had = queues.pop(version), (rows, tokens), len(taken)
            until = None if by_version or not queues else min(other[0][0] for other in queues.values())
            while queue and (until is None or queue[0][0] < until):
                _, unit, unit_rows, unit_tokens = queue[0]
                is_over = 0 <= most_rows < rows + unit_rows or 0 <= most_tokens < tokens + unit_tokens
                if taken and (is_over or len(taken) == most_units):
                    is_full = True
                    break
                queue.popleft()
                taken.append(unit)
                rows, tokens = rows + unit_rows, tokens + unit_tokens
            self._tallies[version].add(had - len(taken), before[0] - rows, before[1] - tokens)
            if queue:
                queues[version] = queue
            else:
                self._forget(version)
        self.num_rows -= rows
        return taken

    def _forget(self, version: int) -> None:
        """Nothing of it is left: costs shall not grow with the versions that have been."""
        del self._queues[version], self._tallies[version]

    def remove(self, units: Iterable[Unit]) -> list[Entry]:
        """Take these out, wherever they stand: at once if they come first, as those that were handed out in turn do."""
        gone = {id(unit) for unit in units}
        found: list[Entry] = []
        for version in list(self._queues) if gone else ():
            queue = self._queues[version]
            while queue and len(found) < len(gone) and id(queue[0][1]) in gone:
                found.append(queue.popleft())
                self._count(version, found[-1:], -1)
            if len(found) < len(gone) and any(id(entry[1]) in gone for entry in queue):
                out = [entry for entry in queue if id(entry[1]) in gone]
                self._count(version, out, -1)
                found += out
                queue = self._queues[version] = deque(entry for entry in queue if id(entry[1]) not in gone)
            if not queue:
                self._forget(version)
            if len(found) == len(gone):
                break
        return found

    def reorder(self, ids: Sequence[int]) -> None:
        """Everybody's turn is as these say."""
        place = {unit_id: place for place, unit_id in enumerate(ids)}
        units = sorted(self.in_order(None), key=lambda unit: place.get(unit.id, len(place)))
        self.remove(units)
        self.push(units)

    def update(self, units: Iterable[Unit]) -> None:
        """Groups have lost rows: they keep their turn, and are counted anew."""
        for turn, unit, _, _ in self.remove(units):
            entry = (turn, unit, unit.num_rows, unit.tokens)
            entries = [*self._queue(unit.version), entry]
            self._queues[unit.version] = deque(sorted(entries, key=lambda one: one[0]))
            self._count(unit.version, [entry], 1)
