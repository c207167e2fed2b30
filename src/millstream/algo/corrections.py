"""Corrections for losses that do not read the behaviour policy: a factor sg(w), w = prox/mu.

w is computed per token; per sequence (the product over its tokens); or geometric (the root of that product, the scale of one
token). It is truncated (min(w, cap)) or masked (0 outside of [floor, cap]).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from millstream.algo.aggregate import row_means, row_sums
from millstream.algo.credit import MAX_LOG_RATIO
from millstream.objective import LossInputs, TokenLoss

Level = Literal["token", "sequence", "geometric"]


def ratio(new_N: Tensor, old_N: Tensor) -> Tensor:
    """Of probabilities; never overflows: see `bounded_exp`."""
    return bounded_exp(new_N - old_N)


def ratio_at(level: Level, new_N: Tensor, old_N: Tensor, row_N: Tensor) -> Tensor:
    """Per token: its own ratio, or that of its row."""
    match level:
        case "token":
            return ratio(new_N, old_N)
        case "sequence":
            return bounded_exp(row_sums(new_N - old_N, row_N))
        case "geometric":
            return bounded_exp(row_means(new_N - old_N, row_N))


def bounded_exp(log_ratio_N: Tensor) -> Tensor:
    """exp up to `MAX_LOG_RATIO`, its tangent beyond: e^20 (1 + x - 20). A clamp would bound the value and end the gradient, and
    a token that has become e^20 times too likely would never be pushed back. Below, exp itself: it falls to 0,
    which is also its value for a token that has become impossible (a log-probability of -inf)."""
    beyond_N = (log_ratio_N - MAX_LOG_RATIO).relu()
    return log_ratio_N.clamp(max=MAX_LOG_RATIO).exp() * (1 + beyond_N)


def truncated(x: LossInputs, loss: TokenLoss, *, level: Level, cap: float) -> TokenLoss:
    """sg(min(prox/mu, cap)) times the loss."""
    weight_N = ratio_at(level, x.proximal_N, x.behaviour_N, x.row_N).detach()
    return TokenLoss(weight_N.clamp(max=cap) * loss.loss_N, {**loss.metrics, **truncation(weight_N, cap)})


def truncation(weight_N: Tensor, cap: float) -> dict[str, Tensor]:
    """What min(w, cap) cuts off, summed over tokens: how many it cuts, and the share of its weight that each loses."""
    is_cut_N = weight_N > cap
    lost_N = torch.where(is_cut_N, 1 - cap / weight_N, 0)
    return {"truncated_share": is_cut_N.float().sum(), "truncated_weight": lost_N.sum()}


def masked(x: LossInputs, loss: TokenLoss, *, level: Level, floor: float, cap: float) -> TokenLoss:
    """sg(prox/mu) times the loss where that is within [floor, cap], and 0 elsewhere. Masked tokens still count in the
    divisor of the batch: masking half of them halves the step."""
    weight_N = ratio_at(level, x.proximal_N, x.behaviour_N, x.row_N).detach()
    is_kept_N = (weight_N >= floor) & (weight_N <= cap)
    metrics = {**loss.metrics, "masked_share": (~is_kept_N).float().sum()}
    return TokenLoss(torch.where(is_kept_N, weight_N, 0) * loss.loss_N, metrics)
