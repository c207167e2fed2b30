"""Advantages within a rollout: from a reward at every token or turn, and what a critic expects. Pure functions; no part of a
run writes values or rewards of turns yet, so no config names them.

Shapes: T tokens of one rollout, K turns of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millstream.algo.advantages import Rewards

Mask = NDArray[np.bool_]


def gae(
    rewards_T: Rewards, values_T: Rewards, *, discount: float, trace: float, after: float = 0.0
) -> tuple[Rewards, Rewards]:
    """Advantages, returns: A_t = sum over l of (discount trace)^l d_{t+l}, d_t = r_t + discount V_{t+1} - V_t; and A_t + V_t.
    arXiv 1506.02438. Of trained tokens alone; `after` is the value beyond the last one, 0 where the episode ended."""
    advantages_T = np.zeros(len(rewards_T))
    next_value, later = after, 0.0
    for t in reversed(range(len(rewards_T))):
        surprise = rewards_T[t] + discount * next_value - values_T[t]
        later = advantages_T[t] = surprise + discount * trace * later
        next_value = float(values_T[t])
    return advantages_T, advantages_T + values_T


def to_go(rewards_K: Rewards, *, discount: float) -> Rewards:
    """What is still to come from each turn on: r_k + discount r_{k+1} + ..."""
    returns_K, later = np.zeros(len(rewards_K)), 0.0
    for k in reversed(range(len(rewards_K))):
        later = returns_K[k] = rewards_K[k] + discount * later
    return returns_K


def of_turns(rewards: Sequence[Rewards], *, discount: float = 1.0) -> list[Rewards]:
    """Of each member of a group, an advantage a turn: what is still to come, less the mean of that over the members that came
    to this turn. With one turn it is Dr. GRPO; a turn that a single member came to has 0."""
    returns = [to_go(rewards_K, discount=discount) for rewards_K in rewards]
    most = max(map(len, returns), default=0)
    baseline_K = np.array([np.mean([own[k] for own in returns if len(own) > k]) for k in range(most)])
    return [own - baseline_K[: len(own)] for own in returns]


def over_turns(advantages_K: Rewards, mask_T: Mask) -> Rewards:
    """Every trained token has the advantage of its turn; turns are the runs of the mask."""
    begins_T = mask_T & ~np.concatenate([[False], mask_T[:-1]])
    num_turns = int(begins_T.sum())
    if num_turns != len(advantages_K):
        raise ValueError(f"{len(advantages_K)} advantages for {num_turns} turns: expected one a run of the loss mask")
    if not num_turns:
        return np.zeros(len(mask_T))
    turn_T = np.maximum(begins_T.cumsum() - 1, 0)
    return np.where(mask_T, advantages_K[turn_T], 0.0)
