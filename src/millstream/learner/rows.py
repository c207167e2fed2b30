"""Rows of a micro-batch as flat tensors: no padding, and a prompt that several rows share is computed once.

Rows with a number that is not finite are skipped by the callers, with their label: one would spoil the gradient of all others.
Shapes: N tokens to compute (a shared prompt counts once), T tokens of all rows, M of them trained, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millstream.errors import LearnerError
from millstream.model.attention import Indices, Packed, on_device
from millstream.types import Tokens, TrainRow

MAX_FILLER = 512  # tokens of a filler sequence: attention over a longer one would cost time
COLUMNS_PER_TOKEN = ("logprobs", "advantages", "reference", "proximal", "values", "returns")  # some are optional


EMPTY_ROW = TrainRow(
    tokens=np.zeros(2, np.int32),
    loss_mask=np.array([False, True]),
    logprobs=np.zeros(2, np.float32),
    advantages=np.zeros(2, np.float32),
)
"""What a rank without rows computes while the other ranks need its shard."""


def not_finite(row: TrainRow) -> list[str]:
    """The columns with a number that is not finite. Only trained tokens are read."""
    columns = {name: column for name in COLUMNS_PER_TOKEN if (column := getattr(row, name)) is not None}
    return [name for name, column in columns.items() if not np.isfinite(column[row.loss_mask]).all()]


def is_finite(row: TrainRow) -> bool:
    """Whether every number of its trained tokens is."""
    return not not_finite(row)


class RowTensors:
    """The tensors of a forward pass over some rows. A trained token is predicted from the position before it. With a `quantum`
    the tokens to compute are filled up to a multiple of it with unused sequences: few distinct sizes, so that compiled layers
    are compiled rarely."""

    def __init__(self, rows: Sequence[TrainRow], device: torch.device, *, quantum: int = 1) -> None:
        masks = [row.loss_mask for row in rows]
        if any(mask[0] for mask in masks):
            raise LearnerError("the first token of a row cannot be trained: nothing comes before it")
        self._rows = rows
        self._device = device
        self._trained_M = np.flatnonzero(np.concatenate(masks))
        self.num_trained = len(self._trained_M)
        indices = share_prompts(rows)
        self.packed = Packed([*indices, *_filling(indices, quantum)], device)
        at_T, tokens_T = np.concatenate(indices), np.concatenate([row.tokens for row in rows])
        tokens_N = np.zeros(self.packed.position_ids.shape[1], np.int64)
        tokens_N[at_T] = tokens_T
        self.num_computed = len(tokens_N)
        self.tokens_N = on_device(tokens_N, device)
        self.before_M = on_device(at_T[self._trained_M - 1], device)
        self.targets_M = on_device(tokens_T[self._trained_M].astype(np.int64), device)
        self.row_M = on_device(np.repeat(np.arange(len(rows)), [len(row) for row in indices])[self._trained_M], device)
        self.counts_R = torch.tensor([int(mask.sum()) for mask in masks], dtype=torch.float32)  # on the host

    def column(self, name: str) -> Tensor:
        """One of `COLUMNS_PER_TOKEN`, of the trained tokens."""
        columns = [getattr(row, name) for row in self._rows]
        if any(column is None for column in columns):
            raise LearnerError(f"rows without {name}, which the objective reads")
        return on_device(np.concatenate(columns)[self._trained_M].astype(np.float32), self._device)

    def per_row(self, values_M: Tensor) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Split values of all trained tokens by row."""
        return np.split(values_M.float().cpu().numpy(), np.cumsum(self.counts_R.numpy().astype(int))[:-1])


def _filling(indices: Sequence[Indices], quantum: int) -> list[Indices]:
    used = 1 + max(int(row.max()) for row in indices)
    end = -(-used // quantum) * quantum
    return [np.arange(begin, min(end, begin + MAX_FILLER)) for begin in range(used, end, MAX_FILLER)]


def share_prompts(rows: Sequence[TrainRow]) -> list[Indices]:
    """The positions of each row's tokens when every distinct prompt is stored once, before the first row that has it."""
    return share_beginnings([(row.tokens, row.num_shared) for row in rows])


def share_beginnings(rows: Sequence[tuple[Tokens, int]]) -> list[Indices]:
    """Of rows as their tokens and the length of the beginning that others may share."""
    beginnings: dict[bytes, Indices] = {}
    indices: list[Indices] = []
    num_tokens = 0
    for tokens, length in rows:
        key = tokens[:length].tobytes()
        if key not in beginnings:
            beginnings[key] = np.arange(num_tokens, num_tokens + length)
            num_tokens += length
        end = num_tokens + len(tokens) - length
        indices.append(np.concatenate([beginnings[key], np.arange(num_tokens, end)]))
        num_tokens = end
    return indices
