"""The interface between an algorithm and a learner: tensors over the trained tokens of a micro-batch.

The learner computes log-probabilities, passes them to the objective and differentiates the result: it does not know the
algorithm. The algorithm gets flat tensors and the row of each token: it does not know packing, devices or asynchrony.

Shapes: N trained tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class LossInputs(NamedTuple):
    """All log-probabilities are at the sampling temperature."""

    logprobs_N: Tensor  # th: the policy being optimised; carries the gradient
    behaviour_N: Tensor  # mu: of the engine that sampled the token, as it reported it
    proximal_N: Tensor  # prox: the learner at the start of the batch
    advantages_N: Tensor
    row_N: Tensor  # the row of each token in the micro-batch. Never decreases: a row's tokens are adjacent and complete
    entropy_N: Tensor | None = None  # of th at this token; carries a gradient. None: not needed by the objective
    reference_N: Tensor | None = None  # ref: a policy to stay near. None: there is none


class TokenLoss(NamedTuple):
    loss_N: Tensor  # to be minimised; one value per token, not yet aggregated
    metrics: dict[str, Tensor]  # sums over the tokens; the learner divides them by the tokens of the batch


class Objective(NamedTuple):
    """minimise  sum over rows [ row_weight * sum over its tokens of the loss ]  /  units of the whole batch.

    Both depend on the number of trained tokens of each row alone, so that rows may be accumulated in any split and order.
    """

    token_loss: Callable[[LossInputs], TokenLoss]
    row_weights: Callable[[Tensor], Tensor]  # counts_R -> the weight of each token of the row
    units: Callable[[Tensor], Tensor]  # counts_R -> the share of these rows in the divisor of the batch
    needs_entropy: bool = False  # whether `entropy_N` is computed
