"""Algorithms: pure functions over rewards and log-probabilities. They know neither queues nor workers nor versions.

This file holds what can be said without torch: the config, and the combinations that are refused, all of them in `check`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
from msgspec import Struct, structs

from millstream import imports
from millstream.algo.advantages import ADVANTAGES, Advantage, Rewards
from millstream.algo.presets import CORRECTION_CAPS, LOSSES, NOT_NAMED, PRESETS, SHAPE, Aggregation, LossKind, Name
from millstream.errors import ConfigError


class AlgorithmConfig(Struct, frozen=True, kw_only=True):
    """Keys that are not set are filled in from the name's preset and from the loss: what is left unset is not read."""

    name: Name | None = None
    """A preset: values for the other keys, of which each may still be set. None: that of truncated_is."""
    advantage: str = ""
    """grpo, dr_grpo, rloo, reinforce_plus_plus, lite_ppo, or one of your own: file.py:function or package.module:function."""
    loss: str = ""
    """truncated_is, decoupled_ppo, ppo, cispo, topr, weighted_topr, gspo, kimi, reinforce, or one of your own."""
    aggregation: Aggregation | None = None
    fixed_length: int | None = None
    """The constant of aggregation = "fixed_length". None: rollout.max_tokens."""
    clip_low: float | None = None
    clip_high: float | None = None
    """Ratios are clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None = None
    """PPO: negatives lose at most this many times their advantage."""
    ratio_cap: float | None = None
    """Where importance weights are cut off."""
    positive_weight: float | None = None
    negative_weight: float | None = None
    """Weighted TOPR: of rollouts with a positive and with a negative advantage."""
    regularisation: float | None = None
    """Kimi: tau, how strongly the policy is held to the one that sampled."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """A weight prox/mu, for a loss that has no correction of its own (reinforce): cut off at ratio_cap, or 0 where it is
    outside [ratio_floor, ratio_cap]."""
    correction_level: Literal["token", "sequence", "geometric"] | None = None
    """What the correction's weight is of. None: the token."""
    ratio_floor: float | None = None
    """Of correction = "mask". None: 1 / ratio_cap."""
    entropy_bonus: float = 0.0
    """Times the policy's entropy at each token, taken off the loss."""
    overlong_buffer: int | None = None
    """DAPO: over the last so many tokens before rollout.max_tokens the reward falls by up to 1. None: it does not."""

    def __post_init__(self) -> None:
        for key, value in _filled(self).items():
            structs.force_setattr(self, key, value)
        if self.advantage not in ADVANTAGES and not imports.is_own(self.advantage):
            raise ValueError(_unknown("advantage", self.advantage, ADVANTAGES))
        if self.loss not in LOSSES and not imports.is_own(self.loss):
            raise ValueError(_unknown("loss", self.loss, LOSSES))
        for key in ("clip_high", "ratio_cap", "ratio_floor", "fixed_length", "overlong_buffer"):
            if (value := getattr(self, key)) is not None and value <= 0:
                raise ValueError(f"{key} must be above 0")
        if self.clip_low is not None and not 0 < self.clip_low <= 1:
            raise ValueError("clip_low must be above 0 and at most 1, which is no lower clip at all")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError("dual_clip must be above 1")
        for key in ("positive_weight", "negative_weight", "regularisation", "entropy_bonus"):
            if (getattr(self, key) or 0) < 0:
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
    if config.correction != "none":
        level = config.correction_level or "token"
        cap = config.ratio_cap or CORRECTION_CAPS[level]
        values |= {"correction_level": level, "ratio_cap": cap}
        values |= {"ratio_floor": 1 / cap} if config.correction == "mask" else {}
    return {key: value for key, value in values.items() if getattr(config, key) in (None, "")}


def advantage_of(config: AlgorithmConfig) -> Advantage:
    """Raises `ConfigError` for one of the user's that is not there. It may have an `over_batch` as a built-in one has."""
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
    for key in ("fixed_length", "correction_level", "ratio_floor", *_all_knobs()):
        if getattr(config, key) is not None and key not in read:
            has = f"which reads {', '.join(sorted(read))}" if read else "which reads none of these keys"
            raise ConfigError(
                f"algorithm.{key} = {getattr(config, key)} is not read here: algorithm.loss = "
                f'"{config.loss}" with correction = "{config.correction}" and aggregation = "{config.aggregation}", {has}. '
                "Leave it out"
            )


def _all_knobs() -> list[str]:
    return sorted({knob for kind in LOSSES.values() for knob in kind.knobs})


def _read(config: AlgorithmConfig) -> Iterator[str]:
    """The keys that this loss, correction and aggregation have a use for."""
    yield from LOSSES.get(config.loss, LossKind({})).knobs
    if config.aggregation == "fixed_length":
        yield "fixed_length"
    if config.correction != "none":
        yield from ("ratio_cap", "correction_level")
    if config.correction == "mask":
        yield "ratio_floor"


def _check_groups(config: AlgorithmConfig, *, group_size: int, filter_zero_signal: bool) -> None:
    if advantage_of(config).compares_members:
        if group_size < 2:
            raise ConfigError(
                f"rollout.group_size = {group_size}: {config.advantage} compares the rollouts of a group, which takes two. Set "
                'it to 2 or more, or algorithm.advantage = "reinforce_plus_plus", which compares those of a batch'
            )
    elif filter_zero_signal and not imports.is_own(config.advantage):
        raise ConfigError(
            f'algorithm.advantage = "{config.advantage}" measures rollouts against the whole batch: a group whose rewards are '
            "all equal has a gradient, and leaving it out shifts the mean. Set pipeline.filter_zero_signal = false"
        )
