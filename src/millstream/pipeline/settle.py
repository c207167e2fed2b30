"""What becomes of a finished group: advantages, or set aside. Every group that comes in leaves exactly once, by name.

Rewards that are given to a group as a whole come first; they may be slow, and hold nobody else up.

A group without signal, or with too few members left, is replaced by a new prompt within the step's budget of replacements; past
it, its place in the batch stays empty, and it waits for its turn like any other. When training is synchronous, groups are set
aside only when nothing else moves, in the order of their ids: which of them is replaced then depends on ids, never on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from millstream.algo.advantages import Rewards, has_signal
from millstream.algo.credit import Credit
from millstream.errors import MillstreamError, RolloutError, StreamEnded
from millstream.pipeline.admission import Admission
from millstream.pipeline.credit import columns_of, do_turns_differ
from millstream.pipeline.notify import Notifier, QuiescePoint
from millstream.pipeline.state import Ledger
from millstream.pipeline.waits import Waits
from millstream.store import Lease, Row, Store
from millstream.types import Fate, Floats

TASK = "settle"
Advantage = Callable[[Rewards], Rewards]
Leave = Callable[[int, Fate, Rewards, bool], None]
"""(group id, fate, rewards, whether it is replaced): tells the world that a group has left."""


Score = Callable[[Lease], Awaitable[Sequence[float]]]
"""What each member of a complete group earns beside its own reward, in their order."""
Scored = Callable[[int, Rewards, float, str], None]
"""(group id, rewards, when it began, why it failed): tells the world of a group's rewards."""
Begin = Callable[[int], None]
"""A group whose rollouts were aborted begins anew."""


class Rules(NamedTuple):
    advantage: Advantage
    credit: Credit | None
    """Advantages within a rollout; None: every token has that of its rollout."""
    compares_turns: bool
    """Whether a group has a signal by what its turns earned, and not only by their sums."""
    score: Score | None
    min_group_size: int
    filter_zero_signal: bool
    max_replaced: int
    max_failed_in_a_row: int


class CancelReason(Enum):
    ABORT = "abort"
    RESTART = "restart"


class SetAside(NamedTuple):
    lease: Lease
    rewards_G: Rewards
    fate: Fate


