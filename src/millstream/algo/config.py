"""The config of an algorithm, the keys that its preset and its loss fill in, and what follows from it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
from msgspec import Struct, structs

from millstream import imports
from millstream.algo.advantages import ADVANTAGES, Advantage, Rewards, unchanged
from millstream.algo.credit import ADVANTAGE_KEYS, Credit, Penalty, Signal, credit_of, signal_of
from millstream.algo.presets import (
    CORRECTION_CAPS,
    DEFAULT_PRESET,
    KL_ESTIMATORS,
    LOSSES,
    PRESETS,
    SHAPE,
    Aggregation,
    AlgorithmName,
    LossKind,
)
from millstream.errors import ConfigError

KNOWN_ADVANTAGES = (*ADVANTAGES, *ADVANTAGE_KEYS)


class AlgorithmConfig(Struct, frozen=True, kw_only=True):
    """Keys that are not set are filled in from the preset and from the loss; a key that is still unset is not read."""

    name: AlgorithmName | None = None  # a preset of the other keys, each of which may still be set. None: truncated_is
    # grpo, dr_grpo, rloo, reinforce_plus_plus, lite_ppo; within a rollout gae (with a critic), turns, parts, distillation; or
    # your own: file.py:function or package.module:function.
    advantage: str = ""
    discount: float | None = None  # gae and turns: the factor per token, or per turn
    # turns: what a turn is compared with. "turn": the same turn of the other members. "group": all turns of all members
    turn_baseline: Literal["turn", "group"] | None = None
    # turns and parts: how they are compared, as the rollouts of a group are by the advantage of this name
    normalization: Literal["grpo", "dr_grpo", "rloo"] | None = None
    trace: float | None = None  # gae (lambda): 1 is return minus value, 0 relies on the critic after one token
    # truncated_is, decoupled_ppo, ppo, cispo, topr, weighted_topr, gspo, kimi, reinforce, or your own
    loss: str = ""
    aggregation: Aggregation | None = None  # how losses of tokens become one number: see docs/algorithms.md
    fixed_length: int | None = None  # the constant of aggregation = "fixed_length". None: rollout.max_tokens
    clip_low: float | None = None  # see clip_high
    clip_high: float | None = None  # ratios are clipped to [1 - clip_low, 1 + clip_high]
    dual_clip: float | None = None  # PPO: the loss of a negative is at most this times |A|
    ratio_cap: float | None = None  # the upper bound of importance weights
    positive_weight: float | None = None  # see negative_weight
    negative_weight: float | None = None  # weighted TOPR: by the sign of the advantage
    regularisation: float | None = None  # kimi: tau, the strength of the pull to the behaviour policy
    # A weight prox/mu for a loss without a correction of its own (reinforce): truncated at ratio_cap, or 0 outside of
    # [ratio_floor, ratio_cap].
    correction: Literal["none", "truncate", "mask"] = "none"
    # The unit that the correction's weight is computed for. None: the token.
    correction_level: Literal["token", "sequence", "geometric"] | None = None
    ratio_floor: float | None = None  # of correction = "mask". None: 1 / ratio_cap.
    entropy_bonus: float = 0.0  # times the entropy at each token, subtracted from the loss
    # Stay near the reference: the KL is added to the loss, or subtracted from the reward.
    kl: Literal["none", "loss", "reward"] = "none"
    kl_estimator: Literal["k1", "k2", "k3"] | None = None  # None: k3 in the loss, k1 in the reward
    kl_coefficient: float | None = None  # times the KL of each token
    overlong_buffer: int | None = None  # DAPO: over this many last tokens before max_tokens the reward falls by up to 1

    def __post_init__(self) -> None:
        for key, value in _filled(self).items():
            structs.force_setattr(self, key, value)
        if self.advantage not in KNOWN_ADVANTAGES and not imports.is_part("advantage", self.advantage):
            raise ValueError(imports.unknown_part("advantage", self.advantage, KNOWN_ADVANTAGES))
        if self.loss not in LOSSES and not imports.is_part("loss", self.loss):
            raise ValueError(imports.unknown_part("loss", self.loss, LOSSES))
        for key in ("clip_high", "ratio_cap", "ratio_floor", "fixed_length", "overlong_buffer"):
            if (value := getattr(self, key)) is not None and not value > 0:
                raise ValueError(f"{key} must be above 0")
        if self.kl_coefficient is not None and not 0 < self.kl_coefficient < math.inf:
            raise ValueError("kl_coefficient must be above 0 and finite")
        if self.clip_low is not None and not 0 < self.clip_low <= 1:
            raise ValueError("clip_low must be above 0 and at most 1, which means no lower clip")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError("dual_clip must be above 1")
        for key in ("discount", "trace"):
            if not 0 <= (1.0 if (value := getattr(self, key)) is None else value) <= 1:
                raise ValueError(f"{key} must be from 0 to 1")
        for key in ("positive_weight", "negative_weight", "regularisation", "entropy_bonus"):
            if not (getattr(self, key) or 0) >= 0:
                raise ValueError(f"{key} must be at least 0")


def _filled(config: AlgorithmConfig) -> dict[str, Any]:
    """Values for the keys that are not set, from the preset, the loss and the correction."""
    if config.name is not None and config.name not in PRESETS:
        raise ValueError(f"no name {config.name!r}: use {', '.join(PRESETS)}{imports.meant(config.name, PRESETS)}")
    preset = PRESETS[config.name or DEFAULT_PRESET]
    loss = config.loss or preset["loss"]
    kind = LOSSES.get(loss, LossKind({}))
    values: dict[str, Any] = {**kind.keys, "aggregation": kind.aggregation}
    values |= {key: value for key, value in preset.items() if key in SHAPE or loss == preset["loss"]}
    values |= ADVANTAGE_KEYS.get(config.advantage or preset["advantage"], {})
    values |= {"kl_estimator": KL_ESTIMATORS.get(config.kl)}
    if config.correction != "none":
        level = config.correction_level or "token"
        cap = config.ratio_cap or CORRECTION_CAPS[level]
        values |= {"correction_level": level, "ratio_cap": cap}
        values |= {"ratio_floor": 1 / cap} if config.correction == "mask" else {}
    return {key: value for key, value in values.items() if getattr(config, key) in (None, "")}


def advantage_of(config: AlgorithmConfig) -> Advantage:
    """Raises `ConfigError` for a user's function that does not exist. It may have an `over_batch` attribute, as built-in ones
    have. For an advantage within a rollout, `of_group` is what `credit_for` compares turns or parts with."""
    if config.advantage in ADVANTAGE_KEYS:
        if config.normalization is None:
            return Advantage(unchanged, compares_members=False)
        return Advantage(ADVANTAGES[config.normalization].of_group)
    if config.advantage in ADVANTAGES:
        return ADVANTAGES[config.advantage]
    function = imports.load_part("advantage", config.advantage, KNOWN_ADVANTAGES)
    own = partial(_of_group, config.advantage, function)
    return Advantage(own, getattr(function, "over_batch", None), compares_members=False)


def _of_group(name: str, function: Callable[[Rewards], Any], rewards_G: Rewards) -> Rewards:
    """A user's advantage, checked: one finite number per rollout."""
    found = np.asarray(function(rewards_G), dtype=np.float64)
    if found.shape != rewards_G.shape or not np.isfinite(found).all():
        raise ConfigError(f"{name} returned {found} for the rewards {rewards_G}: expected a finite number for each")
    return found


