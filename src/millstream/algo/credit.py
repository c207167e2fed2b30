"""Advantages within a rollout, per token, turn or part: from the rewards of turns, the values of a critic, and the
log-probabilities of a reference.

One agent may have several parts (sequences) in one rollout; they follow each other, and are concatenated here.
Shapes: N trained tokens of one agent in one rollout, K turns of it, P parts of it, G rollouts of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.algo.advantages import Rewards, dr_grpo, has_signal

Estimator = Literal["k1", "k2", "k3"]
OfGroup = Callable[[Rewards], Rewards]  # a group advantage: see `algo.advantages`
MAX_LOG_RATIO = 20.0  # beyond it, exp is continued by its tangent


class Played(NamedTuple):
    """The trained tokens of one agent in one rollout."""

    rewards_K: Rewards  # that the environment gave to turns
    turn_N: NDArray[np.int64]  # the turn of each token: from 0, never decreases, without gaps
    behaviour_N: Rewards
    reference_N: Rewards | None = None
    values_N: Rewards | None = None
    # What no turn has earned of the agent's reward. It belongs to the last turn, or, by part, to every part.
    rest: float = 0.0
    part_K: NDArray[np.int64] | None = None  # the part of each turn, from 0. None: there is one


class Credited(NamedTuple):
    advantages_N: Rewards
    returns_N: Rewards | None = None  # the critic's targets. None: no critic


class Penalty(NamedTuple):
    """KL to the reference, subtracted from the reward of every token."""

    estimator: Estimator
    coefficient: float


# One agent in all rollouts of a group -> the credit of each of its tokens
Credit = Callable[[Sequence[Played]], list[Credited]]
# Whether one agent's rewards in a group give a gradient, before a KL penalty
Signal = Callable[[Sequence[Played]], bool]
# Advantages within a rollout, and the keys that each reads
ADVANTAGE_KEYS: dict[str, dict[str, Any]] = {
    "gae": {"discount": 1.0, "trace": 1.0},
    "turns": {"discount": 1.0, "turn_baseline": "turn", "normalization": "dr_grpo"},
    "parts": {"normalization": "grpo"},
    "distillation": {},
}


def kl_numbers(estimator: Estimator, logprobs_N: Rewards, reference_N: Rewards) -> Rewards:
    """KL(policy || reference) at every token: `algo.kl.kl_estimate` in numpy, without a gradient."""
    log_ratio_N = logprobs_N - reference_N
    match estimator:
        case "k1":
            return log_ratio_N
        case "k2":
            return np.asarray(np.square(log_ratio_N) / 2)
        case "k3":
            beyond_N = np.maximum(-log_ratio_N - MAX_LOG_RATIO, 0)
            growth_N = np.exp(np.minimum(-log_ratio_N, MAX_LOG_RATIO)) * (1 + beyond_N)
            return np.asarray(growth_N + log_ratio_N - 1)


def turn_rewards(played: Played) -> Rewards:
    """Of each turn, together the agent's reward: the last turn has what no turn has earned."""
    rewards_K = played.rewards_K.copy()
    if len(rewards_K):
        rewards_K[-1] += played.rest
    return rewards_K


def part_rewards(played: Played, penalty: Penalty | None = None) -> Rewards:
    """Of each part: what its turns have earned, minus the KL of its tokens, plus what no turn has earned."""
    part_K = np.zeros(len(played.rewards_K), np.int64) if played.part_K is None else played.part_K
    rewards_N = token_rewards(played._replace(rest=0.0), penalty)
    return np.asarray(np.bincount(part_K[played.turn_N], rewards_N) + played.rest, dtype=np.float64)


def token_rewards(played: Played, penalty: Penalty | None) -> Rewards:
    """A turn's reward comes with its last token; the KL of a token, under the policy that sampled it, with the token."""
    rewards_K, rewards_N = turn_rewards(played), np.zeros(len(played.turn_N))
    rewards_N[np.searchsorted(played.turn_N, np.arange(len(rewards_K)), side="right") - 1] = rewards_K
    if penalty is None:
        return rewards_N
    assert played.reference_N is not None, "a penalty needs the reference's log-probabilities"
    return rewards_N - penalty.coefficient * kl_numbers(penalty.estimator, played.behaviour_N, played.reference_N)


def total_reward(played: Played, penalty: Penalty | None) -> float:
    """The number that rollouts are compared by: the reward minus the KL of all tokens."""
    return float(token_rewards(played, penalty).sum())


# ---- advantages ------------------------------------------------------------------------------------------------------


def gae(
    rewards_N: Rewards, values_N: Rewards, *, discount: float, trace: float, after: float = 0.0
) -> tuple[Rewards, Rewards]:
    """Advantages, returns: A_t = sum over l of (discount trace)^l d_{t+l}, d_t = r_t + discount V_{t+1} - V_t; and A_t + V_t.
    arXiv 1506.02438. `after` is the value beyond the last token, 0 where the episode ended."""
    rewards, values = rewards_N.tolist(), values_N.tolist()
    advantages_N, next_value, later = np.zeros(len(rewards)), after, 0.0
    for t in reversed(range(len(rewards))):
        later = rewards[t] + discount * next_value - values[t] + discount * trace * later
        advantages_N[t], next_value = later, values[t]
    return advantages_N, advantages_N + values_N


