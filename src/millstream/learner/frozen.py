"""A learner that does not learn: for runs that only keep rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from millstream.model.adapters import trained_weights
from millstream.types import Floats, HalfFloats, Metrics, TrainRow, Weights


class FrozenLearner:
    """A `RunLearner` (`learner.base`) whose steps leave the weights as they are. Its snapshots are empty."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._weights = trained_weights(model)

    async def ready(self) -> None: ...

    async def begin_batch(self) -> None: ...

    async def accumulate(self, rows: Sequence[TrainRow]) -> None: ...

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return [np.zeros(len(row.tokens), np.float32) for row in rows]

    async def step(self) -> Metrics:
        return {}

    def log_ratios(self) -> HalfFloats:
        return np.zeros(0, np.float16)

    def rank_seconds(self) -> list[float]:
        return []

    async def weights(self) -> Weights:
        return self._weights

    async def snapshot(self) -> FrozenLearner:
        return self

    def write(self, folder: Path) -> None:
        """As a snapshot: there is nothing to write."""

    def restore(self, folder: Path) -> None: ...

    def save(self, path: Path) -> None:
        """There is no trained model."""

    async def close(self) -> None: ...
