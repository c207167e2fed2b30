"""Validation of the columns of a put or a write, and the numbers that belong to each row."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from sys import getsizeof
from typing import Any

from millstream.errors import StoreError
from millstream.store.base import Columns

ROW_BYTES = 512
"""What the store itself needs for a row, about; the same for a column of a put or a write:"""
COLUMN_BYTES = 256
_SCALARS = frozenset((int, float, bool, str, bytes))


def each(values: Any, count: int, name: str) -> list[int]:
    """One number for all rows, or one for each, as Python integers."""
    if type(values) is int:
        return [values] * count
    if not hasattr(values, "__len__"):
        return [operator.index(values)] * count
    if len(values) != count:
        raise StoreError(f"{len(values)} {name} for {count} rows")
    return integers(values)


def integers(values: Iterable[int]) -> list[int]:
    """As Python integers, also from arrays."""
    return [operator.index(value) for value in values]


def num_rows_of(columns: Columns) -> int:
    num_rows = -1
    for cells in columns.values():
        if len(cells) != num_rows:
            num_rows = len(cells) if num_rows < 0 else 0
            if not num_rows:
                break
    if num_rows < 1:
        counts = {name: len(cells) for name, cells in columns.items()}
        raise StoreError(
            f"expected at least one column, all with the same number of rows, at least one: found {counts}"
        )
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


def num_bytes_of(columns: Columns, num_rows: int) -> int:
    """The memory that the columns need, about. Of structs and other objects only the outermost is counted."""
    nbytes = ROW_BYTES * num_rows + COLUMN_BYTES * len(columns)
    for cells in columns.values():
        if (size := getattr(cells, "nbytes", None)) is not None:
            nbytes += int(size)
        elif set(map(type, cells)) <= _SCALARS:
            nbytes += sum(map(getsizeof, cells))
        else:
            nbytes += sum(map(_num_bytes, cells))
    return nbytes


def _num_bytes(cell: Any) -> int:
    """Of a cell with everything that is nested in it."""
    nbytes, unseen = 0, [cell]
    while unseen:
        one = unseen.pop()
        size = getattr(one, "nbytes", None)
        nbytes += getsizeof(one) if size is None else int(size)
        if isinstance(one, dict):
            unseen.extend(one)
            unseen.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            unseen.extend(one)
    return nbytes
