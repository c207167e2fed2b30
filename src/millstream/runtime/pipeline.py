"""The path of one group, top to bottom: prompt, rollouts, rewards, advantages, micro-batches, step, weights, next prompt.

    tasks ──► feed ──► roll_out ×n ──► settle ──► train ──► publish ──► sync ×engines
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
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from millstream.algo.advantages import Rewards
from millstream.clock import Clock
from millstream.engine import Engine
from millstream.env import Environment
from millstream.errors import (
    DataError,
    EngineError,
    EnvironmentFailed,
    InvariantError,
    LagError,
    MillstreamError,
    RolloutTimeout,
    StallError,
    StreamEnded,
)
from millstream.events import (
    Event,
    EventSink,
    GroupAdmitted,
    GroupLeft,
    GroupResumed,
    GroupTaken,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    Span,
    Status,
    Stepped,
    WeightsLoaded,
    WeightsPublished,
)
from millstream.learner import Learner
from millstream.learner.packing import Packer
from millstream.runtime.admission import Admission, Place
from millstream.runtime.episode import Episode
from millstream.runtime.lockstep import Gate
from millstream.runtime.router import Router
from millstream.runtime.settle import TASK as SETTLE
from millstream.runtime.settle import Advantage, Rules, Settler, by_member, rewards_of
from millstream.runtime.state import GroupState, Keeper, Ledger, Standing
from millstream.runtime.waits import Pulse, Waits
from millstream.store import Lease, Reads, Store
from millstream.types import Completion, Fate, Metrics, Request, RequestKey, Rollout, Sampling, Task, TrainRow
from millstream.weights import WeightChannel

T = TypeVar("T")
AfterStep = Callable[[int], Coroutine[Any, Any, None]]
"""Called with every new version; beside training, or, when that is synchronous, between two steps."""
TRAIN = "train"
STORE_TASKS = {
    SETTLE: Reads(("member", "part", "agent", "reward", "tokens")),
    TRAIN: Reads(
        ("member", "part", "reward", "tokens", "loss_mask", "logprobs", "start_version", "advantages"), after=(SETTLE,)
    ),
}
"""What each consumer reads: the columns of a `Rollout`, and `advantages`, which settling adds."""


class RolloutConfig(Struct, frozen=True, kw_only=True):
    group_size: int = 8
    """Rollouts of one prompt; each is a request of its own."""
    max_tokens: int = 256
    """Tokens that one turn may sample."""
    temperature: float = 1.0
    retries: int = 1
    """How often a failed rollout is tried again before its group goes on without it."""
    min_group_size: int = 2
    """A group with fewer survivors fails, by name."""
    timeout_s: float = 600.0
    """For one whole rollout, its reward included."""
    max_parts: int = 1
    """Sequences of one rollout at most: several agents, or turns whose history is rewritten, need more than one."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.retries < 0 or self.timeout_s <= 0 or self.max_parts < 1:
            raise ValueError("max_tokens and max_parts must be at least 1, retries at least 0, timeout_s above 0")
        if not 1 <= self.min_group_size <= self.group_size:
            raise ValueError("min_group_size must be between 1 and group_size")


