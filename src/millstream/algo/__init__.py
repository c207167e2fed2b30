"""Algorithms: pure functions over rewards and log-probabilities. They know neither queues nor workers nor versions.

This file holds what can be said without torch: the config, and the combinations that are refused, all of them in `check`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
from msgspec import Struct, structs

from millstream import imports
from millstream.algo.advantages import ADVANTAGES, Advantage, Rewards, as_they_are
from millstream.algo.credit import ADVANTAGE_KEYS, Credit, Penalty, credit_of
from millstream.algo.presets import (
    CORRECTION_CAPS,
    KL_ESTIMATORS,
    LOSSES,
    NOT_NAMED,
    PRESETS,
    SHAPE,
    Aggregation,
    LossKind,
    Name,
)
from millstream.errors import ConfigError

KNOWN_ADVANTAGES = (*ADVANTAGES, *ADVANTAGE_KEYS)


class AlgorithmConfig(Struct, frozen=True, kw_only=True):
    """Keys that are not set are filled in from the name's preset and from the loss: what is left unset is not read."""

    # A preset: values for the other keys, of which each may still be set. None: that of truncated_is.
    name: Name | None = None
    # grpo, dr_grpo, rloo, reinforce_plus_plus, lite_ppo; within a rollout gae (with a critic), turns, distillation; or
    # one of your own: file.py:function or package.module:function.
    advantage: str = ""
    discount: float | None = None  # of gae and turns: what a reward is worth one token, or one turn, earlier
    trace: float | None = None  # of gae (lambda): 1 is the return less the value, 0 believes the critic after one token
    # truncated_is, decoupled_ppo, ppo, cispo, topr, weighted_topr, gspo, kimi, reinforce, or one of your own.
    loss: str = ""
    aggregation: Aggregation | None = None
    fixed_length: int | None = None  # the constant of aggregation = "fixed_length". None: rollout.max_tokens.
    clip_low: float | None = None
    clip_high: float | None = None  # ratios are clipped to [1 - clip_low, 1 + clip_high]
    dual_clip: float | None = None  # PPO: negatives lose at most this many times their advantage
    ratio_cap: float | None = None  # where importance weights are cut off
    positive_weight: float | None = None
    negative_weight: float | None = None  # weighted TOPR: of rollouts with a positive and with a negative advantage
    regularisation: float | None = None  # kimi: tau, how strongly the policy is held to the one that sampled
    # A weight prox/mu, for a loss that has no correction of its own (reinforce): cut off at ratio_cap, or 0 where it is
    # outside [ratio_floor, ratio_cap].
    correction: Literal["none", "truncate", "mask"] = "none"
    # What the correction's weight is of. None: the token.
    correction_level: Literal["token", "sequence", "geometric"] | None = None
    ratio_floor: float | None = None  # of correction = "mask". None: 1 / ratio_cap.
    entropy_bonus: float = 0.0  # times the policy's entropy at each token, taken off the loss
    # Stay near the reference: the KL is added to the loss, or taken off the reward.
    kl: Literal["none", "loss", "reward"] = "none"
    kl_estimator: Literal["k1", "k2", "k3"] | None = None  # None: k3 in the loss, k1 in the reward
    kl_coefficient: float | None = None  # times the KL of each token
    # DAPO: over the last so many tokens before rollout.max_tokens the reward falls by up to 1. None: it does not.
    overlong_buffer: int | None = None

    def __post_init__(self) -> None:
        for key, value in _filled(self).items():
            structs.force_setattr(self, key, value)
        if self.advantage not in KNOWN_ADVANTAGES and not imports.is_own(self.advantage):
            raise ValueError(_unknown("advantage", self.advantage, KNOWN_ADVANTAGES))
        if self.loss not in LOSSES and not imports.is_own(self.loss):
            raise ValueError(_unknown("loss", self.loss, LOSSES))
        for key in ("clip_high", "ratio_cap", "ratio_floor", "fixed_length", "overlong_buffer"):
            if (value := getattr(self, key)) is not None and not value > 0:
                raise ValueError(f"{key} must be above 0")
        if self.kl_coefficient is not None and not 0 < self.kl_coefficient < math.inf:
            raise ValueError("kl_coefficient must be above 0 and finite")
        if self.clip_low is not None and not 0 < self.clip_low <= 1:
            raise ValueError("clip_low must be above 0 and at most 1, which is no lower clip at all")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError("dual_clip must be above 1")
        for key in ("discount", "trace"):
            if not 0 <= (1.0 if (value := getattr(self, key)) is None else value) <= 1:
                raise ValueError(f"{key} must be from 0 to 1")
        for key in ("positive_weight", "negative_weight", "regularisation", "entropy_bonus"):
            if not (getattr(self, key) or 0) >= 0:
                raise ValueError(f"{key} must be at least 0")


