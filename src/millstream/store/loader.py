"""Micro-batches from the store as rows become ready. A step gets exactly its rows, and is acknowledged as a whole.

    async with micro_batches(store, "train", tokens=8192, rows_per_step=256) as batches:
        for step in range(100):
            async for lease in batches:          # ends when the step has its rows, or with the stream
                learner.accumulate(lease)
            learner.step()
            await batches.finish_step(step)      # before this, the rows are ready again if this process dies

A micro-batch has at most `tokens` tokens (one row or group may be longer than that). It is claimed as soon as that many are
ready, or all that the step still needs. When the loader is closed, the leases of an unfinished step are given back.

How the ranks of a data-parallel group agree on where a step ends, without communication:

- *Each rank reads the store* (`micro_batches(rank=, ranks=)`): by arithmetic. Rank r takes its share of the rows,
  `rows_per_step / ranks` and one more for the first ranks if there is a remainder. The policy `balanced` gives the shares about
  the same number of tokens.
- *One process feeds all ranks* (`RankFeeder`): one reader claims and counts, and gives each micro-batch to the rank with the
  fewest tokens in this step. The tokens of ranks differ by at most one micro-batch as long as every rank keeps up.

A step never gets more than its rows, and fewer only if the stream has ended. The store must have room for a whole step: rows
stay in it until they are acknowledged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TypedDict, Unpack

from msgspec.structs import replace

from millstream.errors import StoreError, StreamEnded
from millstream.store.base import TRAIN, Lease, Store, Want


class StepOptions(TypedDict, total=False):
    """What all readers of steps have in common."""

    rows_per_step: int | None
    groups_per_step: int | None
    """For a task that reads whole groups, in place of `rows_per_step`."""
    partition: str
    patience_s: float | None
    """After this time, take what is ready although it is less than `tokens`."""
    deadline_s: float | None
    """After this time without anything, raise `StoreTimeout`."""


def tokens_in(lease: Lease) -> int:
    """The length of the cells of the column `tokens`, or 1 for each row if there is none."""
    return sum(map(len, lease.columns["tokens"])) if "tokens" in lease.columns else len(lease)


def share_of(total: int | None, rank: int, ranks: int) -> int | None:
    """The rank's share of a step; the shares of all ranks add up to it."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: ranks count from 0")
    return None if total is None else total // ranks + (rank < total % ranks)


