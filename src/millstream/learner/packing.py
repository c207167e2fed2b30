"""Micro-batches by token budget, in the order the rows come: what is in one depends on the rows alone, never on timing."""

from __future__ import annotations

from millstream.types import TrainRow


class Packer:
    """Collects rows; gives out a micro-batch when the next row would not fit. A row above the budget goes alone."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._rows: list[TrainRow] = []
        self._tokens = 0

    def add(self, row: TrainRow) -> list[TrainRow]:
        """The micro-batch that this row completes by not fitting into it; empty while there is room."""
        full: list[TrainRow] = []
        if self._rows and self._tokens + len(row.tokens) > self._max_tokens:
            full = self.flush()
        self._rows.append(row)
        self._tokens += len(row.tokens)
        return full

    def flush(self) -> list[TrainRow]:
        rows, self._rows, self._tokens = self._rows, [], 0
        return rows
