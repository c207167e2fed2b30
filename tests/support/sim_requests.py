"""Requests for simulated engines."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.types import Request, RequestKey, Sampling


def request(
    group_id: int, member: int = 0, *, turn: int = 0, tokens: Sequence[int] = (1, 2, 3), max_tokens: int = 120
) -> Request:
    key = RequestKey(group_id=group_id, member=member, turn=turn)
    seed = group_id * 1000 + member * 10 + turn
    return Request(key=key, tokens=tuple(tokens), sampling=Sampling(max_tokens=max_tokens), seed=seed)
