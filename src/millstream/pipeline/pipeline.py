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
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from millstream.errors import MillstreamError
from millstream.events import GroupAdmitted, Status, Stepped
from millstream.learner.base import reads_store
from millstream.pipeline.attempts import RouterLine
from millstream.pipeline.auto_lag import AutoLag
from millstream.pipeline.batch import BatchTrainer, GroupTaker, TakenGroup
from millstream.pipeline.context import GroupInFlight, RunContext
from millstream.pipeline.critic import CriticUpdates
from millstream.pipeline.grouping import members_of, rewards_of
from millstream.pipeline.host import build_host
from millstream.pipeline.lengths import ExpectedLengths
from millstream.pipeline.lockstep import Gate
from millstream.pipeline.outside import TOO_OLD, OutsideRollouts, outside_start
from millstream.pipeline.parts import AfterStep, Algorithm, Parts, TokenGroupReward, open_less
from millstream.pipeline.policy import SchedulingPolicy, admission_for, complete_with, gate_for
from millstream.pipeline.proximal import Proximal
from millstream.pipeline.recorded import RecordedBatches, RecordedTaker
from millstream.pipeline.reschedule import UNCHANGED, Changed
from millstream.pipeline.resume import Resumption
from millstream.pipeline.rollouts import RolloutConfig, Rollouts
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.settle import GroupFinalizer
from millstream.pipeline.stages import run_stage
from millstream.pipeline.state import Checkpointer, PipelineState
from millstream.pipeline.sync import WeightSync
from millstream.pipeline.workers import RolloutWorkers
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
        self._parts = parts
        self._tasks = tasks
        self._outside = outside
        self._config = config
        self._checkpointer = keeper
        # trained rows stay in the store until a checkpoint covers them
        self._are_held = keeper is not None and any(map(reads_store, (parts.learner, parts.critic)))
        self._is_stopping = False
        self._workers: RolloutWorkers | None = None
        self.waits = parts.waits
        self._context = RunContext(
            store=parts.store, waits=parts.waits, clock=parts.clock, sink=parts.sink, rollouts=parts.rollouts
        )
        open_less(parts, algorithm, config, are_kept=rollout.keep_gb > 0)
        is_in_lockstep = config.is_in_lockstep
        self._context.lengths = ExpectedLengths() if config.longest_first and not is_in_lockstep else None
        self.router = router or Router(
            parts.engines, is_queueing=not is_in_lockstep, clock=parts.clock, sink=parts.sink
        )
        self.admission = admission_for(config)
        self.sync = WeightSync(self._context, parts.channel, self.router, is_in_lockstep=is_in_lockstep)
        self._finalizer = GroupFinalizer(
            self._context, self.admission, algorithm, config, min_group_size=rollout.min_group_size
        )
        gate = gate_for(config, self.router, self._context)
        self._rollouts = self._build_rollouts(algorithm, rollout, seed, gate)
        self._policy = self._build_policy(gate, after_step)
        self.router.rank_of = self._policy.rank
        self.router.length_of = None if self._context.lengths is None else self._policy.relative_length
        self.router.listeners.append(lambda change: self._context.notifier.notify())
        self._critic = self._build_critic(algorithm)
        self._proximal = self._build_proximal(algorithm)
        self._recorded = recorded
        self._taker = self._build_taker(rollout)
        self._batch = self._build_batch(algorithm)
        self._resumption = Resumption(
            self._context, self.admission, self._finalizer, self._rollouts, rollout.num_members
        )
        self._rows = None if resumed is None else self._resumption.restore(resumed, incarnation, changed)
        self._auto_lag = self._build_auto_lag(config)

    def _build_rollouts(self, algorithm: Algorithm, rollout: RolloutConfig, seed: int, gate: Gate | None) -> Rollouts:
        line = RouterLine(self.router, self.waits, self.admission, gate)
        host = build_host(self._parts, self._context, line, algorithm, rollout, seed)
        self._workers = host if isinstance(host, RolloutWorkers) else None
        return Rollouts(
            self._context,
            rollout,
            host,
            router=self.router,
            admission=self.admission,
            finalizer=self._finalizer,
            is_in_lockstep=gate is not None,
            complete_with=complete_with(self._config, rollout),
            are_partial=algorithm.group_reward is not None,
        )

    def _build_policy(self, gate: Gate | None, after_step: AfterStep | None) -> SchedulingPolicy:
        return SchedulingPolicy(
            self._config,
            self._context,
            admission=self.admission,
            router=self.router,
            sync=self.sync,
            finalizer=self._finalizer,
            rollouts=self._rollouts,
            gate=gate,
            after_step=after_step,
        )

    def _build_taker(self, rollout: RolloutConfig) -> GroupTaker | RecordedTaker:
        if self._recorded is not None:
            return RecordedTaker(
                self._context,
                self._recorded,
                admission=self.admission,
                finalizer=self._finalizer,
                num_members=rollout.num_members,
            )
        return GroupTaker(
            self._context,
            admission=self.admission,
            policy=self._policy,
            finalizer=self._finalizer,
            critic=self._critic,
            proximal=self._proximal,
            is_from_users=self._outside is not None,
            are_stored=reads_store(self._parts.learner),
        )

    def _build_batch(self, algorithm: Algorithm) -> BatchTrainer:
        return BatchTrainer(
            self._context,
            self._parts.learner,
            algorithm,
            groups_per_step=self._config.groups_per_step,
            critic=self._critic,
            proximal=self._proximal,
        )

    def _build_auto_lag(self, config: PipelineConfig) -> AutoLag | None:
        if not config.auto_lag or self._recorded is not None:
            return None
        return AutoLag(config.max_lag, self._context, self.admission, self.router)

    def _build_critic(self, algorithm: Algorithm) -> CriticUpdates | None:
        critic, tokens = self._parts.critic, algorithm.critic_batch_tokens
        return None if critic is None else CriticUpdates(critic, tokens, self._context)

    def _build_proximal(self, algorithm: Algorithm) -> Proximal | None:
        follower, tokens = self._parts.proximal, algorithm.proximal_batch_tokens
        num_first = self._config.groups_per_step // algorithm.mini_batches
        return None if follower is None else Proximal(follower, tokens, num_first, self._context)

    async def run(self) -> None:
        """Train to the last step, to the end of the data, or to the end of the batch in progress after `stop`. Raises the error
        that ended the run, if one did. All loops run concurrently; `train` says when the run is over."""
        async with self._tasks_of_the_run():
            if self._rows is not None:
                await self._parts.store.restore(self._rows)
                self._policy.on_stepped()  # what comes after the last step may have been cut short
            await self._checkpoint_if_due()
            if self._auto_lag is not None:
                self._auto_lag.start()
            running = [self._context.spawn(loop) for loop in ([] if self._recorded is not None else self._loops())]
            self.sync.start(self.admission.version)
            if self._rows is not None:
                await self._policy.run_after_step()
            await self.train()
            await self._policy.finish_after_step(is_stopping=self._is_stopping)
            await self.waits.on("the run", "every engine to load the last version", self.sync.until_everywhere())
            for task in running:
                task.cancel()
            self.sync.finish(are_joining_lost=not self._is_stopping)

    def _loops(self) -> list[Coroutine[Any, Any, None]]:
        """All but `train`."""
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
        async for prompt, epoch, task in self._prompts():
            with self.waits.idle("feed", "room under the lag bound"):
                start = await self._room_for(task)
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

    async def _room_for(self, task: Task) -> int:
        """The version that its group starts at, as soon as there is room. `TOO_OLD`: a rollout from outside that is dropped."""
        until, outside = self._context.notifier.until, self._outside
        if outside is None:
            return await until(self._policy.may_start)
        start = await until(lambda: outside_start(outside.oldest_version(task), self.admission))
        if start == TOO_OLD:
            outside.drop(task, self.admission.version)
        return start

    async def _numbered(self) -> AsyncIterator[tuple[int, tuple[int, Task]]]:
        if self._outside is None:
            for numbered in enumerate(self._tasks):
                yield numbered
        else:
            rewarded = aiter(self._outside)
            for prompt in itertools.count():
                with self.waits.idle("feed", "a rewarded session"):
                    task = await anext(rewarded)
                yield prompt, (0, task)

    async def _prompts(self) -> AsyncIterator[tuple[int, int, Task]]:
        """The prompts to admit, each with its number and epoch: in a resumed run, first those that are fed again."""
        again: list[tuple[int, int, Task]] = []
        async for prompt, (epoch, task) in self._numbered():
            if prompt >= self._context.next_prompt:
                yield prompt, epoch, task
            elif prompt in self._context.to_feed:
                again.append((prompt, epoch, task))
            else:  # it was admitted before the checkpoint
                self._resumption.take_up(prompt, task)
            if prompt + 1 >= self._context.next_prompt:  # before the next task is waited for
                for one in again:
                    yield one
                again = []
        for one in again:
            yield one

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
        for (
            lease
        ) in leases:  # after the events: the store may be remote, and no group may start in room not yet recorded
            await self._parts.store.acknowledge(lease, step=version if self._are_held else None)
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

    async def _free_covered(self) -> None:
        """Rows that a checkpoint covers are not trained again by processes that replace those of the learner."""
        covered = self._checkpointer.version if self._checkpointer is not None and self._are_held else None
        if covered is not None:
            await self._parts.store.cover(covered)

    async def _checkpoint_if_due(self) -> None:
        checkpointer, version = self._checkpointer, self.admission.version
        if checkpointer is not None and checkpointer.is_due(version, is_last=self._is_stopping):
            await self._resumption.checkpoint(checkpointer, self._parts, self._batch)

    async def status(self) -> Status:
        """How full everything is, and what is waited for."""
        engines = [engine.stats() for engine in self.router.engines]
        return Status(
            at=self._context.now(),
            requests_running=sum(stats.running for stats in engines),
            requests_waiting=sum(stats.waiting for stats in engines) + self.router.num_waiting,
            rows_in_store=(await self._parts.store.stats()).rows,
            groups_outstanding=self.admission.outstanding,
            groups_taken=self.admission.taken,
            budget=self.admission.budget,
            waits=self.waits.counted(),
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
