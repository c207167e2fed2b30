"""Activations that wait in the host's memory: the same numbers, and parameters stay where they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from millstream.algo import AlgorithmConfig, recipe
from millstream.learner import LearnerConfig
from millstream.learner.rows import RowTensors
from millstream.learner.torch import TorchLearner
from millstream.model.policy import MIN_OFFLOADED, Policy, activations_on_host
from millstream.types import Weights
from support.learners import rows
from support.tiny import make


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_activations_on_the_host_give_the_same_weights_bit_for_bit(name: str, recompute: bool) -> None:
    async def trained(offload: bool) -> Weights:
        config = LearnerConfig(learning_rate=1e-2, recompute=recompute, offload=offload)
        learner = TorchLearner(make(name), config, recipe.objective(AlgorithmConfig(), max_tokens=16))
        for _ in range(2):
            await learner.begin_batch()
            await learner.accumulate(rows(6))
            await learner.step()
        return await learner.weights()

    found, expected = asyncio.run(trained(True)), asyncio.run(trained(False))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_every_large_activation_goes_to_the_host_and_no_parameter_does(name: str) -> None:
    policy, batch = Policy(make(name), temperature=1.0), RowTensors(rows(6), torch.device("cpu"))
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    hooks, moved, stayed = activations_on_host(), list[Any](), list[Any]()
    pack = hooks.pack_hook

    def watched(tensor: torch.Tensor) -> Any:
        packed = pack(tensor)
        (moved if isinstance(packed, tuple) else stayed).append(tensor)
        return packed

    hooks.pack_hook = watched
    with hooks:
        policy(batch.tokens_N, batch.packed, batch.before_M, batch.targets_M)
    assert len(moved) > 20 and not any(one.untyped_storage().data_ptr() in own for one in moved)
    large = [one for one in stayed if one.numel() >= MIN_OFFLOADED]
    assert large and all(one.untyped_storage().data_ptr() in own for one in large)


def test_offload_and_compiled_layers_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="offload and compile exclude each other"):
        LearnerConfig(offload=True, compile=True)
