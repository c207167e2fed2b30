"""Clients that choose a group themselves: each receives the ready groups whenever they have changed."""

from __future__ import annotations

import asyncio
import time

import msgspec

from millstream.clock import Clock
from millstream.store.base import StoreStats, StoreWaiter
from millstream.store.table import RowTable
from millstream.store.wire import ReadyGroups, ReplyBody, WatchReady

MAX_DROPPED = 1000
"""Dropped partitions that are remembered for clients that choose there."""


class ReadyWatch:
    """`wait` answers one client; `notify` is called after every change of the table."""

    def __init__(self, table: RowTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._changes: dict[tuple[str, str], tuple[int, asyncio.Event]] = {}
        self._num_changes = time.time_ns()  # higher than any from before a restart
        self._dropped: dict[str, int] = {}  # partition -> the change with which it was dropped
        self._since: dict[tuple[str, str], float] = {}  # client and task -> waiting since

    async def wait(self, client: str, body: WatchReady) -> ReplyBody:
        """The groups that are ready, as soon as they differ from what the client saw."""
        key = (body.partition, body.task)
        task, since, seen = self._table.tasks.find(body.task), self._clock.now(), body.seen
        while True:
            change, event = self._changes.setdefault(key, (self._num_changes, asyncio.Event()))
            part = self._table.partition(body.partition)
            is_over = part.is_finished and not part.may_still_come(task)
            if 0 < seen < self._dropped.get(body.partition, 0):
                return ReadyGroups(change, [], True)
            if change != seen or is_over:
                return ReadyGroups(change, [unit.id for unit in part.ready[body.task].in_order()], is_over)
            self._since[client, body.task] = since
            try:
                await event.wait()
            finally:
                self._since.pop((client, body.task), None)

    def notify(self) -> None:
        self._num_changes += 1
        for key, (_, event) in list(self._changes.items()):
            self._changes[key] = (self._num_changes, asyncio.Event())
            event.set()

    def on_dropped(self, partition: str) -> None:
        self._dropped[partition] = self._num_changes + 1
        if len(self._dropped) > MAX_DROPPED:
            del self._dropped[next(iter(self._dropped))]

    def add_to(self, stats: StoreStats) -> StoreStats:
        count, now = dict(stats.waiting_consumers), self._clock.now()
        for _, task in self._since:
            count[task] += 1
        choosing = [
            StoreWaiter(who=who, what=f"a choice for {task}", seconds=now - since)
            for (who, task), since in self._since.items()
        ]
        waiting = sorted([*stats.waiting, *choosing], key=lambda one: -one.seconds)
        return msgspec.structs.replace(stats, waiting_consumers=count, waiting=waiting)
