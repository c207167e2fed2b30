"""Aggregation: from losses per token to one number over the mask, independent of how the batch is split into micro-batches.

Each aggregation is a weight per row and a number of units per batch (see `Objective`). Rows without a trained token add
nothing. A row is never split over two micro-batches, and its tokens are adjacent. Shapes: N trained tokens, R rows."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean_weights(counts_R: Tensor) -> Tensor:
    """Every trained token of the batch counts the same (DAPO, arXiv 2503.14476)."""
    return torch.ones_like(counts_R)


def token_mean_units(counts_R: Tensor) -> Tensor:
    return counts_R.sum()


def sequence_mean_weights(counts_R: Tensor) -> Tensor:
    """Every rollout counts the same, whatever its length (GRPO, arXiv 2402.03300)."""
    return 1 / counts_R.clamp(min=1)


def num_rows_units(counts_R: Tensor) -> Tensor:
    return (counts_R > 0).sum().to(counts_R.dtype)


def fixed_length_weights(counts_R: Tensor, *, length: int) -> Tensor:
    """Every token counts 1 / length, a constant: no bias towards short or long rollouts (Dr. GRPO, arXiv 2503.20783)."""
    return torch.full_like(counts_R, 1 / length)


def row_sums(values_N: Tensor, row_N: Tensor) -> Tensor:
    """For every token, the sum over its row. Deterministic, unlike a scatter-add."""
    sums_R = torch.segment_reduce(values_N, "sum", lengths=torch.bincount(row_N), unsafe=True)
    return sums_R[row_N]


def row_counts(row_N: Tensor) -> Tensor:
    """For every token, the number of tokens of its row."""
    return torch.bincount(row_N)[row_N]


def row_means(values_N: Tensor, row_N: Tensor) -> Tensor:
    return row_sums(values_N, row_N) / row_counts(row_N)
