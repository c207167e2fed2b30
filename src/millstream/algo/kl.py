"""Estimators of KL(th || ref) from tokens that th has sampled, each by log-probabilities: http://joschu.net/blog/kl-approx.html.

k1 = log th - log ref, without bias; k2 = k1^2 / 2, whose gradient is that of the KL; k3 = exp(-k1) + k1 - 1, without bias and
never negative. In a loss belong k2 and k3: the gradient of k1 has the mean 0. In a reward belongs k1 (`algo.credit`).
"""

from __future__ import annotations

from torch import Tensor

from millstream.algo.credit import MAX_LOG_RATIO, Estimator
from millstream.errors import ConfigError
from millstream.model.objective import LossInputs, TokenLoss


def estimate(estimator: Estimator, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    log_ratio_N = logprobs_N - reference_N
    match estimator:
        case "k1":
            return log_ratio_N
        case "k2":
            return log_ratio_N.square() / 2
        case "k3":
            inside_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return (-inside_N).exp() + inside_N - 1


def penalised(x: LossInputs, loss: TokenLoss, *, estimator: Estimator, coefficient: float) -> TokenLoss:
    """The loss plus coefficient KL, token by token. k1 is refused."""
    if estimator == "k1":
        raise ConfigError("k1 as a loss does nothing: the mean of its gradient is 0. Use k2 or k3, or k1 in the reward")
    if x.reference_N is None:
        raise ConfigError("a KL to a reference needs the reference's log-probabilities: reference_N is None")
    kl_N = estimate(estimator, x.logprobs_N, x.reference_N)
    return TokenLoss(loss.loss_N + coefficient * kl_N, loss.metrics)


def measured(x: LossInputs, loss: TokenLoss) -> TokenLoss:
    """The loss as it is, and by k3 how far the policy is from the reference, where there is one."""
    if x.reference_N is None:
        return loss
    kl_N = estimate("k3", x.logprobs_N.detach(), x.reference_N)
    return TokenLoss(loss.loss_N, {**loss.metrics, "reference_kl": kl_N.sum()})
