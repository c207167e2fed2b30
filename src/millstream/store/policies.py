"""Claim policies: which of the ready rows (or groups) a claim gets. A policy sees at most `WINDOW`, the longest ready first.

A user's own policy is a function of `(ready, want)` that returns the indices of the rows to hand out, named in the claim as
`package.module:function`; an empty answer means to wait. It runs in the store's process.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache

from msgspec import Struct

from millstream.errors import StoreError
from millstream.store.base import Want

WINDOW = 1024
SWAP_WINDOW = 64
"""The number of later candidates among which `balanced` looks for a better fit."""
BUILT_IN_POLICIES = ("fifo", "oldest_version", "balanced")


class Candidate(Struct, frozen=True, array_like=True):
    """A row, or a group, that is ready."""

    id: int
    version: int
    rows: int
    tokens: int


ClaimPolicy = Callable[[Sequence[Candidate], Want], Sequence[int]]


@lru_cache
def load_policy(name: str) -> ClaimPolicy:
    module, colon, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function) if colon else None
    except Exception as error:  # user code
        raise StoreError(f"no policy {name!r}: {error}") from error
    if found is None:
        expected = f"{', '.join(BUILT_IN_POLICIES)}, or your own function: package.module:function"
        raise StoreError(f"no policy {name!r}: use {expected}")
    policy: ClaimPolicy = found
    return policy


def call_policy(name: str, ready: Sequence[Candidate], want: Want) -> list[int]:
    """Call a user's policy. Any failure in it is raised as the claim's `StoreError`."""
    policy = load_policy(name)
    try:
        chosen = [operator.index(index) for index in dict.fromkeys(policy(ready, want))]
    except Exception as error:  # user code
        raise StoreError(f"the policy {name} failed: {type(error).__name__}: {error}") from error
    if wrong := [index for index in chosen if not 0 <= index < len(ready)]:
        raise StoreError(f"the policy {name} returned the index {wrong[0]}: expected 0 to {len(ready) - 1}")
    return chosen


def take_first(ready: Sequence[Candidate], want: Want) -> list[int]:
    """The first ones, up to the first limit; at least one."""
    taken, rows, tokens = list[int](), 0, 0
    for index, one in enumerate(ready):
        rows, tokens = rows + one.rows, tokens + one.tokens
        limits = ((want.rows, rows), (want.tokens, tokens), (want.groups, index + 1))
        if taken and any(limit is not None and found > limit for limit, found in limits):
            break
        taken.append(index)
    return taken


def balanced(ready: Sequence[Candidate], want: Want, lead: float) -> list[int]:
    """The first ones, except that one of them may be swapped for one of the next `SWAP_WINDOW`, so that the rank receives as
    many tokens as the average. `lead`: the tokens that the rank is ahead of the average. A candidate that was swapped out
    is first in the next claim, so it is not delayed for long."""
    taken = take_first(ready, want)
    mean = sum(one.tokens for one in ready) / len(ready)
    excess = sum(ready[index].tokens for index in taken) - (mean * len(taken) - lead)
    tokens_left = math.inf if want.tokens is None else want.tokens - sum(ready[index].tokens for index in taken)
    rows_left = math.inf if want.rows is None else want.rows - sum(ready[index].rows for index in taken)
    best, swap = abs(excess), None
    for later in range(len(taken), min(len(ready), len(taken) + SWAP_WINDOW)):
        for place, index in enumerate(taken):
            change, more_rows = ready[later].tokens - ready[index].tokens, ready[later].rows - ready[index].rows
            if abs(excess + change) < best and change <= max(tokens_left, 0) and more_rows <= max(rows_left, 0):
                best, swap = abs(excess + change), (place, later)
    if swap is not None:
        taken[swap[0]] = swap[1]
    return taken
