"""Backends: where the parts of a run are started. The pipeline sees no difference between them.

`LocalBackend` is this machine; `run.ray_backend` is a Ray cluster. `backend_for` chooses. Imports torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.algo.recipe import Recipe
from millstream.clock import Clock
from millstream.cluster.resources import check_ray_installed
from millstream.engine import Engine, EngineConfig
from millstream.engine.native.host import ENGINE_START_S
from millstream.events import EventSink, WorkerStarted
from millstream.learner import LearnerConfig, RunLearner
from millstream.pipeline.schema import Stage
from millstream.pipeline.workers import WorkerPlan
from millstream.rpc.process import Kind, Launcher, LocalLauncher, WorkerProcess
from millstream.run import build
from millstream.run.build import HttpServers, RunEngine
from millstream.run.build_scorers import DurableCritic, Scorers, build_scorers
from millstream.run.config import RunConfig, scheduled_engine, uses_lines
from millstream.run.rollout_worker import plan_workers
from millstream.serving.fleet import Fleet
from millstream.store import Store
from millstream.store.client import StoreClient
from millstream.store.host import SharedStore, make_plan
from millstream.store.memory import MemoryStore
from millstream.weights import WeightChannel
from millstream.weights.local import LocalChannel

SERVERS = (
    "the engines are servers that others have started: engine.http.urls names them, and is read once, at the start"
)


class BackendContext(NamedTuple):
    """What a backend is opened with."""

    model: PreTrainedModel  # what the run starts from
    tokenizer: PreTrainedTokenizerBase | None  # for engines that look for stop strings
    folder: Path  # of the run
    clock: Clock
    sink: EventSink


class Backend(Protocol):
    """Starts the parts of a run. Its `launcher` may be handed out before it is open, and used afterwards."""

    launcher: Launcher | None
    """Starts processes of environments and rewards. None: they are started on this machine."""

    @property
    def is_lone_engine_replaced(self) -> bool:
        """Whether the only engine of a run has a process, so that it can die and be replaced."""
        ...

    def has_learner_processes(self, learner: LearnerConfig) -> bool:
        """Whether this learner has processes, of which one can die."""
        ...

    async def open(self, context: BackendContext) -> None: ...

    def make_engine(self, name: str) -> Engine:
        """An engine, perhaps not ready yet. Called on any thread."""
        ...

    def build_learner(
        self, tokenizer: PreTrainedTokenizerBase, *, learner: LearnerConfig, recipe: Recipe, num_steps: int | None
    ) -> RunLearner:
        """A learner that trains the model as it is now."""
        ...

    def build_scorers(self, saved: Path | None, durable: DurableCritic) -> Scorers:
        """Reference, critic and proximal policy, of the model as it is now; perhaps not ready yet. `saved`: see
        `run.build_scorers`. `durable` wraps a critic whose process can die. Called on a thread."""
        ...

    async def open_store(self, stages: Sequence[Stage]) -> Store: ...

    def plan_workers(self, tokenizer: PreTrainedTokenizerBase) -> WorkerPlan | None:
        """The rollout workers of the run, whose store is open. None: it has none."""
        ...

    def new_channel(self, learner: RunLearner) -> WeightChannel:
        """`learner`: gives weights once more if those that it published cannot be reached."""
        ...

    async def close(self) -> None:
        """Close everything else that was opened. Engines, learners and scorers were closed before."""
        ...


class LoggedLauncher(NamedTuple):
    """Starts processes of this machine, each with an event."""

    context: BackendContext

    def launch(self, kind: Kind, target: str, *, name: str, descriptors: Sequence[int] = ()) -> WorkerProcess:
        worker = LocalLauncher(is_warm=True).launch(kind, target, name=name, descriptors=descriptors)
        at = self.context.clock.now()
        self.context.sink.emit(WorkerStarted(at=at, worker=name, what=kind, pid=worker.pid, node=""))
        return worker


class LocalBackend:
    """This process, and processes that it starts."""

    launcher: Launcher | None = None

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._store: SharedStore | None = None  # with rollout workers
        self._client: StoreClient | None = None

    async def open(self, context: BackendContext) -> None:
        self._context = context
        self._engines = LocalEngines(self._config, context)

    @property
    def is_lone_engine_replaced(self) -> bool:
        config = self._config.engine
        return config.kind in ("vllm", "http") or (
            config.kind == "torch" and build.has_process(config, self._context.model)
        )

    def has_learner_processes(self, learner: LearnerConfig) -> bool:
        return build.has_learner_process(self._config, self._context.model, learner)

    def make_engine(self, name: str) -> Engine:
        return self._engines.make(name)

    def build_learner(
        self, tokenizer: PreTrainedTokenizerBase, *, learner: LearnerConfig, recipe: Recipe, num_steps: int | None
    ) -> RunLearner:
        return build.build_learner(
            self._config, self._context.model, tokenizer, learner=learner, recipe=recipe, num_steps=num_steps
        )

    def build_scorers(self, saved: Path | None, durable: DurableCritic) -> Scorers:
        return build_scorers(self._config, self._context.model, saved)

    async def open_store(self, stages: Sequence[Stage]) -> Store:
        tasks = build.store_plan(self._config, stages)
        if not self._config.rollout.workers:
            return MemoryStore(tasks)
        self._store = await asyncio.to_thread(lambda: SharedStore(make_plan(tasks)))
        self._client = await self._store.connect("pipeline")
        return self._client

    def plan_workers(self, tokenizer: PreTrainedTokenizerBase) -> WorkerPlan | None:
        if self._store is None or self._client is None:
            return None
        has_lines = uses_lines(self._config) and build.has_process(self._config.engine, self._context.model)
        store = self._store.plan, self._client
        return plan_workers(self._config, tokenizer, store, LoggedLauncher(self._context), has_lines=has_lines)

    def new_channel(self, learner: RunLearner) -> WeightChannel:
        return LocalChannel()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
        await asyncio.to_thread(self._engines.close)


def build_fleet(backend: Backend, config: EngineConfig, *, is_queueing: bool, clock: Clock, sink: EventSink) -> Fleet:
    """The configured number of engines behind one router."""
    fleet = Fleet(
        backend.make_engine,
        config.num_engines,
        is_queueing=is_queueing,
        patience_s=max(config.answer_s, ENGINE_START_S),
        clock=clock,
        sink=sink,
        is_lone_replaced=backend.is_lone_engine_replaced,
        why_fixed=SERVERS if config.kind == "http" else "",
        is_given_up=config.kind != "http",
    )
    fleet.router.prefixes.are_kept = config.kind == "torch" and config.on_update == "keep"
    return fleet


class LocalEngines:
    """Makes engines of this machine, by name."""

    def __init__(self, config: RunConfig, context: BackendContext) -> None:
        self._config = scheduled_engine(config)
        self._has_lines = uses_lines(config)
        self._context = context
        self._servers: HttpServers | None = None

    def make(self, name: str) -> RunEngine:
        config, context = self._config, self._context
        if config.kind == "http":
            self._servers = self._servers or HttpServers(config, context.model, clock=context.clock, sink=context.sink)
            return self._servers.engine(name)
        return build.build_engine(
            config,
            context.model,
            clock=context.clock,
            sink=context.sink,
            name=name,
            tokenizer=context.tokenizer,
            has_lines=self._has_lines,
        )

    def close(self) -> None:
        """Close what the engines share. Each engine is closed before."""
        if self._servers is not None:
            self._servers.close()


def backend_for(config: RunConfig) -> Backend:
    match config.runtime:
        case "local":
            return LocalBackend(config)
        case "ray":
            check_ray_installed()
            from millstream.run.ray_backend import RayBackend  # Ray is an extra

            return RayBackend(config)