class GroupFinalizer:
    def __init__(
        self,
        rules: Rules,
        *,
        store: Store,
        admission: Admission,
        waits: Waits,
        pulse: Notifier,
        still: QuiescePoint,
        leave: Leave,
        begin_anew: Begin,
        scored: Scored,
    ) -> None:
        self._rules = rules
        self._leave = leave
        self._begin_anew = begin_anew
        self._scored = scored
        self._store = store
        self._admission = admission
        self._waits = waits
        self._pulse = pulse
        self._still = still
        self._waiting: list[SetAside] = []
        self.num_replaced = 0
        self.num_failed_in_a_row = 0
        self.num_unsettled = 0
        """Groups that are closed and whose fate is open."""
        self.vacant: set[int] = set()
        """Groups whose place stays empty."""
        self.settled: set[int] = set()
        """Groups that wait to be taken."""
        self.cancelling: dict[int, CancelReason] = {}
        """Groups whose rollouts are being aborted, and what for."""
        self._scoring: dict[int, asyncio.Task[None] | None] = {}
        self.is_fed = False
        """No prompt is left: nothing can be replaced any more."""
        self.last_failure = ""

    async def close(self, group_id: int) -> None:
        """The last member of a group is done."""
        self.num_unsettled += 1
        await self._store.close_groups([group_id])

    def restore(self, ledger: Ledger, *, num_unsettled: int, settled: set[int]) -> None:
        """The groups whose fate is open are in the store, and will be claimed."""
        self.num_unsettled = num_unsettled
        self.settled = settled
        self.num_replaced = ledger.num_replaced
        self.num_failed_in_a_row = ledger.num_failed_in_a_row
        self.vacant = set(ledger.vacant)

    def begin_batch(self) -> None:
        self.num_replaced = 0

    async def settle(self, *, in_order: bool) -> None:
        """Consumes closed groups; produces advantages. Waits for a closed group; the last member of a group closes it."""
        async with asyncio.TaskGroup() as scoring:
            while True:
                claim = self._store.claim(TASK)
                try:
                    lease = await self._waits.idle("settle", "a finished group", claim)
                except StreamEnded:
                    return
                if lease.group_id not in self.cancelling and self._rules.score is not None and lease.rows:
                    scoring.create_task(self._score_and_settle(lease, self._rules.score, in_order=in_order))
                    continue
                async with self._still:
                    if lease.group_id in self.cancelling:
                        await self._let_go(lease)
                    else:
                        await self._settle(lease, rewards_of(lease), self._judge(lease), in_order=in_order)

    async def _settle(self, lease: Lease, rewards_G: Rewards, fate: Fate, *, in_order: bool) -> None:
        if fate is Fate.TRAINED:
            await self._write_advantages(lease)
            if lease.group_id in self.cancelling:  # meanwhile
                await self._let_go(lease)
                return
            self.settled.add(lease.group_id)
            await self._store.acknowledge(lease)
            await self._settled()
        elif in_order:
            self._waiting.append(SetAside(lease, rewards_G, fate))
            self._pulse.notify()
        else:
            await self._set_aside(SetAside(lease, rewards_G, fate))

    def cancel_group(self, group_id: int, doom: CancelReason) -> None:
        """It leaves, or begins anew, as soon as its rollouts have left. Nobody waits for its reward as a whole any more."""
        self.cancelling[group_id] = doom
        scoring = self._scoring.get(group_id)
        if scoring is not None:
            scoring.cancel()

    async def _score_and_settle(self, lease: Lease, score: Score, *, in_order: bool) -> None:
        """A group whose reward fails has failed."""
        began, failure, group_id = self._waits.now(), "", lease.group_id
        extra_G = np.zeros(len(rewards_of(lease)))
        try:
            if group_id not in self.cancelling:
                self._scoring[group_id] = asyncio.current_task()
                extra_G = np.array(await score(lease), dtype=np.float64)
        except asyncio.CancelledError:
            if group_id not in self.cancelling:
                raise  # the run is ending
        except RolloutError as error:
            failure = self.last_failure = f"{type(error).__name__}: {error}"
        finally:
            self._scoring.pop(group_id, None)
        async with self._still:
            await self._settle_scored(lease, extra_G, began, failure, in_order=in_order)

    async def _settle_scored(
        self, lease: Lease, extra_G: Rewards, began: float, failure: str, *, in_order: bool
    ) -> None:
        group_id = lease.group_id
        if group_id in self.cancelling:
            await self._let_go(lease)
            return
        extra_of = dict(zip(members_of(lease), extra_G, strict=True))
        earned = [row.columns["reward"] + float(extra_of[row.columns["member"]]) for row in lease.rows]
        lease = replace(lease, columns={**lease.columns, "reward": earned})
        self._scored(group_id, rewards_of(lease), began, failure)
        fate = Fate.FAILED if failure else self._judge(lease)
        await self._settle(lease, rewards_of(lease), fate, in_order=in_order)

    async def discard(self, lease: Lease) -> None:
        """A settled group that nobody takes. The fate of one whose place stays empty has been told."""
        await self._store.drop(lease)
        self._admission.remove(lease.group_id)
        self.settled.discard(lease.group_id)
        if lease.group_id in self.vacant:
            self.vacant.discard(lease.group_id)
        else:
            self._leave(lease.group_id, Fate.ABORTED, rewards_of(lease), True)
        await self.end_if_drained()
        self._pulse.notify()

    async def _let_go(self, lease: Lease) -> None:
        """Its rollouts were aborted: it leaves, or begins anew."""
        doom = self.cancelling.pop(lease.group_id)
        await self._store.drop(lease)
        if doom is CancelReason.RESTART:
            self._begin_anew(lease.group_id)
        else:
            self._admission.remove(lease.group_id)
            self._leave(lease.group_id, Fate.ABORTED, rewards_of(lease), True)
        self._store.wake()
        await self._settled()

    async def set_aside_in_order(self, is_still: Callable[[], bool]) -> None:
        """Synchronous training: waits until no rollout moves (`is_still`) and every other group is settled."""
        while True:
            await self._pulse.until(
                lambda: bool(self._waiting) and len(self._waiting) == self.num_unsettled and is_still()
            )
            waiting = sorted(self._waiting, key=lambda aside: aside.lease.group_id)
            self._waiting = []
            for aside in waiting:
                async with self._still:
                    await self._set_aside(aside)

    def _judge(self, lease: Lease) -> Fate:
        if len(rewards_of(lease)) < self._rules.min_group_size:
            return Fate.FAILED
        self.num_failed_in_a_row = 0
        if self._rules.filter_zero_signal and not self._has_signal(lease):
            return Fate.FILTERED
        return Fate.TRAINED

    def _has_signal(self, lease: Lease) -> bool:
        """By the rewards that were given: a KL that is taken off them has no part in it."""
        if self._rules.compares_turns:
            return do_turns_differ(by_member(lease))
        return any(has_signal(own.rewards_G) for own in by_agent(lease))

    async def _set_aside(self, aside: SetAside) -> None:
        lease, rewards_G, fate = aside
        if fate is Fate.FAILED:
            self._count_failure()
        stays_empty = not self.is_fed and self.num_replaced >= self._rules.max_replaced
        if stays_empty:
            self.vacant.add(lease.group_id)
            self.settled.add(lease.group_id)
            await self._write_nothing(lease)
            await self._store.acknowledge(lease)
        else:
            self.num_replaced += 1
            await self._store.drop(lease)
            self._admission.remove(lease.group_id)
            self._store.wake()  # the order that `train` may take groups in has changed
        self._leave(lease.group_id, fate, rewards_G, not stays_empty and not self.is_fed)
        await self._settled()

    def _count_failure(self) -> None:
        self.num_failed_in_a_row += 1
        if self.num_failed_in_a_row >= self._rules.max_failed_in_a_row:
            raise MillstreamError(
                f"{self.num_failed_in_a_row} groups in a row failed: nothing is left to train on. "
                f"The last failure was {self.last_failure}"
            )

    async def _write_advantages(self, lease: Lease) -> None:
        rows = by_member(lease)
        credit = self._rules.credit
        columns = {"advantages": self._by_rollout(lease, rows)} if credit is None else columns_of(rows, credit)
        await self._write(rows, columns)

    def _by_rollout(self, lease: Lease, rows: Sequence[Row]) -> list[Floats]:
        """Members are compared agent by agent; every token of a part has the advantage of its member and agent."""
        of = {
            (member, own.agent): value
            for own in by_agent(lease)
            for member, value in zip(own.members, self._rules.advantage(own.rewards_G), strict=True)
        }
        return [
            np.full(len(row.columns["tokens"]), of[row.columns["member"], row.columns["agent"]], dtype=np.float32)
            for row in rows
        ]

    async def _write_nothing(self, lease: Lease) -> None:
        """Whoever comes after settling finds the columns that it reads, though nothing of this group is trained."""
        rows = by_member(lease)
        if rows:
            names = ("advantages", "returns") if "values" in lease.columns else ("advantages",)
            nothing = [np.zeros(len(row.columns["tokens"]), dtype=np.float32) for row in rows]
            await self._write(rows, dict.fromkeys(names, nothing))

    async def _write(self, rows: Sequence[Row], columns: dict[str, list[Floats]]) -> None:
        is_scored = self._rules.score is not None
        rewards = {"reward": [row.columns["reward"] for row in rows]} if is_scored else {}
        await self._store.write([row.row_id for row in rows], {**columns, **rewards}, overwrite=is_scored)

    async def _settled(self) -> None:
        self.num_unsettled -= 1
        await self.end_if_drained()
        self._pulse.notify()

    async def end_if_drained(self) -> None:
        """No prompt is left and no group is outstanding: whoever waits for a group waits in vain."""
        if self.is_fed and not self._admission.outstanding:
            await self._store.finish()


