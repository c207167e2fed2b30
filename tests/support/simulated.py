"""A run of the production pipeline on the virtual clock, and what must be true of every such run."""

from __future__ import annotations

import asyncio
import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from millstream.algo.advantages import grpo
from millstream.algo.credit import Credit, Penalty, credit_of
from millstream.clock import VirtualClock, run_virtual
from millstream.decoding import decode_json
from millstream.env import Environment
from millstream.events import (
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupTaken,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    Stepped,
)
from millstream.events.rollouts import NO_ROLLOUTS, RolloutSink
from millstream.events.sinks import MemorySink
from millstream.learner import Learner, Snapshot
from millstream.pipeline.outside import OutsideRollouts
from millstream.pipeline.pipeline import (
    AfterStep,
    Algorithm,
    Parts,
    Pipeline,
)
from millstream.pipeline.reschedule import UNCHANGED, Changed
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.schema import REFERENCE, VALUES, Stage, store_tasks
from millstream.pipeline.state import LearnerAndCritic, Ledger, PipelineState
from millstream.pipeline.waits import Waits
from millstream.serving.fleet import Fleet
from millstream.sim.draws import Draw, constant, lognormal, uniform
from millstream.sim.engine import SimEngine
from millstream.sim.environment import SimEnvironment
from millstream.sim.learner import SimCritic, SimFollower, SimLearner, SimScorer, SimSnapshot
from millstream.store import blocks
from millstream.store.memory import MemoryStore
from millstream.types import Fate, Metrics, Sampling, Task, TrainRow
from millstream.weights.local import LocalChannel
from support.rollout_workers import FakeWorkers, LineSimEngine, StagingStore

NUM_PROMPTS = 5  # of an epoch, where what was sampled for a prompt before has an effect


class World(Struct, frozen=True, kw_only=True):
    """Everything that may vary in a simulated run."""

    steps: int = 8
    groups_per_step: int = 2
    group_size: int = 2
    max_lag: float = 1.0
    auto_lag: bool = False
    longest_first: bool = False
    extra_groups: int | None = None
    surplus: Literal["carry_over", "abort"] = "carry_over"
    overdue: Literal["wait", "restart"] = "wait"
    max_restarts: int = 1
    lockstep: bool = True
    extra_members: int = 0
    num_tasks: int | None = None
    num_engines: int = 1
    slots: int = 8
    num_turns: int = 1
    tail: float = 1.0
    mean_tokens: float = 30.0
    latency: float = 0.0
    failure: float = 0.0
    success: float = 0.5
    retries: int = 1
    load: float = 0.0
    train_token_s: float = 1e-4
    max_replaced_per_step: int | None = None
    filter_zero_signal: bool = True
    mini_batches: int = 1
    deadline_s: float = 1e6
    reference: Literal["none", "early", "late"] = "none"
    has_critic: bool = False
    has_proximal: bool = False
    score_token_s: float = 1e-4
    records_turns: bool = False
    workers: int = 0
    has_lines: bool = False
    keep_gb: float = 10.0
    seed: int = 0


class Kept(Struct, frozen=True, kw_only=True):
    standing: PipelineState
    mark: int
    num_rows: int
    critic_rows: int = 0


class Diary:
    """Keeps a checkpoint after every step, as bytes that are read again."""

    def __init__(self) -> None:
        self.sink = MemorySink()
        self.kept: list[Kept] = []

    @property
    def version(self) -> int | None:
        return self.kept[-1].standing.ledger.version if self.kept else None

    def is_due(self, version: int, *, is_last: bool) -> bool:
        return True

    def mark(self) -> int:
        return len(self.sink.events)

    async def keep(self, standing: PipelineState, mark: int, snapshot: Snapshot, held_s: float) -> None:
        critic = SimSnapshot(0)
        if isinstance(snapshot, LearnerAndCritic):
            assert isinstance(snapshot.critic, SimSnapshot)
            snapshot, critic = snapshot
        assert isinstance(snapshot, SimSnapshot)
        ledger = decode_json(msgspec.json.encode(standing.ledger), Ledger)
        rows = blocks.decode_snapshot(blocks.encode_snapshot(standing.rows))
        standing = PipelineState(ledger, rows)
        kept = Kept(standing=standing, mark=mark, num_rows=snapshot.num_rows, critic_rows=critic.num_rows)
        self.kept.append(kept)


