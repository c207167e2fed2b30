"""The store's wait queues: FIFO per task, no polling.

A put waits until there is room. A claim waits until what it wants is ready. A claim for much is not starved by later claims for
little: plain claims of a task are served strictly in order. A claim with a `choose`, a window of versions or a user's policy
waits separately, and other claims may overtake it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from millstream.clock import Clock
from millstream.errors import StoreError, StoreTimeout, StreamEnded
from millstream.store.base import Choose, StoreWaiter, Want
from millstream.store.policies import BUILT_IN_POLICIES
from millstream.store.rows import LeaseEntry, StoreTask
from millstream.store.table import RowTable
from millstream.store.wire import ReadyGroups, ReplyBody, WatchReady

T = TypeVar("T")
MAX_DROPPED = 1000
"""Dropped partitions that are remembered for clients that choose there."""


class WaitingClaim(Struct, eq=False):
    task: StoreTask
    want: Want
    choose: Choose | None
    partition: str
    holder: str
    number: int
    """The holder's own number for this claim."""
    since: float
    future: asyncio.Future[LeaseEntry]
    is_impatient: bool

    @property
    def is_plain(self) -> bool:
        return self.choose is None and self.want.versions is None and self.want.policy in BUILT_IN_POLICIES

    def describe(self) -> str:
        want = self.want
        sizes = {"rows": want.rows, "tokens": want.tokens, "groups": want.groups}
        limits = " or ".join(f"{count} {name}" for name, count in sizes.items() if count is not None)
        return f"{limits} for {self.task.name}" + (f" of versions {want.versions}" if want.versions else "")


class TaskQueue(Struct, eq=False):
    """The claims that wait for one task of one partition, the longest waiting first."""

    partition: str
    task: StoreTask
    claims: list[WaitingClaim] = []
    are_plain: bool = True
    """Whether all claims so far were."""
    stamp: int = -2
    """`ReadyQueue.stamp` when they were served last."""


class WaitingPut(Struct, eq=False):
    num_rows: int
    nbytes: int
    who: str
    since: float
    future: asyncio.Future[None]


