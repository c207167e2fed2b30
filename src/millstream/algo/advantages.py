"""From the rewards of a group to the advantages of its rollouts.

Convention: GRPO divides by the *population* standard deviation plus 1e-6 (arXiv 2402.03300 leaves both open).
Shapes: G rollouts in the group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
EPSILON = 1e-6


def grpo(rewards_G: Rewards) -> Rewards:
    """A = (R - mean) / (std + epsilon): arXiv 2402.03300."""
    centred_G = rewards_G - rewards_G.mean()
    return np.asarray(centred_G / (rewards_G.std() + EPSILON))


def dr_grpo(rewards_G: Rewards) -> Rewards:
    """A = R - mean; no division by the standard deviation: arXiv 2503.20783."""
    return np.asarray(rewards_G - rewards_G.mean())


def has_signal(rewards_G: Rewards) -> bool:
    """False if all rewards are the same: every advantage of the group is then 0, and training on it does nothing."""
    return bool(len(rewards_G)) and bool(rewards_G.max() > rewards_G.min())
