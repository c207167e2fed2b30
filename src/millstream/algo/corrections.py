"""For losses that do not look at the behaviour policy: a weight sg(w), w = prox/mu, in front of them.

w is of the token; of the sequence, the product over its tokens; or geometric, the product's root, one token's worth. It is cut
off (truncate: min(w, cap)), or what it weighs is left out where it is too far from 1 (mask: 0 outside [floor, cap]).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from millstream.algo.rows import row_means, row_sums
from millstream.model.objective import LossInputs, TokenLoss

MAX_LOG_RATIO = 20.0
Level = Literal["token", "sequence", "geometric"]


def ratio(new_N: Tensor, old_N: Tensor) -> Tensor:
    """Of probabilities. Clamped in log space, so that nothing overflows."""
    return _exp(new_N - old_N)


def ratio_at(level: Level, new_N: Tensor, old_N: Tensor, row_N: Tensor) -> Tensor:
    """Every token has its own, or that of its row."""
    match level:
        case "token":
            return ratio(new_N, old_N)
        case "sequence":
            return _exp(row_sums(new_N - old_N, row_N))
        case "geometric":
            return _exp(row_means(new_N - old_N, row_N))


def _exp(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated(x: LossInputs, loss: TokenLoss, *, level: Level, cap: float) -> TokenLoss:
    """sg(min(prox/mu, cap)) times the loss."""
    weight_N = ratio_at(level, x.proximal_N, x.behaviour_N, x.row_N).detach()
    metrics = {**loss.metrics, "truncated_share": (weight_N > cap).float().sum()}
    return TokenLoss(weight_N.clamp(max=cap) * loss.loss_N, metrics)


def masked(x: LossInputs, loss: TokenLoss, *, level: Level, floor: float, cap: float) -> TokenLoss:
    """sg(prox/mu) times the loss where that is within [floor, cap], and 0 elsewhere. What is left out still counts in the
    divisor of the batch: leaving out half of it halves the step."""
    weight_N = ratio_at(level, x.proximal_N, x.behaviour_N, x.row_N).detach()
    is_kept_N = (weight_N >= floor) & (weight_N <= cap)
    metrics = {**loss.metrics, "masked_share": (~is_kept_N).float().sum()}
    return TokenLoss(torch.where(is_kept_N, weight_N, 0) * loss.loss_N, metrics)