class PutQueue:
    """The puts that wait for room, in order, and the room that is reserved."""

    def __init__(self, table: RowTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self.waiting: deque[WaitingPut] = deque()
        self._reserved_rows = 0
        self._reserved_bytes = 0

    def has_room_now(self, num_rows: int, nbytes: int) -> bool:
        """Whether a put need not wait. Raises `StoreError` for what can never fit."""
        self._table.check_size(num_rows, nbytes)
        return not self.waiting and self._has_room(num_rows, nbytes)

    async def room(self, num_rows: int, nbytes: int, *, who: str, deadline_s: float | None) -> None:
        """Returns when there is room, which is reserved for the caller until `use` or `release`."""
        if self.has_room_now(num_rows, nbytes):
            self.reserve(num_rows, nbytes)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = WaitingPut(num_rows, nbytes, who, self._clock.now(), future)
        self.waiting.append(waiting)
        try:
            await _within(future, deadline_s, lambda: self._no_room(waiting))
        except BaseException:  # cancelled or timed out
            if _has_result(future):
                self.release(num_rows, nbytes)  # the room had been reserved already
            raise
        finally:
            self.waiting = deque(other for other in self.waiting if other is not waiting)
            self.serve()

    def _no_room(self, waiting: WaitingPut) -> str:
        rows, size = self._table.num_rows, self._table.num_bytes
        return f"{waiting.who}: no room for {waiting.num_rows} rows: the store holds {rows} rows, {size} bytes"

    def _has_room(self, num_rows: int, nbytes: int) -> bool:
        return self._table.has_room(self._reserved_rows + num_rows, self._reserved_bytes + nbytes)

    def reserve(self, num_rows: int, nbytes: int) -> None:
        """Reserve, whether there is room or not, until `use` or `release`."""
        self._reserved_rows += num_rows
        self._reserved_bytes += nbytes

    def use(self, num_rows: int, nbytes: int) -> None:
        """The rows are put now."""
        self._reserved_rows -= num_rows
        self._reserved_bytes -= nbytes

    def release(self, num_rows: int, nbytes: int) -> None:
        """The rows will not be put."""
        self.use(num_rows, nbytes)
        self.serve()

    def serve(self) -> None:
        while self.waiting:
            first = self.waiting[0]
            if not first.future.done():
                if not self._has_room(first.num_rows, first.nbytes):
                    return
                self.reserve(first.num_rows, first.nbytes)
                first.future.set_result(None)
            self.waiting.popleft()

    def waiters(self) -> list[StoreWaiter]:
        now = self._clock.now()
        puts = [put for put in self.waiting if not put.future.done()]
        return [StoreWaiter(who=put.who, what=f"room for {put.num_rows} rows", seconds=now - put.since) for put in puts]


class ClaimQueues:
    """`on_grant(lease, number)` is called before the holder receives the lease; `give_back` replaces the table's own."""

    def __init__(
        self,
        table: RowTable,
        clock: Clock,
        *,
        on_grant: Callable[[LeaseEntry, int], None] = lambda lease, number: None,
        give_back: Callable[[int], None] | None = None,
    ) -> None:
        self._table = table
        self._clock = clock
        self._on_grant = on_grant
        self._give_back = give_back or table.give_back
        self._queues: dict[tuple[str, str], TaskQueue] = {}  # by partition and task
        self._expiries: dict[int, asyncio.TimerHandle] = {}

    # ---- consumers ---------------------------------------------------------------------------------------------------

    def request(
        self, task: str, want: Want, choose: Choose | None, partition: str, holder: str, number: int = 0
    ) -> WaitingClaim:
        found, future = self._table.tasks.find(task), asyncio.get_running_loop().create_future()
        if choose is None and not found.by_group and want.rows is None and want.tokens is None:
            raise StoreError(f"{task} reads rows, not groups: claim it by rows or by tokens")
        now, is_impatient = self._clock.now(), want.patience_s == 0
        return WaitingClaim(found, want, choose, partition, holder, number, now, future, is_impatient)

    async def claim(self, claim: WaitingClaim) -> LeaseEntry:
        task, partition = claim.task, claim.partition
        part = self._table.partition(partition)
        queue = self._queues.get((partition, task.name))
        if queue is None and not part.is_finished:  # nothing waits before it
            lease = self.claim_now(claim)
            if lease is not None:
                return lease
        if queue is None:
            queue = self._queues[partition, task.name] = TaskQueue(partition, task)
            queue.stamp = part.ready[task.name].stamp
        is_held_up = bool(queue.claims) and claim.is_plain and queue.claims[0].is_plain
        queue.claims.append(claim)
        queue.are_plain = queue.are_plain and claim.is_plain
        if part.is_finished or (len(queue.claims) > 1 and not is_held_up):
            self._serve(queue)
        return await self._wait_for(claim)

    def claim_now(self, claim: WaitingClaim, *, is_last: bool = False) -> LeaseEntry | None:
        """A lease, if what is wanted is ready. `is_last`: waiting would not add more."""
        task, want, is_all = claim.task, claim.want, claim.is_impatient or is_last
        units = self._table.partition(claim.partition).ready[task.name].select(want, claim.choose, is_all=is_all)
        if not units:
            return None
        lease = self._table.grant(task, units, claim.partition, claim.holder, want)
        self._on_grant(lease, claim.number)
        self.start_expiry(lease)
        return lease

    async def _wait_for(self, claim: WaitingClaim) -> LeaseEntry:
        want, timer = claim.want, None
        if want.patience_s and not claim.future.done():
            timer = asyncio.get_running_loop().call_later(want.patience_s, self._on_patience_timeout, claim)
        try:
            return await _within(claim.future, want.deadline_s, lambda: self._not_ready(claim))
        except BaseException:  # cancelled or timed out
            self._withdraw(claim)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _not_ready(self, claim: WaitingClaim) -> str:
        ready = self._table.partition(claim.partition).ready[claim.task.name].total(claim.want.versions)
        return f"{claim.holder} asked for {claim.describe()}: {ready.rows} rows with {ready.tokens} tokens are ready"

    def _on_patience_timeout(self, claim: WaitingClaim) -> None:
        claim.is_impatient = True
        self._serve_task(claim.partition, claim.task)

    def _withdraw(self, claim: WaitingClaim) -> None:
        """A claim whose caller is gone. If it was granted, the lease is given back."""
        if _has_result(claim.future):
            if claim.future.result().id in self._table.leases:
                self.give_back(claim.future.result().id)
            return
        claim.future.cancel()
        queue = self._queues.get((claim.partition, claim.task.name))
        if queue is not None and claim in queue.claims:
            queue.claims.remove(claim)
        self._serve_task(claim.partition, claim.task)  # claims behind it may be served now

    def serve(self) -> None:
        """After a change: serve the tasks for which something has become ready since the last time."""
        for queue in list(self._queues.values()):
            part = self._table.partition(queue.partition)
            stamp = part.ready[queue.task.name].stamp
            if part.is_finished or stamp != queue.stamp:
                queue.stamp = stamp
                self._serve(queue)

    def wake(self) -> None:
        for queue in list(self._queues.values()):
            self._serve(queue)

    def _serve_task(self, partition: str, task: StoreTask) -> None:
        queue = self._queues.get((partition, task.name))
        if queue is not None:
            self._serve(queue)

    def _serve(self, queue: TaskQueue) -> None:
        """Grant what is ready to the waiting claims, the longest waiting first. A plain one that has to wait holds up the plain
        ones behind it."""
        part, task = self._table.partition(queue.partition), queue.task
        is_last = part.is_finished and not part.may_become_ready(task)
        left: list[WaitingClaim] = []
        is_held_up = False
        for number, claim in enumerate(queue.claims):
            if is_held_up and queue.are_plain:  # with ten thousand of them this loop was the cost of a claim
                left += queue.claims[number:]
                break
            if (is_held_up and claim.is_plain and not claim.future.done()) or not self._is_served(claim, is_last):
                is_held_up = is_held_up or claim.is_plain
                left.append(claim)
        queue.claims = left
        if part.is_finished and not part.may_still_come(task):
            self._end(queue, f"{task.name}: the stream has ended")
        elif not left:
            self._queues.pop((queue.partition, task.name), None)

    def _is_served(self, claim: WaitingClaim, is_last: bool) -> bool:
        """Whether this claim no longer waits."""
        if claim.future.done():
            return True
        try:
            lease = self.claim_now(claim, is_last=is_last)
        except Exception as error:  # of its own policy or `choose`: no other claim is affected
            claim.future.set_exception(error)
            return True
        if lease is not None:
            claim.future.set_result(lease)
        return lease is not None

    def _end(self, queue: TaskQueue, why: str) -> None:
        self._queues.pop((queue.partition, queue.task.name), None)
        for claim in queue.claims:
            if not claim.future.done():
                claim.future.set_exception(StreamEnded(why))

    def end_partition(self, partition: str) -> None:
        for queue in [queue for queue in self._queues.values() if queue.partition == partition]:
            self._end(queue, f"partition {partition!r} was dropped")
        for lease_id in [one for one in self._expiries if one not in self._table.leases]:
            self.stop_expiry(lease_id)

    # ---- leases ------------------------------------------------------------------------------------------------------

    def give_back(self, lease_id: int) -> None:
        lease = self._table.lease(lease_id)
        self._give_back(lease_id)
        self.stop_expiry(lease_id)
        self._serve_task(lease.partition, lease.task)

    def give_back_of(self, holder: str) -> None:
        """A consumer is dead."""
        for lease_id in [lease.id for lease in self._table.leases.values() if lease.holder == holder]:
            self.give_back(lease_id)

    def renew(self, lease_id: int) -> None:
        lease = self._table.lease(lease_id)
        self.stop_expiry(lease_id)
        self.start_expiry(lease)

    def start_expiry(self, lease: LeaseEntry) -> None:
        if lease.want.expires_s is not None:
            loop = asyncio.get_running_loop()
            self._expiries[lease.id] = loop.call_later(lease.want.expires_s, self.give_back, lease.id)

    def stop_expiry(self, lease_id: int) -> None:
        timer = self._expiries.pop(lease_id, None)
        if timer is not None:
            timer.cancel()

    def waiters(self) -> list[tuple[str, StoreWaiter]]:
        """The claims that wait, each with its task."""
        claims, now = [claim for queue in self._queues.values() for claim in queue.claims], self._clock.now()
        return [
            (claim.task.name, StoreWaiter(who=claim.holder, what=claim.describe(), seconds=now - claim.since))
            for claim in claims
            if not claim.future.done()
        ]


class ReadyWatch:
    """Clients that choose a group themselves: each receives the ready groups whenever they have changed. `wait` answers one
    client; `notify` is called after every change of the table."""

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

    def waiters(self) -> list[tuple[str, StoreWaiter]]:
        now = self._clock.now()
        return [
            (task, StoreWaiter(who=who, what=f"a choice for {task}", seconds=now - since))
            for (who, task), since in self._since.items()
        ]


def _has_result(future: asyncio.Future[T]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


async def _within(future: asyncio.Future[T], deadline_s: float | None, why: Callable[[], str]) -> T:
    if deadline_s is None or future.done():
        return await future
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            return await future
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise StoreTimeout(f"{why()} after {deadline_s:g} s") from error
