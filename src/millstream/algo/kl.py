"""Estimators of KL(th || ref) from log-probabilities of tokens that th sampled: http://joschu.net/blog/kl-approx.html.

k1 = log th - log ref, unbiased; k2 = k1^2 / 2, whose gradient is that of the KL; k3 = exp(-k1) + k1 - 1, unbiased and never
negative. A loss uses k2 or k3, because the gradient of k1 has mean 0; a reward uses k1 (`algo.credit`).
"""

from __future__ import annotations

from torch import Tensor

from millstream.algo.corrections import bounded_exp
from millstream.algo.credit import Estimator
from millstream.errors import ConfigError
from millstream.objective import LossInputs, TokenLoss


def kl_estimate(estimator: Estimator, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    log_ratio_N = logprobs_N - reference_N
    match estimator:
        case "k1":
            return log_ratio_N
        case "k2":
            return log_ratio_N.square() / 2
        case "k3":
            return bounded_exp(-log_ratio_N) + log_ratio_N - 1


def with_kl_penalty(x: LossInputs, loss: TokenLoss, *, estimator: Estimator, coefficient: float) -> TokenLoss:
    """The loss plus coefficient times KL, per token. k1 is refused."""
    if estimator == "k1":
        raise ConfigError("k1 as a loss does nothing: the mean of its gradient is 0. Use k2 or k3, or k1 in the reward")
    if x.reference_N is None:
        raise ConfigError("a KL to a reference needs the reference's log-probabilities: reference_N is None")
    kl_N = kl_estimate(estimator, x.logprobs_N, x.reference_N)
    return TokenLoss(loss.loss_N + coefficient * kl_N, loss.metrics)


def with_kl_metric(x: LossInputs, loss: TokenLoss) -> TokenLoss:
    """The loss unchanged, with the metric `reference_kl` (k3) if there is a reference."""
    if x.reference_N is None:
        return loss
    kl_N = kl_estimate("k3", x.logprobs_N.detach(), x.reference_N)
    return TokenLoss(loss.loss_N, {**loss.metrics, "reference_kl": kl_N.sum()})
