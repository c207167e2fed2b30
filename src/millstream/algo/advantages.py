"""Advantages from rewards. Most compare the rollouts of a group; some need statistics of the whole batch (`over_batch`).

Conventions: standard deviations are those of the *population*, and 1e-6 is added to divisors (arXiv 2402.03300 leaves both
open). A group or a batch whose rewards are all equal has advantages of 0, never NaN.
Shapes: G rollouts in the group, R rollouts in the batch, N trained tokens in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
EPSILON = 1e-6


class BatchScale(NamedTuple):
    """(A - shift) / divisor."""

    shift: float
    divisor: float


# rewards_R, advantages_N -> the shift and the divisor of every advantage of the batch
OverBatch = Callable[[Rewards, Rewards], BatchScale]


class Advantage(NamedTuple):
    of_group: Callable[[Rewards], Rewards]
    # Statistics of the whole batch, which is then complete before the first of its rows is trained. None: not needed.
    over_batch: OverBatch | None = None
    # Whether rollouts are compared within their group: it then needs two members, and equal rewards give no gradient.
    compares_members: bool = True


def grpo(rewards_G: Rewards) -> Rewards:
    """A = (R - mean) / (std + epsilon): arXiv 2402.03300."""
    centred_G = rewards_G - rewards_G.mean()
    return np.asarray(centred_G / (rewards_G.std() + EPSILON))


def dr_grpo(rewards_G: Rewards) -> Rewards:
    """A = R - mean; no division by the standard deviation: arXiv 2503.20783."""
    return np.asarray(rewards_G - rewards_G.mean())


def rloo(rewards_G: Rewards) -> Rewards:
    """A = R - mean of the others, which is (R - mean) G / (G - 1): arXiv 2402.14740. Alone in its group, a rollout has 0."""
    num = len(rewards_G)
    return np.asarray(dr_grpo(rewards_G) * (num / max(1, num - 1)))


def unchanged(rewards_G: Rewards) -> Rewards:
    return rewards_G


def whiten_tokens(rewards_R: Rewards, advantages_N: Rewards) -> BatchScale:
    """A = (R - mean) / (std + epsilon) over all trained tokens of the batch, whatever their prompt: REINFORCE++, arXiv
    2501.03262."""
    return BatchScale(float(advantages_N.mean()), float(advantages_N.std()) + EPSILON)


def divide_by_deviation(rewards_R: Rewards, advantages_N: Rewards) -> BatchScale:
    """A = (R - mean of the group) / (std of all rewards of the batch + epsilon): Lite PPO, arXiv 2508.08221."""
    return BatchScale(0.0, float(rewards_R.std()) + EPSILON)


ADVANTAGES = {
    "grpo": Advantage(grpo),
    "dr_grpo": Advantage(dr_grpo),
    "rloo": Advantage(rloo),
    "reinforce_plus_plus": Advantage(unchanged, whiten_tokens, compares_members=False),
    "lite_ppo": Advantage(dr_grpo, divide_by_deviation),
}


def has_signal(rewards_G: Rewards) -> bool:
    """False if all rewards are the same: every advantage that compares members is then 0, and so is its gradient."""
    return bool(len(rewards_G)) and bool(rewards_G.max() > rewards_G.min())


def overlong_penalty(lengths_G: Rewards, *, max_tokens: int, buffer: int) -> Rewards:
    """Added to the reward: 0 up to max_tokens - buffer, then falling linearly to -1 at max_tokens, and -1 beyond: DAPO, arXiv
    2503.14476."""
    return np.asarray(np.clip((max_tokens - buffer - lengths_G) / buffer, -1.0, 0.0))
