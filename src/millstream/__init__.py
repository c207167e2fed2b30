"""Millstream: post-training of language models by asynchronous reinforcement learning, with bounded staleness.

    from millstream import RunConfig, train
    result = train(RunConfig(...))

Importing the package imports nothing else: each name below is imported when it is first used, and torch with `train`, `resume`,
`export` and `evaluate`. Worker processes and the store start in half the time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from millstream.run.evaluate import evaluate
    from millstream.run.export import export
    from millstream.run.run import resume, resume_async, train, train_async

__version__ = "0.1.0"
_MODULES = {
    "AlgorithmConfig": "millstream.algo",
    "CheckpointConfig": "millstream.run.checkpoint",
    "DataConfig": "millstream.env.data",
    "EngineConfig": "millstream.engine",
    "EnvironmentConfig": "millstream.env.config",
    "EvaluationConfig": "millstream.run.config",
    "LearnerConfig": "millstream.learner",
    "MillstreamError": "millstream.errors",
    "ModelConfig": "millstream.run.config",
    "PipelineConfig": "millstream.pipeline.schedule",
    "RewardConfig": "millstream.env.rewards",
    "RolloutConfig": "millstream.pipeline.rollouts",
    "RunConfig": "millstream.run.config",
    "TinyConfig": "millstream.run.config",
    "WarmupConfig": "millstream.run.config",
    "evaluate": "millstream.run.evaluate",
    "export": "millstream.run.export",
    "resume": "millstream.run.run",
    "resume_async": "millstream.run.run",
    "train": "millstream.run.run",
    "train_async": "millstream.run.run",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
    "resume_async",
    "train",
    "train_async",
]
