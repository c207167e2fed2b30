"""Backends: where the parts of a run are started. The pipeline sees no difference between them.

`LocalBackend` is this machine; `run.ray_backend` is a Ray cluster. `backend_for` chooses. Imports torch.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream import imports
from millstream.algo.recipe import Recipe
from millstream.clock import Clock
from millstream.cluster.resources import check_ray_installed
from millstream.engine import Engine, EngineConfig
from millstream.engine.native.host import ENGINE_START_S
from millstream.engine.processes import SHARED, EngineSupply, LocalWeights, process_engine
from millstream.events import EventSink, WorkerStarted
from millstream.learner import LearnerConfig, RunLearner
from millstream.learner.fsdp import PublishingRanks
from millstream.learner.messages import StoreAccess
from millstream.learner.processes import LOOPBACK
from millstream.pipeline.schema import Stage
from millstream.pipeline.workers import WorkerPlan
from millstream.rpc.process import Kind, Launcher, LocalLauncher, WorkerProcess, own_node
from millstream.run import build
from millstream.run.build import HttpServers
from millstream.run.build_scorers import DurableCritic, Scorers, StageProcesses, build_scorers
from millstream.run.config import RunConfig, scheduled_engine, uses_lines
from millstream.run.device import is_gpu_memory_shareable
from millstream.run.outside import build_outside_engine
from millstream.run.places import Places
from millstream.run.replay import ReplayedLearner
from millstream.run.rollout_worker import plan_workers
from millstream.run.weight_ways import local_ways
from millstream.serving.fleet import Fleet
from millstream.store import Store
from millstream.store.client import StoreClient
from millstream.store.host import SharedStore, make_plan
from millstream.store.memory import MemoryStore
from millstream.weights import WeightChannel
from millstream.weights.local import LocalChannel
from millstream.weights.remote import RemoteChannel
from millstream.weights.transfer import Delivery
from millstream.weights.transfer.publisher import open_publisher

PROGRAMS = "the engines are programs outside, which connect to the run: start as many as you like"
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
    """Starts processes of environments and rewards. None: they are started on this machine, and see no GPU."""

    @property
    def is_lone_engine_replaced(self) -> bool:
        """Whether the only engine of a run has a process, so that it can die and be replaced."""
        ...

    @property
    def learner_device(self) -> str:
        """Of the learner, once it is open: "cpu" or "cuda"."""
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


@runtime_checkable
class ClosedStore(Protocol):
    """A store of the user's own that must be closed."""

    async def close(self) -> None: ...


class LoggedLauncher(NamedTuple):
    """Starts processes of this machine, each with an event."""

    context: BackendContext
    launcher: LocalLauncher = LocalLauncher(is_warm=True)

    def launch(self, kind: Kind, target: str, *, name: str, descriptors: Sequence[int] = ()) -> WorkerProcess:
        worker = self.launcher.launch(kind, target, name=name, descriptors=descriptors)
        at = self.context.clock.now()
        self.context.sink.emit(WorkerStarted(at=at, worker=name, what=kind, pid=worker.pid, node=""))
        return worker


class LocalBackend:
    """This process, and processes that it starts."""

    def __init__(self, config: RunConfig, places: Places) -> None:
        self.launcher: Launcher | None = LocalLauncher(rewards_see_gpus=True) if config.resources.reward_gpus else None
        self._config = config
        self._places = places
        self.learner_device = ""
        self._own_store: Store | None = None  # one of the user's own
        self._store: SharedStore | None = None  # with rollout workers, or rows on disk
        self._client: StoreClient | None = None

    async def open(self, context: BackendContext) -> None:
        self._context = context
        self._engines = LocalEngines(self._config, context, self._places)
        self.learner_device = self._places.device(context.model.device.type)

    @property
    def is_lone_engine_replaced(self) -> bool:
        config = self._config.engine
        return config.is_own or config.kind == "http" or self._engines.are_processes

    def has_learner_processes(self, learner: LearnerConfig) -> bool:
        is_apart = bool(self._places.engines)
        return build.has_learner_process(self._config, self.learner_device, learner, is_apart=is_apart)

    def _publishes_by_itself(self, learner: LearnerConfig) -> bool:
        is_apart = bool(self._places.engines)
        return build.publishes_by_itself(self._config, self.learner_device, learner, is_apart=is_apart)

    def make_engine(self, name: str) -> Engine:
        return self._engines.make(name)

    def build_learner(
        self, tokenizer: PreTrainedTokenizerBase, *, learner: LearnerConfig, recipe: Recipe, num_steps: int | None
    ) -> RunLearner:
        return build.build_learner(
            self._config,
            self._context.model,
            tokenizer,
            learner=learner,
            recipe=recipe,
            num_steps=num_steps,
            device=self.learner_device,
            store=self._find_store,
            is_apart=bool(self._places.engines),
            publishing=self._engines.ranks_on_their_gpu() if self._publishes_by_itself(learner) else None,
        )

    def _find_store(self) -> StoreAccess | None:
        return None if self._store is None else StoreAccess("millstream.store.host:connect_here", self._store.plan)

    def build_scorers(self, saved: Path | None, durable: DurableCritic) -> Scorers:
        launcher = LocalLauncher(is_warm=self.learner_device == "cpu", environment_of=self._places.stage_environment)
        processes = StageProcesses(
            launcher=LoggedLauncher(self._context, launcher),
            open_publisher=lambda: open_publisher(SHARED),
            device=self.learner_device,
            durable=durable,
            store=self._find_store,
            are_here=True,
        )
        return build_scorers(self._config, self._context.model, saved, processes)

    async def open_store(self, stages: Sequence[Stage]) -> Store:
        plan, config = build.store_plan(self._config, stages), self._config.store
        if config.is_own:
            self._own_store = imports.load_part("store", config.kind)(plan, **config.args)
            return self._own_store
        if not self._config.rollout.workers and config.memory_bytes is None:
            return MemoryStore(plan)
        made = make_plan(plan, memory_bytes=config.memory_bytes, spill=config.spill_folder)
        self._store = await asyncio.to_thread(SharedStore, made)
        self._client = await self._store.connect("pipeline")
        return self._client

    def plan_workers(self, tokenizer: PreTrainedTokenizerBase) -> WorkerPlan | None:
        if not self._config.rollout.workers or self._store is None or self._client is None:
            return None
        has_lines = uses_lines(self._config) and self._engines.are_processes
        store = self._store.plan, self._client
        return plan_workers(self._config, tokenizer, store, LoggedLauncher(self._context), has_lines=has_lines)

    def new_channel(self, learner: RunLearner) -> WeightChannel:
        config = self._config.weights
        if isinstance(learner, ReplayedLearner) and self._publishes_by_itself(self._config.learner):
            return remote_channel(learner)
        if not config.is_own:
            return LocalChannel()
        channel: WeightChannel = imports.load_part("weights", config.kind)(**config.args)
        return channel

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
        await asyncio.to_thread(self._engines.close)
        if isinstance(self._own_store, ClosedStore):
            await self._own_store.close()


