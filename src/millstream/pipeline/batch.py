"""A batch: which settled groups are in it, and how its rows reach the learner.

`GroupTaker` takes complete groups into the batch, in the order that the policy chooses. `BatchTrainer` packs their rows into
micro-batches, makes one optimizer step per mini-batch, and scales advantages that need the whole batch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from millstream.algo.advantages import OverBatch
from millstream.errors import LagError, StreamEnded
from millstream.events import GroupTaken, MicroBatchLowered, Span
from millstream.events.rollouts import TakenRows, TrainedRows
from millstream.learner import Learner
from millstream.learner.packing import Packer
from millstream.pipeline.admission import Admission, Place
from millstream.pipeline.context import RunContext
from millstream.pipeline.critic import CriticUpdates
from millstream.pipeline.grouping import by_agent, members_of, row_order
from millstream.pipeline.parts import Algorithm
from millstream.pipeline.policy import SchedulingPolicy
from millstream.pipeline.proximal import Proximal
from millstream.pipeline.schema import TRAIN, train_rows
from millstream.pipeline.settle import GroupFinalizer
from millstream.store import Lease
from millstream.types import Floats, Metrics, StoredRow, TrainRow, Weights, scaled_advantages

T = TypeVar("T")
TRAINING = ("accumulate", "step")  # calls of the learner that every rank takes part in


class TakenGroup(NamedTuple):
    """A group that joined the batch; no rows where its place stays empty."""

    lease: Lease
    rows: list[TrainRow]


class GroupTaker:
    """Takes settled groups into the current batch.

    With a proximal policy, groups join the batch as they become complete, ahead of the learner, so that there is time to
    score them. `is_from_users`: groups come when users reward them, which may take any time. `are_stored`: the learner reads
    their rows from the store by itself."""

    def __init__(
        self,
        context: RunContext,
        *,
        admission: Admission,
        policy: SchedulingPolicy,
        finalizer: GroupFinalizer,
        critic: CriticUpdates | None,
        proximal: Proximal | None,
        is_from_users: bool,
        are_stored: bool,
    ) -> None:
        self._context = context
        self._admission = admission
        self._policy = policy
        self._is_from_users = is_from_users
        self._are_stored = are_stored
        self._finalizer = finalizer
        self._critic = critic
        self._proximal = proximal
        self._places: dict[int, Place] = {}  # of groups that were chosen and not handed over yet
        self._ahead: asyncio.Queue[TakenGroup | None] = asyncio.Queue()  # None after the last one of a batch
        self._is_learner_waiting = True
        self._num_taken = 0

    def begin_batch(self) -> None:
        self._num_taken = 0
        if self._proximal is not None:
            self._context.spawn(self._take_ahead())

    async def next(self) -> TakenGroup | None:
        """The next group of the batch; None if it is full, or no group is left.

        Waits for groups that the policy chooses. Ended by: `settle`, which completes them; rollouts have timeouts."""
        if self._proximal is None:
            claim = self._claim()
            if claim is None:
                return None
            return await self._take(self._wait(claim))
        self._is_learner_waiting = self._ahead.empty()
        if self._is_learner_waiting:
            self._context.store.wake()  # the policy is asked again, and may restart groups that are overdue
        taken = await self._wait(self._ahead.get())
        self._is_learner_waiting = False
        return taken

    async def _wait(self, group: Awaitable[T]) -> T:
        waits, wait = self._context.waits, ("train", "a complete group")
        if not self._is_from_users:
            return await waits.on(*wait, group, deadline=False)
        with waits.idle(*wait):
            return await group

    async def _take_ahead(self) -> None:
        """Consumes settled groups. Produces the groups of one batch, in a queue. Waits as `next` does."""
        while (claim := self._claim()) is not None:
            with self._context.waits.idle("train, ahead", "a complete group"):
                taken = await self._take(claim)
            if taken is None:
                break
            self._ahead.put_nowait(taken)
        self._ahead.put_nowait(None)

    def _claim(self) -> Awaitable[Lease] | None:
        return None if self._admission.is_batch_full else self._context.store.claim(TRAIN, choose=self._choose)

    def _choose(self, ready: Iterable[int]) -> int | None:
        """The chosen group joins the batch in the same moment: before the event loop runs again, a new admission could make
        the choice invalid."""
        group_id = self._policy.choose(ready, is_learner_waiting=self._is_learner_waiting)
        if group_id is not None:
            self._places[group_id] = self._admission.take(group_id)
        return group_id

    async def _take(self, claim: Awaitable[Lease]) -> TakenGroup | None:
        try:
            lease = await claim
        except StreamEnded:
            return None
        place = self._places.pop(lease.group_id)
        self._finalizer.settled.discard(lease.group_id)
        await self._finalizer.end_if_drained()
        is_vacant = lease.group_id in self._context.vacant
        taken = TakenGroup(lease, [] if is_vacant else self._checked_rows(lease, place))
        self._context.keep(_taken_rows(taken, self._admission.version, self._num_taken))
        self._num_taken += 1
        if self._critic is not None:
            self._critic.take(lease.group_id, is_last=self._admission.is_batch_full)
        if self._proximal is not None:
            self._proximal.take(lease.group_id)
        return taken

    def _checked_rows(self, lease: Lease, place: Place) -> list[TrainRow]:
        """The last line of defence: the rows are fresh enough, or the run stops with a `LagError`."""
        version, bound = self._admission.version, place.bound
        oldest = min(lease["start_version"])
        if oldest < place.start or version - oldest > bound:
            raise LagError(
                f"group {lease.group_id} was admitted at version {place.start} and has a rollout that started at "
                f"{oldest}; it was about to be trained at {version} with a bound of {bound}"
            )
        self._context.emit(
            GroupTaken(
                at=self._context.now(),
                group_id=lease.group_id,
                version=version,
                lag=version - oldest,
                num_rollouts=len(members_of(lease)),
            )
        )
        return train_rows(lease, are_stored=self._are_stored)


def _taken_rows(taken: TakenGroup, version: int, number: int) -> TakenRows:
    lease, order = taken.lease, row_order(taken.lease) if taken.rows else []
    places = [(lease["member"][i], lease["part"][i]) for i in order]
    are_named = order and isinstance(taken.rows[0], StoredRow)  # without the numbers that are kept, where any are
    rows = train_rows(lease) if are_named and "tokens" in lease.columns else taken.rows
    return TakenRows(lease.group_id, version, number, places, [lease["reward"][i] for i in order], rows)


class BatchTrainer:
    """The learner's side of a batch: gradients accumulate while the rest of the batch is still being generated.

    `groups_per_step`: with `Algorithm.mini_batches` it says after how many groups there is an optimizer step."""

    def __init__(
        self,
        context: RunContext,
        learner: Learner,
        algorithm: Algorithm,
        *,
        groups_per_step: int,
        critic: CriticUpdates | None,
        proximal: Proximal | None,
    ) -> None:
        self._context = context
        self._learner = learner
        self._over_batch = algorithm.over_batch
        self._groups_per_mini_batch = groups_per_step // algorithm.mini_batches
        self._critic = critic
        self._proximal = proximal
        self._packer = Packer[TrainRow](algorithm.micro_batch_tokens)
        self._metrics: list[Metrics] = []
        self._num_trained = 0
        self._since_step: list[TakenGroup] = []
        self._start_weights: Weights | None = None
        self.groups: list[TakenGroup] = []

    async def begin(self, version: int) -> None:
        self.groups = []
        self._since_step = []
        self._metrics = []
        self._num_trained = 0
        await self.call("begin_batch", self._learner.begin_batch())
        if self._proximal is not None:
            weights = self._start_weights
            if weights is None:  # nothing was published by this process
                weights = await self.copy_weights()
            self._start_weights = None
            self._proximal.begin_batch(version, weights)

    async def add(self, taken: TakenGroup) -> None:
        self.groups.append(taken)
        if self._over_batch is None:
            await self._train(taken)

    async def finish(self, *, is_full: bool) -> Metrics:
        """The batch's metrics, when all of it is trained. A batch that is not full (end of data) ends with a step, too."""
        if self._over_batch is not None:
            self.groups = _scaled(self._over_batch, self.groups)
            for taken in self.groups:
                await self._train(taken)
        await self._accumulate(self._packer.flush())
        if not is_full:
            await self._step()
        if self._critic is not None:  # its waits have their deadlines
            learning = self._critic.finish_batch()
            self._metrics.append(await self._context.waits.on("train", "the critic's batch", learning, deadline=False))
        return _mean(self._metrics)

    async def copy_weights(self) -> Weights:
        """The proximal policy of the next batch starts with them."""
        weights = await self.call("copy weights", self._learner.weights())
        if self._proximal is not None:
            self._start_weights = weights
        return weights

    async def call(self, what: str, work: Awaitable[T], num_tokens: int = 0) -> T:
        """Await the learner under a name, and record how long it took."""
        began = self._context.now()
        result = await self._context.waits.on("train", f"the learner to {what}", work)
        now = self._context.now()
        ranks = self._learner.rank_seconds() if what in TRAINING else []
        span = Span(at=now, worker="learner", what=what, seconds=now - began, num_tokens=num_tokens)
        self._context.emit(replace(span, rank_seconds=ranks) if ranks else span)
        return result

    async def _train(self, taken: TakenGroup) -> None:
        """One group; an optimizer step if it ends a mini-batch."""
        self._num_trained += 1
        self._since_step.append(taken)
        rows = taken.rows
        if self._proximal is not None:
            rows = await self._proximal.join(taken.lease.group_id, rows, self._num_trained)
        for row in rows:
            await self._accumulate(self._packer.add(row))
        if self._num_trained % self._groups_per_mini_batch == 0:
            await self._accumulate(self._packer.flush())
            await self._step()

    async def _step(self) -> None:
        metrics = await self.call("step", self._learner.step())
        self._metrics.append(metrics)
        self._keep_log_ratios()
        if tokens := int(metrics.get("micro_batch_tokens", 0)):
            self._context.emit(MicroBatchLowered(at=self._context.now(), micro_batch_tokens=tokens))

    def _keep_log_ratios(self) -> None:
        groups, found = self._since_step, self._learner.log_ratios()
        self._since_step = []
        if not len(found):
            return
        counts = [row.num_trained for taken in groups for row in taken.rows]
        by_row = (found[begin:end] for begin, end in pairwise(accumulate(counts, initial=0)))
        for taken in groups:
            if taken.rows:
                self._context.keep(TrainedRows(taken.lease.group_id, [next(by_row) for _ in taken.rows]))

    async def _accumulate(self, rows: Sequence[TrainRow]) -> None:
        if rows:
            num_tokens = sum(row.num_tokens for row in rows)
            await self.call("accumulate", self._learner.accumulate(rows), num_tokens)


