"""The `Objective` of an algorithm's config. Combinations that are refused: `algo.checks`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct
from torch import Tensor

from millstream import imports
from millstream.algo import aggregate, corrections, kl, losses
from millstream.algo.config import AlgorithmConfig
from millstream.decoding import decode_json
from millstream.errors import ConfigError
from millstream.objective import LossInputs, Objective, TokenLoss


class Recipe(Struct, frozen=True, kw_only=True):
    """An objective as data, for the process that builds it (`from_json`)."""

    algorithm: AlgorithmConfig | None  # None: maximum likelihood
    max_tokens: int = 0  # of a rollout: some aggregations divide by it

    def objective(self) -> Objective:
        return supervised() if self.algorithm is None else objective(self.algorithm, max_tokens=self.max_tokens)


def from_json(data: bytes) -> Objective:
    return decode_json(data, Recipe).objective()


def objective(config: AlgorithmConfig, *, max_tokens: int) -> Objective:
    token_loss, needs_entropy = _token_loss(config), config.entropy_bonus > 0
    match config.aggregation:
        case "sequence_mean":
            return Objective(token_loss, aggregate.sequence_mean_weights, aggregate.num_rows_units, needs_entropy)
        case "fixed_length":
            weights = partial(aggregate.fixed_length_weights, length=config.fixed_length or max_tokens)
            return Objective(token_loss, weights, aggregate.num_rows_units, needs_entropy)
        case "token_mean" | None:
            return Objective(token_loss, aggregate.token_mean_weights, aggregate.token_mean_units, needs_entropy)


def supervised() -> Objective:
    """Maximum likelihood of the masked tokens: reinforce with every advantage 1."""
    return Objective(losses.reinforce, aggregate.token_mean_weights, aggregate.token_mean_units)


def _token_loss(config: AlgorithmConfig) -> Callable[[LossInputs], TokenLoss]:
    """The loss, then its correction, then the entropy, then the KL to the reference."""
    plain, correct, bonus, penalise = _plain(config), _correction(config), config.entropy_bonus, _kl_penalty(config)

    def token_loss(x: LossInputs) -> TokenLoss:
        loss = plain(x)
        loss = loss if correct is None else correct(x, loss)
        loss = losses.with_entropy(x, loss, bonus=bonus) if bonus > 0 else loss
        return kl.with_kl_metric(x, loss if penalise is None else penalise(x, loss))

    return token_loss


def _plain(config: AlgorithmConfig) -> Callable[[LossInputs], TokenLoss]:
    low, high, dual, cap = config.clip_low, config.clip_high, config.dual_clip, config.ratio_cap
    match config.loss:
        case "truncated_is":
            return partial(losses.truncated_is, cap=_set(cap))
        case "decoupled_ppo":
            return partial(
                losses.decoupled_ppo, clip_low=_set(low), clip_high=_set(high), dual_clip=dual, cap=_set(cap)
            )
        case "ppo":
            return partial(losses.ppo, clip_low=_set(low), clip_high=_set(high), dual_clip=dual)
        case "cispo":
            return partial(losses.cispo, clip_low=_set(low), clip_high=_set(high))
        case "topr":
            return partial(losses.topr, cap=_set(cap))
        case "weighted_topr":
            positive, negative = _set(config.positive_weight), _set(config.negative_weight)
            return partial(losses.topr, cap=_set(cap), positive_weight=positive, negative_weight=negative)
        case "gspo":
            return partial(losses.gspo, clip_low=_set(low), clip_high=_set(high))
        case "kimi":
            return partial(losses.kimi, regularisation=_set(config.regularisation))
        case "reinforce":
            return losses.reinforce
        case own:
            return partial(_own, own, imports.load_part("loss", own))


def _set(value: float | None) -> float:
    """The value of a key that the loss reads: the config has filled it in."""
    assert value is not None
    return value


def _own(name: str, function: Callable[[LossInputs], Any], x: LossInputs) -> TokenLoss:
    """A user's loss: a tensor, or a `TokenLoss` with metrics. The shape is checked: another one would be broadcast silently."""
    result = function(x)
    loss = TokenLoss(result, {}) if isinstance(result, Tensor) else result
    if not isinstance(loss, TokenLoss) or loss.loss_N.shape != x.logprobs_N.shape:
        found = type(loss).__name__ if not isinstance(loss, TokenLoss) else f"the shape {tuple(loss.loss_N.shape)}"
        raise ConfigError(
            f"{name} returned {found}: expected one loss per token, of the shape {tuple(x.logprobs_N.shape)}"
        )
    return loss


def _correction(config: AlgorithmConfig) -> Callable[[LossInputs, TokenLoss], TokenLoss] | None:
    level = config.correction_level or "token"
    match config.correction:
        case "none":
            return None
        case "truncate":
            return partial(corrections.truncated, level=level, cap=_set(config.ratio_cap))
        case "mask":
            floor, cap = _set(config.ratio_floor), _set(config.ratio_cap)
            return partial(corrections.masked, level=level, floor=floor, cap=cap)


def _kl_penalty(config: AlgorithmConfig) -> Callable[[LossInputs, TokenLoss], TokenLoss] | None:
    if config.kl != "loss":
        return None
    assert config.kl_estimator is not None
    return partial(kl.with_kl_penalty, estimator=config.kl_estimator, coefficient=_set(config.kl_coefficient))