class WatchfulLearner(SimLearner):
    """Asserts that rows bring what the policy of their batch's start says of them, where somebody else is to compute it and
    the batch has made a step; and nothing otherwise."""

    def __init__(self, *, has_proximal: bool, token_s: float = 1e-4, seed: int = 0) -> None:
        super().__init__(token_s=token_s, seed=seed)
        self._has_proximal = has_proximal
        self._num_rows_before, self._num_steps = 0, 0
        self.num_after_a_step = 0

    async def begin_batch(self) -> None:
        self._num_rows_before, self._num_steps = self.num_rows, 0

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        for row in rows:
            if self._has_proximal and self._num_steps:
                self.num_after_a_step += 1
                expected = row.loss_mask * ((1 + row.tokens % 7) / -4 - self._num_rows_before)
                assert row.proximal is not None and np.allclose(row.proximal, expected), "of another version"
            else:
                assert row.proximal is None, "before the first step the proximal policy is the policy"
        await super().accumulate(rows)

    async def step(self) -> Metrics:
        self._num_steps += 1
        return await super().step()


class Others(NamedTuple):
    """Another learner for the pipeline, and how to find the one that is left in the end."""

    learner: Learner
    survivor: Callable[[], SimLearner]


OnWorkers = Callable[[FakeWorkers], Coroutine[Any, Any, None]]
NewLearner = Callable[[MemorySink], Others]
OnFleet = Callable[[Fleet], Coroutine[Any, Any, None]]


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """In place of a thread, which no virtual clock knows of."""
    return function(*arguments)


def fleet_of(make: Callable[[str], SimEngine], num: int, sink: MemorySink, **options: Any) -> Fleet:
    usual = {"is_queueing": True, "patience_s": 1000.0, "is_lone_replaced": True, "in_thread": at_once}
    return Fleet(make, num, clock=VirtualClock(), sink=sink, **usual | options)


class Outcome(Struct, frozen=True, kw_only=True):
    sink: MemorySink
    pipeline: Pipeline
    store: MemoryStore
    learner: SimLearner
    engines: tuple[SimEngine, ...]
    seconds: float
    stages: tuple[Stage, ...] = ()
    critic: SimCritic | None = None
    proximal: SimFollower | None = None


def tasks(world: World) -> Iterator[tuple[int, Task]]:
    numbers = itertools.count() if world.num_tasks is None else range(world.num_tasks)
    for number in numbers:
        epoch, number = divmod(number, NUM_PROMPTS) if world.longest_first else (0, number)
        yield epoch, Task(id=f"task-{number}", prompt="?")


def configs(world: World) -> tuple[PipelineConfig, RolloutConfig]:
    config = PipelineConfig(
        steps=world.steps,
        groups_per_step=world.groups_per_step,
        max_lag=world.max_lag,
        auto_lag=world.auto_lag,
        longest_first=world.longest_first,
        lockstep=world.lockstep,
        extra_groups=world.extra_groups,
        surplus=world.surplus,
        overdue=world.overdue,
        max_restarts=world.max_restarts,
        filter_zero_signal=world.filter_zero_signal,
        max_replaced_per_step=world.max_replaced_per_step,
    )
    return config, RolloutConfig(
        group_size=world.group_size,
        extra_members=world.extra_members,
        retries=world.retries,
        keep_gb=world.keep_gb,
    )


def stages_of(world: World, critic: SimCritic | None) -> tuple[Stage, ...]:
    stages = []
    if world.reference != "none":
        scorer = SimScorer(token_s=world.score_token_s)
        stages.append(Stage(REFERENCE, scorer, 100, is_early=world.reference == "early"))
    if critic is not None:
        stages.append(Stage(VALUES, critic, 100, is_early=True))
    return tuple(stages)


def credit_of_world(world: World) -> Credit | None:
    penalty = Penalty("k1", 0.1) if world.reference == "early" else None
    return credit_of("gae" if world.has_critic else "grpo", grpo, discount=1.0, trace=0.9, penalty=penalty)


def simulate(
    world: World,
    *,
    environment: Environment | None = None,
    num_tokens: Draw | None = None,
    after_step: AfterStep | None = None,
    on_pipeline: Callable[[Pipeline], None] = lambda pipeline: None,
    keeper: Diary | None = None,
    kept: Kept | None = None,
    changed: Changed = UNCHANGED,
    new_learner: NewLearner | None = None,
    on_fleet: OnFleet | None = None,
    on_workers: OnWorkers | None = None,
    learner: Learner | None = None,
    critic: SimCritic | None = None,
    outside: OutsideRollouts | None = None,
    rollouts: Callable[[MemorySink], RolloutSink] = lambda sink: NO_ROLLOUTS,
    **algorithm: object,
) -> Outcome:
    """Run to the end. Raises what stops the run: a `LagError`, a `Deadlock`, a `StallError`, ... With `on_fleet` engines are
    replaced when they die, and that runs concurrently; so does `on_workers`. `learner`, `critic`, `outside` and fields of `Algorithm` replace the default ones."""
    parts = _Replaced(learner, critic, outside, rollouts, algorithm, on_workers)
    return run_virtual(
        _simulate(
            world, environment, num_tokens, after_step, on_pipeline, keeper, kept, changed, new_learner, on_fleet, parts
        )
    )


