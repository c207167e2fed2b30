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
from millstream.engine.outside import OutsideEngine
from millstream.events import EventSink
from millstream.learner import LearnerConfig, RunLearner
from millstream.pipeline.schema import Stage
from millstream.rpc.process import Launcher
from millstream.run import build
from millstream.run.build import HttpServers, RunEngine
from millstream.run.build_scorers import DurableCritic, Scorers, build_scorers
from millstream.run.config import RunConfig, scheduled_engine
from millstream.run.outside import build_outside_engine
from millstream.serving.fleet import Fleet
from millstream.store import Store
from millstream.store.memory import MemoryStore
from millstream.weights import WeightChannel
from millstream.weights.local import LocalChannel

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

    def new_channel(self, learner: RunLearner) -> WeightChannel:
        """`learner`: gives weights once more if those that it published cannot be reached."""
        ...

    async def close(self) -> None:
        """Close everything else that was opened. Engines, learners and scorers were closed before."""
        ...


class LocalBackend:
    """This process, and processes that it starts."""

    launcher: Launcher | None = None

    def __init__(self, config: RunConfig) -> None:
        self._config = config

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
        return MemoryStore(build.store_plan(self._config, stages))

    def new_channel(self, learner: RunLearner) -> WeightChannel:
        return LocalChannel()

    async def close(self) -> None:
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
        why_fixed={"http": SERVERS, "outside": PROGRAMS}.get(config.kind, ""),
        is_given_up=config.kind != "http",
    )
    fleet.router.prefixes.are_kept = config.kind == "torch" and config.on_update == "keep"
    return fleet


class LocalEngines:
    """Makes engines of this machine, by name."""

    def __init__(self, config: RunConfig, context: BackendContext) -> None:
        self._config = scheduled_engine(config)
        self._context = context
        self._servers: HttpServers | None = None

    def make(self, name: str) -> RunEngine | OutsideEngine:
        config, context = self._config, self._context
        if config.kind == "outside":
            return build_outside_engine(
                config, context.model, context.folder, clock=context.clock, sink=context.sink, name=name
            )
        if config.kind == "http":
            self._servers = self._servers or HttpServers(config, context.model, clock=context.clock, sink=context.sink)
            return self._servers.engine(name)
        return build.build_engine(
            config, context.model, clock=context.clock, sink=context.sink, name=name, tokenizer=context.tokenizer
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
