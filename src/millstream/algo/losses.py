"""Losses per token, to be minimised. mu: behaviour; prox: the learner at the start of the batch; th: the policy being
optimised; A: advantage; sg: stop-gradient. Ratios are exp of log-probability differences, beyond e^20 its tangent: no overflow,
and no end of the gradient (`corrections.bounded_exp`).

With one optimizer step per batch, prox = th and every th/prox is 1; what corrects for staleness is then th/mu (truncated IS,
CISPO, TOPR, and PPO, GSPO and Kimi with old = mu) or prox/mu (decoupled PPO). `algo.checks` refuses combinations that
correct twice, or not at all.

TOPR, GSPO and Kimi use whole sequences: their ratios are those of a row of the micro-batch, which is never split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millstream.algo.aggregate import row_counts, row_sums
from millstream.algo.corrections import ratio, ratio_at, truncation
from millstream.objective import LossInputs, TokenLoss


def reinforce(x: LossInputs) -> TokenLoss:
    """-A log th. Correct on policy only; with A = 1 it is supervised learning."""
    return TokenLoss(-x.advantages_N * x.logprobs_N, {})


def truncated_is(x: LossInputs, *, cap: float) -> TokenLoss:
    """-sg(min(th/mu, cap)) A log th: arXiv 1802.01561."""
    ratio_N = ratio(x.logprobs_N, x.behaviour_N).detach()
    return TokenLoss(-ratio_N.clamp(max=cap) * x.advantages_N * x.logprobs_N, truncation(ratio_N, cap))


def cispo(x: LossInputs, *, clip_low: float, clip_high: float) -> TokenLoss:
    """-sg(clip(th/mu, 1 - low, 1 + high)) A log th: arXiv 2506.13585. Unlike PPO's, a token that is clipped still learns."""
    ratio_N = ratio(x.logprobs_N, x.behaviour_N).detach()
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight_N * x.advantages_N * x.logprobs_N, {"clipped_share": (ratio_N != weight_N).float().sum()})


def topr(x: LossInputs, *, cap: float, positive_weight: float = 1.0, negative_weight: float = 1.0) -> TokenLoss:
    """Positives -A log th; negatives -sg(min(th/mu, cap)) A log th, the ratio that of the whole trajectory: arXiv 2503.14286.
    Each with its weight: Weighted TOPR."""
    is_positive_N = x.advantages_N >= 0
    ratio_N = ratio_at("sequence", x.logprobs_N, x.behaviour_N, x.row_N).detach()
    weight_N = torch.where(is_positive_N, positive_weight, negative_weight * ratio_N.clamp(max=cap))
    return TokenLoss(-weight_N * x.advantages_N * x.logprobs_N, truncation(ratio_N.where(~is_positive_N, 0), cap))


def ppo(x: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = th/mu: arXiv 1707.06347. `old` is the behaviour policy: with old =
    prox and one step per batch the ratio would be 1 and the clip would never act."""
    return _clipped(ratio(x.logprobs_N, x.behaviour_N), x.advantages_N, clip_low, clip_high, dual_clip)


def decoupled_ppo(
    x: LossInputs, *, clip_low: float, clip_high: float, cap: float, dual_clip: float | None = None
) -> TokenLoss:
    """-sg(min(prox/mu, cap)) min(u A, clip(u, 1 - low, 1 + high) A) with u = th/prox: arXiv 2110.00641, 2505.24298."""
    weight_N = ratio(x.proximal_N, x.behaviour_N).detach()
    moved_N = ratio(x.logprobs_N, x.proximal_N)
    loss_N, metrics = _clipped(moved_N, x.advantages_N, clip_low, clip_high, dual_clip)
    return TokenLoss(weight_N.clamp(max=cap) * loss_N, metrics | truncation(weight_N, cap))


def gspo(x: LossInputs, *, clip_low: float, clip_high: float) -> TokenLoss:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean over the row of log th - log mu): arXiv 2507.18071. Every token has
    the loss of its row, so that `sequence_mean` is the paper's."""
    ratio_N = ratio_at("geometric", x.logprobs_N, x.behaviour_N, x.row_N)
    return _clipped(ratio_N, x.advantages_N, clip_low, clip_high, None)


def kimi(x: LossInputs, *, regularisation: float) -> TokenLoss:
    """-A log th + (tau / 2) (log th - log mu)^2, both summed over the row: Kimi k1.5, arXiv 2501.12599. The square is split
    evenly over the row's tokens; `fixed_length` is the paper's, up to a constant factor."""
    distance_N = row_sums(x.logprobs_N - x.behaviour_N, x.row_N)
    square_N = distance_N.square() / row_counts(x.row_N)
    loss_N = -x.advantages_N * x.logprobs_N + regularisation / 2 * square_N
    return TokenLoss(loss_N, {"squared_distance": square_N.detach().sum()})


def with_entropy(x: LossInputs, loss: TokenLoss, *, bonus: float) -> TokenLoss:
    """The loss minus bonus times the policy's entropy, per token."""
    assert x.entropy_N is not None, "the objective says that it needs entropies"
    return TokenLoss(loss.loss_N - bonus * x.entropy_N, {**loss.metrics, "entropy": x.entropy_N.detach().sum()})


def _clipped(
    ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """With a dual clip c, negatives are at most c |A|, however large the ratio: arXiv 1912.09729."""
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    gain_N = torch.minimum(plain_N, clipped_N)
    metrics = {"clipped_share": (clipped_N < plain_N).float().sum()}
    if dual_clip is not None:
        least_N = dual_clip * advantages_N
        is_cut_N = (advantages_N < 0) & (gain_N < least_N)
        gain_N = torch.where(is_cut_N, least_N, gain_N)
        metrics["dual_clipped_share"] = is_cut_N.float().sum()
    return TokenLoss(-gain_N, metrics)