def remote_channel(learner: RunLearner) -> RemoteChannel:
    """Weights that were lost with the process that had staged them are staged again by the learner that replaced it."""
    return RemoteChannel(learner.weights_of if isinstance(learner, ReplayedLearner) else None)


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
        why_fixed={"http": SERVERS, "outside": PROGRAMS}.get(config.kind, ""),
        is_given_up=config.kind != "http",
    )
    fleet.router.prefixes.are_kept = config.kind == "torch" and config.on_update == "keep"
    return fleet


class LocalEngines:
    """Makes engines of this machine, by name."""

    def __init__(self, config: RunConfig, context: BackendContext, places: Places) -> None:
        self._run_config = config
        self._config = scheduled_engine(config)
        self._has_lines = uses_lines(config)
        self._context = context
        self._places = places
        self._device = places.device(context.model.device.type)
        self._names: list[str] = []  # of all engines, in the order in which they were first made
        self._servers: HttpServers | None = None
        self._weights: LocalWeights | None = None
        self._lock = threading.Lock()  # engines are made on any thread

    def make(self, name: str) -> Engine:
        config, context = self._config, self._context
        model, tokenizer, clock, sink = context.model, context.tokenizer, context.clock, context.sink
        if config.kind == "outside":
            return build_outside_engine(config, model, context.folder, clock=clock, sink=sink, name=name)
        if config.kind == "http":
            self._servers = self._servers or HttpServers(config, model, clock=clock, sink=sink)
            return self._servers.engine(name)
        if config.is_own:
            return build.own_engine(config, model, clock=clock, sink=sink, name=name)
        if not self.are_processes:
            return build.thread_engine(config, model, tokenizer, clock=clock, sink=sink, name=name)
        return process_engine(config, model, tokenizer, self._supply(name), clock=clock, sink=sink, name=name)

    @property
    def are_processes(self) -> bool:
        """Engines on GPUs of their own always are."""
        return bool(self._places.engines) or build.has_process(self._config, self._device)

    def _delivery(self) -> Delivery:
        ways = local_ways(
            self._run_config,
            self._places,
            is_gpu=self._device == "cuda",
            is_shareable=is_gpu_memory_shareable(),
        )
        folder = self._context.folder
        return Delivery(ways=ways, files=str((folder / "weights").absolute()) if "files" in ways else None)

    def _supply(self, name: str) -> EngineSupply:
        """Raises `EngineError` where there is no GPU for one more engine, `ConfigError` where it cannot run here."""
        config = self._config
        build.check_engine_here(config, self._device)
        weights = self._staged()
        with self._lock:
            self._names += [name] if name not in self._names else []
            environment = self._places.environment(name, self._names)
        is_warm = config.kind == "torch" and self._device == "cpu"
        launcher = LocalLauncher(is_warm=is_warm, environment_of=lambda _: environment)
        return EngineSupply(launcher, weights.first, weights.publish, self._device, has_lines=self._has_lines)

    def _staged(self) -> LocalWeights:
        with self._lock:
            self._weights = self._weights or LocalWeights(self._config, self._context.model, self._delivery)
            return self._weights

    def ranks_on_their_gpu(self) -> PublishingRanks:
        """For a learner's process on the GPU of these engines: it publishes what they load in the memory of that GPU."""
        return PublishingRanks(
            launcher=LocalLauncher(),
            host=LOOPBACK,
            node=own_node(),
            first=self._staged().first(is_exact=True),
            delivery=self._delivery(),
        )

    def close(self) -> None:
        """Close what the engines share. Each engine is closed before."""
        if self._servers is not None:
            self._servers.close()
        if self._weights is not None:
            self._weights.close()
        # also what a process of the run that was killed has left
        shutil.rmtree(self._context.folder / "weights", ignore_errors=True)


def backend_for(config: RunConfig, places: Places) -> Backend:
    match config.runtime:
        case "local":
            return LocalBackend(config, places)
        case "ray":
            check_ray_installed()
            from millstream.run.ray_backend import RayBackend  # Ray is an extra

            return RayBackend(config)
