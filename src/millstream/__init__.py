"""Millstream: post-training of language models by asynchronous reinforcement learning, with bounded staleness.

    from millstream import RunConfig, train
    result = train(RunConfig(...))

Importing the package is light: torch is imported with `train`, `resume`, `export` and `evaluate`, when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from millstream.run.evaluate import evaluate
    from millstream.run.export import export
    from millstream.run.run import resume, train

__version__ = "0.1.0"
_LAZY = {
    "evaluate": "millstream.run.evaluate",
    "export": "millstream.run.export",
    "resume": "millstream.run.run",
    "train": "millstream.run.run",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


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
