"""The store of one process: hands out references, copies nothing, polls nothing.

Single-threaded: it lives on the event loop. The cost of an operation depends on the rows it touches, not on those resident.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping

from millstream.errors import StoreError, StreamEnded
from millstream.store import Choose, Columns, Lease, Reads, Row, Saved, StoreStats


class _Group:
    """What the store knows of one group."""

    __slots__ = ("acknowledged", "is_closed", "leased", "rows")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.is_closed = False
        self.leased: set[str] = set()
        self.acknowledged: set[str] = set()


def _oldest(ready: Iterable[int]) -> int | None:
    return next(iter(ready), None)


class MemoryStore:
    """See `millstream.store.Store` for the promises."""

    def __init__(self, tasks: Mapping[str, Reads], *, capacity_rows: int) -> None:
        self._tasks = dict(tasks)
        self._capacity = capacity_rows
        self._groups: dict[int, _Group] = {}
        self._rows: dict[int, Row] = {}
        self._ready: dict[str, dict[int, None]] = {task: {} for task in tasks}
        self._leases: dict[int, Lease] = {}
        self._claims: dict[str, deque[tuple[Choose, asyncio.Future[int]]]] = {task: deque() for task in tasks}
        self._puts: deque[asyncio.Future[None]] = deque()
        self._is_finished = False
        self._next_row = 0
        self._next_lease = 0

    # ---- producers ---------------------------------------------------------------------------------------------------

    async def put(self, group_id: int, columns: Columns) -> int:
        while len(self._rows) >= self._capacity:
            await self._wait_for_room()
        group = self._groups.setdefault(group_id, _Group())
        if group.is_closed:
            raise StoreError(f"group {group_id} is closed: no row can be added to it")
        row = Row(row_id=self._next_row, group_id=group_id, columns=dict(columns))
        self._next_row += 1
        self._rows[row.row_id] = row
        group.rows.append(row)
        return row.row_id

    async def _wait_for_room(self) -> None:
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._puts.append(room)
        try:
            await room
        finally:
            if room in self._puts:
                self._puts.remove(room)

    def write(self, row_id: int, columns: Columns) -> None:
        row = self._rows.get(row_id)
        if row is None:
            raise StoreError(f"row {row_id} is not in the store (freed, dropped, or never put)")
        if twice := row.columns.keys() & columns.keys():
            raise StoreError(f"row {row_id} has {', '.join(sorted(twice))} already: a cell is written once")
        row.columns.update(columns)
        self._refresh(row.group_id)

    def close_group(self, group_id: int) -> None:
        group = self._groups.setdefault(group_id, _Group())
        group.is_closed = True
        self._refresh(group_id)

    # ---- consumers ---------------------------------------------------------------------------------------------------

    async def claim(self, task: str, choose: Choose | None = None, *, expires_s: float | None = None) -> Lease:
        if task not in self._tasks:
            raise StoreError(f"no task {task!r}: the store was built for {', '.join(self._tasks)}")
        chosen: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._claims[task].append((choose or _oldest, chosen))
        self._serve(task)
        try:
            group_id = await chosen
        except asyncio.CancelledError:
            self._withdraw(task, chosen)
            raise
        return self._lease(task, group_id, expires_s)

    def _withdraw(self, task: str, chosen: asyncio.Future[int]) -> None:
        """A cancelled claim: leave the queue, and if a group had been promised, let another have it."""
        self._claims[task] = deque(claim for claim in self._claims[task] if claim[1] is not chosen)
        if chosen.done() and not chosen.cancelled():
            self._groups[chosen.result()].leased.discard(task)
            self._refresh(chosen.result())

    def _lease(self, task: str, group_id: int, expires_s: float | None) -> Lease:
        lease = Lease(lease_id=self._next_lease, task=task, group_id=group_id, rows=tuple(self._groups[group_id].rows))
        self._next_lease += 1
        self._leases[lease.lease_id] = lease
        if expires_s is not None:
            asyncio.get_running_loop().call_later(expires_s, self._expire, lease)
        return lease

    def _expire(self, lease: Lease) -> None:
        if lease.lease_id in self._leases:
            self.give_back(lease)

    def acknowledge(self, lease: Lease) -> None:
        group = self._end(lease)
        group.acknowledged.add(lease.task)
        if len(group.acknowledged) == len(self._tasks):
            self._forget(lease.group_id, self._groups.pop(lease.group_id))
        else:
            self._refresh(lease.group_id)
        if self._is_finished:
            self.wake()

    def drop(self, lease: Lease) -> None:
        group = self._end(lease)
        if group.leased:
            raise StoreError(f"group {lease.group_id} is on lease to {', '.join(sorted(group.leased))}, too")
        self._forget(lease.group_id, self._groups.pop(lease.group_id))

    def give_back(self, lease: Lease) -> None:
        self._end(lease)
        self._refresh(lease.group_id)

    def _end(self, lease: Lease) -> _Group:
        if self._leases.pop(lease.lease_id, None) is None:
            raise StoreError(f"the lease on group {lease.group_id} has ended (acknowledged, given back, or expired)")
        group = self._groups[lease.group_id]
        group.leased.discard(lease.task)
        return group

    # ---- who gets what -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        for task in self._tasks:
            self._serve(task)

    def finish(self) -> None:
        self._is_finished = True
        self.wake()

    def _refresh(self, group_id: int) -> None:
        """Work out for which tasks this group is ready now."""
        group = self._groups[group_id]
        for task, reads in self._tasks.items():
            is_ready = (
                group.is_closed
                and task not in group.leased
                and task not in group.acknowledged
                and group.acknowledged.issuperset(reads.after)
                and all(column in row.columns for row in group.rows for column in reads.columns)
            )
            if is_ready:
                self._ready[task].setdefault(group_id)
                self._serve(task)
            else:
                self._ready[task].pop(group_id, None)

    def _serve(self, task: str) -> None:
        """Hand ready groups to the waiting claims, the longest waiting first."""
        ready, waiting = self._ready[task], deque[tuple[Choose, asyncio.Future[int]]]()
        while ready and self._claims[task]:
            choose, chosen = self._claims[task].popleft()
            if chosen.done():
                continue
            group_id = choose(tuple(ready))
            if group_id is None:
                waiting.append((choose, chosen))
                continue
            del ready[group_id]
            self._groups[group_id].leased.add(task)
            chosen.set_result(group_id)
        waiting.extend(self._claims[task])
        self._claims[task] = waiting
        if self._is_finished and not self._may_still_come(task):
            self._end_claims(task)

    def _may_still_come(self, task: str) -> bool:
        return any(task not in group.acknowledged | group.leased for group in self._groups.values())

    def _end_claims(self, task: str) -> None:
        claims, self._claims[task] = self._claims[task], deque()
        for _, chosen in claims:
            if not chosen.done():
                chosen.set_exception(StreamEnded(f"{task}: the stream has ended"))

    def _forget(self, group_id: int, group: _Group) -> None:
        for row in group.rows:
            del self._rows[row.row_id]
        for ready in self._ready.values():
            ready.pop(group_id, None)
        room = self._capacity - len(self._rows)
        while self._puts and room > 0:
            room -= 1
            waiting = self._puts.popleft()
            if not waiting.done():
                waiting.set_result(None)

    # ---- state -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Saved:
        return Saved(
            rows=tuple(
                Row(row_id=row.row_id, group_id=row.group_id, columns=dict(row.columns)) for row in self._rows.values()
            ),
            is_closed={group_id: group.is_closed for group_id, group in self._groups.items()},
            acknowledged={
                task: tuple(g for g, group in self._groups.items() if task in group.acknowledged)
                for task in self._tasks
            },
        )

    def restore(self, saved: Saved) -> None:
        if self._groups:
            raise StoreError("a snapshot can only be restored into an empty store")
        self._groups = {group_id: _Group() for group_id in saved.is_closed}
        for row in saved.rows:
            copy = Row(row_id=row.row_id, group_id=row.group_id, columns=dict(row.columns))
            self._rows[row.row_id] = copy
            self._groups[row.group_id].rows.append(copy)
            self._next_row = max(self._next_row, row.row_id + 1)
        for task, groups in saved.acknowledged.items():
            for group_id in groups:
                self._groups[group_id].acknowledged.add(task)
        for group_id, is_closed in saved.is_closed.items():
            self._groups[group_id].is_closed = is_closed
            self._refresh(group_id)

    def stats(self) -> StoreStats:
        return StoreStats(
            rows=len(self._rows),
            groups=len(self._groups),
            leases=len(self._leases),
            waiting_producers=len(self._puts),
            waiting_consumers={task: len(claims) for task, claims in self._claims.items()},
        )
