"""One token per row from its own uniform number, and the log-probability it was really sampled with.

Inverse transform: a row's token is a function of its logits, its temperature and one number that comes from the request's
seed and the token's position. Other requests in the batch play no part.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from millstream.types import Sampling

GOLDEN = 0x9E3779B97F4A7C15
Uniforms = np.ndarray[Any, np.dtype[np.float64]]


def uniforms(seeds: ArrayLike, positions: ArrayLike) -> Uniforms:
    """One number in [0, 1) for each request's seed and the position of the token: output number `position` of the generator
    SplitMix64 (Steele, Lea and Flood, 2014) that starts at the seed. It has no state: a request can move to another engine."""
    with np.errstate(over="ignore"):
        z = np.asarray(seeds, np.uint64) + (np.asarray(positions, np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    numbers: Uniforms = (z >> np.uint64(11)) * 2.0**-53
    return numbers


def restrict(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """The logits with -inf where a token is not among the `top_k` likeliest (0: all are), or not among the fewest of these that
    have the probability `top_p` together. The likeliest is always left; the order of two equal ones is not defined."""
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True)
    rank_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    is_out_RV = (rank_V >= top_k_R[:, None]) & (top_k_R[:, None] > 0)
    sorted_RV = sorted_RV.masked_fill(is_out_RV, float("-inf"))
    before_RV = sorted_RV.softmax(-1).cumsum(-1).roll(1, dims=-1)
    before_RV[:, 0] = 0.0
    sorted_RV = sorted_RV.masked_fill((before_RV >= top_p_R[:, None]) & (top_p_R[:, None] < 1.0), float("-inf"))
    return torch.empty_like(logits_RV).scatter_(-1, order_RV, sorted_RV)


def sample(
    logits_RV: Tensor, samplings: Sequence[Sampling], uniforms_R: Sequence[float] | Uniforms
) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities. Temperature 0 takes the likeliest token and reports its plain log-probability."""
    device = logits_RV.device
    greedy_R = torch.tensor([one.temperature == 0 for one in samplings], device=device)
    divisors = [one.temperature or 1.0 for one in samplings]
    if any(divisor != 1.0 for divisor in divisors):
        logits_RV = logits_RV / torch.tensor(divisors, device=device)[:, None]
    if any(is_restricted(one) for one in samplings):
        top_k_R = torch.tensor([one.top_k for one in samplings], device=device)
        logits_RV = restrict(logits_RV, top_k_R, torch.tensor([one.top_p for one in samplings], device=device))
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
    threshold_R1 = torch.tensor(uniforms_R, dtype=torch.float64, device=device)[:, None] * cumulative_RV[:, -1:]
    tokens_R1 = torch.searchsorted(cumulative_RV, threshold_R1, right=True).clamp_(max=logits_RV.shape[-1] - 1)
    if greedy_R.any():
        tokens_R1 = torch.where(greedy_R[:, None], logprobs_RV.argmax(-1, keepdim=True), tokens_R1)
    return tokens_R1[:, 0].tolist(), logprobs_RV.gather(1, tokens_R1)[:, 0].tolist()


def is_restricted(sampling: Sampling) -> bool:
    """Whether not all tokens can be sampled."""
    return sampling.top_k > 0 or sampling.top_p < 1.0
