"""Millstream: post-training of language models by asynchronous reinforcement learning, with bounded staleness.

    from millstream import RunConfig, train
    result = train(RunConfig(...))

Importing the package is light: torch is loaded by `train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.algo import AlgorithmConfig
from millstream.engine import EngineConfig
from millstream.env.config import EnvironmentConfig
from millstream.env.data import DataConfig
from millstream.env.rewards import RewardConfig
from millstream.errors import MillstreamError
from millstream.learner import LearnerConfig
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.run.checkpoint import CheckpointConfig
from millstream.run.config import EvaluationConfig, ModelConfig, RunConfig, TinyConfig, WarmupConfig

if TYPE_CHECKING:
    from millstream.env.rewards import Reward
    from millstream.events import EventSink
    from millstream.run.evaluate import Measured
    from millstream.run.export import Exported
    from millstream.run.folder import RunResult

__version__ = "0.1.0"


def train(
    config: RunConfig, *, reward: Reward | None = None, sinks: Sequence[EventSink] = (), name: str = "run"
) -> RunResult:
    """Run a config from beginning to end in this process; its events also go to `sinks`. A function passed as `reward` takes
    the place of the one that the config names."""
    from millstream.run import run

    return run.train(config, reward=reward, sinks=sinks, name=name)


def resume(
    run_dir: str | Path,
    *,
    reward: Reward | None = None,
    sinks: Sequence[EventSink] = (),
    changes: Sequence[str] = (),
) -> RunResult:
    """Go on with a run that was stopped or died, from its newest checkpoint. A `reward` that was passed to `train` is passed
    again. `changes` of where its parts are, as in `learner.ranks=1`, are kept in the run folder."""
    from millstream.run import run

    return run.resume(Path(run_dir), reward=reward, sinks=sinks, changes=changes)


def export(run_dir: str | Path, target: str | Path, *, step: int | None = None) -> Exported:
    """What a run has trained so far, from a checkpoint of it, as a folder that transformers loads."""
    from millstream.run import export as exporting

    return exporting.export(Path(run_dir), Path(target), step=step)


def evaluate(config: RunConfig, *, reward: Reward | None = None) -> Measured:
    """The mean reward of the config's model on its held-out tasks: sampled as in training, and greedy; and what it wrote."""
    from millstream.run import evaluator

    return evaluator.evaluate_model(config, reward=reward)


__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "DataConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "LearnerConfig",
    "MillstreamError",
    "ModelConfig",
    "PipelineConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "TinyConfig",
    "WarmupConfig",
    "__version__",
    "evaluate",
    "export",
    "resume",
    "train",
]
