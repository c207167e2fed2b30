"""Every algorithm learns, from samples that are two versions old: a policy of a few numbers, an exact gradient, no pipeline."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from torch import Tensor

from millstream.algo import AlgorithmConfig, advantage_of, recipe
from millstream.algo.advantages import ADVANTAGES
from millstream.algo.presets import PRESETS
from millstream.objective import LossInputs

SYMBOLS, LONGEST, GROUPS, MEMBERS, LAG = 6, 4, 8, 4, 2


def batch(logits: Tensor, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Sequences of 1 to 4 symbols, the log-probabilities they were sampled with, and the share of zeros as the reward."""
    logs = torch.log_softmax(logits.detach(), -1).numpy()
    probabilities = np.exp(logs) / np.exp(logs).sum()
    said = [rng.choice(SYMBOLS, size=rng.integers(1, LONGEST + 1), p=probabilities) for _ in range(GROUPS * MEMBERS)]
    return said, [logs[tokens] for tokens in said], np.array([np.mean(tokens == 0) for tokens in said])


def learn(config: AlgorithmConfig, *, steps: int, seed: int = 0) -> float:
    """The probability of the good symbol in the end."""
    rng, logits = np.random.default_rng(seed), torch.zeros(SYMBOLS, dtype=torch.float64, requires_grad=True)
    optimizer, waiting = torch.optim.Adam([logits], lr=0.05), deque([batch(logits, rng) for _ in range(LAG)])
    objective, advantage = recipe.objective(config, max_tokens=LONGEST), advantage_of(config)
    for _ in range(steps):
        waiting.append(batch(logits, rng))
        said, behaviour, rewards = waiting.popleft()
        of_rows = np.concatenate([advantage.of_group(group) for group in rewards.reshape(GROUPS, MEMBERS)])
        counts = np.array([len(tokens) for tokens in said])
        if advantage.over_batch is not None:
            shift, divisor = advantage.over_batch(rewards, np.repeat(of_rows, counts))
            of_rows = (of_rows - shift) / divisor
        logprobs_N = torch.log_softmax(logits, -1)[torch.from_numpy(np.concatenate(said))]
        row_N, counts_R = torch.from_numpy(np.repeat(np.arange(len(said)), counts)), torch.from_numpy(counts).double()
        behaviour_N, advantages_N = torch.from_numpy(np.concatenate(behaviour)), torch.from_numpy(of_rows)[row_N]
        loss = objective.token_loss(LossInputs(logprobs_N, behaviour_N, logprobs_N.detach(), advantages_N, row_N))
        total = (loss.loss_N * objective.row_weights(counts_R)[row_N]).sum() / objective.units(counts_R)
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return float(torch.softmax(logits.detach(), -1)[0])


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name]["advantage"] in ADVANTAGES])
def test_every_preset_that_compares_rewards_learns_off_policy(name: str) -> None:
    wide = {"clip_low": 0.2, "clip_high": 0.2} if name == "gspo" else {}  # a step here moves a thousand times as far
    assert learn(AlgorithmConfig(name=name, **wide), steps=60) > 0.9, "it began at 1/6"  # type: ignore[arg-type]


def test_a_clip_that_is_too_narrow_for_the_lag_slows_learning_down() -> None:
    """Why `clipped_share` is to be watched: GSPO's own bounds are for policies that hardly move."""
    assert learn(AlgorithmConfig(name="gspo"), steps=60) < 0.6


@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_every_correction_lets_reinforce_learn_off_policy(correction: str, level: str) -> None:
    config = AlgorithmConfig(loss="reinforce", correction=correction, correction_level=level, ratio_cap=2.0)  # type: ignore[arg-type]
    assert learn(config, steps=60) > 0.9, "it began at 1/6"
