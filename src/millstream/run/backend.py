"""Where the parts of a run are: all of them here, or on a cluster. The pipeline sees no difference.

`LocalBackend` is this machine; `run.ray_backend` is a Ray cluster. Chosen in one place, `backend_for`. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.algo.recipe import Recipe
from millstream.clock import Clock
from millstream.cluster.resources import check_installed
from millstream.engine import Engine, EngineConfig
from millstream.engine.native.host import ENGINE_START_S
from millstream.events import EventSink
from millstream.learner import LearnerConfig, RunLearner
from millstream.pipeline.stages import Stage
from millstream.rpc.process import Launcher
from millstream.run import build
from millstream.run import build_scorers as build_stages
from millstream.run.build import RunEngine
from millstream.run.build_scorers import Lasting, Scorers
from millstream.run.config import RunConfig
from millstream.serving.fleet import Fleet
from millstream.store import Store
from millstream.weights import WeightChannel
from millstream.weights.local import LocalChannel

SERVERS = "the engine is made of servers that others have started: engine.http.urls says which"


class BackendContext(NamedTuple):
    """What a site is told when it is opened."""

    model: PreTrainedModel
    """What the run starts from."""
    tokenizer: PreTrainedTokenizerBase | None
    """For engines that look for text."""
    folder: Path
    """The run's."""
    clock: Clock
    sink: EventSink


class Backend(Protocol):
    """Made before it is opened: what is made of it in between may be used afterwards."""

    launcher: Launcher | None
    """For processes of environments and rewards. None: they are this machine's."""

    @property
    def is_lone_engine_replaced(self) -> bool:
        """Whether an engine has a process, so that it may die alone."""
        ...

    def has_ranks_elsewhere(self, learner: LearnerConfig) -> bool:
        """Whether this learner has processes, of which one may die alone."""
        ...

    async def open(self, around: BackendContext) -> None: ...

    def make_engine(self, name: str) -> Engine:
        """May return before it is ready. Called on any thread."""
        ...

    def build_learner(
        self, tokenizer: PreTrainedTokenizerBase, *, learner: LearnerConfig, recipe: Recipe, num_steps: int | None
    ) -> RunLearner:
        """Trains what the model is now."""
        ...

    def build_scorers(self, kept: Path | None, lasting: Lasting) -> Scorers:
        """Who works beside the learner, with the model as it is now; perhaps not yet ready. `kept`: see
        `build_stages.build_scorers`. `lasting`: makes of critics that may die one that outlives them. Called on a thread."""
        ...

    async def open_store(self, stages: Sequence[Stage]) -> Store: ...

    def new_channel(self, version: int, learner: RunLearner) -> WeightChannel:
        """`version`: that of the weights the engines start with. `learner`: who can be asked for weights again."""
        ...

    async def close(self) -> None:
        """Of everything else that was opened. Engines, learners and those beside them were closed before."""
        ...


class LocalBackend:
    """Everything in this process, or in processes that it starts."""

    launcher: Launcher | None = None

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    async def open(self, around: BackendContext) -> None:
        self._around = around

    @property
    def is_lone_engine_replaced(self) -> bool:
        config = self._config.engine
        return config.kind == "vllm" or (config.kind == "torch" and build.has_process(config, self._around.model))

    def has_ranks_elsewhere(self, learner: LearnerConfig) -> bool:
        return learner.ranks > 1

    def make_engine(self, name: str) -> Engine:
        return local_engine(self._config, self._around, name)

    def build_learner(
        self, tokenizer: PreTrainedTokenizerBase, *, learner: LearnerConfig, recipe: Recipe, num_steps: int | None
    ) -> RunLearner:
        return build.build_learner(
            self._config, self._around.model, tokenizer, learner=learner, recipe=recipe, num_steps=num_steps
        )

    def build_scorers(self, kept: Path | None, lasting: Lasting) -> Scorers:
        return build_stages.build_scorers(self._config, self._around.model, kept)

    async def open_store(self, stages: Sequence[Stage]) -> Store:
        return build.build_store(self._config, stages)

    def new_channel(self, version: int, learner: RunLearner) -> WeightChannel:
        return LocalChannel(version)

    async def close(self) -> None: ...


def build_fleet(site: Backend, config: EngineConfig, *, is_queueing: bool, clock: Clock, sink: EventSink) -> Fleet:
    """As many engines as the config asks for, wherever they are, behind one router."""
    return Fleet(
        site.make_engine,
        config.replicas,
        is_queueing=is_queueing,
        patience_s=max(config.answer_s, ENGINE_START_S),
        clock=clock,
        sink=sink,
        is_lone_replaced=site.is_lone_engine_replaced,
        why_fixed=SERVERS if config.kind == "http" else "",
    )


def local_engine(config: RunConfig, around: BackendContext, name: str) -> RunEngine:
    return build.build_engine(
        config.engine,
        around.model,
        clock=around.clock,
        sink=around.sink,
        name=name,
        seed=config.seed,
        tokenizer=around.tokenizer,
    )


def backend_for(config: RunConfig) -> Backend:
    match config.runtime:
        case "local":
            return LocalBackend(config)
        case "ray":
            check_installed()
            from millstream.run.ray_backend import RayBackend  # Ray is an extra

            return RayBackend(config)