def credit_for(config: AlgorithmConfig) -> Credit | None:
    """How every token is credited; None where all tokens of a rollout have the advantage of its reward."""
    penalty = None
    if config.kl == "reward":
        assert config.kl_estimator is not None and config.kl_coefficient is not None, "see `check_algorithm`"
        penalty = Penalty(config.kl_estimator, config.kl_coefficient)
    return credit_of(
        config.advantage,
        advantage_of(config).of_group,
        discount=1.0 if config.discount is None else config.discount,
        trace=1.0 if config.trace is None else config.trace,
        penalty=penalty,
        over_all_turns=config.turn_baseline == "group",
    )


def signal_for(config: AlgorithmConfig) -> Signal | None:
    """Which groups have a gradient; None: those whose rollouts have different rewards."""
    discount = 1.0 if config.discount is None else config.discount
    return signal_of(config.advantage, discount=discount, over_all_turns=config.turn_baseline == "group")


def needs_reference(config: AlgorithmConfig) -> bool:
    return config.kl != "none" or config.advantage == "distillation"


def needs_critic(config: AlgorithmConfig) -> bool:
    return config.advantage == "gae"


def reads_proximal(config: AlgorithmConfig) -> bool:
    """Whether the loss may read the policy of the batch's start: a user's loss may."""
    return config.loss not in LOSSES or LOSSES[config.loss].reads_proximal


def corrects(config: AlgorithmConfig) -> bool:
    """Whether the loss weighs by the behaviour policy itself. A user's loss declares it: `loss.corrects = True`."""
    if config.loss in LOSSES:
        return LOSSES[config.loss].corrects
    return bool(getattr(imports.load_part("loss", config.loss, LOSSES), "corrects", False))
