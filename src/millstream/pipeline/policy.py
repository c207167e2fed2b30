"""The scheduling policy: when a group may start, which one is trained next, and what becomes of the slow ones.

The loops of the run ask it five questions:

    may_start        feed: the version that the next group may start at; None: wait
    choose           train: which complete group joins the batch; None: wait (`_on_blocked` decides about those it waits for)
    on_batch_full    train: what to do with groups that only this batch could have trained
    on_stepped       train: what must happen before the next group may start
    rank             router: which group's requests go first
    relative_length  router: how long they are expected to be

Options of `[pipeline]` and `[rollout]` that are decided here:

    lockstep                 max_lag = 0: decode batches depend on ids alone (`pipeline.lockstep`)
    surplus = "abort"        first to finish: what is late when the batch is full is aborted; so are extra members of a group
    overdue = "restart"      groups that alone hold up a full batch are aborted and started again, under the same id

A policy for slow groups is a method of this class: it cancels a group with `_cancel`, and says what comes then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

from millstream.events import GroupRestarted
from millstream.events.rollouts import Restart
from millstream.pipeline.admission import Admission
from millstream.pipeline.context import RunContext
from millstream.pipeline.lockstep import Gate
from millstream.pipeline.parts import AfterStep
from millstream.pipeline.rollouts import RolloutConfig, Rollouts
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.schema import TRAIN, this_one
from millstream.pipeline.settle import GroupFinalizer, OnCancelled
from millstream.pipeline.sync import WeightSync
from millstream.serving.router import RequestRank, Router
from millstream.store import Lease


def admission_for(config: PipelineConfig) -> Admission:
    return Admission(
        groups_per_step=config.groups_per_step,
        max_lag=config.max_lag,
        budget=config.most_groups,
        num_steps=config.steps,
        is_in_order=config.is_in_lockstep,
        is_greedy=config.is_first_to_finish,
    )


def gate_for(config: PipelineConfig, router: Router, context: RunContext) -> Gate | None:
    return Gate(router, context) if config.is_in_lockstep else None


def complete_with(config: PipelineConfig, rollout: RolloutConfig) -> int | None:
    """How many ended rollouts complete a group. None: all that were started."""
    return rollout.group_size if config.is_first_to_finish else None


class SchedulingPolicy:
    """Asks the admission rule, and acts on the rollouts. `after_step` is called with every new version."""

    def __init__(
        self,
        config: PipelineConfig,
        context: RunContext,
        *,
        admission: Admission,
        router: Router,
        sync: WeightSync,
        finalizer: GroupFinalizer,
        rollouts: Rollouts,
        gate: Gate | None,
        after_step: AfterStep | None,
    ) -> None:
        self._config = config
        self._context = context
        self._admission = admission
        self._router = router
        self._sync = sync
        self._finalizer = finalizer
        self._rollouts = rollouts
        self._gate = gate
        self._after_step = after_step
        self._is_held = False  # in lockstep: `after_step` has not ended
        self._after_steps: list[asyncio.Task[None]] = []  # `after_step` of one step each

    # ---- the questions -----------------------------------------------------------------------------------------------

    def may_start(self) -> int | None:
        """The oldest serving version that a new group may start at: the older, the more engines may serve it. In lockstep no
        group starts before every engine has the new weights."""
        if self._is_held or (self._gate is not None and not self._sync.is_everywhere()):
            return None
        return next((v for v in self._router.serving_versions() if self._admission.may_admit(v)), None)

    def choose(self, ready: Iterable[int], *, is_learner_waiting: bool) -> int | None:
        """The complete group that joins the batch next; None to wait for others."""
        ready = list(ready)
        group_id = self._admission.choose(ready)
        if group_id is None and is_learner_waiting:
            self._on_blocked(ready)
        return group_id

    async def on_batch_full(self) -> None:
        """First to finish: groups that this batch could have trained, and no later one can, are aborted. Waits for their
        rollouts to leave; the engines end that wait."""
        for group_id in self._admission.overdue():
            if group_id in self._finalizer.settled:
                claim = self._context.store.claim(TRAIN, choose=partial(this_one, group_id))
                lease = await self._context.waits.on("train", f"group {group_id}, which is over", claim)
                await self._finalizer.discard(lease)
            elif group_id not in self._finalizer.cancelled:
                self._cancel(group_id, "the batch is full", self._finalizer.leave_aborted)
        gone = self._context.notifier.until(lambda: not self._admission.overdue())
        await self._context.waits.on("train", "aborted rollouts to leave", gone)

    def on_stepped(self) -> None:
        self._is_held = self._gate is not None and self._after_step is not None

    async def run_after_step(self) -> None:
        """`after_step` runs concurrently with training. In lockstep it has the engines to itself, so that it changes no
        batch: waits for every engine to load the new version, and for `after_step`, whose rollouts have their timeouts."""
        if self._after_step is None:
            return
        if self._gate is None:
            running = [task for task in self._after_steps if not task.done()]
            self._after_steps = [*running, self._context.spawn(self._after_step(self._admission.version))]
            return
        waits = self._context.waits
        await waits.on("train", "every engine to load the new version", self._sync.until_everywhere())
        evaluation = self._after_step(self._admission.version)
        await waits.on("train", "what comes after the step", evaluation, deadline=False)
        self._is_held = False
        self._context.notifier.notify()

    async def finish_after_step(self, *, is_stopping: bool) -> None:
        """Training is over: wait for what still runs, which may keep an engine from loading the last version. In a
        run that is stopped it is cancelled."""
        running = [task for task in self._after_steps if not task.done()]
        for task in running if is_stopping else ():
            task.cancel()
        if running:  # the task group has their errors
            ended = asyncio.gather(*running, return_exceptions=True)
            await self._context.waits.on("the run", "what comes after the step", ended, deadline=False)

    def rank(self, group_id: int) -> RequestRank | None:
        """The earliest deadline first; of these, longest first, the prompt with the longest rollouts; of these, the group with
        the fewest members in flight."""
        if group_id not in self._admission:
            return None
        length = self.relative_length(group_id)
        return self._admission.place(group_id).deadline, -length, self._rollouts.num_living(group_id)

    def relative_length(self, group_id: int) -> float:
        """Of its rollouts that have not ended, expected: 1 is that of all rollouts, or not known."""
        lengths, group = self._context.lengths, self._context.groups.get(group_id)
        return 1.0 if lengths is None or group is None else lengths.relative(group.task_id)

    # ---- slow groups -------------------------------------------------------------------------------------------------

    def _on_blocked(self, ready: Iterable[int]) -> None:
        """The learner waits, and nothing that is complete may be taken. With overdue = "restart", groups that alone hold up the
        batch start again, and others take their place."""
        if self._config.overdue != "restart":
            return
        for group_id in self._admission.blockers(ready):
            is_in_flight = group_id in self._rollouts and group_id not in self._finalizer.cancelled
            if is_in_flight and self._context.groups[group_id].restarts < self._config.max_restarts:
                self._cancel(group_id, "its group is restarted", self._restart)

    def _cancel(self, group_id: int, why: str, then: OnCancelled) -> None:
        """Abort its rollouts; `then` is called with what it had when the last of them has left."""
        self._finalizer.cancel(group_id, then)
        self._rollouts.abort(group_id, why)

    def _restart(self, lease: Lease) -> None:
        group = self._context.groups[lease.group_id]
        assert group.task is not None
        place = self._admission.restart(lease.group_id, self._router.newest_version)
        group.restarts += 1
        group.first_attempt = max(group.first_attempt + self._rollouts.num_attempts, group.next_attempt)
        self._context.emit(
            GroupRestarted(
                at=self._context.now(),
                group_id=lease.group_id,
                start_version=place.start,
                deadline=place.deadline,
                restarts=group.restarts,
                first_attempt=group.first_attempt,
            )
        )
        self._context.keep(Restart(lease.group_id, "restarted"))
        self._rollouts.start(lease.group_id, group.task, place)

    # ---- lockstep ----------------------------------------------------------------------------------------------------

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """What runs concurrently with the loops of the run: in lockstep, the gate."""
        if self._gate is None:
            return []
        return [self._gate.run(self._is_quiet), self._finalizer.set_aside_in_order(self._is_still)]

    def _is_still(self) -> bool:
        """Whether every rollout in flight waits at the gate."""
        to_do = sum(len(group.to_do) for group in self._context.groups.values())
        return self._gate is not None and self._gate.num_waiting == self._rollouts.num_in_flight + to_do

    def _is_quiet(self) -> bool:
        """Whether nothing but the gate can move."""
        is_full = self._finalizer.is_fed or self.may_start() is None
        return is_full and not self._finalizer.num_unsettled and self._is_still()
