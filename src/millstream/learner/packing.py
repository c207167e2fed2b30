"""Micro-batches by token budget, in the order of the rows, and the distribution of a micro-batch over ranks. Deterministic: the
result depends on the rows alone, never on timing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from millstream.types import TrainRow

REPEATED = 8  # tokens of a prompt that is in the pass already count as one: only keys and values are repeated


class Tokenized(Protocol):
    """A row of a pass. The first `num_shared` of its tokens, its `prompt`, are computed once for all rows that have it."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_shared(self) -> int: ...
    @property
    def prompt(self) -> bytes: ...


R = TypeVar("R", bound=Tokenized)
FloatT = TypeVar("FloatT", bound=np.floating[Any])


class Packer(Generic[R]):
    """Collects rows and returns a micro-batch when the next row would not fit. A row above the budget is one by itself.

    What counts are the tokens that a pass computes. Rows of one prompt that come one after the other are a larger micro-batch
    than as many rows of different prompts: with long prompts and short completions most of their tokens are the same."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._rows: list[R] = []
        self._tokens = 0
        self._prompts: set[bytes] = set()

    def add(self, row: R) -> list[R]:
        """The micro-batch that this row did not fit into; empty while there is room."""
        full: list[R] = []
        prompt = row.prompt
        size = _size(row, is_repeated=prompt in self._prompts)
        if self._rows and self._tokens + size > self._max_tokens:
            full, size = self.flush(), _size(row, is_repeated=False)
        self._rows.append(row)
        self._tokens += size
        self._prompts.add(prompt)
        return full

    def flush(self) -> list[R]:
        rows = self._rows
        self._rows = []
        self._tokens = 0
        self._prompts = set()
        return rows


def _size(row: Tokenized, *, is_repeated: bool) -> int:
    return row.num_tokens - (row.num_shared - row.num_shared // REPEATED if is_repeated else 0)


def packed(rows: Iterable[R], max_tokens: int) -> Iterator[list[R]]:
    """Micro-batches of at most `max_tokens` tokens to compute, in order."""
    packer = Packer[R](max_tokens)
    for row in rows:
        if full := packer.add(row):
            yield full
    if rest := packer.flush():
        yield rest


def num_computed(rows: Sequence[Tokenized]) -> int:
    """What a pass over these rows counts, as a `Packer` counts it."""
    prompts: set[bytes] = set()
    total = 0
    for row in rows:
        prompt = row.prompt
        total += _size(row, is_repeated=prompt in prompts)
        prompts.add(prompt)
    return total


MAX_IMBALANCE = 1.1  # tokens of the fullest rank, with rows of one prompt kept together, over those without


def deal(rows: Sequence[TrainRow], num_ranks: int, *, max_tokens: int) -> list[list[list[TrainRow]]]:
    """Rows by rank, balanced by the tokens to compute, as passes of at most `max_tokens`. Every rank has the same number of
    passes, some of them empty: a pass is a collective."""
    by_rank = [list(packed(share, max_tokens)) for share in deal_shares(rows, num_ranks)]
    most = max(map(len, by_rank))
    return [passes + [[] for _ in range(most - len(passes))] for passes in by_rank]


def deal_passes(rows: Sequence[TrainRow], num_ranks: int, *, max_tokens: int) -> list[list[list[TrainRow]]]:
    """As `deal`, but a single rank gets the rows as they are, in one pass: what a model on a thread of this process gets."""
    return [[list(rows)]] if num_ranks == 1 else deal(rows, num_ranks, max_tokens=max_tokens)


def deal_shares(rows: Sequence[TrainRow], num: int) -> list[list[TrainRow]]:
    """Balanced by the tokens to compute; rows of one prompt stay together, unless that would leave others without work."""
    if num == 1:
        return [list(rows)]
    shares = _balanced(_by_prompt(rows), num)
    apart = _balanced([[row] for row in rows], num)
    return apart if _fullest(shares) > MAX_IMBALANCE * _fullest(apart) else shares


def numbers_by_row(
    rows: Sequence[TrainRow], rows_of: Sequence[Sequence[TrainRow]], found: Sequence[NDArray[FloatT]]
) -> list[NDArray[FloatT]]:
    """Numbers of the trained tokens of each row. They were found by rank, in the order of its own rows."""
    by_row: dict[int, NDArray[FloatT]] = {}
    for own, numbers in zip(rows_of, found, strict=True):
        ends = np.cumsum([row.num_trained for row in own])
        by_row |= zip(map(id, own), np.split(numbers, ends[:-1]), strict=True) if own else ()
    return [by_row[id(row)] for row in rows]


def _balanced(bundles: Sequence[list[TrainRow]], num_ranks: int) -> list[list[TrainRow]]:
    """Greedy: the largest bundle first, each to the rank with the fewest tokens."""
    shares: list[list[TrainRow]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for bundle in sorted(bundles, key=num_computed, reverse=True):  # stable: equals keep their order
        rank = loads.index(min(loads))
        shares[rank] += bundle
        loads[rank] += num_computed(bundle)
    return shares


def _by_prompt(rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
    bundles: dict[bytes, list[TrainRow]] = {}
    for row in rows:
        bundles.setdefault(row.prompt, []).append(row)
    return list(bundles.values())


def _fullest(shares: Sequence[Sequence[TrainRow]]) -> int:
    return max(map(num_computed, shares))
