"""How many rows there are in columns, and what belongs to each."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from millstream.errors import StoreError
from millstream.store import Columns


def each(values: Any, count: int, name: str) -> list[int]:
    """One number for all rows, or one for each; an array's numbers are as good as Python's."""
    if not hasattr(values, "__len__"):
        return [operator.index(values)] * count
    if len(values) != count:
        raise StoreError(f"{len(values)} {name} for {count} rows")
    return integers(values)


def integers(values: Iterable[int]) -> list[int]:
    """Python's own, out of arrays too."""
    return [operator.index(value) for value in values]


def num_rows_of(columns: Columns) -> int:
    num_rows = len(next(iter(columns.values()), ()))
    if not num_rows or any(len(cells) != num_rows for cells in columns.values()):
        counts = {name: len(cells) for name, cells in columns.items()}
        raise StoreError(f"columns must be there and have the same number of rows, at least one: {counts or 'none'}")
    return num_rows


def token_counts(columns: Columns, tokens: Sequence[int] | None, num_rows: int) -> Sequence[int] | None:
    if tokens is not None:
        return each(tokens, num_rows, "tokens")
    cells = columns.get("tokens")
    return None if cells is None else [_length(cell) for cell in cells]


def _length(cell: Any) -> int:
    """A cell without a length (a number, or an array without dimensions) is one token."""
    try:
        return len(cell)
    except TypeError:
        return 1
