"""The path of one group, top to bottom: prompt, rollouts, rewards, advantages, micro-batches, step, weights, next prompt.

    tasks ──► feed ──► roll_out ×n ──► settle ──► train ──► publish ──► sync ×engines        (stages: `stages`)
               ▲          │  ▲            │         │                      │
               │        store.put     store.write  store.claim             │
               └──── admission ◄── remove (filtered) ◄── take, step ◄──────┘ (engine versions)

Every loop says what it consumes, what it produces, what it waits for and who ends that wait. Guarantees: no rollout is
trained later than the lag bound allows (`admission`); every admitted group leaves exactly once, by name; every wait has
an owner; with max_lag = 0 the result depends on ids and seeds alone (`lockstep`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from millstream.algo.advantages import OverBatch, Rewards
from millstream.algo.credit import Credit
from millstream.clock import Clock
from millstream.engine import Engine
from millstream.env import Environment
from millstream.errors import (
    DataError,
    EngineGone,
    LagError,
    MillstreamError,
    StallError,
    StreamEnded,
    WeightsError,
    WeightsUnreachable,
)
from millstream.events import (
    Event,
    EventSink,
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupResumed,
    GroupScored,
    GroupTaken,
    Span,
    Status,
    Stepped,
    Warned,
    WeightsLoaded,
    WeightsPublished,
)
from millstream.learner import Critic, Follower, Learner, Snapshot
from millstream.learner.packing import Packer
from millstream.pipeline.admission import Admission, Place
from millstream.pipeline.lockstep import Gate
from millstream.pipeline.notify import Notifier, QuiescePoint
from millstream.pipeline.proximal import Proximal
from millstream.pipeline.rollouts import RolloutConfig, Rollouts, Setting
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.settle import TASK as SETTLE
from millstream.pipeline.settle import (
    Advantage,
    CancelReason,
    GroupFinalizer,
    Rules,
    by_agent,
    by_member,
    members_of,
    rewards_of,
)
from millstream.pipeline.stages import TRAIN, Stage, Surroundings, Updates, run_stage, this_one, train_row
from millstream.pipeline.state import Checkpointer, GroupState, LearnerAndCritic, Ledger, PipelineState
from millstream.pipeline.waits import Waits
from millstream.serving.router import Rank, Router
from millstream.store import Lease, Store
from millstream.types import Fate, Metrics, Sampling, Task, TrainRow, Weights
from millstream.weights import Publication, WeightChannel

T = TypeVar("T")
WEIGHTS_S = 1.0
"""After weights that did not arrive; twice as long after the next."""
MAX_WEIGHTS_FAILED = 5
"""In a row, to one engine: then it is given up, or, where no other serves, the run ends with the error."""
AfterStep = Callable[[int], Coroutine[Any, Any, None]]
"""Called with every new version; beside training, or, when that is synchronous, between two steps."""
GroupReward = Callable[[Task, Sequence[Sequence[int]]], Awaitable[Sequence[float]]]
"""What each member earns beside its own reward, from the task and the tokens that each has sampled."""


class Prompt(NamedTuple):
    """Of a group in flight. A task is None until a resumed run has read it again."""

    epoch: int
    task_id: str
    task: Task | None


class Taken(NamedTuple):
    """A group that joined the batch; no rows where its place is empty."""

    lease: Lease
    rows: list[TrainRow]


class Parts(Struct, frozen=True, kw_only=True, eq=False):
    """What a pipeline is made of: one of each seam."""

    engines: tuple[Engine, ...]
    environment: Environment
    learner: Learner
    store: Store
    channel: WeightChannel
    clock: Clock
    sink: EventSink
    waits: Waits
    stages: tuple[Stage, ...] = ()
    """What is computed of every row; the store must have been made for them (`stages.store_tasks`)."""
    critic: Critic | None = None
    """Learns beside the learner. None: there is none."""
    proximal: Follower | None = None
    """Has the policy of the batch's start beside the learner. None: the learner has it, if it needs it."""


class Algorithm(Struct, frozen=True, kw_only=True, eq=False):
    """What the pipeline needs to know of learning."""

    advantage: Advantage
    sampling: Sampling
    micro_batch_tokens: int
    mini_batches: int = 1
    group_reward: GroupReward | None = None
    """Of a complete group as a whole; None where every rollout has only its own."""
    over_batch: OverBatch | None = None
    """What advantages need of the whole batch: its rows wait until it is complete. None: they are trained as they come."""
    credit: Credit | None = None
    """Advantages within a rollout, instead of `advantage`; None: every token has that of its rollout."""
    compares_turns: bool = False
    """Whether rollouts differ by what their turns earned, and not only by their rewards."""
    critic_batch_tokens: int = 8192
    """As micro_batch_tokens, for the critic."""
    proximal_batch_tokens: int = 8192
    """As micro_batch_tokens, for the proximal policy beside the learner."""


