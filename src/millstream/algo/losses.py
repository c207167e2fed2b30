"""Losses per token, to be minimised. mu: behaviour; prox: the learner at the start of the batch; th: being optimised;
A: advantage; sg: stop-gradient. Ratios are exp of log-probability differences, which are clamped so that none overflows.

With one optimizer step a batch, prox = th and every th/prox is 1; what corrects for staleness is then th/mu (truncated IS,
PPO with old = mu) or prox/mu (decoupled PPO). `algo.recipe` refuses combinations that correct twice, or not at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millstream.model.objective import LossInputs, TokenLoss

MAX_LOG_RATIO = 20.0


def ratio(new_N: Tensor, old_N: Tensor) -> Tensor:
    return (new_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def reinforce(x: LossInputs) -> TokenLoss:
    """-A log th. Right on policy only; with A = 1 it is supervised learning."""
    return TokenLoss(-x.advantages_N * x.logprobs_N, {})


def truncated_is(x: LossInputs, *, cap: float) -> TokenLoss:
    """-sg(min(th/mu, cap)) A log th: arXiv 1802.01561."""
    ratio_N = ratio(x.logprobs_N, x.behaviour_N).detach()
    weight_N = ratio_N.clamp(max=cap)
    return TokenLoss(-weight_N * x.advantages_N * x.logprobs_N, {"truncated_share": (ratio_N > cap).float().sum()})


def ppo(x: LossInputs, *, clip_low: float, clip_high: float) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = th/mu: arXiv 1707.06347. `old` is the behaviour policy: with old =
    prox and one step a batch the ratio would be 1 and the clip would never act."""
    return _clipped(x.logprobs_N, x.behaviour_N, x.advantages_N, clip_low, clip_high)


def decoupled_ppo(x: LossInputs, *, clip_low: float, clip_high: float, cap: float) -> TokenLoss:
    """-sg(min(prox/mu, cap)) min(u A, clip(u, 1 - low, 1 + high) A) with u = th/prox: arXiv 2110.00641, 2505.24298."""
    weight_N = ratio(x.proximal_N, x.behaviour_N).detach()
    loss_N, metrics = _clipped(x.logprobs_N, x.proximal_N, x.advantages_N, clip_low, clip_high)
    metrics["truncated_share"] = (weight_N > cap).float().sum()
    return TokenLoss(weight_N.clamp(max=cap) * loss_N, metrics)


def corrected(x: LossInputs, loss: TokenLoss, *, cap: float) -> TokenLoss:
    """The mismatch correction, truncated, by token: sg(min(prox/mu, cap)) times a loss that does not look at mu itself."""
    weight_N = ratio(x.proximal_N, x.behaviour_N).detach()
    metrics = {**loss.metrics, "truncated_share": (weight_N > cap).float().sum()}
    return TokenLoss(weight_N.clamp(max=cap) * loss.loss_N, metrics)


def _clipped(new_N: Tensor, old_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    ratio_N = ratio(new_N, old_N)
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return TokenLoss(-torch.minimum(plain_N, clipped_N), {"clipped_share": (clipped_N < plain_N).float().sum()})
