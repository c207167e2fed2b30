"""Which of the ready rows (or groups) a claim gets. A policy sees the longest ready first, at most `WINDOW` of them.

One of your own is a function of `(ready, want)` that returns the indices of those to hand out, named in the claim as
`package.module:function`; an empty answer means to wait. It runs where the store runs.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache

from msgspec import Struct

from millstream.errors import StoreError
from millstream.store import Want

WINDOW = 1024
NEAR = 64
"""How many that come next `balanced` looks at to find a better fit."""
BUILT_IN = ("fifo", "oldest_version", "balanced")


class Candidate(Struct, frozen=True, array_like=True):
    """A row, or a group, that is ready."""

    id: int
    version: int
    rows: int
    tokens: int


Policy = Callable[[Sequence[Candidate], Want], Sequence[int]]


@lru_cache
def find(name: str) -> Policy:
    module, colon, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function) if colon else None
    except Exception as error:  # the border to the user's code
        raise StoreError(f"no policy {name!r}: {error}") from error
    if found is None:
        raise StoreError(f"no policy {name!r}: use {', '.join(BUILT_IN)}, or one of your own: package.module:function")
    policy: Policy = found
    return policy


def ask(name: str, ready: Sequence[Candidate], want: Want) -> list[int]:
    """What a policy of the user's own answers. Whatever goes wrong in it is the claim's error."""
    policy = find(name)
    try:
        chosen = [operator.index(index) for index in dict.fromkeys(policy(ready, want))]
    except Exception as error:  # the border to the user's code
        raise StoreError(f"the policy {name} failed: {type(error).__name__}: {error}") from error
    if wrong := [index for index in chosen if not 0 <= index < len(ready)]:
        raise StoreError(f"the policy {name} chose {wrong[0]} of {len(ready)} that are ready")
    return chosen


def first(ready: Sequence[Candidate], want: Want) -> list[int]:
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
    """The first ones, except that one of them may be swapped for one that comes soon after, so that this rank gets as many
    tokens as `lead`, what it has had more than the average rank, leaves to it. Nobody is passed over for long: what was
    swapped out stands first the next time."""
    taken = first(ready, want)
    mean = sum(one.tokens for one in ready) / len(ready)
    excess = sum(ready[index].tokens for index in taken) - (mean * len(taken) - lead)
    tokens_left = math.inf if want.tokens is None else want.tokens - sum(ready[index].tokens for index in taken)
    rows_left = math.inf if want.rows is None else want.rows - sum(ready[index].rows for index in taken)
    best, swap = abs(excess), None
    for later in range(len(taken), min(len(ready), len(taken) + NEAR)):
        for place, index in enumerate(taken):
            change, more_rows = ready[later].tokens - ready[index].tokens, ready[later].rows - ready[index].rows
            if abs(excess + change) < best and change <= max(tokens_left, 0) and more_rows <= max(rows_left, 0):
                best, swap = abs(excess + change), (place, later)
    if swap is not None:
        taken[swap[0]] = swap[1]
    return taken
