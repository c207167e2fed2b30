"""Algorithms: pure functions over rewards and log-probabilities. They know neither queues nor workers nor versions.

This file holds what can be said without torch: the config, and the combinations that are refused.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from millstream.errors import ConfigError


class AlgorithmConfig(Struct, frozen=True, kw_only=True):
    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    loss: Literal["truncated_is", "decoupled_ppo", "ppo", "reinforce"] = "truncated_is"
    correction: Literal["none", "truncate"] = "none"
    """A weight min(prox/mu, ratio_cap) per token, for a loss that has no correction of its own (reinforce)."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float | None = None
    """Where importance weights are cut off. None: 1 for truncated_is, 5 for decoupled_ppo and the correction."""
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    fixed_length: int | None = None
    """The constant of aggregation = "fixed_length". None: rollout.max_tokens."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise ValueError("clip_low must be between 0 and 1, clip_high above 0")
        if self.ratio_cap is not None and self.ratio_cap <= 0:
            raise ValueError("ratio_cap must be above 0")


def check(
    config: AlgorithmConfig, *, max_lag: float, group_size: int, temperature: float, mini_batches: int = 1
) -> None:
    """Raises `ConfigError` for a combination whose mathematics is wrong."""
    if config.correction != "none" and config.loss != "reinforce":
        raise ConfigError(
            f'algorithm.correction = "{config.correction}" on top of algorithm.loss = "{config.loss}" corrects twice: the '
            'loss weighs by the behaviour policy already. Set algorithm.correction = "none", or algorithm.loss = "reinforce"'
        )
    if max_lag > 0 and config.loss == "reinforce" and config.correction == "none":
        raise ConfigError(
            f'algorithm.loss = "reinforce" has no off-policy correction and pipeline.max_lag = {max_lag} trains on older '
            'samples. Set algorithm.loss = "truncated_is" or "decoupled_ppo", or algorithm.correction = "truncate", or '
            "pipeline.max_lag = 0"
        )
    if mini_batches > 1 and config.loss == "reinforce":
        raise ConfigError(
            f'learner.mini_batches = {mini_batches} is off policy from the second one on, and algorithm.loss = "reinforce" '
            'does not look at how far the policy has moved. Set algorithm.loss = "decoupled_ppo" or "ppo", or mini_batches = 1'
        )
    if group_size < 2:
        raise ConfigError(
            f"rollout.group_size = {group_size}: {config.advantage} compares the rollouts of a group, which takes two"
        )
    if temperature <= 0:
        raise ConfigError(
            f"rollout.temperature = {temperature}: greedy rollouts have no behaviour distribution to learn from. "
            "Set rollout.temperature = 1.0"
        )
