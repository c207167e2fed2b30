"""Sums over the rows of a micro-batch. A row is never split over two of them, and its tokens stand side by side.

Shapes: N trained tokens, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(values_N: Tensor, row_N: Tensor) -> Tensor:
    """Every token has the sum over its row. The same bits on every call, which a scattered addition does not promise."""
    sums_R = torch.segment_reduce(values_N, "sum", lengths=torch.bincount(row_N), unsafe=True)
    return sums_R[row_N]


def row_counts(row_N: Tensor) -> Tensor:
    """Every token has the number of its row's tokens."""
    return torch.bincount(row_N)[row_N]


def row_means(values_N: Tensor, row_N: Tensor) -> Tensor:
    return row_sums(values_N, row_N) / row_counts(row_N)
