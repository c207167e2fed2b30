"""The one place where benchmarks import parts of Millstream that are not its public API: a module that moves breaks one line.

Imports no torch; what does is in `internals_torch.py`. Public API, which benchmarks import directly: `millstream` itself, its
types, events, config and clock, and the protocols `millstream.engine.Engine` and `millstream.env.Environment`.
"""

# mypy: implicit-reexport
# ruff: noqa: F401
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any
from unittest.mock import patch

from msgspec import structs

from millstream import PipelineConfig, RolloutConfig, RunConfig
from millstream.algo.advantages import ADVANTAGES, Advantage, grpo, has_signal
from millstream.algo.credit import Estimator, gae
from millstream.audit import AuditReport, audit, report_lines
from millstream.clock import VirtualClock
from millstream.config import load
from millstream.dash.tiles import RunTiles
from millstream.engine import Engine
from millstream.env import Context, Environment
from millstream.env.data import DataSet, in_order, read
from millstream.env.games.frozen_lake import FrozenLake
from millstream.env.resolve import find_environment, make_tasks
from millstream.env.rewards import CompletionScorer, RewardConfig, exact_match, prepare_rewards
from millstream.env.sandbox.base import Limits
from millstream.env.sandbox.config import SandboxConfig
from millstream.env.sandbox.keepers import WALLS, SandboxBroken
from millstream.env.sandbox.pool import SandboxPool
from millstream.env.sandbox.programs import ProgramSandbox, what_is_contained
from millstream.env.sandbox.walled import WalledSandbox
from millstream.errors import StoreTimeout
from millstream.events import EventSink, Status
from millstream.events.bias import BiasReport, bias_report
from millstream.events.bottleneck import bottleneck_of
from millstream.events.encoding import encode_event
from millstream.events.findings import findings_of
from millstream.events.index import IndexWriter, index_of
from millstream.events.rollouts.writer import RolloutWriter
from millstream.events.sinks import JsonlSink, MemorySink, MetricsSink, read_events, read_history
from millstream.events.summary import Interval, merge_intervals, total_length
from millstream.learner import Learner, Scorer
from millstream.pipeline.admission import full_budget
from millstream.pipeline.episode import Episode, EpisodeResult, Player
from millstream.pipeline.pipeline import Algorithm, Parts, Pipeline
from millstream.pipeline.schema import REFERENCE, Stage, store_tasks
from millstream.pipeline.sync import WeightSync
from millstream.pipeline.waits import Waits
from millstream.rpc.call import Channel
from millstream.rpc.frames import FrameProtocol, Frames
from millstream.rpc.process import LocalLauncher
from millstream.run.advise import Advice, advise
from millstream.run.calibrate import as_it_ran, calibrate
from millstream.run.check import check_config
from millstream.run.estimates import mean_estimate
from millstream.run.folder import RunResult
from millstream.run.garbage import seldom_collected
from millstream.run.plan import Planner, Settings, plan_run
from millstream.run.roofline import parse_gpus
from millstream.run.simulate import costs_of, simulate
from millstream.run.sizes import shape_from
from millstream.seeds import derive_seed
from millstream.serving.request import Pin
from millstream.serving.router import Router
from millstream.sim.config import DrawConfig, SimConfig, SimEnvironmentConfig
from millstream.sim.costs import H200, H200_KV_TOKENS, Costs
from millstream.sim.draws import Draw, at_most, constant, lognormal, mixture, pareto, truncated_normal, uniform
from millstream.sim.engine import SimEngine
from millstream.sim.environment import SimEnvironment, Success, by_prompt, longer_is_harder
from millstream.sim.learner import SimLearner, SimScorer
from millstream.store import Reads, Want
from millstream.store.client import Address as StoreAddress
from millstream.store.client import StoreClient
from millstream.store.coordinator import StorePlan
from millstream.store.host import ShardedStore, SharedStore, make_plan
from millstream.store.memory import MemoryStore
from millstream.store.segments import SegmentServer, SegmentServerAgent, segment_folder
from millstream.store.sharded import ShardedClient, shard_of
from millstream.types import Sampling, Task
from millstream.weights.local import LocalChannel
from report import ROOT

TINY = (
    "data.size=200",
    "data.holdout=8",
    "warmup.max_steps=2",
    "engine.process=false",
    "engine.slots=16",
    "pipeline.groups_per_step=2",
    "rollout.group_size=2",
    "pipeline.filter_zero_signal=false",
    "evaluation.every_steps=",
)
"""Changes of a recipe that make it as small as it can be: for `--smoke`."""