def returns_to_go(rewards_K: Rewards, *, discount: float) -> Rewards:
    """The return from each turn on: r_k + discount r_{k+1} + ..."""
    returns_K, later = np.zeros(len(rewards_K)), 0.0
    for k in reversed(range(len(rewards_K))):
        later = returns_K[k] = rewards_K[k] + discount * later
    return returns_K


def turn_advantages(
    rewards: Sequence[Rewards], *, discount: float = 1.0, of_group: OfGroup = dr_grpo, over_all_turns: bool = False
) -> list[Rewards]:
    """For each member of a group, one advantage per turn: `of_group` of the returns from there on. A return is compared with
    those of the same turn, in the members that reached it, or with those of all turns of all members. With one turn it is
    `of_group` of the rewards. A turn that only one member reached has 0, unless it is compared with all."""
    returns = [returns_to_go(rewards_K, discount=discount) for rewards_K in rewards]
    if over_all_turns:
        return _split(of_group(np.concatenate(returns)), returns)
    advantages = [np.zeros(len(own)) for own in returns]
    for k in range(max(map(len, returns), default=0)):
        reached = [member for member, own in enumerate(returns) if len(own) > k]
        compared = of_group(np.array([returns[member][k] for member in reached]))
        for member, advantage in zip(reached, compared, strict=True):
            advantages[member][k] = advantage
    return advantages


def _split(values: Rewards, like: Sequence[Rewards]) -> list[Rewards]:
    """Concatenated arrays, apart again."""
    return np.split(values, np.cumsum([len(own) for own in like])[:-1])


# ---- credit: the same, for a whole group -------------------------------------------------------------------------------------


def by_rollout(of_group: OfGroup, penalty: Penalty, group: Sequence[Played]) -> list[Credited]:
    """A group advantage of the rewards minus the KL: every token has that of its rollout."""
    advantages_G = of_group(np.array([total_reward(one, penalty) for one in group], dtype=np.float64))
    return [Credited(np.full(len(one.turn_N), value)) for one, value in zip(group, advantages_G, strict=True)]


def by_token(discount: float, trace: float, penalty: Penalty | None, group: Sequence[Played]) -> list[Credited]:
    """GAE: each rollout separately."""
    found = []
    for one in group:
        assert one.values_N is not None, "GAE needs values"
        found.append(Credited(*gae(token_rewards(one, penalty), one.values_N, discount=discount, trace=trace)))
    return found


def by_turn(
    of_group: OfGroup, discount: float, over_all_turns: bool, penalty: Penalty | None, group: Sequence[Played]
) -> list[Credited]:
    """Every token has the advantage of its turn."""
    rewards = [
        np.bincount(one.turn_N, token_rewards(one, penalty), minlength=len(one.rewards_K)).astype(np.float64)
        for one in group
    ]
    advantages = turn_advantages(rewards, discount=discount, of_group=of_group, over_all_turns=over_all_turns)
    return [Credited(own_K[one.turn_N]) for own_K, one in zip(advantages, group, strict=True)]


def by_part(of_group: OfGroup, penalty: Penalty | None, group: Sequence[Played]) -> list[Credited]:
    """Every token has the advantage of its part, which is compared with all parts of the same agent in the group."""
    rewards = [part_rewards(one, penalty) for one in group]
    found = []
    for one, own_P in zip(group, _split(of_group(np.concatenate(rewards)), rewards), strict=True):
        part_N = np.zeros_like(one.turn_N) if one.part_K is None else one.part_K[one.turn_N]
        found.append(Credited(own_P[part_N]))
    return found


def by_teacher(group: Sequence[Played]) -> list[Credited]:
    """On-policy distillation: A = log ref - log mu, the negative reverse KL at each token that the student sampled. arXiv
    2306.13649, 2306.08543. The reward is not used."""
    found = []
    for one in group:
        assert one.reference_N is not None, "distillation needs the teacher's log-probabilities"
        found.append(Credited(one.reference_N - one.behaviour_N))
    return found


def credit_of(
    advantage: str,
    of_group: OfGroup,
    *,
    discount: float,
    trace: float,
    penalty: Penalty | None,
    over_all_turns: bool = False,
) -> Credit | None:
    """None: the advantage of the group's rewards, the same for all tokens of a rollout."""
    match advantage:
        case "gae":
            return partial(by_token, discount, trace, penalty)
        case "turns":
            return partial(by_turn, of_group, discount, over_all_turns, penalty)
        case "parts":
            return partial(by_part, of_group, penalty)
        case "distillation":
            return by_teacher
        case _:
            return None if penalty is None else partial(by_rollout, of_group, penalty)


def signal_of(advantage: str, *, discount: float = 1.0, over_all_turns: bool = False) -> Signal | None:
    """None: that of the rewards of whole rollouts."""
    match advantage:
        case "turns" if over_all_turns:
            return partial(_do_returns_differ, discount)
        case "turns":
            return lambda group: differ([turn_rewards(one) for one in group])
        case "parts":
            return lambda group: has_signal(np.concatenate([part_rewards(one) for one in group]))
        case _:
            return None


def _do_returns_differ(discount: float, group: Sequence[Played]) -> bool:
    return has_signal(np.concatenate([returns_to_go(turn_rewards(one), discount=discount) for one in group]))


def differ(rewards: Sequence[Rewards]) -> bool:
    """Whether the rewards of a turn differ between rollouts; a turn that was not played counts 0."""
    most = max(map(len, rewards), default=0)
    padded_GK = [np.pad(one, (0, most - len(one))) for one in rewards]
    return any(not np.array_equal(one, padded_GK[0]) for one in padded_GK)
