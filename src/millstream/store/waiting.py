"""Where producers and consumers wait: first come, first served, without polling, and nobody waits for anybody's answer but the
store's own.

A put waits until there is room. A claim waits until what it wants is ready; one that asks for much is not starved by later ones
that ask for little, since those that want the same kind of thing are served in turn. A claim with a `choose` or with a window
of versions waits by itself: others pass it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from millstream.clock import Clock
from millstream.errors import StoreError, StoreTimeout, StreamEnded
from millstream.store import Choose, StoreStats, Waiting, Want
from millstream.store.entries import Unit
from millstream.store.policies import BUILT_IN
from millstream.store.table import LeaseEntry, RowTable, Task

T = TypeVar("T")
MAX_SHOWN = 20


class Claim:
    __slots__ = ("choose", "future", "holder", "is_impatient", "number", "partition", "since", "task", "turn", "want")

    def __init__(
        self, task: Task, want: Want, choose: Choose | None, partition: str, holder: str, since: float, number: int
    ) -> None:
        self.number = number
        self.turn = 0
        self.task = task
        self.want = want
        self.choose = choose
        self.partition = partition
        self.holder = holder
        self.since = since
        self.is_impatient = want.patience_s == 0
        self.future: asyncio.Future[LeaseEntry] = asyncio.get_running_loop().create_future()

    @property
    def is_plain(self) -> bool:
        return self.choose is None and self.want.versions is None and self.want.policy in BUILT_IN

    def what(self) -> str:
        want = self.want
        asked = {"rows": want.rows, "tokens": want.tokens, "groups": want.groups}
        limits = " or ".join(f"{count} {name}" for name, count in asked.items() if count is not None)
        return f"{limits} for {self.task.name}" + (f" of versions {want.versions}" if want.versions else "")


class Line:
    """Who waits for one task of one partition: those that are served in turn, and those that others may pass."""

    def __init__(self) -> None:
        self.plain: deque[Claim] = deque()
        self.special: list[Claim] = []
        self.stamp = -2
        """Of what was ready when they were served last: see `Ready.stamp`."""


class Room:
    """A put that waits."""

    __slots__ = ("future", "nbytes", "num_rows", "since", "who")

    def __init__(self, num_rows: int, nbytes: int, who: str, since: float) -> None:
        self.num_rows = num_rows
        self.nbytes = nbytes
        self.who = who
        self.since = since
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class WaitQueues:
    """`on_grant` is told of a lease before its holder; `give_back` is how the books are told of one that has ended."""

    def __init__(
        self,
        catalog: RowTable,
        clock: Clock,
        *,
        on_grant: Callable[[LeaseEntry, Claim], None] = lambda lease, claim: None,
        give_back: Callable[[int], None] | None = None,
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._on_grant = on_grant
        self._give_back = give_back or catalog.give_back
        self._lines: dict[tuple[str, str], Line] = {}
        self._next_turn = 0
        self._puts: deque[Room] = deque()
        self._reserved_rows = 0
        self._reserved_bytes = 0
        self._expiries: dict[int, asyncio.TimerHandle] = {}

    # ---- producers ---------------------------------------------------------------------------------------------------

    async def room(self, num_rows: int, nbytes: int, *, who: str, deadline_s: float | None) -> None:
        """Returns when there is room, which is the caller's until `use` or `release`."""
        self._catalog.check_size(num_rows, nbytes)
        if not self._puts and self._has_room(num_rows, nbytes):
            self.reserve(num_rows, nbytes)
            return
        waiting = Room(num_rows, nbytes, who, self._clock.now())
        self._puts.append(waiting)
        try:
            await self._within(waiting.future, deadline_s, lambda: self._full(waiting))
        except BaseException:  # cancelled, say, or too late
            if waiting.future.done() and not waiting.future.cancelled() and waiting.future.exception() is None:
                self.release(num_rows, nbytes)  # it had been given room, and is gone
            raise
        finally:
            self._puts = deque(other for other in self._puts if other is not waiting)
            self.serve_producers()

    def _full(self, waiting: Room) -> str:
        rows, size = self._catalog.num_rows, self._catalog.num_bytes
        return f"{waiting.who}: no room for {waiting.num_rows} rows: the store holds {rows} rows, {size} bytes"

    def _has_room(self, num_rows: int, nbytes: int) -> bool:
        return self._catalog.has_room(self._reserved_rows + num_rows, self._reserved_bytes + nbytes)

    def reserve(self, num_rows: int, nbytes: int) -> None:
        """Whether there is room or not: the caller's until `use` or `release`."""
        self._reserved_rows += num_rows
        self._reserved_bytes += nbytes

    def use(self, num_rows: int, nbytes: int) -> None:
        """The rows are being put now."""
        self._reserved_rows -= num_rows
        self._reserved_bytes -= nbytes

    def release(self, num_rows: int, nbytes: int) -> None:
        """They never will be."""
        self.use(num_rows, nbytes)
        self.serve_producers()

    def serve_producers(self) -> None:
        while self._puts:
            first = self._puts[0]
            if not first.future.done():
                if not self._has_room(first.num_rows, first.nbytes):
                    return
                self.reserve(first.num_rows, first.nbytes)
                first.future.set_result(None)
            self._puts.popleft()

    # ---- consumers ---------------------------------------------------------------------------------------------------

    async def claim(
        self, task: Task, want: Want, choose: Choose | None, partition: str, holder: str, number: int = 0
    ) -> LeaseEntry:
        """`number` is the holder's own for this claim."""
        if choose is None and not task.reads.by_group and want.rows is None and want.tokens is None:
            raise StoreError(f"{task.name} reads rows, not groups: claim it by rows or by tokens")
        claim = Claim(task, want, choose, partition, holder, self._clock.now(), number)
        self._stand_in_line(claim)
        self.serve(partition, task)
        timer = None
        if want.patience_s and not claim.future.done():
            timer = asyncio.get_running_loop().call_later(want.patience_s, self._lose_patience, claim)
        try:
            return await self._within(claim.future, want.deadline_s, lambda: self._nothing(claim))
        except BaseException:  # cancelled, say, or too late
            self._withdraw(claim)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _stand_in_line(self, claim: Claim) -> None:
        line = self._lines.setdefault((claim.partition, claim.task.name), Line())
        claim.turn = self._next_turn
        self._next_turn += 1
        (line.plain if claim.is_plain else line.special).append(claim)

    def _nothing(self, claim: Claim) -> str:
        ready = self._catalog.partition(claim.partition).ready[claim.task.name].total(claim.want.versions)
        return f"{claim.holder} asked for {claim.what()}: {ready.rows} rows with {ready.tokens} tokens are ready"

    def _lose_patience(self, claim: Claim) -> None:
        claim.is_impatient = True
        self.serve(claim.partition, claim.task)

    def _withdraw(self, claim: Claim) -> None:
        """A claim that is not waited for any more: if it had been served, let another have it."""
        future = claim.future
        if future.done() and not future.cancelled() and future.exception() is None:
            if future.result().id in self._catalog.leases:
                self.give_back(future.result().id)
            return
        future.cancel()
        line = self._lines.get((claim.partition, claim.task.name))
        if line is not None and claim in line.plain:
            line.plain.remove(claim)
        self.serve(claim.partition, claim.task)  # it may have stood before others

    async def _within(self, future: asyncio.Future[T], deadline_s: float | None, why: Callable[[], str]) -> T:
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

    def serve_all(self, partition: str) -> None:
        """After a change: those who wait for what has become ready. Whoever came later has looked already."""
        part = self._catalog.partitions.get(partition)
        for (line_partition, name), line in list(self._lines.items()):
            if line_partition != partition:
                continue
            stamp = -1 if part is None or part.is_finished else part.ready[name].stamp
            if stamp != line.stamp or stamp == -1:
                line.stamp = stamp
                self.serve(partition, self._catalog.tasks[name])

    def wake(self) -> None:
        for partition, name in list(self._lines):
            self.serve(partition, self._catalog.tasks[name])

    def serve(self, partition: str, task: Task) -> None:
        """Hand what is ready to those who wait, the longest waiting first."""
        line = self._lines.get((partition, task.name))
        if line is None:
            return
        is_over = self._is_over(partition)
        is_last = is_over and not self._catalog.may_become_ready(task, partition)
        turn = line.plain[0].turn if line.plain else None
        line.special = [c for c in line.special if (turn is not None and c.turn > turn) or not self._serve(c, is_last)]
        while line.plain and self._serve(line.plain[0], is_last):
            line.plain.popleft()
        if turn is not None:
            line.special = [claim for claim in line.special if claim.turn < turn or not self._serve(claim, is_last)]
        if is_over and not self._catalog.may_still_come(task, partition):
            self._end(partition, task.name, f"{task.name}: the stream has ended")
        elif not line.plain and not line.special:
            del self._lines[partition, task.name]

    def _serve(self, claim: Claim, is_last: bool) -> bool:
        """Whether this one need not wait any more."""
        if claim.future.done():
            return True
        try:
            units = self._select(claim, is_all=claim.is_impatient or is_last)
        except Exception as error:  # of its own policy or choice: nobody else's affair
            claim.future.set_exception(error)
            return True
        if not units:
            return False
        lease = self._catalog.grant(claim.task, units, claim.partition, claim.holder, claim.want)
        self._on_grant(lease, claim)
        self._watch(lease)
        claim.future.set_result(lease)
        return True

    def _select(self, claim: Claim, *, is_all: bool) -> list[Unit]:
        return self._catalog.select(claim.task, claim.want, claim.partition, is_all=is_all, choose=claim.choose)

    def _is_over(self, partition: str) -> bool:
        part = self._catalog.partitions.get(partition)
        return part is not None and part.is_finished

    def _end(self, partition: str, name: str, why: str) -> None:
        line = self._lines.pop((partition, name), Line())
        for claim in (*line.plain, *line.special):
            if not claim.future.done():
                claim.future.set_exception(StreamEnded(why))

    def end_partition(self, partition: str) -> None:
        for name in self._catalog.tasks:
            self._end(partition, name, f"partition {partition!r} was dropped")
        for lease_id in [one for one in self._expiries if one not in self._catalog.leases]:
            self.forget(lease_id)
        self.serve_producers()

    # ---- leases ------------------------------------------------------------------------------------------------------

    def give_back(self, lease_id: int) -> None:
        lease = self._catalog.lease(lease_id)
        self._give_back(lease_id)
        self.forget(lease_id)
        self.serve(lease.partition, lease.task)

    def give_back_of(self, holder: str) -> None:
        """A consumer is dead."""
        for lease_id in [lease.id for lease in self._catalog.leases.values() if lease.holder == holder]:
            self.give_back(lease_id)

    def renew(self, lease_id: int) -> None:
        lease = self._catalog.lease(lease_id)
        self.forget(lease_id)
        self._watch(lease)

    def _watch(self, lease: LeaseEntry) -> None:
        if lease.want.expires_s is not None:
            loop = asyncio.get_running_loop()
            self._expiries[lease.id] = loop.call_later(lease.want.expires_s, self.give_back, lease.id)

    def watch_all(self, leases: Iterable[LeaseEntry]) -> None:
        """After the books were read from a journal: time begins anew."""
        for lease in leases:
            self._watch(lease)

    def forget(self, lease_id: int) -> None:
        timer = self._expiries.pop(lease_id, None)
        if timer is not None:
            timer.cancel()

    # ---- what goes on ------------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        now = self._clock.now()
        lines = self._lines.values()
        claims = [claim for line in lines for claim in (*line.plain, *line.special) if not claim.future.done()]
        puts = [put for put in self._puts if not put.future.done()]
        waiting = [Waiting(who=claim.holder, what=claim.what(), seconds=now - claim.since) for claim in claims]
        waiting += [Waiting(who=put.who, what=f"room for {put.num_rows} rows", seconds=now - put.since) for put in puts]
        count = {name: sum(1 for claim in claims if claim.task.name == name) for name in self._catalog.tasks}
        return msgspec.structs.replace(
            self._catalog.stats(now),
            waiting_producers=len(puts),
            waiting_consumers=count,
            waiting=sorted(waiting, key=lambda wait: -wait.seconds)[:MAX_SHOWN],
        )
