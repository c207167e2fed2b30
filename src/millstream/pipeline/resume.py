"""The state of a run between two batches: captured for a checkpoint, and restored by the run that resumes from it.

A resumed run continues every group that was in flight under its own id, start version and deadline: rollouts that are in the
store are kept, the others are rolled out again with the same random numbers. With changed settings: see `reschedule`.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from millstream.errors import DataError
from millstream.events import GroupResumed
from millstream.events.rollouts import Restart
from millstream.pipeline.admission import Admission, Place
from millstream.pipeline.batch import BatchTrainer
from millstream.pipeline.context import GroupInFlight, RunContext
from millstream.pipeline.parts import Parts
from millstream.pipeline.reschedule import Changed, take_over
from millstream.pipeline.rollouts import Rollouts
from millstream.pipeline.schema import SETTLE, SharedColumns
from millstream.pipeline.settle import GroupFinalizer
from millstream.pipeline.state import Checkpointer, GroupState, LearnerAndCritic, Ledger, PipelineState
from millstream.store import Saved
from millstream.types import Fate, Task


class Resumption:
    """Captures and restores the state of a run's components. `num_members`: rollouts that a group starts."""

    def __init__(
        self,
        context: RunContext,
        admission: Admission,
        finalizer: GroupFinalizer,
        rollouts: Rollouts,
        num_members: int,
    ) -> None:
        self._context = context
        self._admission = admission
        self._finalizer = finalizer
        self._rollouts = rollouts
        self._num_members = num_members
        self.rows: Saved | None = None  # what the store of a resumed run begins with
        self._group_of: dict[int, int] = {}  # by prompt: groups that a resumed run has not read the task of yet

    # ---- capture -----------------------------------------------------------------------------------------------------

    async def checkpoint(self, checkpointer: Checkpointer, parts: Parts, learner: BatchTrainer) -> None:
        """Write a checkpoint between two batches. Waits for changes in progress, for copies of the learner's and the critic's
        state, and for the checkpointer."""
        context, began = self._context, self._context.now()
        await context.waits.on("train", "changes that have begun", context.quiesce.stop())
        try:
            state, mark = await self.capture(), checkpointer.mark()  # one moment: later events are not in it
        finally:
            context.quiesce.resume()
        snapshot = await learner.call("copy its state", parts.learner.snapshot())
        if parts.critic is not None:
            copying = parts.critic.snapshot()
            copied = await context.waits.on("train", "the critic to copy its state", copying)
            snapshot = LearnerAndCritic(snapshot, copied)
        keeping = checkpointer.keep(state, mark, snapshot, context.now() - began)
        await context.waits.on("train", "the checkpoint", keeping)

    async def capture(self) -> PipelineState:
        """To be called between two batches. Groups may be admitted while the store answers, so everything else is read after
        it. A group whose rollouts are being aborted is rolled out again by a resumed run."""
        store = self._context.store
        # rows that are held for a learner that reads them again are trained, and in its checkpoint
        rows = await (store.snapshot(with_held=False) if isinstance(store, SharedColumns) else store.snapshot())
        cancelled = self._finalizer.cancelled
        stored: dict[int, set[int]] = {}
        for row in rows.rows:
            stored.setdefault(row.group_id, set()).add(int(row.columns["member"]))
        groups = {
            group_id: self._group_state(
                group_id, place, stored.get(group_id, set()), is_cancelled=group_id in cancelled
            )
            for group_id, place in self._admission.places()
        }
        is_closed = {group_id: closed and group_id not in cancelled for group_id, closed in rows.is_closed.items()}
        # the store may not know yet that a group is complete
        is_closed |= {group_id: True for group_id, group in groups.items() if not group.to_do}
        ledger = Ledger(
            version=self._admission.version,
            next_group=self._context.next_group,
            groups=groups,
            vacant=sorted(self._context.vacant),
            num_replaced=self._finalizer.num_replaced,
            num_failed_in_a_row=self._finalizer.num_failed_in_a_row,
            next_prompt=self._context.next_prompt,
            to_feed=sorted(self._context.to_feed),
            lengths={} if self._context.lengths is None else self._context.lengths.state(),
        )
        return PipelineState(ledger, replace(rows, is_closed=is_closed))

    def _group_state(self, group_id: int, place: Place, stored: set[int], *, is_cancelled: bool) -> GroupState:
        group = self._context.groups[group_id]
        living = group.to_do or self._rollouts.living(group_id)
        to_do = set(range(self._num_members)) if is_cancelled else living
        return GroupState(
            task_id=group.task_id,
            epoch=group.epoch,
            start=place.start,
            deadline=place.deadline,
            kept=sorted(stored),
            to_do=sorted(to_do - stored),
            restarts=group.restarts,
            prompt=group.prompt,
            first_attempt=group.first_attempt,
        )

    # ---- restore -----------------------------------------------------------------------------------------------------

    def restore(self, state: PipelineState, incarnation: int, changed: Changed) -> None:
        """Before the run starts. `rows` are then those for the store, with those of groups that were closed and not settled:
        they will be claimed."""
        (ledger, rows), superseded = take_over(state, changed, self._admission, self._num_members)
        places = {group_id: Place(group.start, group.deadline) for group_id, group in ledger.groups.items()}
        self._admission.restore(ledger.version, places)
        settled = rows.acknowledged.get(SETTLE, ())  # recorded batches are not settled again
        self._finalizer.num_unsettled = sum(c for g, c in rows.is_closed.items() if g not in settled)
        self._finalizer.settled = set(settled) & ledger.groups.keys()
        self._finalizer.num_replaced = ledger.num_replaced
        self._finalizer.num_failed_in_a_row = ledger.num_failed_in_a_row
        self._context.next_group = ledger.next_group
        self._context.next_prompt = ledger.next_group if ledger.next_prompt < 0 else ledger.next_prompt
        self._context.to_feed = set(ledger.to_feed)
        self._context.vacant = set(ledger.vacant)
        if self._context.lengths is not None:
            self._context.lengths.restore(ledger.lengths)
        for group_id in superseded:
            task_id = state.ledger.groups[group_id].task_id
            self._finalizer.leave(group_id, Fate.SUPERSEDED, np.zeros(0), task_id=task_id)
        for group_id, group in ledger.groups.items():
            self._restore_group(group_id, group, incarnation)
        self.rows = rows

    def _restore_group(self, group_id: int, group: GroupState, incarnation: int) -> None:
        prompt, first = group.prompt_of(group_id), group.first_attempt
        self._group_of[prompt] = group_id
        self._context.groups[group_id] = GroupInFlight(
            group.task_id,
            group.epoch,
            prompt=prompt,
            first_attempt=group.restarts * self._rollouts.num_attempts if first < 0 else first,
            restarts=group.restarts,
            num_kept=len(group.kept),
            to_do=group.to_do,
        )
        if group_id not in self._context.vacant:
            now, kept, to_do = self._context.now(), group.kept, group.to_do
            self._context.emit(GroupResumed(at=now, group_id=group_id, incarnation=incarnation, kept=kept, to_do=to_do))
            if to_do:
                self._context.keep(Restart(group_id, "superseded", kept))

    def take_up(self, prompt: int, task: Task) -> None:
        """The data set's task of a group that was admitted before the checkpoint: start the members that it lacks."""
        group_id = self._group_of.pop(prompt, -1)
        group = self._context.groups.get(group_id)
        if group is None:  # it has left
            return
        if group.task_id != task.id:
            raise DataError(
                f"the checkpoint has group {group_id} at work on task {group.task_id!r}, the data set has {task.id!r} there: "
                "the data must be the same as before"
            )
        group.task = task
        to_do = group.to_do
        group.to_do = set()
        if to_do:
            self._rollouts.start(group_id, task, self._admission.place(group_id), to_do)