def _mean(metrics: Sequence[Metrics]) -> Metrics:
    """Over the mini-batches of a batch; one without rows has no metrics. Of what is a maximum, the largest. Values that are
    not finite are left out: a file of events cannot hold them, and the step was left out as well."""
    names = dict.fromkeys(name for some in metrics for name in some)
    values = {name: [some[name] for some in metrics if math.isfinite(some.get(name, math.nan))] for name in names}
    return {name: float((max if name.startswith("max_") else np.mean)(of)) for name, of in values.items() if of}


def _scaled(over_batch: OverBatch, groups: list[TakenGroup]) -> list[TakenGroup]:
    """The batch's rows, their advantages shifted and scaled by statistics of the whole batch. Empty places are no part of it,
    and neither are values that are not finite: the learner leaves those out."""
    filled = [taken for taken in groups if taken.rows]
    if not filled:
        return groups
    rewards_R = np.concatenate([own.rewards_G for taken in filled for own in by_agent(taken.lease)])
    advantages_N = np.concatenate([own for taken in filled for own in _trained_advantages(taken)]).astype(np.float64)
    finite_N = advantages_N[np.isfinite(advantages_N)]
    if not len(finite_N):
        return groups
    shift, divisor = over_batch(rewards_R, finite_N)

    def scaled(row: TrainRow) -> TrainRow:
        if isinstance(row, StoredRow):
            return replace(row, scale=(shift, divisor))
        return replace(row, advantages=scaled_advantages(row.advantages, shift, divisor))

    return [TakenGroup(taken.lease, [scaled(row) for row in taken.rows]) for taken in groups]


def _trained_advantages(taken: TakenGroup) -> list[Floats]:
    if "loss_mask" in taken.lease.columns:
        masks = taken.lease["loss_mask"]
        return [row.advantages[masks[i]] for i, row in zip(row_order(taken.lease), taken.rows, strict=True)]
    return [row.advantages[: row.num_trained] for row in taken.rows]  # one number for all tokens of a row