class PipelineConfig(Struct, frozen=True, kw_only=True):
    steps: int = 100
    groups_per_step: int = 16
    max_lag: float = 1.0
    """The asynchronous ratio: how many versions old a rollout's start may be when it is trained. 0 is synchronous."""
    budget: int | None = None
    """Groups in flight. None: floor((1 + max_lag) * groups_per_step). Less leaves room to pass a straggler."""
    filter_zero_signal: bool = True
    """Replace groups whose rewards are all equal: they have no gradient."""
    max_replaced_per_step: int | None = None
    """Groups a step may replace before places stay empty. None: 8 * groups_per_step."""
    stall_s: float = 30.0
    """A wait this long is reported."""
    deadline_s: float = 1800.0
    """A wait for an engine or the learner this long ends the run with an error that names it."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.groups_per_step < 1 or not 0 <= self.max_lag < math.inf:
            raise ValueError("steps and groups_per_step must be at least 1, max_lag a number from 0")
        if self.budget is not None and self.budget < self.groups_per_step:
            raise ValueError(
                f"budget = {self.budget} is below groups_per_step = {self.groups_per_step}: no batch fills"
            )
        if self.stall_s <= 0 or self.deadline_s <= 0:
            raise ValueError("stall_s and deadline_s must be above 0")


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


class Algorithm(Struct, frozen=True, kw_only=True, eq=False):
    """What the pipeline needs to know of learning."""

    advantage: Advantage
    sampling: Sampling
    micro_batch_tokens: int
    mini_batches: int = 1


class Pipeline:
    """One run. `tasks` yields (epoch, task) in the order of training; it is read one ahead, as room appears. `after_step`
    (an evaluation, say) may use the engines: it takes no budget and holds nothing up. `keeper` writes checkpoints.

    With `resumed` it goes on where another stood: the store must be empty, the learner restored, the engines at the version."""

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
        keeper: Keeper | None = None,
        resumed: Standing | None = None,
        incarnation: int = 0,
    ) -> None:
        self._after_step, self._is_held = after_step, False
        self._keeper, self._incarnation, self._is_stopping = keeper, incarnation, False
        self._parts, self._algorithm = parts, algorithm
        self._tasks: Iterator[tuple[int, Task]] = iter(tasks)
        self._config, self._rollout, self._seed = config, rollout, seed
        self.admission = Admission(
            groups_per_step=config.groups_per_step,
            max_lag=config.max_lag,
            budget=config.budget,
            num_steps=config.steps,
        )
        self.waits = parts.waits
        self._store, self._learner, self._channel = parts.store, parts.learner, parts.channel
        self._router, self._pulse = Router(parts.engines), Pulse()
        self._gate = Gate(self._router, self._pulse, self.waits) if self.admission.is_in_order else None
        self._next_group = 0
        self._prompts: dict[int, tuple[int, str]] = {}
        self._living: dict[int, set[int]] = {}
        self._rolling_out: set[asyncio.Task[None]] = set()
        self._taken: dict[int, Place] = {}
        self._settler = Settler(
            self._rules(),
            store=self._store,
            admission=self.admission,
            waits=self.waits,
            pulse=self._pulse,
            leave=self._leave,
        )
        self._rows = None if resumed is None else resumed.rows
        self._resumed = None if resumed is None else self._restore(resumed)

    def _rules(self) -> Rules:
        groups, replaced = self._config.groups_per_step, self._config.max_replaced_per_step
        return Rules(
            advantage=self._algorithm.advantage,
            min_group_size=self._rollout.min_group_size,
            filter_zero_signal=self._config.filter_zero_signal,
            max_replaced=8 * groups if replaced is None else replaced,
            max_failed_in_a_row=max(8, groups),
        )

    async def run(self) -> None:
        """Train to the last step, to the end of the data, or to the batch after `stop`. Raises the error that stopped it, if
        one did."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._rows is not None:
                    await self._store.restore(self._rows)
                await self._keep_if_due()
                in_order = self._gate is not None
                loops = [self.feed(tasks), self._settler.settle(in_order=in_order)]
                loops += [self.sync(engine) for engine in self._parts.engines]
                if self._gate is not None:
                    loops += [self._gate.keep(self._is_quiet), self._settler.set_aside_in_order(self._is_still)]
                running = [tasks.create_task(loop) for loop in loops]
                if self._resumed is not None:
                    await self._look_back(tasks)  # what came after the last step may have been cut short
                await self.train(tasks)
                await self.waits.on("the run", "every engine to load the last version", self._engines_at_the_end())
                for task in (*running, *self._rolling_out):
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    def stop(self) -> None:
        """End as if the next step were the last, with a checkpoint."""
        self._is_stopping = True

    # ---- 1. feed: consumes tasks; produces groups -----------------------------------------------------------------

    async def feed(self, tasks: asyncio.TaskGroup) -> None:
        """Waits for room under the lag bound; `train` (a step), `settle` (a replacement) and `sync` make it."""
        for group_id, (epoch, task) in enumerate(self._tasks):
            if group_id < self._next_group:  # resumed: this prompt has been admitted before
                self._take_up(tasks, group_id, task)
                continue
            room = self._pulse.until(self._start_for_next)
            start = await self.waits.on("feed", "room under the lag bound", room, has_deadline=False, has_alarm=False)
            place = self.admission.admit(group_id, start)
            self._next_group, self._prompts[group_id] = group_id + 1, (epoch, task.id)
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
            self._start(tasks, group_id, task, place, range(self._rollout.group_size))
        self._settler.is_fed = True
        await self._settler.end_if_drained()
        self._pulse.notify()

    def _start(self, tasks: asyncio.TaskGroup, group_id: int, task: Task, place: Place, members: Iterable[int]) -> None:
        self._living[group_id] = set(members)
        for member in sorted(self._living[group_id]):
            rolling_out = tasks.create_task(self.roll_out(group_id, member, task, place))
            self._rolling_out.add(rolling_out)
            rolling_out.add_done_callback(self._rolling_out.discard)

    def _take_up(self, tasks: asyncio.TaskGroup, group_id: int, task: Task) -> None:
        """A group that was in flight at the checkpoint: what it still lacks is done under its own id and deadline."""
        state = None if self._resumed is None else self._resumed.groups.get(group_id)
        if state is None:
            return
        if state.task_id != task.id:
            raise DataError(
                f"the checkpoint has group {group_id} at work on task {state.task_id!r}, the data set has {task.id!r} there: "
                "the data must be the same as before"
            )
        if state.to_do:
            self._start(tasks, group_id, task, self.admission.place(group_id), state.to_do)

    def _start_for_next(self) -> int | None:
        """The oldest serving version that a new group may start at: the older, the more engines may serve it."""
        if self._is_held or (self._gate is not None and not self._are_engines_alike()):
            return None  # synchronous: no rollout starts before every engine has the new weights
        return next((v for v in self._router.serving_versions() if self.admission.may_admit(v)), None)

    # ---- 2. roll out: consumes one place of a group; produces a row in the store ----------------------------------

    async def roll_out(self, group_id: int, member: int, task: Task, place: Place) -> None:
        """One member, independent of all others. Waits for its environment, at most `timeout_s` an attempt."""
        for attempt in range(1 + self._rollout.retries):
            key = RequestKey(group_id=group_id, member=member, attempt=attempt)
            parts = await self._attempt(key, task, place)
            if parts:
                rows = {name: [getattr(part, name) for part in parts] for name in Rollout.__struct_fields__}
                put = self._store.put(group_id, rows, versions=min(part.start_version for part in parts))
                await self.waits.on(f"group {group_id}", "room in the store", put)
                break
        self._living[group_id].remove(member)
        if not self._living[group_id]:
            del self._living[group_id]
            await self._settler.close(group_id)
        self._pulse.notify()

    async def _attempt(self, key: RequestKey, task: Task, place: Place) -> tuple[Rollout, ...]:
        """One attempt, part by part; none if it failed, which is data and not a crash."""
        began = self._now()
        self._emit(RolloutStarted(at=began, group_id=key.group_id, member=key.member, attempt=key.attempt))

        async def generate(request: Request) -> Completion:
            await self._pass_gate(request.key, limit)
            return await self._generate(request, place)

        limit = asyncio.timeout(self._rollout.timeout_s)
        episode = Episode(
            task,
            key,
            generate=generate,
            waiting=lambda what, work: self.waits.on(_owner(key), what, work, has_deadline=False, has_alarm=False),
            sampling=self._algorithm.sampling,
            run_seed=self._seed,
            role="train",
            max_parts=self._rollout.max_parts,
            limit=limit,
        )
        try:
            async with limit:
                playing = self._parts.environment.rollout(episode)
                reward = await self.waits.on(
                    _owner(key), "its environment", playing, has_deadline=False, has_alarm=False
                )
            parts = episode.finish(reward)
        except (EngineError, InvariantError, StallError):
            raise
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                raise  # the run is ending
            failure: Exception = EnvironmentFailed("the environment was cancelled from inside")
        except TimeoutError as error:
            failure = self._too_late(error) if limit.expired() else error
        except Exception as error:  # whatever an environment or a reward raises is a failed rollout
            failure = error
        else:
            self._record_rollout(parts, began)
            return parts
        self._record_failure(key, failure, began, episode.num_sampled)
        return ()

    def _too_late(self, error: TimeoutError) -> RolloutTimeout:
        """Names what the rollout was waiting for when its time was up."""
        limit, cut = self._rollout.timeout_s, Waits.cut_by(error)
        waiting = "" if cut is None else f": {self._now() - cut.since:.0f} s of it it waited for {cut.what}"
        return RolloutTimeout(f"no reward after {limit:g} s{waiting}; rollout.timeout_s sets the limit")

    def _record_rollout(self, parts: tuple[Rollout, ...], began: float) -> None:
        rollout = parts[0]
        self._emit(
            RolloutEnded(
                at=self._now(),
                group_id=rollout.group_id,
                member=rollout.member,
                attempt=rollout.attempt,
                reward=rollout.reward,
                num_tokens=sum(len(part.tokens) for part in parts),
                num_sampled=sum(int(part.loss_mask.sum()) for part in parts),
                start_version=min(part.start_version for part in parts),
                end_version=max(int(part.versions.max()) for part in parts),
                finish=parts[-1].finish,
                seconds=self._now() - began,
            )
        )

    def _record_failure(self, key: RequestKey, error: Exception, began: float, num_sampled: int) -> None:
        self._settler.last_failure = f"{type(error).__name__}: {error}"
        self._emit(
            RolloutFailed(
                at=self._now(),
                group_id=key.group_id,
                member=key.member,
                attempt=key.attempt,
                error=type(error).__name__,
                message=str(error),
                is_final=key.attempt == self._rollout.retries,
                seconds=self._now() - began,
                num_sampled=num_sampled,
            )
        )

    async def _generate(self, request: Request, place: Place) -> Completion:
        """One turn, on an engine that is not older than the group's start."""
        owner = _owner(request.key)
        if self.admission.version > place.deadline:
            raise LagError(f"{owner} is overdue: deadline {place.deadline}, version {self.admission.version}")
        turn = self._router.generate(request, floor=place.start)
        # rollout.timeout_s is its deadline
        return await self.waits.on(owner, "an engine", turn, has_deadline=False, has_alarm=False)

    async def _pass_gate(self, key: RequestKey, limit: asyncio.Timeout) -> None:
        """Synchronous training: wait for the others. The time spent here does not count as the rollout's own."""
        if self._gate is None:
            return
        loop, deadline = asyncio.get_running_loop(), limit.when()
        left = None if deadline is None else deadline - loop.time()
        limit.reschedule(None)
        others = self._gate.pass_through(key)
        what = "the other rollouts of the step"  # which have their timeouts
        await self.waits.on(_owner(key), what, others, has_deadline=False, has_alarm=False)
        limit.reschedule(None if left is None else loop.time() + left)

    def _is_still(self) -> bool:
        """Whether every living rollout waits at the gate."""
        return self._gate is not None and self._gate.num_waiting == sum(map(len, self._living.values()))

    def _is_quiet(self) -> bool:
        """Whether nothing but the gate can move: see `lockstep`."""
        is_full = self._settler.is_fed or self._start_for_next() is None
        return is_full and not self._settler.num_unsettled and self._is_still()

    # ---- 3. settle: consumes closed groups; produces advantages, or sets the group aside: see `runtime.settle` --------

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
        await self.waits.on("train", "what comes after the step", evaluation, has_deadline=False)
        self._is_held = False
        self._pulse.notify()

    async def _train_batch(self) -> bool:
        """One batch: gradients accumulate while the rest of it is still being generated. False if nothing was left.

        Waits for groups that the admission rule lets through; `settle` brings them."""
        began, leases, rows = self._now(), list[Lease](), list[TrainRow]()
        await self._learn("begin_batch", self._learner.begin_batch())
        packer, metrics = Packer(self._algorithm.micro_batch_tokens), list[Metrics]()
        groups_per_mini_batch = self._config.groups_per_step // self._algorithm.mini_batches
        while not self.admission.is_batch_full:
            claim = self._store.claim(TRAIN, choose=self._choose_and_take)
            try:
                lease = await self.waits.on("train", "a complete group", claim, has_deadline=False)  # rollouts time out
            except StreamEnded:
                break
            leases.append(lease)
            for row in await self._take(lease):
                rows.append(row)
                await self._accumulate(packer.add(row))
            if self.admission.taken % groups_per_mini_batch == 0:
                await self._accumulate(packer.flush())
                metrics.append(await self._learn("step", self._learner.step()))
        if not leases:
            return False
        await self._accumulate(packer.flush())
        if not self.admission.is_batch_full:
            metrics.append(await self._learn("step", self._learner.step()))
        await self._finish_batch(leases, rows, _mean(metrics), began)
        return True

    def _choose_and_take(self, ready: Iterable[int]) -> int | None:
        """The group that the admission rule lets through joins the batch in the same moment: a choice that waited for the
        event loop could be overtaken by a new admission."""
        group_id = self.admission.choose(ready)
        if group_id is not None:
            self._taken[group_id] = self.admission.take(group_id)
        return group_id

    async def _take(self, lease: Lease) -> list[TrainRow]:
        """The rows of a group that joined the batch. The last line of defence: they are fresh enough, or the run stops."""
        place, version = self._taken.pop(lease.group_id), self.admission.version
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
        return [TrainRow(**{name: row.columns[name] for name in TrainRow.__struct_fields__}) for row in rows]

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
        """The version rises, the rows are done with, the weights go out."""
        trained = [lease for lease in leases if lease.group_id not in self._settler.vacant]
        version = self.admission.step()
        self._settler.begin_batch()
        for lease in leases:
            await self._store.acknowledge(lease)
            self._settler.vacant.discard(lease.group_id)
        for lease in trained:
            self._leave(lease.group_id, Fate.TRAINED, rewards_of(lease))
        self._emit(
            Stepped(
                at=self._now(),
                version=version,
                num_groups=len(trained),
                num_rows=len(rows),
                num_tokens=sum(len(row.tokens) for row in rows),
                seconds=self._now() - began,
                metrics=metrics,
            )
        )
        self._prompts = {g: prompt for g, prompt in self._prompts.items() if g in self.admission}
        self._is_held = self._gate is not None and self._after_step is not None
        await self._publish(version)

    # ---- 5. publish and sync: consume versions; produce engines that serve them -----------------------------------

    async def _publish(self, version: int) -> None:
        began = self._now()
        weights = await self._learn("copy weights", self._learner.weights())
        await self.waits.on("train", f"version {version} to be published", self._channel.publish(version, weights))
        self._emit(WeightsPublished(at=self._now(), version=version, seconds=self._now() - began))
        self._pulse.notify()

    async def sync(self, engine: Engine) -> None:
        """One engine takes the newest weights, between two of its decode steps, whenever it is ready for them.

        Waits for a version newer than the engine's; `train` publishes it."""
        owner = f"sync of {engine.name}"
        while True:
            newer = self._pulse.until(lambda: self._channel.version > engine.version)
            await self.waits.on(owner, "a newer version", newer, has_deadline=False, has_alarm=False)
            version, weights = await self.waits.on(owner, "the weights to arrive", self._channel.fetch())
            began = self._now()
            await self.waits.on(owner, f"{engine.name} to load version {version}", engine.load(version, weights))
            self._emit(WeightsLoaded(at=self._now(), engine=engine.name, version=version, seconds=self._now() - began))
            self._pulse.notify()

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
        began, standing, mark = (
            self._now(),
            await self.standing(),
            self._keeper.mark(),
        )  # one moment: what follows is not in it
        snapshot = await self._learn("copy its state", self._learner.snapshot())
        keep = self._keeper.keep(standing, mark, snapshot, self._now() - began)
        await self.waits.on("train", "the checkpoint", keep)

    async def standing(self) -> Standing:
        """To be taken between two batches."""
        rows = await self._store.snapshot()
        kept: dict[int, set[int]] = {}
        for row in rows.rows:
            kept.setdefault(row.group_id, set()).add(int(row.columns["member"]))
        groups = {}
        for group_id, place in self.admission.places():
            epoch, task_id = self._prompts[group_id]
            done = sorted(kept.get(group_id, ()))
            groups[group_id] = GroupState(
                task_id=task_id,
                epoch=epoch,
                start=place.start,
                deadline=place.deadline,
                kept=done,
                to_do=sorted(self._living.get(group_id, set()).difference(done)),
            )
        ledger = Ledger(
            version=self.admission.version,
            next_group=self._next_group,
            groups=groups,
            vacant=sorted(self._settler.vacant),
            num_replaced=self._settler.num_replaced,
            num_failed_in_a_row=self._settler.num_failed_in_a_row,
        )
        return Standing(ledger, rows)

    def _restore(self, standing: Standing) -> Ledger:
        ledger, rows = standing
        places = {group_id: Place(group.start, group.deadline) for group_id, group in ledger.groups.items()}
        self.admission.restore(ledger.version, places)
        settled = rows.acknowledged[SETTLE]
        self._settler.restore(ledger, num_unsettled=sum(c for g, c in rows.is_closed.items() if g not in settled))
        self._next_group = ledger.next_group
        self._living = {group_id: set(group.to_do) for group_id, group in ledger.groups.items() if group.to_do}
        self._prompts = {group_id: (group.epoch, group.task_id) for group_id, group in ledger.groups.items()}
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
        engines = [engine.stats() for engine in self._parts.engines]
        return Status(
            at=self._now(),
            requests_running=sum(stats.running for stats in engines),
            requests_waiting=sum(stats.waiting for stats in engines),
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
    """Over the mini-batches of a batch; one without rows says nothing."""
    names = dict.fromkeys(name for some in metrics for name in some)
    return {name: float(np.mean([some[name] for some in metrics if name in some])) for name in names}


def _owner(key: RequestKey) -> str:
    return f"group {key.group_id} member {key.member}"


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
