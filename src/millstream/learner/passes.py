"""Passes that survive running out of memory: the rows of a pass that failed are computed again in smaller passes.

Each row counts once. A backward pass that fails has added the gradient of all its rows to some parameters and nothing to the
others. In the passes that repeat it, those parameters are left out (`Optimizer.leaving_out`), so that no copy of the gradient
is needed to undo anything. The host raises the error when it asks for memory, before the operation is launched: what was added
and what was not is known without waiting for the device.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch

from millstream.errors import LearnerError
from millstream.learner.optimizer import Optimizer
from millstream.learner.packing import R, Tokenized, num_computed, packed

logger = logging.getLogger(__name__)
LOCKSTEP = "With pipeline.max_lag = 0 sizes are fixed at the start, since others would change the last bits"
SHARDED = "The other ranks wait for this pass"
T = TypeVar("T")


def why_fixed(*, is_sharded: bool, is_fixed: bool) -> str:
    """Why a pass that fails is not repeated; empty: it is."""
    return SHARDED if is_sharded else LOCKSTEP if is_fixed else ""


class Passes:
    """The passes of one model on one device. `table`: its config table, for messages. `why_fixed`: why a pass that fails is not
    repeated; empty if it is. `is_logged`: whether it logs a lower limit; otherwise its owner reports it."""

    def __init__(self, table: str, *, why_fixed: str = "", is_logged: bool = True) -> None:
        self.max_tokens: int | None = None  # None: memory has never run out
        self._table = table
        self._why_fixed = why_fixed
        self._is_logged = is_logged

    def run(
        self, rows: Sequence[R], one_pass: Callable[[Sequence[R]], T], optimizer: Optimizer | None = None
    ) -> list[T]:
        """The results of `one_pass` over all rows, in order: one pass, or several where memory has run out. `optimizer`: the
        one that the passes add gradients to. Raises `LearnerError` if a row alone is too much."""
        some = [rows] if self.max_tokens is None else list(packed(rows, self.max_tokens))
        return [result for part in some for result in self._try(part, one_pass, optimizer)]

    def _try(self, rows: Sequence[R], one_pass: Callable[[Sequence[R]], T], optimizer: Optimizer | None) -> list[T]:
        marks = None if optimizer is None else optimizer.marks()
        try:
            return [one_pass(rows)]
        except torch.OutOfMemoryError as error:
            self._lower(rows, error)
        # here the error is gone, and with it the tensors of its frames
        _free_cached()
        with nullcontext() if optimizer is None or marks is None else optimizer.leaving_out(optimizer.added(marks)):
            return self.run(rows, one_pass, optimizer)

    def _lower(self, rows: Sequence[Tokenized], error: torch.OutOfMemoryError) -> None:
        """Halve the limit. Raises `LearnerError` where that does not help or is not allowed."""
        found = num_computed(rows)
        what = f"out of memory in a pass of {len(rows)} rows, {found:,} tokens"
        if self._why_fixed:
            raise LearnerError(
                f"{what}. {self._why_fixed}: set {self._table}.micro_batch_tokens = {found // 2}"
            ) from error
        if len(rows) == 1:
            raise LearnerError(
                f"{what}, and a row cannot be split: set engine.cache_gb or rollout.max_tokens lower, or learner.recompute = "
                "true"
            ) from error
        self.max_tokens = found // 2
        if self._is_logged:
            logger.warning("%s: %s; from here on %s has passes of %d", self._table, what, self._table, self.max_tokens)


def _free_cached() -> None:
    """Give freed memory back to the device: the allocator keeps it in blocks of the size that was just too large."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