class OfAgent(NamedTuple):
    """What one agent earned in each member of a group; in a rollout of one agent, what the rollout earned."""

    agent: int
    members: list[int]
    rewards_G: Rewards


def by_member(lease: Lease) -> list[Row]:
    """In the order of members and their parts, not in that of arrival."""
    return sorted(lease.rows, key=lambda row: (row.columns["member"], row.columns["part"]))


def _in_order(lease: Lease) -> list[int]:
    """The same order, as indices into the columns."""
    if not lease.row_ids:
        return []
    members, parts = lease["member"], lease["part"]
    return sorted(range(len(members)), key=lambda index: (members[index], parts[index]))


def by_agent(lease: Lease) -> list[OfAgent]:
    earned: dict[int, dict[int, float]] = {}
    for index in _in_order(lease):
        earned.setdefault(lease["agent"][index], {})[lease["member"][index]] = lease["reward"][index]
    return [
        OfAgent(agent, list(of), np.array(list(of.values()), dtype=np.float64)) for agent, of in sorted(earned.items())
    ]


def rewards_of(lease: Lease) -> Rewards:
    """Of each member, in their order: the reward of its first part."""
    first: dict[int, float] = {}
    for index in _in_order(lease):
        first.setdefault(lease["member"][index], lease["reward"][index])
    return np.array(list(first.values()), dtype=np.float64)


def members_of(lease: Lease) -> list[int]:
    return sorted(set(lease["member"])) if lease.row_ids else []
