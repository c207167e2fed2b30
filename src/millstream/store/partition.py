"""One partition: its rows and groups, what is ready for each task, and when a row can be freed.

Methods that remove rows return them: the table releases their payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from millstream.errors import StoreError
from millstream.store.base import PartitionStats
from millstream.store.ready import ReadyQueue
from millstream.store.rows import GroupEntry, LeaseEntry, RowEntry, StoreTask, TaskSet, Unit, rows_in

STATES = ("waiting", "ready", "leased", "done")
"""Of a row, for a task. Waiting: for a column or another task."""


class Partition:
    """A run, or an evaluation: rows that are put, claimed and dropped independently of other partitions."""

    def __init__(self, name: str, tasks: TaskSet) -> None:
        self.name = name
        self._tasks = tasks
        self.num_bytes = 0
        self.rows: dict[int, RowEntry] = {}
        self.groups: dict[int, GroupEntry] = {}
        self.ready = {task.name: ReadyQueue(by_group=task.by_group) for task in tasks.all}
        self.num_leased = {task.name: 0 for task in tasks.all}
        self.num_done = {task.name: 0 for task in tasks.all}
        self.by_version: dict[int, int] = {}
        self.uncovered: dict[int, list[RowEntry]] = {}  # rows that all tasks are done with, by their last step
        self.covered = -1
        self.is_finished = False

    def stats(self) -> PartitionStats:
        by_stage = {}
        for name in self._tasks.by_name:
            ready, leased, done = self.ready[name].num_rows, self.num_leased[name], self.num_done[name]
            counts = (len(self.rows) - ready - leased - done, ready, leased, done)
            by_stage[name] = dict(zip(STATES, counts, strict=True))
        return PartitionStats(rows=len(self.rows), groups=len(self.groups), bytes=self.num_bytes, by_stage=by_stage)

    def rows_to_save(self, *, with_held: bool) -> list[RowEntry]:
        """The rows of a snapshot. `with_held`: also those that were acknowledged for a step."""
        return [row for row in self.rows.values() if with_held or not row.steps]

    # ---- rows are added and become ready -----------------------------------------------------------------------------

    def open_groups(self, group_ids: Iterable[int]) -> dict[int, GroupEntry]:
        """The groups with these ids, new ones included. Raises `StoreError` if one is closed; changes nothing yet."""
        if self.is_finished:
            raise StoreError(f"partition {self.name!r} is finished: no row can be added to it")
        groups: dict[int, GroupEntry] = {}
        for group_id in group_ids:
            if group_id in groups:
                continue
            group = groups[group_id] = self.groups.get(group_id) or GroupEntry(group_id, self.name)
            if group.is_closed:
                raise StoreError(f"group {group_id} is closed: no row can be added to it")
        return groups

    def add(self, rows: Sequence[RowEntry]) -> None:
        for row in rows:
            group, version = row.group, row.version
            self.groups[group.id] = group
            self.rows[row.id] = group.rows[row.id] = row
            self.by_version[version] = self.by_version.get(version, 0) + 1

    def close_group(self, group_id: int) -> None:
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = GroupEntry(group_id, self.name)
        group.is_closed = True
        self.offer_group(group)
        self.forget_if_done(group)

    def offer(self, rows: Sequence[RowEntry]) -> None:
        """Queue rows that have changed for the tasks that can have them now. Consecutive rows in the same state are handled
        together."""
        start, num_rows = 0, len(rows)
        if num_rows == 1:
            (row,) = rows
            self._offer_alike(rows, row.present, row.done, row.offered)
            self.offer_group(row.group)
            return
        while start < num_rows:
            first = rows[start]
            present, done, offered = first.present, first.done, first.offered
            end = start + 1
            while end < num_rows and (row := rows[end]).present == present and row.done == done:
                if row.offered != offered:
                    break
                end += 1
            self._offer_alike(rows if end - start == num_rows else rows[start:end], present, done, offered)
            start = end
        if self._tasks.of_groups:
            for group in {row.group.id: row.group for row in rows if row.group.is_closed}.values():
                self.offer_group(group)

    def _offer_alike(self, rows: Sequence[RowEntry], present: int, done: int, offered: int) -> None:
        bits = 0
        for task in self._tasks.all:
            if offered & task.bit or present & task.needs != task.needs or done & task.after != task.after:
                continue
            bits |= task.bit
            if not task.by_group:
                self.ready[task.name].push(rows)
                continue
            for row in rows:
                num_ready = row.group.num_ready
                num_ready[task.bit] = num_ready.get(task.bit, 0) + 1
        if bits:
            for row in rows:
                row.offered |= bits

    def offer_group(self, group: GroupEntry) -> None:
        """Queue a closed group for the tasks that all its rows are ready for."""
        if not group.is_closed:
            return
        for task in self._tasks.of_groups:
            bit = task.bit
            if group.offered & bit or group.done & task.after_groups != task.after_groups:
                continue
            if group.num_ready.get(bit, 0) == len(group.rows):
                group.offered |= bit
                self.ready[task.name].push([group])

    # ---- leases ------------------------------------------------------------------------------------------------------

    def lease(self, task: StoreTask, units: Sequence[Unit]) -> list[RowEntry]:
        """Mark units as leased to a task; their rows."""
        rows = rows_in(units)
        for entry in rows:
            entry.leased |= task.bit
        if task.by_group:
            for unit in units:
                unit.leased |= task.bit
        self.num_leased[task.name] += len(rows)
        return rows

    def end_lease(self, lease: LeaseEntry) -> list[RowEntry]:
        rows, keep = lease.rows, ~lease.task.bit
        self.num_leased[lease.task.name] -= len(rows)
        for row in rows:
            row.leased &= keep
        if lease.task.by_group:
            for unit in lease.units:
                unit.leased &= keep
        return rows

    def give_back(self, lease: LeaseEntry) -> None:
        self.end_lease(lease)
        task = lease.task
        due = [unit for unit in lease.units if self._is_due(task, unit)]
        self.ready[task.name].push_front(due)
        for unit in lease.units if len(due) < len(lease.units) else ():
            if not self._is_due(task, unit):  # a task that it comes after was rewound in the meantime
                self._withdraw(task, rows_in([unit]))
                unit.offered &= ~task.bit

    def acknowledge(self, lease: LeaseEntry, step: int | None) -> list[RowEntry]:
        """The rows that are freed."""
        task, rows = lease.task, self.end_lease(lease)
        self.num_done[task.name] += len(rows)
        for row in rows:
            row.done |= task.bit
        if step is not None:
            for row in rows:
                row.steps = (*row.steps, (task.bit, step))
        if task.by_group:
            for unit in lease.units:
                unit.done |= task.bit
        all_bits = self._tasks.all_bits
        done = [row for row in rows if row.done == all_bits]
        self.offer(rows if not done else [row for row in rows if row.done != all_bits])
        freed = self.free(done)
        for unit in lease.units if task.by_group else ():
            if isinstance(unit, GroupEntry):
                self.offer_group(unit)
                self.forget_if_done(unit)
        return freed

    def drop(self, lease: LeaseEntry) -> list[RowEntry]:
        rows = self.end_lease(lease)
        self.take_out(rows, lease.units)
        for group in lease.units:
            if isinstance(group, GroupEntry):
                self.groups.pop(group.id, None)
        return rows

    # ---- rows are removed --------------------------------------------------------------------------------------------

    def take_out(self, rows: Sequence[RowEntry], units: Sequence[Unit]) -> None:
        """Remove rows that may be ready for tasks, counted in groups, or done with by some tasks."""
        for task in self._tasks.all:
            candidates: Sequence[Unit] = units if task.by_group else rows
            self.ready[task.name].remove(
                [unit for unit in candidates if unit.offered & ~(unit.leased | unit.done) & task.bit]
            )
            self.num_done[task.name] -= sum(1 for row in rows if row.done & task.bit)
        for row in rows:
            for task in self._tasks.of_groups:
                if row.offered & task.bit:
                    row.group.num_ready[task.bit] -= 1
        self.remove(rows)
        gone = {unit.id for unit in units if isinstance(unit, GroupEntry)}
        groups = {row.group.id: row.group for row in rows if row.group.id not in gone}
        for task in self._tasks.of_groups:
            self.ready[task.name].recount(groups.values())
        for group in groups.values():
            self.offer_group(group)

    def free(self, rows: Sequence[RowEntry]) -> list[RowEntry]:
        """Rows that every task is done with: removed and returned, unless they wait for a checkpoint."""
        freed = []
        for row in rows:
            last = row.last_step
            if last is None or last <= self.covered:
                freed.append(row)
            else:
                self.uncovered.setdefault(last, []).append(row)
        for task in self._tasks.all if freed else ():
            self.num_done[task.name] -= len(freed)
        self.remove(freed)
        return freed

    def remove(self, rows: Sequence[RowEntry]) -> None:
        for row in rows:
            version, group = row.version, row.group
            del self.rows[row.id], group.rows[row.id]
            if self.by_version[version] == 1:
                del self.by_version[version]
            else:
                self.by_version[version] -= 1
            if not group.rows:
                self.forget_if_done(group)

    def forget_if_done(self, group: GroupEntry) -> None:
        """Remove a group that has no rows and that no task will be handed any more."""
        wanted = self._tasks.group_bits
        if not group.rows and group.done & wanted == wanted and (group.is_closed or not wanted):
            self.groups.pop(group.id, None)

    def cover(self, step: int) -> list[RowEntry]:
        self.covered = max(self.covered, step)
        steps = [at for at in self.uncovered if at <= self.covered]
        return [row for at in steps for row in self.free(self.uncovered.pop(at))]

    # ---- rewinds -----------------------------------------------------------------------------------------------------

    def rewind(self, task: StoreTask, step: int) -> int:
        """Rows that the task acknowledged for a later step are ready again, as if it had never seen them."""
        rows = [row for row in self.rows.values() if any(bit == task.bit and at > step for bit, at in row.steps)]
        for row in rows:
            row.steps = tuple(one for one in row.steps if one[0] != task.bit)
            row.done &= ~task.bit
            row.offered &= ~task.bit
        self.num_done[task.name] -= len(rows)
        for at in list(self.uncovered):
            self.uncovered[at] = [row for row in self.uncovered[at] if row.done == self._tasks.all_bits]
        for group in [row.group for row in rows] if task.by_group else ():
            group.done &= ~task.bit
            group.offered &= ~task.bit
            group.num_ready[task.bit] = 0
        for other in self._tasks.all:
            if other.after & task.bit:
                self._withdraw(other, rows)
        self.offer(rows)
        return len(rows)

    def _is_due(self, task: StoreTask, unit: Unit) -> bool:
        """Whether the tasks that this one comes after are done with the unit."""
        if not task.after:
            return True
        if isinstance(unit, GroupEntry) and unit.done & task.after_groups != task.after_groups:
            return False
        return all(row.done & task.after == task.after for row in rows_in([unit]))

    def _withdraw(self, task: StoreTask, rows: Sequence[RowEntry]) -> None:
        """Take rows out of a task's queue, where a task that it comes after has to see them again."""
        units: dict[int, Unit] = {}
        for row in rows:
            if row.offered & task.bit and not (row.leased | row.done) & task.bit and not self._is_due(task, row):
                row.offered &= ~task.bit
                unit: Unit = row.group if task.by_group else row
                if isinstance(unit, GroupEntry):
                    unit.num_ready[task.bit] -= 1
                unit.offered &= ~task.bit
                units[unit.id] = unit
        self.ready[task.name].remove(units.values())

    # ---- the whole partition -----------------------------------------------------------------------------------------

    def mark_done(self, acknowledged: Mapping[str, Iterable[int]]) -> None:
        """After a restore. By task: ids of rows, or of groups for a task that reads groups."""
        for name, ids in acknowledged.items():
            task, done = self._tasks.find(name), set(ids)
            for group in self.groups.values():
                if task.by_group and group.id in done:
                    group.done |= task.bit
            for row in self.rows.values():
                if (row.group.id if task.by_group else row.id) in done:
                    row.done |= task.bit

    def rebuild(self) -> list[RowEntry]:
        """Compute queues and counts from the masks of the rows. Returns the rows that are freed."""
        self.uncovered.clear()
        for task in self._tasks.all:
            self.ready[task.name] = ReadyQueue(by_group=task.by_group)
            self.num_leased[task.name] = sum(1 for row in self.rows.values() if row.leased & task.bit)
            self.num_done[task.name] = sum(1 for row in self.rows.values() if row.done & task.bit)
        for group in self.groups.values():
            group.num_ready.clear()
            group.offered = group.done | group.leased
        for row in self.rows.values():
            row.offered = row.done | row.leased
        self.offer(list(self.rows.values()))
        for group in list(self.groups.values()):
            for task in self._tasks.of_groups:
                if (group.done | group.leased) & task.bit:
                    group.num_ready[task.bit] = len(group.rows)
            if not group.rows:
                self.offer_group(group)
                self.forget_if_done(group)
        return self.free([row for row in self.rows.values() if row.done == self._tasks.all_bits])

    def acknowledged(self) -> dict[str, list[int]]:
        """By task: the ids of the rows, or of the groups for a task that reads groups, that it is done with."""
        return {
            task.name: [
                entry.id for entry in (self.groups if task.by_group else self.rows).values() if entry.done & task.bit
            ]
            for task in self._tasks.all
        }

    def may_still_come(self, task: StoreTask) -> bool:
        """After `finish`: whether some row or group can still be handed to the task."""
        return self._has_more(task, 0, lambda group: group.done | group.leased)

    def may_become_ready(self, task: StoreTask) -> bool:
        """After `finish`: whether some row or group that is not ready now can still be handed to the task."""
        return self._has_more(task, self.ready[task.name].num_rows, lambda group: group.offered)

    def _has_more(self, task: StoreTask, num_ready: int, seen: Callable[[GroupEntry], int]) -> bool:
        """Whether there are other rows than these, those on lease and those done, or a group that was closed without a row and
        that the task has not seen."""
        num_over = self.num_leased[task.name] + self.num_done[task.name] + num_ready
        return len(self.rows) > num_over or (
            task.by_group
            and any(group.is_closed and not group.rows and not seen(group) & task.bit for group in self.groups.values())
        )
