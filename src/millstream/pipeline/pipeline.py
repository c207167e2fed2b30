"""The path of one group, top to bottom: prompt, rollouts, rewards, advantages, micro-batches, step, weights, next prompt.

    tasks ──► feed ──► roll_out ×n ──► settle ──► train ──► publish ──► sync ×engines        (stages: `stages`)
               ▲          │  ▲            │         │                      │
               │        store.put     store.write  store.claim             │
               └──── admission ◄── remove (filtered) ◄── take, step ◄──────┘ (engine versions)

Each loop says what it consumes, produces and waits for, and what ends that wait. Guarantees: no rollout is trained later than
the lag bound allows (`admission`); every admitted group leaves exactly once, with an event; every wait has an owner (`waits`);
with max_lag = 0 the result depends on ids and seeds alone (`lockstep`). What becomes of slow groups: `policy`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from millstream.errors import MillstreamError
from millstream.events import GroupAdmitted, PartitionNow, Status, Stepped, StoreNow
from millstream.learner.base import reads_store
from millstream.pipeline.auto_lag import AutoLag
from millstream.pipeline.batch import TakenGroup
from millstream.pipeline.components import Components
from millstream.pipeline.context import GroupInFlight
from millstream.pipeline.grouping import members_of, rewards_of
from millstream.pipeline.outside import TOO_OLD, OutsideRollouts
from millstream.pipeline.parts import AfterStep, Algorithm, Parts, TokenGroupReward
from millstream.pipeline.prompts import Prompts
from millstream.pipeline.recorded import RecordedBatches, RecordedTaker
from millstream.pipeline.reschedule import UNCHANGED, Changed
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.stages import run_stage
from millstream.pipeline.state import Checkpointer, PipelineState
from millstream.serving.router import Router
from millstream.types import Fate, Metrics, Task

__all__ = ["AfterStep", "Algorithm", "Parts", "Pipeline", "TokenGroupReward"]


class Pipeline:
    """One run. `tasks` yields (epoch, task) in the order of training; it is read one ahead, as room appears. `after_step`
    (an evaluation, say) may use the engines: it takes no budget and delays nothing. `keeper` writes checkpoints. All users of
    the engines share the `router`, so that their requests wait in one queue.

    With `recorded` the batches of another run are trained instead: no task is read, and nothing is generated for training.
    With `outside` rollouts that were sampled and rewarded elsewhere are trained instead, each as a group of one.

    With `resumed` it continues from a checkpoint: the store must be empty, the learner restored, the engines at the version.
    `changed`: whether its config has other settings than those of the checkpoint.
    The weights that the engines start with must have been published to the channel."""

    def __init__(
        self,
        parts: Parts,
        tasks: Iterable[tuple[int, Task]],
        algorithm: Algorithm,
        *,
        config: PipelineConfig,
        rollout: RolloutConfig,
        seed: int,
        after_step: AfterStep | None = None,
        keeper: Checkpointer | None = None,
        resumed: PipelineState | None = None,
        changed: Changed = UNCHANGED,
        incarnation: int = 0,
        router: Router | None = None,
        recorded: RecordedBatches | None = None,
        outside: OutsideRollouts | None = None,
    ) -> None:
        built = Components(
            parts,
            algorithm,
            config,
            rollout,
            seed=seed,
            after_step=after_step,
            router=router,
            recorded=recorded,
            is_from_users=outside is not None,
        )
        self._parts = parts
        self._config = config
        self._checkpointer = keeper
        self._is_stopping = False
        self.waits = parts.waits
        self._context = built.context
        self.router = built.router
        self.admission = built.admission
        self.sync = built.sync
        self._workers = built.workers
        self._rollouts = built.rollouts
        self._finalizer = built.finalizer
        self._policy = built.policy
        self._critic = built.critic
        self._proximal = built.proximal
        self._taker = built.taker
        self._batch = built.batch
        self._resumption = built.resumption
        self._prompts = Prompts(
            tasks,
            outside,
            self._context,
            admission=self.admission,
            policy=self._policy,
            resumption=self._resumption,
        )
        if resumed is not None:
            self._resumption.restore(resumed, incarnation, changed)
        self._auto_lag = self._build_auto_lag(config)

    def _build_auto_lag(self, config: PipelineConfig) -> AutoLag | None:
        if not config.auto_lag or self._is_recorded:
            return None
        return AutoLag(config.max_lag, self._context, self.admission, self.router)

    @property
    def _is_recorded(self) -> bool:
        """Whether recorded batches are trained: nothing is generated for training."""
        return isinstance(self._taker, RecordedTaker)

    async def run(self) -> None:
        """Train to the last step, to the end of the data, or to the end of the batch in progress after `stop`. Raises the error
        that ended the run, if one did. All loops run concurrently; `train` says when the run is over."""
        async with self._tasks_of_the_run():
            rows = self._resumption.rows
            if rows is not None:
                await self._parts.store.restore(rows)
                self._policy.on_stepped()  # what comes after the last step may have been cut short
            await self._checkpoint_if_due()
            if self._auto_lag is not None:
                self._auto_lag.start()
            running = [self._context.spawn(loop) for loop in self._loops()]
            self.sync.start(self.admission.version)
            if rows is not None:
                await self._policy.run_after_step()
            await self.train()
            await self._policy.finish_after_step(is_stopping=self._is_stopping)
            await self.waits.on("the run", "every engine to load the last version", self.sync.until_everywhere())
            for task in running:
                task.cancel()
            self.sync.finish(are_joining_lost=not self._is_stopping)

    def _loops(self) -> list[Coroutine[Any, Any, None]]:
        """All but `train`. With recorded batches there is nothing else to do."""
        if self._is_recorded:
            return []
        is_in_lockstep = self._config.is_in_lockstep
        loops = [self.feed(), self._finalizer.settle()]
        loops += [run_stage(stage, self._context, is_in_lockstep=is_in_lockstep) for stage in self._parts.stages]
        loops += [component.run() for component in (self._critic, self._proximal) if component is not None]
        return [*loops, *self._policy.loops()]

    @asynccontextmanager
    async def _tasks_of_the_run(self) -> AsyncIterator[None]:
        """Tasks that the block starts end with it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._context.tasks = tasks
                if self._workers is not None:
                    self._workers.open()
                try:
                    yield
                finally:
                    self.sync.stop()
                    self._rollouts.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            if self._workers is not None:
                await self._workers.close()

    def stop(self) -> None:
        """End as if the next step were the last, with a checkpoint."""
        self._is_stopping = True

    def change_lag(self, config: PipelineConfig) -> None:
        """`max_lag`, `auto_lag` and `extra_groups` of this config, for the groups that start from now on. Not in lockstep."""
        self._auto_lag = self._build_auto_lag(config)
        if self._auto_lag is not None:
            self._auto_lag.start()
        else:
            self.admission.change_terms(config.max_lag, config.most_groups)
            self._context.notifier.notify()

    # ---- 1. feed -----------------------------------------------------------------------------------------------------

    async def feed(self) -> None:
        """Consumes tasks. Produces admitted groups, whose members roll out. Waits for room under the lag bound. Ended by:
        `train` (a step), `settle` (a replacement), `sync` (a new version on an engine)."""
        async for prompt, epoch, task in self._prompts:
            with self.waits.idle("feed", "room under the lag bound"):
                start = await self._prompts.room_for(task)
            self._context.next_prompt = max(self._context.next_prompt, prompt + 1)
            self._context.to_feed.discard(prompt)
            if start == TOO_OLD:
                continue
            group_id = self._context.next_group
            place = self.admission.admit(group_id, start)
            self._context.next_group += 1
            self._context.groups[group_id] = GroupInFlight(task.id, epoch, task, prompt=prompt)
            self._context.emit(
                GroupAdmitted(
                    at=self._context.now(),
                    group_id=group_id,
                    task_id=task.id,
                    epoch=epoch,
                    start_version=place.start,
                    deadline=place.deadline,
                    source=str(task.data.get("source", "")),
                )
            )
            self._rollouts.start(group_id, task, place)
        self._finalizer.is_fed = True
        await self._finalizer.end_if_drained()
        self._context.notifier.notify()

    @property
    def num_fed(self) -> int:
        """Prompts that were admitted or dropped; the others wait."""
        return self._context.next_prompt - len(self._context.to_feed)

    # ---- 2. roll out: `Rollouts.roll_out`, one task per member; rows go to the store -----------------------------------
    # ---- 3. settle: `GroupFinalizer.settle`; advantages go to the store, or the group leaves ---------------------------
    # ---- 4. train ------------------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """Consumes settled groups. Produces versions, checkpoints, and `after_step`. Waits for groups that the policy chooses,
        and for the learner. Ended by: `settle`; the learner's calls have deadlines."""
        while not self.admission.is_finished and not self._is_stopping and await self._train_batch():
            await self._checkpoint_if_due()
            await self._policy.run_after_step()
        if self._is_stopping:
            await self._checkpoint_if_due()

    async def _train_batch(self) -> bool:
        """One batch: gradients accumulate while the rest of it is still being generated. False if no group was left."""
        began = self._context.now()
        await self._batch.begin(self.admission.version)
        await self._free_covered()
        self._taker.begin_batch()
        while (taken := await self._next_group()) is not None:
            await self._batch.add(taken)
        if not self._batch.groups:
            return False
        metrics = await self._batch.finish(is_full=self.admission.is_batch_full)
        await self._finish_batch(metrics, began)
        await self._publish()
        return True

    async def _next_group(self) -> TakenGroup | None:
        taken = self._taker.next()
        return await (taken if self._auto_lag is None else self._auto_lag.watch(taken))

    async def _finish_batch(self, metrics: Metrics, began: float) -> None:
        """The version rises, the groups leave, their rows are acknowledged."""
        leases = [taken.lease for taken in self._batch.groups]
        rows = [row for taken in self._batch.groups for row in taken.rows]
        trained = [lease for lease in leases if lease.group_id not in self._context.vacant]
        await self._policy.on_batch_full()
        version = self.admission.step()
        self._finalizer.begin_batch()
        self._context.vacant.difference_update(lease.group_id for lease in leases)
        for lease in trained:
            self._finalizer.leave(lease.group_id, Fate.TRAINED, rewards_of(lease))
        now = self._context.now()
        self._context.emit(
            Stepped(
                at=now,
                version=version,
                num_groups=len(trained),
                num_rollouts=sum(len(members_of(lease)) for lease in trained),
                num_rows=len(rows),
                num_tokens=sum(row.num_tokens for row in rows),
                seconds=now - began,
                metrics=metrics,
            )
        )
        # after the events: the store may be remote, and no group may start in room not yet recorded
        step = version if self._are_held else None
        if self._workers is not None:
            await asyncio.gather(*(self._parts.store.acknowledge(lease, step=step) for lease in leases))
        else:
            for lease in leases:
                await self._parts.store.acknowledge(lease, step=step)
        groups = self._context.groups
        self._context.groups = {group_id: group for group_id, group in groups.items() if group_id in self.admission}
        if self._auto_lag is not None:
            self._auto_lag.on_stepped(metrics, now - began)
        self._batch.groups = []  # its memory is free while weights are published and checkpoints written
        self._policy.on_stepped()

    # ---- 5. publish and sync: `WeightSync.sync`, one task per engine -----------------------------------------------------

    async def _publish(self) -> None:
        """Consumes the learner's weights. Produces a version that engines load (`WeightSync.sync`)."""
        began = self._context.now()
        weights = await self._batch.copy_weights()
        await self.sync.publish(self.admission.version, weights, began)

    # ---- between two batches -------------------------------------------------------------------------------------------

    @property
    def _are_held(self) -> bool:
        """Whether trained rows stay in the store until a checkpoint covers them."""
        return self._checkpointer is not None and any(map(reads_store, (self._parts.learner, self._parts.critic)))

    async def _free_covered(self) -> None:
        """Rows that a checkpoint covers are not trained again by processes that replace those of the learner."""
        covered = self._checkpointer.version if self._are_held and self._checkpointer is not None else None
        if covered is not None:
            await self._parts.store.cover(covered)

    async def _checkpoint_if_due(self) -> None:
        checkpointer, version = self._checkpointer, self.admission.version
        if checkpointer is not None and checkpointer.is_due(version, is_last=self._is_stopping):
            await self._resumption.checkpoint(checkpointer, self._parts, self._batch)

    async def status(self) -> Status:
        """How full everything is, and what is waited for."""
        engines, store = [engine.stats() for engine in self.router.engines], await self._parts.store.stats()
        return Status(
            at=self._context.now(),
            requests_running=sum(stats.running for stats in engines),
            requests_waiting=sum(stats.waiting for stats in engines) + self.router.num_waiting,
            rows_in_store=store.rows,
            groups_outstanding=self.admission.outstanding,
            groups_taken=self.admission.taken,
            budget=self.admission.budget,
            waits=self.waits.counted(),
            store=StoreNow(
                bytes=store.bytes,
                spilled_bytes=store.spilled_bytes,
                claims_waiting=store.waiting_consumers,
                puts_waiting=store.waiting_producers,
                operations=store.operations,
                partitions={
                    name: PartitionNow(rows=part.rows, bytes=part.bytes, tasks=part.by_stage)
                    for name, part in store.by_partition.items()
                },
            ),
        )


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The cause, out of a group: an error of ours if there is one."""
    leaves = list(_leaves(errors))
    return next((error for error in leaves if isinstance(error, MillstreamError)), leaves[0])


def _leaves(errors: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