class Pipeline:
    """One run. `tasks` yields (epoch, task) in the order of training; it is read one ahead, as room appears. `after_step`
    (an evaluation, say) may use the engines: it takes no budget and holds nothing up. `keeper` writes checkpoints.

    Whoever else uses the engines shares the `router`, so that they wait in one queue.

    With `resumed` it goes on where another stood: the store must be empty, the learner restored, the engines at the
    version.

    `first_weights`: what the engines begin with. An engine that comes before anything is published gets them; without them it
    waits for the first publication."""

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
        incarnation: int = 0,
        router: Router | None = None,
        first_weights: Weights | None = None,
    ) -> None:
        self._after_step = after_step
        self._is_held = False
        self._keeper = keeper
        self._incarnation = incarnation
        self._is_stopping = False
        self._parts = parts
        self._algorithm = algorithm
        self._feed: Iterator[tuple[int, Task]] = iter(tasks)
        self._config = config
        self._rollout = rollout
        self._seed = seed
        self.admission = Admission(
            groups_per_step=config.groups_per_step,
            max_lag=config.max_lag,
            budget=config.most_groups,
            num_steps=config.steps,
            is_in_order=config.is_in_lockstep,
            is_greedy=config.is_first_to_finish,
        )
        self.waits = parts.waits
        self._store = parts.store
        self._learner = parts.learner
        self._channel = parts.channel
        self._router = router or Router(
            parts.engines, is_queueing=not config.is_in_lockstep, clock=parts.clock, sink=parts.sink
        )
        self._router.rank_of = self._rank
        self._pulse = Notifier()
        self._still = QuiescePoint()
        self._router.on_change = self._pulse.notify
        self._num_loading = 0
        self._has_published = False
        self._first = None if first_weights is None else Publication(self._channel.version, first_weights)
        self._has_warned_of_weights = False
        self._syncing: list[asyncio.Task[None]] = []
        self._is_over = False
        self._gate = Gate(self._router, self._pulse, self.waits) if config.is_in_lockstep else None
        self._next_group = 0
        self._prompts: dict[int, Prompt] = {}
        self._restarts: dict[int, int] = {}
        self._taken: dict[int, Place] = {}
        self._to_do: dict[int, set[int]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._settler = GroupFinalizer(
            self._rules(),
            store=self._store,
            admission=self.admission,
            waits=self.waits,
            pulse=self._pulse,
            still=self._still,
            leave=self._leave,
            begin_anew=self._begin_anew,
            scored=self._record_scores,
        )
        self._rollouts = Rollouts(
            self._setting(), emit=self._emit, close=self._settler.close, on_failure=self._on_failure
        )
        self._around = self._surroundings()
        critic, most = parts.critic, algorithm.critic_batch_tokens
        self._updates = None if critic is None else Updates(critic, most, self._around)
        self._proximal = self._build_proximal()
        self._ahead: asyncio.Queue[Taken | None] = asyncio.Queue()
        """Groups of this batch that were taken before the learner came to them; None after the last."""
        self._is_learner_waiting = True
        self._start_weights: Weights | None = None
        self._rows = None if resumed is None else resumed.rows
        self._resumed = None if resumed is None else self._restore(resumed)

    def _rules(self) -> Rules:
        groups, replaced = self._config.groups_per_step, self._config.max_replaced_per_step
        return Rules(
            advantage=self._algorithm.advantage,
            credit=self._algorithm.credit,
            compares_turns=self._algorithm.compares_turns,
            score=None if self._algorithm.group_reward is None else self._score_group,
            min_group_size=self._rollout.min_group_size,
            filter_zero_signal=self._config.filter_zero_signal,
            max_replaced=8 * groups if replaced is None else replaced,
            max_failed_in_a_row=max(8, groups),
        )

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            store=self._store,
            waits=self.waits,
            emit=self._emit,
            is_vacant=lambda group_id: group_id in self._settler.vacant,
            still=self._still,
            is_in_lockstep=self._config.is_in_lockstep,
        )

    def _build_proximal(self) -> Proximal | None:
        follower, most = self._parts.proximal, self._algorithm.proximal_batch_tokens
        return None if follower is None else Proximal(follower, most, self._groups_per_mini_batch, self._around)

    @property
    def _groups_per_mini_batch(self) -> int:
        return self._config.groups_per_step // self._algorithm.mini_batches

    async def run(self) -> None:
        """Train to the last step, to the end of the data, or to the batch after `stop`. Raises the error that stopped it, if
        one did."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await self._run(tasks)
                finally:
                    self._is_over = True  # nobody is adopted any more
                    self._rollouts.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        if self._rows is not None:
            await self._store.restore(self._rows)
        await self._keep_if_due()
        in_order = self._gate is not None
        loops = [self.feed(), self._settler.settle(in_order=in_order)]
        loops += [run_stage(stage, self._around) for stage in self._parts.stages]
        if self._updates is not None:
            loops.append(self._updates.update())
        if self._proximal is not None:
            loops.append(self._proximal.run())
        if self._gate is not None:
            loops += [self._gate.keep(self._is_quiet), self._settler.set_aside_in_order(self._is_still)]
        running = [tasks.create_task(loop) for loop in loops]
        self._syncing += [tasks.create_task(self.sync(engine)) for engine in self._router.engines]
        if self._resumed is not None:
            await self._look_back(tasks)  # what came after the last step may have been cut short
        await self.train(tasks)
        await self.waits.on("the run", "every engine to load the last version", self._engines_at_the_end())
        self._is_over = True
        for task in [*running, *self._syncing]:
            task.cancel()

    def stop(self) -> None:
        """End as if the next step were the last, with a checkpoint."""
        self._is_stopping = True

    # ---- 1. feed: consumes tasks; produces groups -----------------------------------------------------------------

    async def feed(self) -> None:
        """Waits for room under the lag bound; `train` (a step), `settle` (a replacement) and `sync` make it."""
        for group_id, (epoch, task) in enumerate(self._feed):
            if group_id < self._next_group:  # resumed: this prompt has been admitted before
                self._take_up(group_id, task)
                continue
            room = self._pulse.until(self._start_for_next)
            start = await self.waits.idle("feed", "room under the lag bound", room)
            place = self.admission.admit(group_id, start)
            self._next_group = group_id + 1
            self._prompts[group_id] = Prompt(epoch, task.id, task)
            self._emit(
                GroupAdmitted(
                    at=self._now(),
                    group_id=group_id,
                    task_id=task.id,
                    epoch=epoch,
                    start_version=place.start,
                    deadline=place.deadline,
                    source=str(task.data.get("source", "")),
                )
            )
            self._start(group_id, task, place, range(self._rollout.num_members))
        self._settler.is_fed = True
        await self._settler.end_if_drained()
        self._pulse.notify()

    def _start(self, group_id: int, task: Task, place: Place, members: Iterable[int], *, num_ended: int = 0) -> None:
        assert self._tasks is not None
        first = self._first_attempt(group_id)
        self._rollouts.start(self._tasks, group_id, task, place, members, num_ended=num_ended, first_attempt=first)

    def _take_up(self, group_id: int, task: Task) -> None:
        """A group that was in flight at the checkpoint: what it still lacks is done under its own id and deadline."""
        state = None if self._resumed is None else self._resumed.groups.get(group_id)
        if state is None:
            return
        if state.task_id != task.id:
            raise DataError(
                f"the checkpoint has group {group_id} at work on task {state.task_id!r}, the data set has {task.id!r} there: "
                "the data must be the same as before"
            )
        self._prompts[group_id] = Prompt(state.epoch, task.id, task)
        to_do, is_complete = self._to_do.pop(group_id, None), len(state.kept) >= self._rollout.group_size
        if to_do and self._tasks is not None:
            self._start(group_id, task, self.admission.place(group_id), to_do, num_ended=len(state.kept))
            if self._config.is_first_to_finish and is_complete:
                self._rollouts.abort(self._tasks, group_id, "its group is complete")

    def _start_for_next(self) -> int | None:
        """The oldest serving version that a new group may start at: the older, the more engines may serve it."""
        if self._is_held or (self._gate is not None and not self._are_engines_alike()):
            return None  # synchronous: no rollout starts before every engine has the new weights
        return next((v for v in self._router.serving_versions() if self.admission.may_admit(v)), None)

    # ---- 2. roll out: consumes the places of a group; produces rows in the store: see `pipeline.rollouts` ---------------

    def _setting(self) -> Setting:
        return Setting(
            environment=self._parts.environment,
            store=self._store,
            router=self._router,
            books=self.admission,
            waits=self.waits,
            clock=self._parts.clock,
            pulse=self._pulse,
            gate=self._gate,
            still=self._still,
            config=self._rollout,
            sampling=self._algorithm.sampling,
            seed=self._seed,
            is_first_to_finish=self._config.is_first_to_finish,
        )

    def _rank(self, group_id: int) -> Rank | None:
        """What is due first goes first; of that, what is almost complete."""
        if group_id not in self.admission:
            return None
        return self.admission.place(group_id).deadline, len(self._rollouts.living(group_id))

    def _on_failure(self, failure: str) -> None:
        self._settler.last_failure = failure

    def _restart_overdue(self, ready: Iterable[int]) -> None:
        """The batch lacks only groups that are not complete: they begin anew, and others take their place."""
        assert self._tasks is not None
        for group_id in self.admission.blockers(ready):
            is_at_work = group_id in self._rollouts and group_id not in self._settler.cancelling
            if is_at_work and self._restarts.get(group_id, 0) < self._config.max_restarts:
                self._settler.cancel_group(group_id, CancelReason.RESTART)
                self._rollouts.abort(self._tasks, group_id, "its group begins anew")

    def _begin_anew(self, group_id: int) -> None:
        task = self._prompts[group_id].task
        assert self._tasks is not None and task is not None
        place = self.admission.restart(group_id, self._router.newest_version)
        restarts = self._restarts[group_id] = self._restarts.get(group_id, 0) + 1
        self._emit(
            GroupRestarted(
                at=self._now(),
                group_id=group_id,
                start_version=place.start,
                deadline=place.deadline,
                restarts=restarts,
                first_attempt=self._first_attempt(group_id),
            )
        )
        self._start(group_id, task, place, range(self._rollout.num_members))

    def _first_attempt(self, group_id: int) -> int:
        """A group that begins anew draws new numbers."""
        return self._restarts.get(group_id, 0) * (1 + self._rollout.retries)

    def _is_still(self) -> bool:
        """Whether every living rollout waits at the gate."""
        num_living = self._rollouts.num_living + sum(map(len, self._to_do.values()))
        return self._gate is not None and self._gate.num_waiting == num_living

    def _is_quiet(self) -> bool:
        """Whether nothing but the gate can move: see `lockstep`."""
        is_full = self._settler.is_fed or self._start_for_next() is None
        return is_full and not self._settler.num_unsettled and self._is_still()

    # ---- 3. settle: consumes closed groups; produces advantages, or sets the group aside: see `pipeline.settle` --------

    def _leave(self, group_id: int, fate: Fate, rewards_G: Rewards, is_replaced: bool = False) -> None:
        """The one place where a group's fate is told."""
        mean = float(rewards_G.mean()) if len(rewards_G) else 0.0
        self._emit(
            GroupLeft(
                at=self._now(),
                group_id=group_id,
                fate=fate,
                is_replaced=is_replaced,
                num_members=len(rewards_G),
                mean_reward=mean,
            )
        )

    async def _score_group(self, lease: Lease) -> Sequence[float]:
        """Consumes a complete group; waits for whoever gives the reward, which has time limits of its own."""
        assert self._algorithm.group_reward is not None
        group_id = lease.group_id
        known = self._pulse.until(lambda: self._prompts[group_id].task)
        task = await self.waits.on(f"group {group_id}", "its prompt to be read again", known)
        said = dict[int, list[int]]()
        for row in by_member(lease):
            sampled = row.columns["tokens"][row.columns["loss_mask"]]
            said.setdefault(row.columns["member"], []).extend(sampled.tolist())
        scoring = self._algorithm.group_reward(task, list(said.values()))
        return await self.waits.on(f"group {group_id}", "the reward of the whole group", scoring, deadline=False)

    def _record_scores(self, group_id: int, rewards_G: Rewards, began: float, failure: str) -> None:
        rewards = [] if failure else rewards_G.tolist()
        self._emit(
            GroupScored(
                at=self._now(), group_id=group_id, rewards=rewards, seconds=self._now() - began, failure=failure
            )
        )

    # ---- 4. train: consumes settled groups; produces versions -----------------------------------------------------

    async def train(self, tasks: asyncio.TaskGroup) -> None:
        """Batch after batch, until the last step or the end of the data."""
        while not self.admission.is_finished and not self._is_stopping and await self._train_batch():
            await self._keep_if_due()
            await self._look_back(tasks)
        if self._is_stopping:
            await self._keep_if_due()

    async def _look_back(self, tasks: asyncio.TaskGroup) -> None:
        if self._after_step is None:
            return
        if self._gate is None:
            tasks.create_task(self._after_step(self.admission.version))
        else:
            await self._between_steps(self._after_step)

    async def _between_steps(self, after_step: AfterStep) -> None:
        """Synchronous training: what comes after a step has the engines to itself, so that it changes no batch."""
        at_version = self._engines_at_the_end()
        await self.waits.on("train", "every engine to load the new version", at_version)
        evaluation = after_step(self.admission.version)  # its rollouts have their timeouts
        await self.waits.on("train", "what comes after the step", evaluation, deadline=False)
        self._is_held = False
        self._pulse.notify()

    async def _train_batch(self) -> bool:
        """One batch: gradients accumulate while the rest of it is still being generated. False if nothing was left.

        Waits for groups that the admission rule lets through; `settle` brings them."""
        began, leases, groups = self._now(), list[Lease](), list[list[TrainRow]]()
        await self._begin_batch()
        packer, metrics, over_batch = (
            Packer(self._algorithm.micro_batch_tokens),
            list[Metrics](),
            self._algorithm.over_batch,
        )
        while (taken := await self._next_taken()) is not None:
            leases.append(taken.lease)
            groups.append(taken.rows)
            if over_batch is None:
                metrics += await self._train_group(taken, packer, len(groups))
        if not leases:
            return False
        if over_batch is not None:
            groups = _scaled(over_batch, leases, groups)
            for number, taken in enumerate(map(Taken, leases, groups), start=1):
                metrics += await self._train_group(taken, packer, number)
        await self._accumulate(packer.flush())
        if not self.admission.is_batch_full:
            metrics.append(await self._learn("step", self._learner.step()))
        if self._updates is not None:  # its waits have their deadlines
            learning = self._updates.finish_batch()
            metrics.append(await self.waits.on("train", "the critic's batch", learning, deadline=False))
        await self._finish_batch(leases, [row for group in groups for row in group], _mean(metrics), began)
        return True

    async def _begin_batch(self) -> None:
        await self._learn("begin_batch", self._learner.begin_batch())
        if self._proximal is None:
            return
        weights = self._start_weights
        self._start_weights = None
        if weights is None:  # nothing was published in this life of the run
            weights = await self._learn("copy weights", self._learner.weights())
        self._proximal.begin_batch(self.admission.version, weights)
        assert self._tasks is not None
        self._tasks.create_task(self._take_ahead())

    async def _next_taken(self) -> Taken | None:
        """The next one of the batch; None if it is full, or nothing is left."""
        if self._proximal is None:
            return await self._take_next("train")
        self._is_learner_waiting = self._ahead.empty()
        if self._is_learner_waiting:
            self._store.wake()  # what is overdue may begin anew: see `_choose_and_take`
        taken = await self.waits.on("train", "a complete group", self._ahead.get(), deadline=False)
        self._is_learner_waiting = False
        return taken

    async def _take_ahead(self) -> None:
        """Groups join the batch as they are complete, not as the learner comes to them: whoever scores them has time to.

        Waits for groups that the admission rule lets through; `settle` brings them."""
        while (taken := await self._take_next("train, ahead", is_ahead=True)) is not None:
            self._ahead.put_nowait(taken)
        self._ahead.put_nowait(None)

    async def _take_next(self, owner: str, *, is_ahead: bool = False) -> Taken | None:
        if self.admission.is_batch_full:
            return None
        claim = self._store.claim(TRAIN, choose=self._choose_and_take)
        try:  # rollouts time out
            lease = await (
                self.waits.idle(owner, "a complete group", claim)
                if is_ahead
                else self.waits.on(owner, "a complete group", claim, deadline=False)
            )
        except StreamEnded:
            return None
        taken = Taken(lease, await self._take(lease))
        if self._updates is not None:
            self._updates.take(lease.group_id, is_last=self.admission.is_batch_full)
        if self._proximal is not None:
            self._proximal.take(lease.group_id)
        return taken

    async def _train_group(self, taken: Taken, packer: Packer, number: int) -> list[Metrics]:
        """The batch's group of this number, counted from 1; an optimizer step if it ends a mini-batch."""
        rows = taken.rows
        if self._proximal is not None:
            rows = await self._proximal.join(taken.lease.group_id, rows, number)
        for row in rows:
            await self._accumulate(packer.add(row))
        if number % self._groups_per_mini_batch:
            return []
        await self._accumulate(packer.flush())
        return [await self._learn("step", self._learner.step())]

    def _choose_and_take(self, ready: Iterable[int]) -> int | None:
        """The group that the admission rule lets through joins the batch in the same moment: a choice that waited for the
        event loop could be overtaken by a new admission."""
        ready = list(ready)
        group_id = self.admission.choose(ready)
        if group_id is not None:
            self._taken[group_id] = self.admission.take(group_id)
        elif self._config.overdue == "restart" and self._is_learner_waiting:
            self._restart_overdue(ready)
        return group_id

    async def _take(self, lease: Lease) -> list[TrainRow]:
        """The rows of a group that joined the batch. The last line of defence: they are fresh enough, or the run stops."""
        place, version = self._taken.pop(lease.group_id), self.admission.version
        self._settler.settled.discard(lease.group_id)
        await self._settler.end_if_drained()
        if lease.group_id in self._settler.vacant:
            return []
        rows = by_member(lease)
        oldest = min(row.columns["start_version"] for row in rows)
        if oldest < place.start or version - oldest > self.admission.bound:
            raise LagError(
                f"group {lease.group_id} was admitted at version {place.start} and has a rollout that started at "
                f"{oldest}; it was about to be trained at {version} with a bound of {self.admission.bound}"
            )
        self._emit(
            GroupTaken(
                at=self._now(),
                group_id=lease.group_id,
                version=version,
                lag=version - oldest,
                num_rollouts=len({row.columns["member"] for row in rows}),
            )
        )
        return [train_row(row) for row in rows]

    async def _accumulate(self, rows: Sequence[TrainRow]) -> None:
        if rows:
            tokens = sum(len(row.tokens) for row in rows)
            await self._learn("accumulate", self._learner.accumulate(rows), tokens)

    async def _learn(self, what: str, work: Awaitable[T], num_tokens: int = 0) -> T:
        began = self._now()
        result = await self.waits.on("train", f"the learner to {what}", work)
        now = self._now()
        self._emit(Span(at=now, worker="learner", what=what, seconds=now - began, num_tokens=num_tokens))
        return result

    async def _finish_batch(self, leases: list[Lease], rows: list[TrainRow], metrics: Metrics, began: float) -> None:
        """The version rises, all of that is told at once, the rows are done with, the weights go out."""
        trained = [lease for lease in leases if lease.group_id not in self._settler.vacant]
        await self._abort_overdue()
        version = self.admission.step()
        self._settler.begin_batch()
        self._settler.vacant.difference_update(lease.group_id for lease in leases)
        for lease in trained:
            self._leave(lease.group_id, Fate.TRAINED, rewards_of(lease))
        self._emit(
            Stepped(
                at=self._now(),
                version=version,
                num_groups=len(trained),
                num_rollouts=sum(len(members_of(lease)) for lease in trained),
                num_rows=len(rows),
                num_tokens=sum(len(row.tokens) for row in rows),
                seconds=self._now() - began,
                metrics=metrics,
            )
        )
        for lease in leases:  # the store may be far: nobody must see room that is not told of yet
            await self._store.acknowledge(lease)
        self._prompts = {g: prompt for g, prompt in self._prompts.items() if g in self.admission}
        self._restarts = {g: count for g, count in self._restarts.items() if g in self.admission}
        self._is_held = self._gate is not None and self._after_step is not None
        await self._publish(version)

    async def _abort_overdue(self) -> None:
        """First to finish: what this batch could have trained, and no later one can, ends here and now."""
        assert self._tasks is not None
        for group_id in self.admission.overdue():
            if group_id in self._settler.settled:
                claim = self._store.claim(TRAIN, choose=partial(this_one, group_id))
                await self._settler.discard(await self.waits.on("train", f"group {group_id}, which is over", claim))
            elif group_id not in self._settler.cancelling:
                self._settler.cancel_group(group_id, CancelReason.ABORT)
                self._rollouts.abort(self._tasks, group_id, "the batch is full")
        gone = self._pulse.until(lambda: not self.admission.overdue())
        await self.waits.on("train", "aborted rollouts to leave", gone)

    # ---- 5. publish and sync: consume versions; produce engines that serve them -----------------------------------

    async def _publish(self, version: int) -> None:
        began = self._now()
        weights = await self._learn("copy weights", self._learner.weights())
        if self._proximal is not None:
            self._start_weights = weights
        await self.waits.on("train", f"version {version} to be published", self._channel.publish(version, weights))
        self._has_published = True
        self._first = None
        self._emit(WeightsPublished(at=self._now(), version=version, seconds=self._now() - began))
        self._pulse.notify()

    async def sync(self, engine: Engine) -> None:
        """One engine takes the newest weights, between two of its decode steps, whenever it is ready for them; until it leaves.

        Waits for a version newer than the engine's, which `train` publishes, and for its turn: of several engines at most half
        load at the same time, so that the others go on."""
        owner, num_failed = f"sync of {engine.name}", 0
        try:
            while True:
                newer = self._pulse.until(lambda: self._channel.version > engine.version or not self._serves(engine))
                await self.waits.idle(owner, "a newer version", newer)
                if not self._serves(engine):
                    return
                await self.waits.on(owner, "its turn to load", self._pulse.until(self._may_load))
                self._num_loading += 1
                try:
                    await self._load(engine, owner)
                    num_failed = 0
                except WeightsError as error:
                    num_failed += 1
                    late = error
                finally:
                    self._num_loading -= 1
                    self._pulse.notify()
                if num_failed:
                    await self._wait_for_weights(engine, owner, late, num_failed)
        except EngineGone as error:
            self._router.lose(engine, error)

    def _may_load(self) -> bool:
        """In lockstep nothing is generated meanwhile, and nobody need go on."""
        return self._gate is not None or self._num_loading < max(1, len(self._router.engines) // 2)

    def _serves(self, engine: Engine) -> bool:
        return engine in self._router.engines

    async def _wait_for_weights(self, engine: Engine, owner: str, error: WeightsError, num_failed: int) -> None:
        """Weights that did not arrive (others came after them, or whoever sent them died) are not the end: a newer version may
        do, or the same a little later. If the error comes again and again, that is the end of this engine (`_give_up`)."""
        if num_failed > MAX_WEIGHTS_FAILED:
            self._give_up(engine, error)
        if not self._has_warned_of_weights:
            self._has_warned_of_weights = True
            self._emit(Warned(at=self._now(), message=f"{owner}: {error}; it tries again, and so does whoever is next"))
        if isinstance(error, WeightsUnreachable):
            weights = await self.waits.on(owner, "weights to be staged anew", self._channel.anew())
            if weights is not None:
                self._first = None if self._first is None else Publication(self._first.version, weights)
                if num_failed == 1:  # else it was not for want of weights, and the way to them needs time
                    return
        version = self._channel.version
        newer = self._pulse.until(lambda: self._channel.version > version)
        with suppress(TimeoutError):
            async with asyncio.timeout(WEIGHTS_S * 2 ** (num_failed - 1)):
                await self.waits.on(owner, "weights that arrive", newer)

    def _give_up(self, engine: Engine, error: WeightsError | StallError) -> NoReturn:
        """An engine that does not get its weights is as good as gone (`EngineGone`), and whether another takes its place is for
        whoever replaces engines to say. Where no other serves, the run cannot go on: raises the error."""
        if all(one is engine for one in self._router.engines):
            raise error
        raise EngineGone(f"{engine.name} does not get its weights: {error}") from error

    def adopt(self, engine: Engine) -> bool:
        """An engine that came while the run goes on takes part as soon as it has the newest weights. False: it does not."""
        if self._tasks is None or self._is_over:
            return False
        self._syncing.append(self._tasks.create_task(self._take_in(engine)))
        return True

    async def _take_in(self, engine: Engine) -> None:
        """Waits for weights that it can be sure of: what the run began with, or what is published. Then it is one of many.
        Until then it serves nobody, and takes nobody's turn to load."""
        owner = f"sync of {engine.name}"
        has_weights = self._pulse.until(lambda: self._has_published or self._first is not None)
        await self.waits.idle(owner, "a version to be published", has_weights)
        try:
            await self._load_until_it_has(engine, owner)
        except EngineGone as error:
            self._emit(Warned(at=self._now(), message=f"{engine.name} broke before it could join: {error}"))
            self._router.on_lost(engine)
            return
        self._router.join(engine)
        await self.sync(engine)

    async def _load_until_it_has(self, engine: Engine, owner: str) -> None:
        """It may be on its way still, and a cluster may take longer to find room for it than anybody else may wait."""
        num_failed = 0
        while True:
            try:
                await self._load(engine, owner)
                return
            except WeightsError as error:
                num_failed += 1
                await self._wait_for_weights(engine, owner, error, num_failed)
            except StallError as error:
                self._give_up(engine, error)

    async def _load(self, engine: Engine, owner: str) -> None:
        if self._first is not None and self._first.version == self._channel.version:
            version, weights = self._first  # nothing is published yet, nor about to be
        else:
            version, weights = await self.waits.on(owner, "the weights to arrive", self._channel.fetch())
        began = self._now()
        await self.waits.on(owner, f"{engine.name} to load version {version}", engine.load(version, weights))
        self._emit(WeightsLoaded(at=self._now(), engine=engine.name, version=version, seconds=self._now() - began))
        self._router.dispatch()

    def _are_engines_alike(self) -> bool:
        """Whether every engine serves the newest version."""
        return self._router.serving_versions() == [self._channel.version]

    async def _engines_at_the_end(self) -> None:
        await self._pulse.until(self._are_engines_alike)

    # ---- checkpoints: where it stands between two batches ----------------------------------------------------------

    async def _keep_if_due(self) -> None:
        version = self.admission.version
        if self._keeper is None or not self._keeper.is_due(version, is_last=self._is_stopping):
            return
        began = self._now()
        await self.waits.on("train", "changes that have begun", self._still.stop())
        try:
            standing, mark = await self.standing(), self._keeper.mark()  # one moment: what follows is not in it
        finally:
            self._still.resume()
        snapshot: Snapshot = await self._learn("copy its state", self._learner.snapshot())
        if self._parts.critic is not None:
            copying = self._parts.critic.snapshot()
            snapshot = LearnerAndCritic(snapshot, await self.waits.on("train", "the critic to copy its state", copying))
        keep = self._keeper.keep(standing, mark, snapshot, self._now() - began)
        await self.waits.on("train", "the checkpoint", keep)

    async def standing(self) -> PipelineState:
        """To be taken between two batches."""
        rows = await self._store.snapshot()
        cancelling = (
            self._settler.cancelling
        )  # their rollouts are being aborted: whoever resumes goes on with them instead
        if cancelling:
            rows = replace(rows, is_closed={g: c and g not in cancelling for g, c in rows.is_closed.items()})
        kept: dict[int, set[int]] = {}
        for row in rows.rows:
            kept.setdefault(row.group_id, set()).add(int(row.columns["member"]))
        groups = {}
        for group_id, place in self.admission.places():
            prompt, done = self._prompts[group_id], kept.get(group_id, set())
            living = self._to_do.get(group_id) or self._rollouts.living(group_id)
            to_do = set(range(self._rollout.num_members)) if group_id in cancelling else living
            groups[group_id] = GroupState(
                task_id=prompt.task_id,
                epoch=prompt.epoch,
                start=place.start,
                deadline=place.deadline,
                kept=sorted(done),
                to_do=sorted(to_do - done),
                restarts=self._restarts.get(group_id, 0),
            )
        done_with = {
            g: True for g, group in groups.items() if not group.to_do
        }  # the store may not have heard of it yet
        rows = replace(rows, is_closed={**rows.is_closed, **done_with})
        ledger = Ledger(
            version=self.admission.version,
            next_group=self._next_group,
            groups=groups,
            vacant=sorted(self._settler.vacant),
            num_replaced=self._settler.num_replaced,
            num_failed_in_a_row=self._settler.num_failed_in_a_row,
        )
        return PipelineState(ledger, rows)

    def _restore(self, standing: PipelineState) -> Ledger:
        ledger, rows = standing
        places = {group_id: Place(group.start, group.deadline) for group_id, group in ledger.groups.items()}
        self.admission.restore(ledger.version, places)
        settled = rows.acknowledged[SETTLE]
        num_unsettled = sum(c for g, c in rows.is_closed.items() if g not in settled)
        self._settler.restore(ledger, num_unsettled=num_unsettled, settled=set(settled) & ledger.groups.keys())
        self._next_group = ledger.next_group
        self._to_do = {group_id: set(group.to_do) for group_id, group in ledger.groups.items() if group.to_do}
        self._prompts = {g: Prompt(group.epoch, group.task_id, None) for g, group in ledger.groups.items()}
        self._restarts = {group_id: group.restarts for group_id, group in ledger.groups.items() if group.restarts}
        for group_id, group in ledger.groups.items():
            if group_id not in self._settler.vacant:
                self._emit(
                    GroupResumed(
                        at=self._now(),
                        group_id=group_id,
                        incarnation=self._incarnation,
                        kept=group.kept,
                        to_do=group.to_do,
                    )
                )
        return ledger

    # ---- what it is doing, for those who watch --------------------------------------------------------------------

    async def status(self) -> Status:
        """How full everything is and what everybody waits for."""
        engines = [engine.stats() for engine in self._router.engines]
        return Status(
            at=self._now(),
            requests_running=sum(stats.running for stats in engines),
            requests_waiting=sum(stats.waiting for stats in engines) + self._router.num_waiting,
            rows_in_store=(await self._store.stats()).rows,
            groups_outstanding=self.admission.outstanding,
            groups_taken=self.admission.taken,
            budget=self.admission.budget,
            waits=self.waits.counted(),
        )

    # ---- small things ---------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._parts.clock.now()

    def _emit(self, event: Event) -> None:
        self._parts.sink.emit(event)


def _mean(metrics: Sequence[Metrics]) -> Metrics:
    """Over the mini-batches of a batch; one without rows says nothing. Of what is a maximum, the largest. What is not finite
    is no number that a file of events could hold: it is left out, as the step was."""
    names = dict.fromkeys(name for some in metrics for name in some)
    values = {name: [some[name] for some in metrics if math.isfinite(some.get(name, math.nan))] for name in names}
    return {name: float((max if name.startswith("max_") else np.mean)(of)) for name, of in values.items() if of}


def _scaled(over_batch: OverBatch, leases: Sequence[Lease], groups: Sequence[list[TrainRow]]) -> list[list[TrainRow]]:
    """The batch's rows, their advantages shifted and scaled by what the whole batch is like. Empty places are no part of it,
    and neither is what is not finite: the learner leaves it out."""
    filled = [lease for lease, rows in zip(leases, groups, strict=True) if rows]
    if not filled:
        return list(groups)
    rewards_R = np.concatenate([own.rewards_G for lease in filled for own in by_agent(lease)])
    advantages_N = np.concatenate([row.advantages[row.loss_mask] for rows in groups for row in rows]).astype(np.float64)
    sound_N = advantages_N[np.isfinite(advantages_N)]
    if not len(sound_N):
        return list(groups)
    shift, divisor = over_batch(rewards_R, sound_N)

    def scaled(row: TrainRow) -> TrainRow:
        return replace(row, advantages=((row.advantages - shift) / divisor).astype(np.float32))

    return [[scaled(row) for row in rows] for rows in groups]


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
