"""Settling: what becomes of a finished group. It gets its advantages, or is set aside; every group leaves exactly once.

The reward of a group as a whole (`Algorithm.group_reward`) comes first; it may be slow, and delays no other group. The user's
own filter (`pipeline.filter`) comes last, and sees only groups that would be trained.

A group without signal, with too few members left, or that the filter refuses, is replaced by a new prompt within the step's
budget of replacements. Past it, its place in the batch stays empty (`RunContext.vacant`), and it waits to be taken like any
other. In lockstep, groups are set aside only when nothing else moves, in the order of their ids: which of them is replaced then
depends on ids, never on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from millstream import imports
from millstream.algo.advantages import Rewards, has_signal
from millstream.errors import ConfigError, MillstreamError, RolloutError, StreamEnded
from millstream.events import GroupLeft, GroupScored
from millstream.events.rollouts import GroupFate
from millstream.pipeline.admission import Admission
from millstream.pipeline.context import RunContext
from millstream.pipeline.credit import columns_of, is_any_agent_credited
from millstream.pipeline.grouping import by_agent, by_member, members_of, rewards_of, row_order, sampled_by_member
from millstream.pipeline.parts import Algorithm, TokenGroupReward, group_filter
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.schema import SETTLE, num_tokens_of
from millstream.store import Lease
from millstream.types import Fate, FinishedGroup, Floats, Task

OnCancelled = Callable[[Lease], None]
"""Called with what was left of a cancelled group when its last rollout has ended and its rows are dropped."""


class SetAside(NamedTuple):
    """A group that will not be trained, and why."""

    lease: Lease
    rewards_G: Rewards
    fate: Fate


class GroupFinalizer:
    """Settles finished groups. `min_group_size`: a group with fewer members has failed. `num_at_once`: groups that are settled
    concurrently, where the store is another process: each waits for three of its answers."""

    def __init__(
        self,
        context: RunContext,
        admission: Admission,
        algorithm: Algorithm,
        config: PipelineConfig,
        *,
        min_group_size: int,
        num_at_once: int = 1,
    ) -> None:
        self._context = context
        self._store = context.store
        self._admission = admission
        self._algorithm = algorithm
        self._config = config
        self._filter = group_filter(config)
        self._filter_name = imports.absolute(config.filter)  # as in the config that the run keeps
        self._min_group_size = min_group_size
        self._num_at_once = num_at_once
        self._to_set_aside: list[SetAside] = []  # in lockstep
        self._scoring: dict[int, asyncio.Task[None] | None] = {}
        self._cancelled: dict[int, OnCancelled] = {}
        self.settled: set[int] = set()  # groups that wait to be taken
        self.num_unsettled = 0  # groups that are closed and not settled yet
        self.num_replaced = 0  # in this step
        self.num_failed_in_a_row = 0
        self.last_failure = ""
        self.is_fed = False  # no prompt is left: nothing can be replaced any more

    async def close(self, group_id: int) -> None:
        """The last member of a group has ended."""
        self.num_unsettled += 1
        await self._store.close_groups([group_id])

    def begin_batch(self) -> None:
        self.num_replaced = 0

    async def settle(self) -> None:
        """Consumes closed groups. Produces advantages, or sets the group aside. Waits for a closed group. Ended by: the last
        rollout of a group, which closes it."""
        async with asyncio.TaskGroup() as scoring:
            for _ in range(self._num_at_once - 1):
                scoring.create_task(self._settle_groups(scoring))
            await self._settle_groups(scoring)

    async def _settle_groups(self, scoring: asyncio.TaskGroup) -> None:
        while True:
            claim = self._store.claim(SETTLE)
            try:
                with self._context.waits.idle("settle", "a finished group"):
                    lease = await claim
            except StreamEnded:
                return
            needs_task = self._algorithm.group_reward is not None or self._filter is not None
            if needs_task and lease.rows and lease.group_id not in self._cancelled:
                scoring.create_task(self._score_and_settle(lease))
                continue
            async with self._context.quiesce:
                if lease.group_id in self._cancelled:
                    await self._finish_cancelled(lease)
                else:
                    await self._settle(lease, rewards_of(lease), self._judge(lease))

    async def _settle(self, lease: Lease, rewards_G: Rewards, fate: Fate) -> None:
        if fate is Fate.TRAINED:
            await self._write_advantages(lease)
            if lease.group_id in self._cancelled:  # meanwhile
                await self._finish_cancelled(lease)
                return
            self.settled.add(lease.group_id)
            await self._store.acknowledge(lease)
            await self._count_settled()
        elif self._config.is_in_lockstep:
            self._to_set_aside.append(SetAside(lease, rewards_G, fate))
            self._context.notifier.notify()
        else:
            await self._set_aside(SetAside(lease, rewards_G, fate))

    # ---- the reward of a group as a whole ----------------------------------------------------------------------------

    async def _score_and_settle(self, lease: Lease) -> None:
        """A group whose reward fails has failed. Waits for its prompt, which a resumed run has to read again."""
        began, failure, group_id = self._context.now(), "", lease.group_id
        group_reward = self._algorithm.group_reward
        extra_G = np.zeros(len(rewards_of(lease)))
        try:
            if group_id not in self._cancelled:
                self._scoring[group_id] = asyncio.current_task()
                task = await self._task_of(group_id)
                if group_reward is not None:
                    extra_G = np.array(await self._score(lease, task, group_reward), dtype=np.float64)
        except asyncio.CancelledError:
            if group_id not in self._cancelled:
                raise  # the run is ending
        except RolloutError as error:
            failure = self.last_failure = f"{type(error).__name__}: {error}"
        finally:
            self._scoring.pop(group_id, None)
        async with self._context.quiesce:
            await self._settle_scored(lease, extra_G, began, failure)

    async def _task_of(self, group_id: int) -> Task:
        known = self._context.notifier.until(lambda: self._context.groups[group_id].task)
        return await self._context.waits.on(f"group {group_id}", "its prompt to be read again", known)

    async def _score(self, lease: Lease, task: Task, group_reward: TokenGroupReward) -> Sequence[float]:
        """Waits for the reward, which has time limits of its own."""
        scoring = group_reward(task, [tokens.tolist() for tokens in sampled_by_member(lease)])
        what = "the reward of the whole group"
        return await self._context.waits.on(f"group {lease.group_id}", what, scoring, deadline=False)

    async def _settle_scored(self, lease: Lease, extra_G: Rewards, began: float, failure: str) -> None:
        group_id = lease.group_id
        if group_id in self._cancelled:
            await self._finish_cancelled(lease)
            return
        if self._algorithm.group_reward is None:
            await self._settle(lease, rewards_of(lease), self._judge(lease))
            return
        extra_of = dict(zip(members_of(lease), extra_G, strict=True))
        earned = [row.columns["reward"] + float(extra_of[row.columns["member"]]) for row in lease.rows]
        lease = replace(lease, columns={**lease.columns, "reward": earned})
        rewards_G, now = rewards_of(lease), self._context.now()
        self._context.emit(
            GroupScored(
                at=now,
                group_id=group_id,
                rewards=[] if failure else rewards_G.tolist(),
                seconds=now - began,
                failure=failure,
            )
        )
        await self._settle(lease, rewards_G, Fate.FAILED if failure else self._judge(lease))

    # ---- groups that leave without being trained ---------------------------------------------------------------------

    @property
    def cancelled(self) -> set[int]:
        """Groups whose rollouts are being aborted."""
        return set(self._cancelled)

    def cancel(self, group_id: int, then: OnCancelled) -> None:
        """`then` is called as soon as its last rollout has ended. A reward of the group that is being computed is cancelled."""
        self._cancelled[group_id] = then
        scoring = self._scoring.get(group_id)
        if scoring is not None:
            scoring.cancel()

    async def _finish_cancelled(self, lease: Lease) -> None:
        then = self._cancelled.pop(lease.group_id)
        await self._store.drop(lease)
        then(lease)
        self._store.wake()
        await self._count_settled()

    def leave_aborted(self, lease: Lease) -> None:
        self._admission.remove(lease.group_id)
        self.leave(lease.group_id, Fate.ABORTED, rewards_of(lease), is_replaced=True)

    async def discard(self, lease: Lease) -> None:
        """Drop a settled group that no batch takes. If its place was to stay empty, its fate has been recorded already."""
        await self._store.drop(lease)
        self.settled.discard(lease.group_id)
        if lease.group_id in self._context.vacant:
            self._admission.remove(lease.group_id)
            self._context.vacant.discard(lease.group_id)
        else:
            self.leave_aborted(lease)
        await self.end_if_drained()
        self._context.notifier.notify()

    async def set_aside_in_order(self, is_still: Callable[[], bool]) -> None:
        """In lockstep. Consumes groups to set aside. Produces replacements and empty places. Waits until no rollout moves
        (`is_still`) and every other group is settled. Ended by: rollouts that wait at the gate, `settle`."""
        while True:
            await self._context.notifier.until(
                lambda: bool(self._to_set_aside) and len(self._to_set_aside) == self.num_unsettled and is_still()
            )
            waiting = sorted(self._to_set_aside, key=lambda aside: aside.lease.group_id)
            self._to_set_aside = []
            for aside in waiting:
                async with self._context.quiesce:
                    await self._set_aside(aside)

    async def _set_aside(self, aside: SetAside) -> None:
        lease, rewards_G, fate = aside
        if fate is Fate.FAILED:
            self._count_failure()
        stays_empty = not self.is_fed and self.num_replaced >= self._config.max_replaced
        if stays_empty:
            self._context.vacant.add(lease.group_id)
        is_refused = fate is Fate.FILTERED and not self._lacks_signal(lease)
        self.leave(
            lease.group_id,
            fate,
            rewards_G,
            is_replaced=not stays_empty and not self.is_fed,
            refused_by=self._filter_name if is_refused else UNSET,
        )
        if stays_empty:
            self.settled.add(lease.group_id)
            await self._write_nothing(lease)
            await self._store.acknowledge(lease)
        else:
            self.num_replaced += 1
            await self._store.drop(lease)
            self._admission.remove(lease.group_id)
            self._store.wake()  # the order in which `train` may take groups has changed
        await self._count_settled()

    def refused_by(self, fate: Fate, rewards_G: Rewards) -> str | UnsetType:
        """Of a group of a run that is trained again: the filter, where its rewards have a signal."""
        is_refused = fate is Fate.FILTERED and (has_signal(rewards_G) or not self._config.filter_zero_signal)
        return self._filter_name if is_refused and self._filter_name else UNSET

    def _count_failure(self) -> None:
        self.num_failed_in_a_row += 1
        if self.num_failed_in_a_row >= max(8, self._config.groups_per_step):
            raise MillstreamError(
                f"{self.num_failed_in_a_row} groups in a row failed: nothing is left to train on. "
                f"The last failure was {self.last_failure}"
            )

    # ---- fates and advantages ----------------------------------------------------------------------------------------

    def leave(
        self,
        group_id: int,
        fate: Fate,
        rewards_G: Rewards,
        *,
        is_replaced: bool = False,
        task_id: str | None = None,
        refused_by: str | UnsetType = UNSET,
    ) -> None:
        """Record a group's fate. The only place that does. `task_id`: of a group that is not in flight."""
        self._context.emit(
            GroupLeft(
                at=self._context.now(),
                group_id=group_id,
                fate=fate,
                is_replaced=is_replaced,
                num_members=len(rewards_G),
                mean_reward=float(rewards_G.mean()) if len(rewards_G) else 0.0,
                refused_by=refused_by,
            )
        )
        task_id = self._context.groups[group_id].task_id if task_id is None else task_id
        is_vacant = group_id in self._context.vacant
        self._context.keep(GroupFate(group_id, task_id, fate, rewards_G.tolist(), is_vacant))

    def _judge(self, lease: Lease) -> Fate:
        if len(members_of(lease)) < self._min_group_size:
            return Fate.FAILED
        self.num_failed_in_a_row = 0
        return Fate.FILTERED if self._lacks_signal(lease) or self._is_refused(lease) else Fate.TRAINED

    def _lacks_signal(self, lease: Lease) -> bool:
        return self._config.filter_zero_signal and not self._has_signal(lease)

    def _is_refused(self, lease: Lease) -> bool:
        """Whether the user's own filter refuses it. A filter that fails ends the run: it would leave out the wrong groups."""
        if self._filter is None:
            return False
        task, name = self._context.groups[lease.group_id].task, self._config.filter
        assert task is not None, "see `_score_and_settle`"
        rewards = tuple(rewards_of(lease).tolist())
        group = FinishedGroup(task=task, rewards=rewards, tokens=tuple(sampled_by_member(lease)))
        what = f"pipeline.filter = {name!r}, for group {lease.group_id} (task {task.id!r}, rewards {list(rewards)})"
        try:
            found = self._filter(group)
        except Exception as error:  # user code: reported with its cause
            raise ConfigError(f"{what} raised {type(error).__name__}: {error}") from error
        if not isinstance(found, bool | np.bool_):
            raise ConfigError(f"{what} returned {found!r}: expected True (train it) or False")
        return not found

    def _has_signal(self, lease: Lease) -> bool:
        """By the rewards that were given, before a KL penalty is subtracted."""
        if self._algorithm.signal is not None:
            return is_any_agent_credited(by_member(lease), self._algorithm.signal)
        return any(has_signal(own.rewards_G) for own in by_agent(lease))

    async def _write_advantages(self, lease: Lease) -> None:
        credit = self._algorithm.credit
        order = row_order(lease)
        columns = (
            {"advantages": self._by_rollout(lease, order)} if credit is None else columns_of(by_member(lease), credit)
        )
        await self._write(lease, order, columns)

    def _by_rollout(self, lease: Lease, order: Sequence[int]) -> list[Floats]:
        """Members are compared agent by agent; every token of a part has the advantage of its member and agent. Each is one
        number, which the store keeps once."""
        of = {
            (member, own.agent): value
            for own in by_agent(lease)
            for member, value in zip(own.members, self._algorithm.advantage(own.rewards_G), strict=True)
        }
        members, agents, num_tokens = lease["member"], lease["agent"], num_tokens_of(lease)
        return [_repeated(of[members[i], agents[i]], num_tokens[i]) for i in order]

    async def _write_nothing(self, lease: Lease) -> None:
        """Zeros, for consumers after settling that read these columns, though nothing of this group is trained."""
        order = row_order(lease)
        if order:
            names = ("advantages", "returns") if "values" in lease.columns else ("advantages",)
            num_tokens = num_tokens_of(lease)
            nothing: list[Floats] = [np.broadcast_to(np.float32(0), (num_tokens[i],)) for i in order]
            await self._write(lease, order, dict.fromkeys(names, nothing))

    async def _write(self, lease: Lease, order: Sequence[int], columns: dict[str, list[Floats]]) -> None:
        is_scored, ids = self._algorithm.group_reward is not None, [lease.row_ids[i] for i in order]
        if is_scored:  # apart: a consumer may read it without columns that grow with the rollout
            await self._store.write(ids, {"reward": [lease["reward"][i] for i in order]}, overwrite=True)
        await self._store.write(ids, columns, overwrite=is_scored)

    async def _count_settled(self) -> None:
        self.num_unsettled -= 1
        await self.end_if_drained()
        self._context.notifier.notify()

    async def end_if_drained(self) -> None:
        """No prompt is left and no group is outstanding: the store's streams end."""
        if self.is_fed and not self._admission.outstanding:
            await self._store.finish()


def _repeated(value: float, count: int) -> Floats:
    """One number as an array of that length, as `np.broadcast_to`, which takes five times as long."""
    return np.ndarray((count,), np.float32, np.float32(value).tobytes(), strides=(0,))