class _Replaced(NamedTuple):
    learner: Learner | None
    critic: SimCritic | None
    outside: OutsideRollouts | None
    rollouts: Callable[[MemorySink], RolloutSink]
    algorithm: Mapping[str, object]
    on_workers: OnWorkers | None = None


async def _simulate(
    world: World,
    environment: Environment | None,
    num_tokens: Draw | None,
    after_step: AfterStep | None,
    on_pipeline: Callable[[Pipeline], None],
    keeper: Diary | None,
    kept: Kept | None,
    changed: Changed,
    new_learner: NewLearner | None,
    on_fleet: OnFleet | None,
    replaced: _Replaced,
) -> Outcome:
    sink = MemorySink()
    learner = WatchfulLearner(has_proximal=world.has_proximal, token_s=world.train_token_s, seed=world.seed)
    others = None if new_learner is None else new_learner(sink)
    version = kept.standing.ledger.version if kept is not None else 0
    if keeper is not None:
        keeper.sink = sink
    if kept is not None:
        with tempfile.TemporaryDirectory() as folder:
            SimSnapshot(kept.num_rows).write(Path(folder))
            learner.restore(Path(folder))
    critic = replaced.critic or (SimCritic(token_s=world.score_token_s, seed=1) if world.has_critic else None)
    if kept is not None:
        with tempfile.TemporaryDirectory() as folder:
            SimSnapshot(kept.critic_rows).write(Path(folder))
            if critic is not None:
                critic.restore(Path(folder))
    config, rollout = configs(world)
    stages = stages_of(world, critic)
    proximal = SimFollower(token_s=world.score_token_s) if world.has_proximal else None
    reads = store_tasks(
        stages,
        has_critic=critic is not None,
        has_proximal=world.has_proximal,
        is_in_lockstep=config.is_in_lockstep,
    )
    store = StagingStore(reads) if world.workers else MemoryStore(reads)
    engines: list[LineSimEngine] = []

    def make(name: str) -> SimEngine:
        engine = LineSimEngine(
            name=name,
            slots=world.slots,
            num_tokens=num_tokens or lognormal(world.mean_tokens, world.tail),
            load_s=uniform(0, world.load) if world.load else constant(0.0),
            version=version if on_fleet is None else 0,
            seed=world.seed,
        )
        engines.append(engine)
        return engine

    clock, fleet = VirtualClock(), None
    if on_fleet is None:
        for number in range(world.num_engines):
            make(f"engine-{number}")
    else:
        fleet = fleet_of(make, world.num_engines, sink, is_queueing=not config.is_in_lockstep)
    channel = LocalChannel()
    await channel.publish(version, {"num_rows": learner.num_rows})
    environment = environment or SimEnvironment(
        num_turns=world.num_turns,
        latency_s=uniform(0, world.latency) if world.latency else constant(0.0),
        failure=world.failure,
        success=world.success,
    )
    workers = FakeWorkers(environment, store, engines) if isinstance(store, StagingStore) else None
    parts = Parts(
        engines=tuple(engines),
        environment=environment,
        learner=replaced.learner or (learner if others is None else others.learner),
        store=store,
        channel=channel,
        clock=clock,
        sink=sink,
        waits=Waits(clock=clock, sink=sink, stall_s=30.0, deadline_s=world.deadline_s),
        stages=stages,
        critic=critic,
        proximal=proximal,
        rollouts=replaced.rollouts(sink),
        records_turns=world.records_turns,
        workers=None if workers is None else workers.plan(world.workers, has_lines=world.has_lines),
    )
    algorithm = Algorithm(
        advantage=grpo,
        sampling=Sampling(max_tokens=2000),
        micro_batch_tokens=128,
        mini_batches=world.mini_batches,
        credit=credit_of_world(world),
        critic_batch_tokens=100,
        proximal_batch_tokens=100,
    )
    pipeline = Pipeline(
        parts,
        tasks(world),
        replace(algorithm, **replaced.algorithm),
        config=config,
        rollout=rollout,
        seed=world.seed,
        after_step=after_step,
        keeper=keeper,
        resumed=None if kept is None else kept.standing,
        changed=changed,
        incarnation=1,
        router=None if fleet is None else fleet.router,
        outside=replaced.outside,
    )
    on_pipeline(pipeline)
    beside = []
    if fleet is not None and on_fleet is not None:
        beside = [asyncio.create_task(fleet.replace(pipeline.sync.adopt)), asyncio.create_task(on_fleet(fleet))]
    if replaced.on_workers is not None and workers is not None:
        beside.append(asyncio.create_task(replaced.on_workers(workers)))
    await pipeline.run()
    for task in beside:
        task.cancel()
    return Outcome(
        sink=sink,
        pipeline=pipeline,
        store=store,
        learner=learner if others is None else others.survivor(),
        engines=tuple(engines),
        seconds=asyncio.get_running_loop().time(),
        stages=stages,
        critic=critic,
        proximal=proximal,
    )


