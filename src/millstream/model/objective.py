"""What passes between an algorithm and a learner: tensors over the trained tokens of a micro-batch, and nothing else.

The learner computes log-probabilities, hands them over and differentiates what comes back: it is blind to the algorithm. The
algorithm sees flat tensors and which row each token is of: it is blind to packing, devices and asynchrony.

Shapes: N trained tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class LossInputs(NamedTuple):
    """All log-probabilities are at the sampling temperature."""

    logprobs_N: Tensor  # th: the policy that is being optimised; carries the gradient
    behaviour_N: Tensor  # mu: the engine that sampled the token, as it reported it
    proximal_N: Tensor  # prox: the learner at the start of the batch
    advantages_N: Tensor
    # Which row of the micro-batch the token belongs to. Never falls: a row's tokens stand side by side, and all are here.
    row_N: Tensor
    # Of th's distribution where the token was sampled; carries a gradient. None: the objective does not need it.
    entropy_N: Tensor | None = None
    reference_N: Tensor | None = None  # ref: a policy to stay near. None: there is none.


class TokenLoss(NamedTuple):
    loss_N: Tensor  # to be minimised, one value a token, not yet aggregated
    metrics: dict[str, Tensor]  # sums over the tokens; the learner divides them by the tokens of the batch


class Objective(NamedTuple):
    """minimise  sum over rows [ row_weight * sum over its tokens of the loss ]  /  units of the whole batch.

    Both come from the number of trained tokens of each row alone, so that rows may be accumulated in any split and order.
    """

    token_loss: Callable[[LossInputs], TokenLoss]
    row_weights: Callable[[Tensor], Tensor]  # counts_R -> the weight of each token of the row
    units: Callable[[Tensor], Tensor]  # counts_R -> what these rows add to the divisor of the batch
    needs_entropy: bool = False  # whether `entropy_N` is to be computed