def _unknown(key: str, value: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(value, list(known), n=1, cutoff=0.5)
    meant = f" Did you mean {near[0]}?" if near else ""
    return f"no {key} {value!r}: use {', '.join(known)}, or one of your own: file.py:function.{meant}"


def _filled(config: AlgorithmConfig) -> dict[str, Any]:
    """The keys that are not set, where the preset, the loss or the correction has a value for them."""
    preset = PRESETS[config.name or NOT_NAMED]
    loss = config.loss or preset["loss"]
    kind = LOSSES.get(loss, LossKind({}))
    values: dict[str, Any] = {**kind.knobs, "aggregation": kind.aggregation}
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
    """Raises `ConfigError` for one of the user's that is not there. It may have an `over_batch` as a built-in one has. Of those
    within a rollout (`credit_for`) it says whether members are compared."""
    if config.advantage in ADVANTAGE_KEYS:
        return Advantage(as_they_are, compares_members=config.advantage == "turns")
    if not imports.is_own(config.advantage):
        return ADVANTAGES[config.advantage]
    function = imports.load(config.advantage)
    own = partial(_of_group, config.advantage, function)
    return Advantage(own, getattr(function, "over_batch", None), compares_members=False)


def _of_group(name: str, function: Callable[[Rewards], Any], rewards_G: Rewards) -> Rewards:
    """An advantage of the user's, looked at: one number a rollout."""
    found = np.asarray(function(rewards_G), dtype=np.float64)
    if found.shape != rewards_G.shape or not np.isfinite(found).all():
        raise ConfigError(f"{name} gave {found} for the rewards {rewards_G}: expected a finite number for each")
    return found


def credit_for(config: AlgorithmConfig) -> Credit | None:
    """How settling credits every token; None where all of a rollout have the advantage of its reward."""
    penalty = None
    if config.kl == "reward":
        assert config.kl_estimator is not None and config.kl_coefficient is not None, "see `check`"
        penalty = Penalty(config.kl_estimator, config.kl_coefficient)
    return credit_of(
        config.advantage,
        advantage_of(config).of_group,
        discount=1.0 if config.discount is None else config.discount,
        trace=1.0 if config.trace is None else config.trace,
        penalty=penalty,
    )


def needs_reference(config: AlgorithmConfig) -> bool:
    return config.kl != "none" or config.advantage == "distillation"


def needs_critic(config: AlgorithmConfig) -> bool:
    return config.advantage == "gae"


def reads_proximal(config: AlgorithmConfig) -> bool:
    """Whether the loss may look at the policy of the batch's start: one of the user's may."""
    return imports.is_own(config.loss) or LOSSES[config.loss].reads_proximal


def corrects(config: AlgorithmConfig) -> bool:
    """Whether the loss looks at the behaviour policy itself. One of the user's says so: `loss.corrects = True`."""
    if not imports.is_own(config.loss):
        return LOSSES[config.loss].corrects
    return bool(getattr(imports.load(config.loss), "corrects", False))


def check(
    config: AlgorithmConfig,
    *,
    max_lag: float,
    group_size: int,
    temperature: float,
    mini_batches: int = 1,
    max_tokens: int | None = None,
    filter_zero_signal: bool = False,
    is_one_turn: bool = True,
) -> None:
    """Raises `ConfigError` for a combination whose mathematics is wrong, or with a key that nothing reads."""
    _check_correction(config, max_lag=max_lag, mini_batches=mini_batches)
    _check_knobs(config)
    _check_kl(config)
    _check_groups(config, group_size=group_size, filter_zero_signal=filter_zero_signal)
    if temperature <= 0:
        raise ConfigError(
            f"rollout.temperature = {temperature}: greedy rollouts have no behaviour distribution to learn from. "
            "Set rollout.temperature = 1.0"
        )
    if config.overlong_buffer is not None and not is_one_turn:
        raise ConfigError(
            "algorithm.overlong_buffer counts the tokens of one answer, and an environment here has turns of its own: leave it "
            "out, and let the environment's reward say what is too long"
        )
    if config.overlong_buffer is not None and max_tokens is not None and config.overlong_buffer > max_tokens:
        raise ConfigError(
            f"algorithm.overlong_buffer = {config.overlong_buffer} is more than rollout.max_tokens = {max_tokens}: every "
            "answer would be too long. Set it lower; DAPO has a fifth"
        )


def _check_correction(config: AlgorithmConfig, *, max_lag: float, mini_batches: int) -> None:
    loss = f'algorithm.loss = "{config.loss}"'
    mends_itself = corrects(config)
    says_so = (
        " (one of your own that weighs by x.behaviour_N says so: loss.corrects = True)"
        if imports.is_own(config.loss)
        else ""
    )
    if config.correction != "none" and mends_itself:
        raise ConfigError(
            f'algorithm.correction = "{config.correction}" on top of {loss} corrects twice: the loss weighs by the behaviour '
            'policy already. Set algorithm.correction = "none", or algorithm.loss = "reinforce"'
        )
    if max_lag > 0 and config.correction == "none" and not mends_itself:
        raise ConfigError(
            f"{loss} has no off-policy correction and pipeline.max_lag = {max_lag} trains on older samples{says_so}. Set "
            'algorithm.loss = "truncated_is" or "decoupled_ppo", or algorithm.correction = "truncate", or pipeline.max_lag = 0'
        )
    if mini_batches > 1 and not mends_itself:
        raise ConfigError(
            f"learner.mini_batches = {mini_batches} is off policy from the second one on, and {loss} does not look at how far "
            f'the policy has moved{says_so}. Set algorithm.loss = "decoupled_ppo" or "ppo", or mini_batches = 1'
        )


def _check_knobs(config: AlgorithmConfig) -> None:
    read = set(_read(config))
    for key in ("fixed_length", "correction_level", "ratio_floor", "kl_estimator", "kl_coefficient", *_all_knobs()):
        if getattr(config, key) is not None and key not in read:
            has = f"which reads {', '.join(sorted(read))}" if read else "which reads none of these keys"
            raise ConfigError(
                f'algorithm.{key} = {getattr(config, key)} is not read here: algorithm.advantage = "{config.advantage}", loss '
                f'= "{config.loss}" with correction = "{config.correction}", aggregation = "{config.aggregation}" and kl = '
                f'"{config.kl}", {has}. Leave it out'
            )


def _all_knobs() -> list[str]:
    of_losses = {knob for kind in LOSSES.values() for knob in kind.knobs}
    return sorted(of_losses | {knob for knobs in ADVANTAGE_KEYS.values() for knob in knobs})


def _read(config: AlgorithmConfig) -> Iterator[str]:
    """The keys that this advantage, loss, correction, aggregation and KL have a use for."""
    yield from ADVANTAGE_KEYS.get(config.advantage, {})
    if config.kl != "none":
        yield from ("kl_estimator", "kl_coefficient")
    yield from LOSSES.get(config.loss, LossKind({})).knobs
    if config.aggregation == "fixed_length":
        yield "fixed_length"
    if config.correction != "none":
        yield from ("ratio_cap", "correction_level")
    if config.correction == "mask":
        yield "ratio_floor"


def _check_kl(config: AlgorithmConfig) -> None:
    if config.kl != "none" and config.kl_coefficient is None:
        raise ConfigError(
            f'algorithm.kl = "{config.kl}" needs a weight: set algorithm.kl_coefficient (0.001 is usual), or kl = "none"'
        )
    if config.kl == "loss" and config.kl_estimator == "k1":
        raise ConfigError(
            'algorithm.kl_estimator = "k1" does nothing in a loss: the mean of its gradient is 0. Set it to "k2" or "k3", or '
            'algorithm.kl = "reward"'
        )
    if config.advantage != "distillation":
        return
    if config.kl != "none":
        raise ConfigError(
            f'algorithm.kl = "{config.kl}": the advantage of distillation is the KL to the teacher already. Set kl = "none"'
        )
    if config.overlong_buffer is not None:
        raise ConfigError(
            "algorithm.overlong_buffer shapes the reward, which distillation does not learn from: leave it out"
        )


def _check_groups(config: AlgorithmConfig, *, group_size: int, filter_zero_signal: bool) -> None:
    if advantage_of(config).compares_members:
        if group_size < 2:
            raise ConfigError(
                f"rollout.group_size = {group_size}: {config.advantage} compares the rollouts of a group, which takes two. Set "
                'it to 2 or more, or algorithm.advantage = "reinforce_plus_plus", which compares those of a batch'
            )
    elif filter_zero_signal and config.advantage in ADVANTAGE_KEYS:
        raise ConfigError(
            f'algorithm.advantage = "{config.advantage}" compares no rollouts with each other: a group whose rewards are all '
            "equal has a gradient like any other. Set pipeline.filter_zero_signal = false"
        )
    elif filter_zero_signal and not imports.is_own(config.advantage):
        raise ConfigError(
            f'algorithm.advantage = "{config.advantage}" measures rollouts against the whole batch: a group whose rewards are '
            "all equal has a gradient, and leaving it out shifts the mean. Set pipeline.filter_zero_signal = false"
        )
