"""Micro-batches out of the store as they become ready. A step gets its rows exactly, and is acknowledged as a whole.

    async with micro_batches(store, "train", tokens=8192, rows_per_step=256) as batches:
        for step in range(100):
            async for lease in batches:          # ends when the step has its rows, or with the stream
                learner.accumulate(lease)
            learner.step()
            await batches.finish_step(step)      # now they are done with; until here they come back if this process dies

A micro-batch has at most `tokens` tokens (one row or group may be longer than that) and comes as soon as so many are ready,
or what the step still lacks. What was handed out for a step that is not finished is given back when the loader is closed:
the step has not happened.

How the ranks of a data-parallel group agree on where a step ends, without talking to each other:

- *Ranks that read the store themselves* (`micro_batches(rank=, ranks=)`): by arithmetic. Rank r takes its share of the rows,
  `rows_per_step / ranks` and one more for the first ranks if that has a remainder. The policy `balanced` sees to it that the
  shares have about the same number of tokens.
- *Ranks that one process feeds* (`Dealer`): one reader claims and counts, and deals each micro-batch to the rank that has had
  the fewest tokens in this step. Dealt tokens differ by at most one micro-batch as long as every rank keeps up.

A step never gets more than its rows, and fewer only if the stream has ended. The store must have room for a whole step: rows
stay in it until they are acknowledged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from millstream.errors import StoreError, StreamEnded
from millstream.store.base import TRAIN, Lease, Store, Want


def tokens_in(lease: Lease) -> int:
    """The length of the cells of the column `tokens`, or 1 for each row if there is none."""
    return sum(map(len, lease.columns["tokens"])) if "tokens" in lease.columns else len(lease)


def share_of(total: int | None, rank: int, ranks: int) -> int | None:
    """The rank's part of a step; the parts of all ranks add up to it."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: ranks count from 0")
    return None if total is None else total // ranks + (rank < total % ranks)


class Claims:
    """The leases of one step: taken until it is full, then acknowledged or given back. Without a size, it is never full."""

    def __init__(
        self,
        store: Store,
        task: str,
        *,
        tokens: int,
        rows: int | None = None,
        groups: int | None = None,
        rank: int = 0,
        partition: str = TRAIN,
        patience_s: float | None = None,
        deadline_s: float | None = None,
    ) -> None:
        if rows is not None and groups is not None:
            raise ValueError("a step has a number of rows, or a number of groups, not both")
        self._store = store
        self._task = task
        self._partition = partition
        self._by_group = groups is not None
        self._size = groups if rows is None else rows
        self._want = Want(tokens=tokens, policy="balanced", rank=rank, patience_s=patience_s, deadline_s=deadline_s)
        self._leases: list[Lease] = []
        self._groups: set[int] = set()
        self.taken = 0
        """Rows (groups) of the step so far."""
        self.has_ended = False
        """The last claim found that the stream has ended."""

    @property
    def is_full(self) -> bool:
        return self._size is not None and self.taken >= self._size

    async def next(self) -> Lease | None:
        """The next micro-batch; None if the step is full or the stream has ended. A lease without rows (of groups that were
        closed empty) counts, and is not handed out."""
        while not self.is_full:
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
        want = self._want
        return Want(
            tokens=want.tokens,
            rows=None if self._by_group else left,
            groups=left if self._by_group else None,
            policy=want.policy,
            rank=want.rank,
            patience_s=want.patience_s,
            deadline_s=want.deadline_s,
        )

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

    def check_over(self) -> None:
        if not (self.is_full or self.has_ended):
            kind = "groups" if self._by_group else "rows"
            raise StoreError(
                f"the step has had {self.taken} of {self._size} {kind}: read to its end before it is finished"
            )

    async def acknowledge(self, step: int | None = None, *, keep: int = 0) -> None:
        """All leases but the last `keep`. Raises for one that has ended meanwhile, after the others."""
        failed: StoreError | None = None
        while len(self._leases) > keep:
            try:
                await self._store.acknowledge(self._leases[0], step=step)
            except StoreError as error:
                failed = failed or error
            del self._leases[0]
        if failed is not None:
            raise failed

    def begin_anew(self) -> None:
        self.taken = 0
        self._groups.clear()

    async def give_back(self) -> None:
        """What was taken first stands first again."""
        while self._leases:
            lease = self._leases.pop()
            with suppress(StoreError):  # it has ended: another has the rows, or the store is gone
                await self._store.give_back(lease)
        self.begin_anew()


