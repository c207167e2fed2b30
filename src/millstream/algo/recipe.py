"""An algorithm by name: its config, the combinations that are refused, and the objective it stands for.

Refused, each with what to set instead: off-policy training without a correction; a correction on top of a loss that has
one; groups that cannot have an advantage; sampling whose log-probabilities are not those of the policy that is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

from millstream.algo import AlgorithmConfig, advantages, aggregate, losses
from millstream.algo.advantages import Rewards
from millstream.model.objective import LossInputs, Objective, TokenLoss

TRUNCATED_IS_CAP = 1.0
WEIGHT_CAP = 5.0


def advantage_function(config: AlgorithmConfig) -> Callable[[Rewards], Rewards]:
    match config.advantage:
        case "grpo":
            return advantages.grpo
        case "dr_grpo":
            return advantages.dr_grpo
        case _:
            assert_never(config.advantage)


def objective(config: AlgorithmConfig, *, max_tokens: int) -> Objective:
    token_loss = _token_loss(config)
    match config.aggregation:
        case "token_mean":
            return Objective(token_loss, aggregate.token_mean_weights, aggregate.token_mean_units)
        case "sequence_mean":
            return Objective(token_loss, aggregate.sequence_mean_weights, aggregate.num_rows_units)
        case "fixed_length":
            length = config.fixed_length or max_tokens
            weights = partial(aggregate.fixed_length_weights, length=length)
            return Objective(token_loss, weights, aggregate.num_rows_units)
        case _:
            assert_never(config.aggregation)


def supervised() -> Objective:
    """Maximum likelihood of the masked tokens: reinforce with every advantage 1."""
    return Objective(losses.reinforce, aggregate.token_mean_weights, aggregate.token_mean_units)


def _token_loss(config: AlgorithmConfig) -> Callable[[LossInputs], TokenLoss]:
    clip_low, clip_high = config.clip_low, config.clip_high
    match config.loss:
        case "truncated_is":
            return partial(losses.truncated_is, cap=config.ratio_cap or TRUNCATED_IS_CAP)
        case "decoupled_ppo":
            cap = config.ratio_cap or WEIGHT_CAP
            return partial(losses.decoupled_ppo, clip_low=clip_low, clip_high=clip_high, cap=cap)
        case "ppo":
            return partial(losses.ppo, clip_low=clip_low, clip_high=clip_high)
        case "reinforce" if config.correction == "truncate":
            return partial(_corrected_reinforce, cap=config.ratio_cap or WEIGHT_CAP)
        case "reinforce":
            return losses.reinforce
        case _:
            assert_never(config.loss)


def _corrected_reinforce(x: LossInputs, *, cap: float) -> TokenLoss:
    return losses.corrected(x, losses.reinforce(x), cap=cap)