class MicroBatches(AbstractAsyncContextManager["MicroBatches"]):
    """The micro-batches of one rank, step by step (see above): iterate once for each step; one consumer at a time.

    The leases of a step are claimed until it is full, then acknowledged or given back. `is_endless`: the rest of the stream is
    one step, without a size."""

    def __init__(
        self,
        store: Store,
        task: str,
        *,
        tokens: int,
        rank: int = 0,
        ranks: int = 1,
        is_endless: bool = False,
        **step: Unpack[StepOptions],
    ) -> None:
        rows, groups = step.get("rows_per_step"), step.get("groups_per_step")
        if (rows is not None) + (groups is not None) != (not is_endless):
            raise ValueError("say either rows_per_step or groups_per_step")
        self._store = store
        self._task = task
        self._partition = step.get("partition", TRAIN)
        self._by_group = groups is not None
        self._size = share_of(groups if rows is None else rows, rank, ranks)
        patience_s, deadline_s = step.get("patience_s"), step.get("deadline_s")
        self._want = Want(tokens=tokens, policy="balanced", rank=rank, patience_s=patience_s, deadline_s=deadline_s)
        self._leases: list[Lease] = []
        self._groups: set[int] = set()
        self._is_closed = False
        self.taken = 0
        """Rows (groups) of this rank in this step so far."""
        self.has_ended = False
        """Whether the stream has ended: the current step is the last, and may be short or empty."""

    @property
    def is_full(self) -> bool:
        return self._size is not None and self.taken >= self._size

    async def next(self) -> Lease | None:
        """The next micro-batch; None if the step is full or the stream has ended. A lease without rows (of groups that were
        closed empty) counts, and is not returned."""
        while not self.is_full and not self._is_closed:
            try:
                lease = await self._store.claim(self._task, self._wanted(), partition=self._partition)
            except StreamEnded:
                self.has_ended = True
                return None
            self._leases.append(lease)
            self._count(lease)
            if len(lease):
                return lease
        return None

    def _wanted(self) -> Want:
        if self._size is None:
            return self._want
        left = self._size - self.taken
        return replace(self._want, groups=left) if self._by_group else replace(self._want, rows=left)

    def _count(self, lease: Lease) -> None:
        groups = {*lease.group_ids, *lease.empty_groups}
        self.taken += len(groups) if self._by_group else len(lease)
        if self._by_group and self._groups & groups:
            raise StoreError(f"task {self._task!r} reads rows, not whole groups: say rows_per_step")
        if self._size is not None and self.taken > self._size:
            raise StoreError(
                f"task {self._task!r} reads whole groups, and one makes {self.taken} rows in a step of {self._size}: "
                "say groups_per_step"
            )
        self._groups |= groups if self._by_group else set()

    def __aiter__(self) -> MicroBatches:
        return self

    async def __anext__(self) -> Lease:
        lease = await self.next()
        if lease is None:
            raise StopAsyncIteration
        return lease

    async def finish_step(self, step: int | None = None) -> None:
        """Acknowledge the step's micro-batches; with a number, the rows stay until `store.cover` says that a checkpoint
        includes the step. Call it after the iteration has ended."""
        if not (self.is_full or self.has_ended):
            kind = "groups" if self._by_group else "rows"
            raise StoreError(
                f"the step has had {self.taken} of {self._size} {kind}: read to its end before it is finished"
            )
        await self.acknowledge(step)
        self._reset()

    async def acknowledge(self, step: int | None = None, *, keep: int = 0) -> None:
        """All leases but the last `keep`. If one has ended (expired), raises after the others are acknowledged."""
        failed: StoreError | None = None
        while len(self._leases) > keep:
            try:
                await self._store.acknowledge(self._leases[0], step=step)
            except StoreError as error:
                failed = failed or error
            del self._leases[0]
        if failed is not None:
            raise failed

    def _reset(self) -> None:
        self.taken = 0
        self._groups.clear()

    async def aclose(self) -> None:
        """Give back the leases that were not acknowledged, in reverse order, so that the rows are ready in their old order."""
        self._is_closed = True
        while self._leases:
            lease = self._leases.pop()
            with suppress(StoreError):  # the lease has expired, or the store is gone
                await self._store.give_back(lease)
        self._reset()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


micro_batches = MicroBatches


class RankStream:
    """The micro-batches of one rank: an iterator that ends with the step."""

    def __init__(self, feeder: RankFeeder, rank: int) -> None:
        self._feeder = feeder
        self.rank = rank
        self.queue: deque[Lease] = deque()
        self.tokens = 0  # of this step, including the queue
        self.is_idle = False
        self.is_done = False

    @property
    def has_ended(self) -> bool:
        return self._feeder.has_ended

    def __aiter__(self) -> RankStream:
        return self

    async def __anext__(self) -> Lease:
        lease = await self._feeder.take(self)
        if lease is None:
            raise StopAsyncIteration
        return lease

    async def finish_step(self, step: int | None = None) -> None:
        """Returns when every rank has finished the step: then all of it is acknowledged, and the next begins."""
        await self._feeder.finish(self, step)