def check(world: World, outcome: Outcome) -> None:
    """The guarantees, read off the events alone: nothing too old, nothing lost, nothing twice, memory bounded."""
    sink, config = outcome.sink, configs(world)[0]
    starts = _starts(sink)
    for taken in sink.of(GroupTaken):
        oldest = min(starts[taken.group_id])
        assert taken.version - oldest <= math.ceil(world.max_lag), f"{taken} with a rollout that started at {oldest}"
        assert taken.num_rollouts == len(starts[taken.group_id]), (
            "a rollout was lost or doubled between end and training"
        )
        if world.surplus == "abort":
            assert taken.num_rollouts <= world.group_size, "first to finish: the surplus was not aborted"

    admitted = Counter(event.group_id for event in sink.of(GroupAdmitted))
    left = Counter(event.group_id for event in sink.of(GroupLeft))
    assert admitted == left, "every admitted group leaves exactly once"
    assert set(admitted.values()) <= {1}
    fates = {event.group_id: event.fate for event in sink.of(GroupLeft)}
    trained = {group_id for group_id, fate in fates.items() if fate is Fate.TRAINED}
    assert trained == {event.group_id for event in sink.of(GroupTaken)}
    assert outcome.learner.num_rows == sum(len(starts[group_id]) for group_id in trained)
    if outcome.critic is not None:
        assert outcome.critic.num_rows == outcome.learner.num_rows, (
            "the critic learns from what the learner learns from"
        )
    if outcome.proximal is not None and isinstance(outcome.learner, WatchfulLearner):
        assert outcome.proximal.num_scored == outcome.learner.num_after_a_step, "each row that needs it, once"
    if world.surplus == "carry_over":
        assert Fate.ABORTED not in fates.values()
    _check_declared(world, sink)

    steps = sink.of(Stepped)
    assert [step.version for step in steps] == list(range(1, len(steps) + 1))
    assert sum(step.num_groups for step in steps) == len(trained)
    if world.num_tasks is None:
        assert len(steps) == world.steps
    serving = outcome.pipeline.router.engines  # without those that are gone, and those that were about to join
    assert serving and all(engine.version == len(steps) for engine in serving if not engine.is_gone)

    assert asyncio.run(outcome.store.stats()).rows == 0, "rows were left in the store"
    assert not (outcome.store.packed if isinstance(outcome.store, StagingStore) else ()), "packed, and never put"
    assert outcome.pipeline.admission.outstanding == 0
    assert not outcome.pipeline.waits.active(), "somebody still waits"
    assert not any(engine.stats().running or engine.stats().waiting for engine in outcome.engines), (
        "an abort left something"
    )
    _check_in_flight(config.most_groups, sink)


def _starts(sink: MemorySink) -> dict[int, list[int]]:
    """By group: the versions that its rollouts started with, without those of before a restart."""
    starts: dict[int, list[int]] = {}
    for event in sink.events:
        match event:
            case RolloutEnded():
                starts.setdefault(event.group_id, []).append(event.start_version)
            case GroupRestarted():
                starts[event.group_id] = []
    return starts


def _check_declared(world: World, sink: MemorySink) -> None:
    """Aborts and restarts are only where they were asked for, within their limits, and every attempt ends once."""
    restarts = Counter(event.group_id for event in sink.of(GroupRestarted))
    assert max(restarts.values(), default=0) <= (world.max_restarts if world.overdue == "restart" else 0)
    if world.surplus == "carry_over" and world.overdue == "wait":
        assert not sink.of(RolloutAborted)
    attempts = Counter((e.group_id, e.member, e.attempt) for e in sink.of(RolloutStarted))
    ended = Counter(
        (e.group_id, e.member, e.attempt)
        for kind in (RolloutEnded, RolloutFailed, RolloutAborted)
        for e in sink.of(kind)
    )
    assert attempts == ended, "an attempt has no end, or two"
    assert set(attempts.values()) <= {1}


def _check_in_flight(most: int, sink: MemorySink) -> None:
    """Groups admitted and neither stepped nor set aside never exceed the budget."""
    in_flight: set[int] = set()
    for event in sink.events:
        match event:
            case GroupAdmitted():
                in_flight.add(event.group_id)
                assert len(in_flight) <= most
            case GroupLeft():
                in_flight.discard(event.group_id)
