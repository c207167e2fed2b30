"""What the store means, as plain dictionaries: written from its promises, not from its code. Slow, and easy to believe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.store import Lease, Reads, Saved, StoreStats, Want

TASKS = {
    "score": Reads(("value",), by_group=False),
    "train": Reads(("value", "score"), after=("score",)),
    "watch": Reads(("value",)),
    "audit": Reads(("value",), after=("watch",), by_group=False),
}
GROUP_TASKS = {name for name, reads in TASKS.items() if reads.by_group}


class Refused(Exception):
    """The store is to raise `StoreError` here."""


@dataclass
class Row:
    group: int
    version: int
    tokens: int
    cells: dict[str, Any]
    done: set[str] = field(default_factory=set)
    leased: set[str] = field(default_factory=set)
    steps: dict[str, int] = field(default_factory=dict)


@dataclass
class Group:
    is_closed: bool = False
    done: set[str] = field(default_factory=set)
    leased: set[str] = field(default_factory=set)


@dataclass
class Held:
    """A lease: of rows, or of groups."""

    partition: str
    task: str
    units: list[int]
    has_order: bool
    """A lease does not say where its empty groups stood among the others."""


class Part:
    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.groups: dict[int, Group] = {}
        self.covered = -1
        self.is_finished = False
        self.since: dict[str, dict[int, tuple[int, int]]] = {task: {} for task in TASKS}
        """By task, of what is ready: since when, in operations; below zero for what was given back."""

    def rows_of(self, group_id: int) -> list[int]:
        return [row_id for row_id, row in self.rows.items() if row.group == group_id]

    def unit_rows(self, task: str, unit: int) -> list[int]:
        return self.rows_of(unit) if task in GROUP_TASKS else [unit]

    def version(self, task: str, unit: int) -> int:
        return min((self.rows[row_id].version for row_id in self.unit_rows(task, unit)), default=-1)

    def tokens(self, task: str, unit: int) -> int:
        return sum(self.rows[row_id].tokens for row_id in self.unit_rows(task, unit))

    def row_is_due(self, task: str, row: Row) -> bool:
        return set(TASKS[task].columns) <= row.cells.keys() and set(TASKS[task].after) <= row.done

    def is_ready(self, task: str, unit: int) -> bool:
        if task not in GROUP_TASKS:
            row = self.rows[unit]
            return self.row_is_due(task, row) and task not in row.done | row.leased
        group = self.groups[unit]
        is_due = set(TASKS[task].after) & GROUP_TASKS <= group.done
        rows = [self.rows[row_id] for row_id in self.rows_of(unit)]
        is_free = task not in group.done | group.leased
        return group.is_closed and is_due and is_free and all(self.row_is_due(task, row) for row in rows)

    def units(self, task: str) -> Iterable[int]:
        return self.groups if task in GROUP_TASKS else self.rows

    def may_still_come(self, task: str) -> bool:
        if any(task not in row.done | row.leased for row in self.rows.values()):
            return True
        return task in GROUP_TASKS and any(
            group.is_closed and not self.rows_of(group_id) and task not in group.done | group.leased
            for group_id, group in self.groups.items()
        )

    def may_become_ready(self, task: str) -> bool:
        ready = {row_id for unit in self.since[task] for row_id in self.unit_rows(task, unit)}
        if any(task not in row.done | row.leased for row_id, row in self.rows.items() if row_id not in ready):
            return True
        return task in GROUP_TASKS and any(
            group.is_closed
            and not self.rows_of(group_id)
            and task not in group.done | group.leased
            and group_id not in self.since[task]
            for group_id, group in self.groups.items()
        )


class Model:
    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self.leases: dict[int, Held] = {}
        self.given: set[int] = set()
        """Every id of a row that there ever was."""
        self.now = 0
        self.num_given_back = 0
        self.put_rows = self.claimed_rows = self.freed_rows = 0

    def part(self, name: str) -> Part:
        return self.parts.setdefault(name, Part())

    def where(self, row_id: int) -> Part | None:
        return next((part for part in self.parts.values() if row_id in part.rows), None)

    def settle(self) -> None:
        """After every operation: what has become ready is so since now, and what nobody needs is gone."""
        self.now += 1
        for part in self.parts.values():
            for row_id, row in list(part.rows.items()):
                is_covered = all(step <= part.covered for step in row.steps.values())
                if row.done == TASKS.keys() and is_covered:
                    del part.rows[row_id]
                    self.freed_rows += 1
            for group_id, group in list(part.groups.items()):
                if group.is_closed and group.done == GROUP_TASKS and not part.rows_of(group_id):
                    del part.groups[group_id]
            for task, since in part.since.items():
                ready = [unit for unit in part.units(task) if part.is_ready(task, unit)]
                part.since[task] = {unit: since.get(unit, (self.now, 0)) for unit in ready}

    # ---- operations: each raises before it changes anything ----------------------------------------------------------

    def check_put(self, partition: str, group_ids: Sequence[int]) -> None:
        part = self.part(partition)
        if part.is_finished or any(part.groups.get(group_id, Group()).is_closed for group_id in group_ids):
            raise Refused

    def put(self, partition: str, ids: Sequence[int], rows: Sequence[Row]) -> None:
        part = self.part(partition)
        assert not self.given & set(ids) and len(set(ids)) == len(ids), "an id was given twice"
        self.given |= set(ids)
        for row_id, row in zip(ids, rows, strict=True):
            part.rows[row_id] = row
            part.groups.setdefault(row.group, Group())
        self.put_rows += len(ids)

    def write(self, row_ids: Sequence[int], name: str, cells: Sequence[Any], *, overwrite: bool) -> None:
        found = [(self.where(row_id), row_id) for row_id in row_ids]
        if any(part is None for part, _ in found) or len(set(row_ids)) != len(row_ids):
            raise Refused
        rows = [part.rows[row_id] for part, row_id in found if part is not None]
        if not overwrite and any(name in row.cells for row in rows):
            raise Refused
        for row, cell in zip(rows, cells, strict=True):
            row.cells = {**row.cells, name: cell}

    def close(self, partition: str, group_ids: Sequence[int]) -> None:
        for group_id in group_ids:
            self.part(partition).groups.setdefault(group_id, Group()).is_closed = True

    def candidates(self, partition: str, task: str, want: Want) -> list[int]:
        part = self.part(partition)
        low, high = want.versions or (-(10**9), 10**9)
        return [unit for unit in part.since[task] if low <= part.version(task, unit) <= high]

    def amounts(self, part: Part, task: str, units: Sequence[int], want: Want) -> list[tuple[int, int]]:
        """What these are, and the limit, for each limit there is."""
        rows = sum(len(part.unit_rows(task, unit)) for unit in units)
        tokens = sum(part.tokens(task, unit) for unit in units)
        pairs = [(rows, want.rows), (tokens, want.tokens)]
        if task in GROUP_TASKS:
            pairs.append((len(units), want.groups))
        return [(found, limit) for found, limit in pairs if limit is not None]

    def expects(self, partition: str, task: str, want: Want) -> str:
        """What a claim is to get: rows, a timeout, or the end."""
        part, ready = self.part(partition), self.candidates(partition, task, want)
        has_enough = any(found >= limit for found, limit in self.amounts(part, task, ready, want))
        is_last = part.is_finished and not part.may_become_ready(task)
        if has_enough or (ready and (want.patience_s == 0 or is_last)):
            return "rows"
        return "end" if part.is_finished and not part.may_still_come(task) else "timeout"

    def claim(self, partition: str, task: str, want: Want, lease: Lease) -> None:
        part, ready = self.part(partition), self.candidates(partition, task, want)
        taken = self._units_of(part, task, lease, want)
        assert taken and set(taken) <= set(ready)
        key = {unit: self._turn(part, task, unit, want) for unit in ready}
        assert [key[unit] for unit in taken] == sorted(key[unit] for unit in taken)
        left = [unit for unit in ready if unit not in taken]
        if left:
            first = min(key[unit] for unit in left)
            assert max(key[unit] for unit in taken) <= first, "somebody came before"
            nexts = [[*taken, unit] for unit in left if key[unit] == first]
            assert any(self._is_over(part, task, units, want) for units in nexts), "more would have fitted"
        assert len(taken) == 1 or not self._is_over(part, task, taken, want)
        for unit in taken:
            for entry in self._entries(part, task, unit):
                entry.leased.add(task)
        self.leases[lease.lease_id] = Held(partition, task, taken, not lease.empty_groups)
        self.claimed_rows += len(lease.row_ids)

    def _turn(self, part: Part, task: str, unit: int, want: Want) -> tuple[int, ...]:
        turn = part.since[task][unit]
        return (part.version(task, unit), *turn) if want.policy == "oldest_version" else turn

    def _is_over(self, part: Part, task: str, units: Sequence[int], want: Want) -> bool:
        return any(found > limit for found, limit in self.amounts(part, task, units, want))

    def _units_of(self, part: Part, task: str, lease: Lease, want: Want) -> list[int]:
        for row_id, group_id, version in zip(lease.row_ids, lease.group_ids, lease.versions, strict=True):
            assert (part.rows[row_id].group, part.rows[row_id].version) == (group_id, version)
        rows = [part.rows[row_id] for row_id in lease.row_ids]
        shared = set.intersection(*(set(row.cells) for row in rows)) if rows else set()
        assert lease.columns == {name: [row.cells[name] for row in rows] for name in shared}
        if task not in GROUP_TASKS:
            return list(lease.row_ids)
        groups = list(dict.fromkeys(lease.group_ids))
        assert lease.row_ids == [row_id for group_id in groups for row_id in part.rows_of(group_id)], (
            "a group was split"
        )
        assert not any(part.rows_of(group_id) for group_id in lease.empty_groups)
        if not lease.empty_groups:
            return groups
        mixed = [*groups, *lease.empty_groups]
        return sorted(mixed, key=lambda unit: self._turn(part, task, unit, want))

    def _entries(self, part: Part, task: str, unit: int) -> list[Any]:
        rows: list[Any] = [part.rows[row_id] for row_id in part.unit_rows(task, unit)]
        return [*rows, part.groups[unit]] if task in GROUP_TASKS else rows

    def _end(self, lease_id: int) -> tuple[Held, Part]:
        if lease_id not in self.leases:
            raise Refused
        held = self.leases.pop(lease_id)
        part = self.parts[held.partition]
        for unit in held.units:
            for entry in self._entries(part, held.task, unit):
                entry.leased.discard(held.task)
        return held, part

    def acknowledge(self, lease_id: int, step: int | None) -> None:
        held, part = self._end(lease_id)
        for unit in held.units:
            for entry in self._entries(part, held.task, unit):
                entry.done.add(held.task)
                if step is not None and isinstance(entry, Row):
                    entry.steps[held.task] = step

    def give_back(self, lease_id: int) -> None:
        held, part = self._end(lease_id)
        self.num_given_back += 1
        for place, unit in enumerate(held.units):
            if part.is_ready(held.task, unit):
                part.since[held.task][unit] = (-self.num_given_back, place if held.has_order else 0)

    def drop(self, lease_id: int) -> None:
        if lease_id not in self.leases:
            raise Refused
        held = self.leases[lease_id]
        part = self.parts[held.partition]
        entries = [entry for unit in held.units for entry in self._entries(part, held.task, unit)]
        if any(entry.leased - {held.task} for entry in entries):
            raise Refused
        self._end(lease_id)
        for unit in held.units:
            for row_id in part.unit_rows(held.task, unit):
                del part.rows[row_id]
                self.freed_rows += 1
            if held.task in GROUP_TASKS:
                del part.groups[unit]

    def cover(self, partition: str, step: int) -> None:
        part = self.part(partition)
        part.covered = max(part.covered, step)

    def rewind(self, partition: str, task: str, step: int) -> int:
        part, count = self.part(partition), 0
        for row in part.rows.values():
            if row.steps.get(task, step) > step:
                del row.steps[task]
                row.done.discard(task)
                count += 1
                if task in GROUP_TASKS:
                    part.groups[row.group].done.discard(task)
        return count

    def drop_partition(self, partition: str) -> int:
        part = self.parts.pop(partition, Part())
        self.leases = {number: held for number, held in self.leases.items() if held.partition != partition}
        self.freed_rows += len(part.rows)
        return len(part.rows)

    def forget_leases(self, partition: str) -> None:
        """A snapshot was restored: nothing is on lease, nothing covered, nothing finished, all ready since now."""
        part = self.part(partition)
        part.covered, part.is_finished = -1, False
        for entry in (*part.rows.values(), *part.groups.values()):
            entry.leased.clear()
        part.since = {task: {} for task in TASKS}
        self.leases = {number: held for number, held in self.leases.items() if held.partition != partition}

    # ---- what it is to say -------------------------------------------------------------------------------------------

    def check_stats(self, stats: StoreStats, base: tuple[int, int, int]) -> None:
        rows = [row for part in self.parts.values() for row in part.rows.values()]
        assert stats.rows == len(rows)
        assert stats.groups == sum(len(part.groups) for part in self.parts.values())
        assert stats.leases == len(self.leases)
        assert (stats.bytes > 0) == bool(rows)
        for name, part in self.parts.items():
            found = stats.by_partition.get(name)
            counts = (0, 0) if found is None else (found.rows, found.groups)
            assert counts == (len(part.rows), len(part.groups))
        assert stats.by_version == {v: sum(row.version == v for row in rows) for v in {row.version for row in rows}}
        for task, stage in stats.by_stage.items():
            ready = sum(len(part.unit_rows(task, unit)) for part in self.parts.values() for unit in part.since[task])
            leased, done = sum(task in row.leased for row in rows), sum(task in row.done for row in rows)
            waiting = len(rows) - ready - leased - done
            assert stage == {"waiting": waiting, "ready": ready, "leased": leased, "done": done}, task
        totals = (stats.rows_put - base[0], stats.rows_claimed - base[1], stats.rows_freed - base[2])
        assert totals == (self.put_rows, self.claimed_rows, self.freed_rows)

    def check_saved(self, partition: str, saved: Saved) -> None:
        part = self.part(partition)
        assert {row.row_id: (row.group_id, row.columns) for row in saved.rows} == {
            row_id: (row.group, row.cells) for row_id, row in part.rows.items()
        }
        assert saved.is_closed == {group_id: group.is_closed for group_id, group in part.groups.items()}
        assert saved.tokens == {row_id: row.tokens for row_id, row in part.rows.items()}
        assert saved.versions == {row_id: row.version for row_id, row in part.rows.items() if row.version >= 0}
        assert saved.steps == {row_id: row.steps for row_id, row in part.rows.items() if row.steps}
        for task, done in saved.acknowledged.items():
            entries: dict[int, Any] = dict(part.groups if task in GROUP_TASKS else part.rows)
            assert set(done) == {unit for unit, entry in entries.items() if task in entry.done}