class RankFeeder(AbstractAsyncContextManager["RankFeeder"]):
    """One reader for all ranks of a data-parallel group.

        async with RankFeeder(store, "train", ranks=2, tokens=8192, rows_per_step=256) as feeder:
            await asyncio.gather(train(feeder.rank(0)), train(feeder.rank(1)))

    Each micro-batch goes to the rank with the fewest tokens in this step. A rank may have `ahead` of them in its queue. If
    the queue of that rank is full, and another rank is idle, the idle one gets it: a slow rank blocks no other, and gets less.
    Ranks may get different numbers of micro-batches."""

    def __init__(
        self,
        store: Store,
        task: str,
        *,
        ranks: int,
        tokens: int,
        ahead: int = 2,
        count: Callable[[Lease], int] = tokens_in,
        **step: Unpack[StepOptions],
    ) -> None:
        if ranks < 1 or ahead < 1:
            raise ValueError("ranks and ahead must be at least 1")
        self._batches = MicroBatches(store, task, tokens=tokens, **step)
        self._streams = [RankStream(self, rank) for rank in range(ranks)]
        self._ahead = ahead
        self._count = count
        self._changed = asyncio.Condition()
        self._is_complete = False
        self._step: int | None = None
        self._steps_finished = 0
        self._error: StoreError | None = None
        self._feeding: asyncio.Task[None] | None = None

    def rank(self, rank: int) -> RankStream:
        return self._streams[rank]

    @property
    def has_ended(self) -> bool:
        return self._batches.has_ended

    async def __aenter__(self) -> RankFeeder:
        self._feeding = asyncio.create_task(self._feed(), name="rank feeder")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give back the leases that were not acknowledged, of all ranks."""
        if self._feeding is not None:
            self._feeding.cancel()
            with suppress(asyncio.CancelledError):
                await self._feeding
        await self._stop(StoreError("the feeder is closed"))
        await self._batches.aclose()

    async def _stop(self, error: StoreError) -> None:
        async with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(is_so)

    async def _feed(self) -> None:
        """Consumes the store, produces the ranks' queues. Waits for a rank with room in its queue (unblocked by `take`), for
        rows, and at the end of a step for all ranks (unblocked by `finish`)."""
        try:
            while True:
                await self._until(lambda: self._due() is not None)
                lease = await self._batches.next()
                async with self._changed:
                    if lease is None:
                        self._is_complete = True
                    else:  # the rank that was due may have been cancelled: use the one with the fewest tokens
                        stream = self._due() or min(self._streams, key=lambda one: (one.tokens, one.rank))
                        stream.queue.append(lease)
                        stream.tokens += self._count(lease)
                    self._changed.notify_all()
                if lease is None:
                    await self._until(lambda: not self._is_complete)
        except StoreError as error:
            await self._stop(error)
        except Exception as error:  # such as of the user's `count`: every rank must get it
            await self._stop(StoreError(f"the feeder failed: {error!r}"))

    def _due(self) -> RankStream | None:
        """The rank that gets the next micro-batch."""
        by_tokens = sorted(self._streams, key=lambda stream: (stream.tokens, stream.rank))
        if len(by_tokens[0].queue) < self._ahead:
            return by_tokens[0]
        return next((stream for stream in by_tokens if stream.is_idle and not stream.queue), None)

    async def take(self, stream: RankStream) -> Lease | None:
        async with self._changed:
            stream.is_idle = True
            self._changed.notify_all()
            try:
                await self._changed.wait_for(lambda: stream.queue or self._is_complete or self._error)
            finally:
                stream.is_idle = False
            if self._error is not None:
                raise self._error
            if not stream.queue:
                return None
            self._changed.notify_all()
            return stream.queue.popleft()

    async def finish(self, stream: RankStream, step: int | None) -> None:
        if not self._is_complete or stream.queue:
            raise StoreError(f"rank {stream.rank} has not had all of its step: read to its end before it is finished")
        others = [other for other in self._streams if other.is_done]
        if others and step != self._step:
            raise StoreError(f"rank {stream.rank} finishes step {step}, and rank {others[0].rank} step {self._step}")
        stream.is_done = True
        self._step = step
        if len(others) + 1 == len(self._streams):
            await self._finish_all(step)
            return
        finished = self._steps_finished
        await self._until(lambda: self._steps_finished > finished or self._error is not None)
        if self._steps_finished == finished and self._error is not None:
            raise self._error

    async def _finish_all(self, step: int | None) -> None:
        try:
            await self._batches.finish_step(step)
        except StoreError as error:
            await self._stop(error)
            raise
        async with self._changed:
            for stream in self._streams:
                stream.tokens = 0
                stream.is_done = False
            self._is_complete = False
            self._steps_finished += 1
            self._changed.notify_all()
