"""One token per row from its own uniform number, and the log-probability it was really sampled with.

Inverse transform: a row's token is a function of its logits, its temperature and one number that comes from the request's
seed and the token's position. The requests beside it play no part.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(
    logits_RV: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities. Temperature 0 takes the likeliest token and reports its plain log-probability."""
    greedy_R = torch.tensor([temperature == 0 for temperature in temperatures], device=logits_RV.device)
    divisors = [temperature or 1.0 for temperature in temperatures]
    if any(divisor != 1.0 for divisor in divisors):
        logits_RV = logits_RV / torch.tensor(divisors, device=logits_RV.device)[:, None]
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
    threshold_R1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_RV.device)[:, None] * cumulative_RV[:, -1:]
    tokens_R1 = torch.searchsorted(cumulative_RV, threshold_R1, right=True).clamp_(max=logits_RV.shape[-1] - 1)
    if greedy_R.any():
        tokens_R1 = torch.where(greedy_R[:, None], logprobs_RV.argmax(-1, keepdim=True), tokens_R1)
    return tokens_R1[:, 0].tolist(), logprobs_RV.gather(1, tokens_R1)[:, 0].tolist()
