"""Rows and learners of a tiny model."""

from __future__ import annotations

import numpy as np

from millstream.algo import AlgorithmConfig, recipe
from millstream.learner import LearnerConfig
from millstream.learner.torch import TorchLearner
from millstream.types import TrainRow
from support.tiny import VOCABULARY, make


def rows(count: int, seed: int = 0) -> list[TrainRow]:
    """Ragged rows with gaps in their masks, as several turns make them; one has no trained token at all."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(rng.integers(3, 24))
        mask = rng.random(length) < (0.0 if number == 3 else 0.6)
        mask[0] = False
        made.append(
            TrainRow(
                tokens=rng.integers(3, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -5 * rng.random(length), 0).astype(np.float32),
                advantages=np.full(length, rng.normal(), dtype=np.float32),
            )
        )
    return made


def learner(algorithm: AlgorithmConfig | None = None, config: LearnerConfig | None = None, name: str = "qwen3",
            temperature: float = 1.0, num_steps: int | None = None) -> TorchLearner:  # fmt: skip
    objective = recipe.objective(algorithm or AlgorithmConfig(), max_tokens=16)
    return TorchLearner(make(name), config or LearnerConfig(), objective, temperature=temperature, num_steps=num_steps)
