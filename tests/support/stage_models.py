"""What tests give to scorers and critics in processes: a model with adapters, rows with returns, steps to train."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import structs
from transformers import PreTrainedModel

from millstream.learner import Critic
from millstream.model.adapters import add_adapters, trained_weights
from millstream.model.load import new_model
from millstream.model.lora import LoraConfig
from millstream.testing.learner import make_rows
from millstream.types import Floats, TrainRow
from support.tiny import CONFIGS, VOCABULARY


def adapted() -> PreTrainedModel:
    """In 16 bits, as it is read: positions are computed in float32."""
    model = new_model(CONFIGS["qwen3"](), seed=0, dtype=torch.bfloat16)
    add_adapters(model, LoraConfig(rank=2), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trained_weights(model).values():  # those that begin at 0 would hide a difference
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
    return model


def returning(rows: Sequence[TrainRow]) -> list[TrainRow]:
    def column(row: TrainRow, seed: int) -> Floats:
        return np.random.default_rng(seed).normal(size=len(row.tokens)).astype(np.float32)

    return [structs.replace(row, values=column(row, 1), returns=column(row, 2)) for row in rows]


async def learn(critic: Critic, steps: range) -> list[object]:
    found: list[object] = []
    for step in steps:
        rows = returning(make_rows(VOCABULARY, seed=step))
        found += await critic.score(rows)
        await critic.accumulate(rows[:4])
        await critic.accumulate(rows[4:])
        found.append(await critic.step())
    return found