class MicroBatches:
    """See `micro_batches`. Iterate once for each step; one consumer at a time."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._is_closed = False

    @property
    def taken(self) -> int:
        """Rows (groups) that this rank has had in this step."""
        return self._claims.taken

    @property
    def has_ended(self) -> bool:
        """The stream has: the step in hand is the last, and may be short or empty."""
        return self._claims.has_ended

    def __aiter__(self) -> MicroBatches:
        return self

    async def __anext__(self) -> Lease:
        lease = None if self._is_closed else await self._claims.next()
        if lease is None:
            raise StopAsyncIteration
        return lease

    async def finish_step(self, step: int | None = None) -> None:
        """Acknowledge the step's micro-batches; with a number, the rows stay until `store.cover` says that a checkpoint holds
        the step. Only after the iteration has ended."""
        self._claims.check_over()
        await self._claims.acknowledge(step)
        self._claims.begin_anew()

    async def aclose(self) -> None:
        """Give back what was not acknowledged."""
        self._is_closed = True
        await self._claims.give_back()

    async def __aenter__(self) -> MicroBatches:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def micro_batches(
    store: Store,
    task: str,
    *,
    tokens: int,
    rows_per_step: int | None = None,
    groups_per_step: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    partition: str = TRAIN,
    patience_s: float | None = None,
    deadline_s: float | None = None,
) -> MicroBatches:
    """What one rank trains on, step by step (see above). `groups_per_step` is for a task that reads whole groups.

    `patience_s`: after so long, take what is ready although it is less than `tokens`. `deadline_s`: after so long without
    anything, raise `StoreTimeout`."""
    if (rows_per_step is None) == (groups_per_step is None):
        raise ValueError("say either rows_per_step or groups_per_step")
    claims = Claims(
        store,
        task,
        tokens=tokens,
        rows=share_of(rows_per_step, rank, ranks),
        groups=share_of(groups_per_step, rank, ranks),
        rank=rank,
        partition=partition,
        patience_s=patience_s,
        deadline_s=deadline_s,
    )
    return MicroBatches(claims)


class Hand:
    """What one rank is dealt: an iterator that ends with the step."""

    def __init__(self, dealer: Dealer, rank: int) -> None:
        self._dealer = dealer
        self.rank = rank
        self.queue: deque[Lease] = deque()
        self.tokens = 0
        """Dealt in this step, what is still in the queue included."""
        self.is_idle = False
        self.is_done = False

    @property
    def has_ended(self) -> bool:
        return self._dealer.has_ended

    def __aiter__(self) -> Hand:
        return self

    async def __anext__(self) -> Lease:
        lease = await self._dealer.take(self)
        if lease is None:
            raise StopAsyncIteration
        return lease

    async def finish_step(self, step: int | None = None) -> None:
        """Returns when every rank has finished the step: then all of it is acknowledged, and the next begins."""
        await self._dealer.finish(self, step)


class Dealer:
    """One reader for all ranks of a data-parallel group.

        async with Dealer(store, "train", ranks=2, tokens=8192, rows_per_step=256) as dealer:
            await asyncio.gather(train(dealer.rank(0)), train(dealer.rank(1)))

    Each micro-batch goes to the rank that has been dealt the fewest tokens in this step. A rank may have `ahead` of them in its
    queue. If the one whose turn it is has a full queue, and another has nothing to do, that one gets it: a slow rank holds
    nobody up, and is then dealt less. Ranks may be dealt different numbers of micro-batches."""

    def __init__(
        self,
        store: Store,
        task: str,
        *,
        ranks: int,
        tokens: int,
        rows_per_step: int | None = None,
        groups_per_step: int | None = None,
        ahead: int = 2,
        count: Callable[[Lease], int] = tokens_in,
        partition: str = TRAIN,
        patience_s: float | None = None,
        deadline_s: float | None = None,
    ) -> None:
        if (rows_per_step is None) == (groups_per_step is None):
            raise ValueError("say either rows_per_step or groups_per_step")
        if ranks < 1 or ahead < 1:
            raise ValueError("ranks and ahead must be at least 1")
        self._claims = Claims(
            store,
            task,
            tokens=tokens,
            rows=rows_per_step,
            groups=groups_per_step,
            partition=partition,
            patience_s=patience_s,
            deadline_s=deadline_s,
        )
        self._hands = [Hand(self, rank) for rank in range(ranks)]
        self._ahead = ahead
        self._count = count
        self._changed = asyncio.Condition()
        self._is_dealt = False
        self._step: int | None = None
        self._steps_finished = 0
        self._error: StoreError | None = None
        self._dealing: asyncio.Task[None] | None = None

    def rank(self, rank: int) -> Hand:
        return self._hands[rank]

    @property
    def has_ended(self) -> bool:
        return self._claims.has_ended

    async def __aenter__(self) -> Dealer:
        self._dealing = asyncio.create_task(self._deal(), name="dealer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Give back what was not acknowledged, whoever has it."""
        if self._dealing is not None:
            self._dealing.cancel()
            with suppress(asyncio.CancelledError):
                await self._dealing
        await self._stop(StoreError("the dealer is closed"))
        await self._claims.give_back()

    async def _stop(self, error: StoreError) -> None:
        async with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(is_so)

    async def _deal(self) -> None:
        """Consumes the store, produces the ranks' queues. Waits for a rank that can be dealt to, unblocked by `take`; for rows;
        and at the end of a step for all ranks, unblocked by `finish`."""
        try:
            while True:
                await self._until(lambda: self._due() is not None)
                lease = await self._claims.next()
                async with self._changed:
                    if lease is None:
                        self._is_dealt = True
                    else:  # whoever was due may have gone away meanwhile: then it waits for whoever has had least
                        hand = self._due() or min(self._hands, key=lambda one: (one.tokens, one.rank))
                        hand.queue.append(lease)
                        hand.tokens += self._count(lease)
                    self._changed.notify_all()
                if lease is None:
                    await self._until(lambda: not self._is_dealt)
        except StoreError as error:
            await self._stop(error)
        except Exception as error:  # of the user's own count, say: every rank must hear of it
            await self._stop(StoreError(f"the dealer failed: {error!r}"))

    def _due(self) -> Hand | None:
        """Who is dealt to next."""
        by_turn = sorted(self._hands, key=lambda hand: (hand.tokens, hand.rank))
        if len(by_turn[0].queue) < self._ahead:
            return by_turn[0]
        return next((hand for hand in by_turn if hand.is_idle and not hand.queue), None)

    async def take(self, hand: Hand) -> Lease | None:
        async with self._changed:
            hand.is_idle = True
            self._changed.notify_all()
            try:
                await self._changed.wait_for(lambda: hand.queue or self._is_dealt or self._error)
            finally:
                hand.is_idle = False
            if self._error is not None:
                raise self._error
            if not hand.queue:
                return None
            self._changed.notify_all()
            return hand.queue.popleft()

    async def finish(self, hand: Hand, step: int | None) -> None:
        if not self._is_dealt or hand.queue:
            raise StoreError(f"rank {hand.rank} has not had all of its step: read to its end before it is finished")
        others = [other for other in self._hands if other.is_done]
        if others and step != self._step:
            raise StoreError(f"rank {hand.rank} finishes step {step}, and rank {others[0].rank} step {self._step}")
        hand.is_done = True
        self._step = step
        if len(others) + 1 == len(self._hands):
            await self._finish_all(step)
            return
        finished = self._steps_finished
        await self._until(lambda: self._steps_finished > finished or self._error is not None)
        if self._steps_finished == finished and self._error is not None:
            raise self._error

    async def _finish_all(self, step: int | None) -> None:
        try:
            await self._claims.acknowledge(step)
        except StoreError as error:
            await self._stop(error)
            raise
        async with self._changed:
            self._claims.begin_anew()
            for hand in self._hands:
                hand.tokens = 0
                hand.is_done = False
            self._is_dealt = False
            self._steps_finished += 1
            self._changed.notify_all()
