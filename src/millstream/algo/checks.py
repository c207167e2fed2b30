"""The combinations of algorithm settings that are refused: wrong mathematics, or a key that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.algo.advantages import ADVANTAGES
from millstream.algo.config import AlgorithmConfig, advantage_of, corrects
from millstream.algo.credit import ADVANTAGE_KEYS
from millstream.algo.presets import LOSSES, LossKind
from millstream.errors import ConfigError


def check_algorithm(
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
    """Raises `ConfigError`, which says what to set."""
    _check_correction(config, max_lag=max_lag, mini_batches=mini_batches)
    _check_unread(config)
    _check_kl(config)
    _check_groups(config, group_size=group_size, filter_zero_signal=filter_zero_signal)
    if temperature <= 0:
        raise ConfigError(
            f"rollout.temperature = {temperature}: greedy rollouts have no behaviour distribution to learn from. "
            "Set rollout.temperature = 1.0"
        )
    if config.overlong_buffer is not None and not is_one_turn:
        raise ConfigError(
            "algorithm.overlong_buffer counts the tokens of one answer, and an environment here has several turns: leave it "
            "out, and let the environment's reward say what is too long"
        )
    if config.overlong_buffer is not None and max_tokens is not None and config.overlong_buffer > max_tokens:
        raise ConfigError(
            f"algorithm.overlong_buffer = {config.overlong_buffer} is more than rollout.max_tokens = {max_tokens}: every "
            "answer would be too long. Set it lower; DAPO uses a fifth"
        )


def _check_correction(config: AlgorithmConfig, *, max_lag: float, mini_batches: int) -> None:
    loss = f'algorithm.loss = "{config.loss}"'
    has_correction = corrects(config)
    how = (
        " (your own loss, if it weighs by x.behaviour_N, needs loss.corrects = True)"
        if config.loss not in LOSSES
        else ""
    )
    if config.correction != "none" and has_correction:
        raise ConfigError(
            f'algorithm.correction = "{config.correction}" on top of {loss} corrects twice: the loss weighs by the behaviour '
            'policy already. Set algorithm.correction = "none", or algorithm.loss = "reinforce"'
        )
    if max_lag > 0 and config.correction == "none" and not has_correction:
        raise ConfigError(
            f"{loss} has no off-policy correction and pipeline.max_lag = {max_lag} trains on older samples{how}. Set "
            'algorithm.loss = "truncated_is" or "decoupled_ppo", or algorithm.correction = "truncate", or pipeline.max_lag = 0'
        )
    if mini_batches > 1 and not has_correction:
        raise ConfigError(
            f"learner.mini_batches = {mini_batches} is off policy from the second one on, and {loss} does not measure how far "
            f'the policy has moved{how}. Set algorithm.loss = "decoupled_ppo" or "ppo", or mini_batches = 1'
        )


def _check_unread(config: AlgorithmConfig) -> None:
    read = set(_read(config))
    for key in ("fixed_length", "correction_level", "ratio_floor", "kl_estimator", "kl_coefficient", *_all_keys()):
        if getattr(config, key) is not None and key not in read:
            has = f"which reads {', '.join(sorted(read))}" if read else "which reads none of these keys"
            raise ConfigError(
                f'algorithm.{key} = {getattr(config, key)} is not read here: algorithm.advantage = "{config.advantage}", loss '
                f'= "{config.loss}" with correction = "{config.correction}", aggregation = "{config.aggregation}" and kl = '
                f'"{config.kl}", {has}. Leave it out'
            )


def _all_keys() -> list[str]:
    of_losses = {key for kind in LOSSES.values() for key in kind.keys}
    return sorted(of_losses | {key for keys in ADVANTAGE_KEYS.values() for key in keys})


def _read(config: AlgorithmConfig) -> Iterator[str]:
    """The keys that this advantage, loss, correction, aggregation and KL read."""
    yield from ADVANTAGE_KEYS.get(config.advantage, {})
    if config.kl != "none":
        yield from ("kl_estimator", "kl_coefficient")
    yield from LOSSES.get(config.loss, LossKind({})).keys
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
        raise ConfigError("algorithm.overlong_buffer shapes the reward, which distillation does not use: leave it out")


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
    elif filter_zero_signal and config.advantage in ADVANTAGES:
        raise ConfigError(
            f'algorithm.advantage = "{config.advantage}" measures rollouts against the whole batch: a group whose rewards are '
            "all equal has a gradient, and leaving it out shifts the mean. Set pipeline.filter_zero_signal = false"
        )
