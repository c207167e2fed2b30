"""Where the parts of a run are: all of them here, or on a cluster. The pipeline sees no difference.

`LocalSite` is this machine; `runtime.ray_site` is a Ray cluster. Chosen in one place, `site_for`. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.algo.recipe import Recipe
from millstream.clock import Clock
from millstream.engine import Engine
from millstream.events import EventSink
from millstream.learner import LearnerConfig, RunLearner
from millstream.runtime import build, build_stages
from millstream.runtime.build_stages import Lasting, Staff
from millstream.runtime.config import RunConfig
from millstream.runtime.stages import Stage
from millstream.store import Store
from millstream.weights import WeightChannel
from millstream.weights.local import LocalChannel
from millstream.workers import Launcher


class Site(Protocol):
    """Made before it is opened: what is made of it in between may be used afterwards."""

    is_elsewhere: bool
    """Whether engines, learners and those beside them are processes of a cluster, of which any may die alone."""
    launcher: Launcher | None
    """For processes of environments and rewards. None: they are this machine's."""

    async def open(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """`model`: what the run starts from. `tokenizer`: for engines that look for text."""
        ...

    def make_engine(self, name: str, *, clock: Clock, sink: EventSink) -> Engine:
        """May return before it is ready. Called on any thread."""
        ...

    def build_learner(
        self, tokenizer: PreTrainedTokenizerBase, *, learner: LearnerConfig, recipe: Recipe, num_steps: int | None
    ) -> RunLearner:
        """Trains what the model is now."""
        ...

    def build_staff(self, kept: Path | None, lasting: Lasting) -> Staff:
        """Who works beside the learner, with the model as it is now; perhaps not yet ready. `kept`: see
        `build_stages.build_staff`. `lasting`: makes of critics that may die one that outlives them. Called on a thread."""
        ...

    async def open_store(self, stages: Sequence[Stage]) -> Store: ...

    def new_channel(self, version: int) -> WeightChannel:
        """`version`: that of the weights the engines start with."""
        ...

    async def close(self) -> None:
        """Of everything else that was opened. Engines, learners and those beside them were closed before."""
        ...


class LocalSite:
    """Everything in this process, or in processes that it starts."""

    is_elsewhere = False
    launcher: Launcher | None = None

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    async def open(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._model, self._tokenizer = model, tokenizer

    def make_engine(self, name: str, *, clock: Clock, sink: EventSink) -> Engine:
        config, seed = self._config.engine, self._config.seed
        return build.build_engine(
            config, self._model, clock=clock, sink=sink, name=name, seed=seed, tokenizer=self._tokenizer
        )

    def build_learner(
        self, tokenizer: PreTrainedTokenizerBase, *, learner: LearnerConfig, recipe: Recipe, num_steps: int | None
    ) -> RunLearner:
        return build.build_learner(
            self._config, self._model, tokenizer, learner=learner, recipe=recipe, num_steps=num_steps
        )

    def build_staff(self, kept: Path | None, lasting: Lasting) -> Staff:
        return build_stages.build_staff(self._config, self._model, kept)

    async def open_store(self, stages: Sequence[Stage]) -> Store:
        return build.build_store(self._config, stages)

    def new_channel(self, version: int) -> WeightChannel:
        return LocalChannel(version)

    async def close(self) -> None: ...


def site_for(config: RunConfig) -> Site:
    match config.runtime:
        case "local":
            return LocalSite(config)
        case "ray":
            from millstream.runtime.ray_site import RaySite  # Ray is an extra

            return RaySite(config)