def recipe(name: str, *changes: str, is_smoke: bool = False) -> RunConfig:
    """The config of `recipes/NAME.toml` with `a.b=c` changes."""
    return load(ROOT / f"recipes/{name}.toml", RunConfig, [*(TINY if is_smoke else ()), *changes])


def data_of(config: RunConfig) -> DataSet:
    """The tasks of a config, as a run reads them."""
    kinds = [find_environment(one) for one in config.environment]
    return read(config.data, seed=config.seed, make=lambda num, seed: make_tasks(kinds, num, seed))


def first_epoch(config: RunConfig) -> list[Task]:
    """The training tasks of a config in the order in which a run uses them first."""
    tasks = data_of(config).train
    return [task for _, task in islice(in_order(tasks, seed=config.seed, shuffle=config.data.shuffle), len(tasks))]


def must_be_clean(report: AuditReport) -> None:
    """Raises `SystemExit` with the findings of an audit, where it has any."""
    if not report.is_clean:
        raise SystemExit("\n".join(report_lines(report)))


async def run_pipeline(
    engines: Sequence[Engine],
    environment: Environment,
    learner: Learner,
    *,
    config: PipelineConfig,
    rollout: RolloutConfig,
    sink: EventSink,
    seed: int = 0,
    micro_batch_tokens: int = 1 << 20,
    reference: Scorer | None = None,
) -> None:
    """The production pipeline on the virtual clock, with the production store, over these engines; tasks are numbered.
    `reference`: scores all rows."""
    clock, channel = VirtualClock(), LocalChannel()
    stages = () if reference is None else (Stage(REFERENCE, reference, micro_batch_tokens, is_early=False),)
    await channel.publish(0, {})
    parts = Parts(
        engines=tuple(engines),
        environment=environment,
        learner=learner,
        store=MemoryStore(store_tasks(stages), capacity_rows=config.most_groups * rollout.most_rows),
        channel=channel,
        clock=clock,
        sink=sink,
        waits=Waits(clock=clock, sink=sink, stall_s=1e6, deadline_s=1e9),
        stages=stages,
    )
    sampling = Sampling(max_tokens=rollout.max_tokens)
    algorithm = Algorithm(advantage=grpo, sampling=sampling, micro_batch_tokens=micro_batch_tokens)
    tasks = ((0, Task(id=f"task-{number}", prompt="?")) for number in itertools.count())
    await Pipeline(parts, tasks, algorithm, config=config, rollout=rollout, seed=seed).run()


@contextmanager
def without_supervision() -> Iterator[None]:
    """Runs within this write no event, metric, checkpoint or summary, and have no watchdog.

    Methods are replaced on their classes, so that it does not matter where a run names them."""
    from millstream.run.checkpoint import Checkpoints
    from millstream.run.folder import RunFolder
    from millstream.run.watchdog import Watchdog

    def nothing(*_: Any, **__: Any) -> None: ...

    changes: list[tuple[type, str, Any]] = [
        (JsonlSink, "emit", nothing),
        (MetricsSink, "emit", nothing),
        (Checkpoints, "is_due", lambda *_, **__: False),
        (Watchdog, "start", nothing),
        (Watchdog, "stop", nothing),
        (RunFolder, "conclude", nothing),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in changes:
            stack.enter_context(patch.object(owner, name, replacement))
        yield


@contextmanager
def without_checkpoints() -> Iterator[list[int]]:
    """Runs within this write no checkpoint: the first would be written beside the first steps. Yields how many requests their
    engines have preempted, a number about every second."""
    from millstream.run.checkpoint import Checkpoints

    preempted: list[int] = []
    status = Pipeline.status

    async def watched(pipeline: Pipeline) -> Status:
        preempted.append(sum(engine.stats().num_preempted for engine in pipeline.router.engines))
        return await status(pipeline)

    with patch.object(Checkpoints, "is_due", lambda *_, **__: False), patch.object(Pipeline, "status", watched):
        yield preempted


def limit_turns(context: Context, max_tokens: int) -> None:
    """From now on the turns of this rollout have this many tokens, whatever is sampled."""
    inner: Any = context
    while not isinstance(inner, Episode):
        inner = inner._context  # a `Conversation`, or the context that stops its environment's clock
    inner._sampling = structs.replace(inner._sampling, max_tokens=max_tokens, stop=())
