"""From rewards to advantages. Most compare the rollouts of a group; some need statistics of the whole batch, and say so.

Conventions: standard deviations are those of the *population*, and 1e-6 is added where one divides (arXiv 2402.03300 leaves
both open). A group or a batch whose rewards are all equal has advantages of 0, never NaN.
Shapes: G rollouts in the group, R rollouts in the batch, N trained tokens in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
EPSILON = 1e-6


class Scale(NamedTuple):
    """(A - shift) / divisor."""

    shift: float
    divisor: float


# rewards_R, advantages_N -> how every advantage of the batch is to be shifted and scaled.
OverBatch = Callable[[Rewards, Rewards], Scale]


class Advantage(NamedTuple):
    of_group: Callable[[Rewards], Rewards]
    # What it needs of the whole batch, which is then complete before the first of its rows is trained. None: nothing.
    over_batch: OverBatch | None = None
    # Whether rollouts are measured against others of their group: it then takes two, and equal rewards teach nothing.
    compares_members: bool = True


def grpo(rewards_G: Rewards) -> Rewards:
    """A = (R - mean) / (std + epsilon): arXiv 2402.03300."""
    centred_G = rewards_G - rewards_G.mean()
    return np.asarray(centred_G / (rewards_G.std() + EPSILON))


def dr_grpo(rewards_G: Rewards) -> Rewards:
    """A = R - mean; no division by the standard deviation: arXiv 2503.20783."""
    return np.asarray(rewards_G - rewards_G.mean())


def rloo(rewards_G: Rewards) -> Rewards:
    """A = R - mean of the others, which is (R - mean) G / (G - 1): arXiv 2402.14740. A rollout without others has 0."""
    num = len(rewards_G)
    return np.asarray(dr_grpo(rewards_G) * (num / max(1, num - 1)))


def as_they_are(rewards_G: Rewards) -> Rewards:
    return rewards_G


def whiten_tokens(rewards_R: Rewards, advantages_N: Rewards) -> Scale:
    """A = (R - mean) / (std + epsilon) over all trained tokens of the batch, whatever their prompt: REINFORCE++, arXiv
    2501.03262."""
    return Scale(float(advantages_N.mean()), float(advantages_N.std()) + EPSILON)


def divide_by_deviation(rewards_R: Rewards, advantages_N: Rewards) -> Scale:
    """A = (R - mean of the group) / (std of all rewards of the batch + epsilon): Lite PPO, arXiv 2508.08221."""
    return Scale(0.0, float(rewards_R.std()) + EPSILON)


ADVANTAGES = {
    "grpo": Advantage(grpo),
    "dr_grpo": Advantage(dr_grpo),
    "rloo": Advantage(rloo),
    "reinforce_plus_plus": Advantage(as_they_are, whiten_tokens, compares_members=False),
    "lite_ppo": Advantage(dr_grpo, divide_by_deviation),
}


def has_signal(rewards_G: Rewards) -> bool:
    """False if all rewards are the same: every advantage that compares members is then 0, and training on it does nothing."""
    return bool(len(rewards_G)) and bool(rewards_G.max() > rewards_G.min())
