"""The prefix cache of a simulated engine: which tokens of a prompt are not computed again."""

from __future__ import annotations

from millstream.types import RequestKey


class PrefixCache:
    """Lengths of the prefixes that have been computed, by conversation and by group. It takes no room. Not `is_on`: every
    prompt is computed."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._lengths: dict[tuple[int, ...], int] = {}

    def reuse(self, key: RequestKey, size: int) -> int:
        """How many of the `size` tokens of this request are known: at most all but the last. From now on all are."""
        if not self._is_on:
            return 0
        conversation, group = (key.group_id, key.member, key.attempt), (key.group_id,)
        known = min(size - 1, max(self._lengths.get(conversation, 0), self._lengths.get(group, 0)))
        self._lengths[conversation] = size
        self._lengths.setdefault(group, size)
        return known

    def keep(self, key: RequestKey, size: int) -> None:
        """A request of this conversation has ended with this many tokens."""
        if self._is_on:
            self._lengths[key.group_id, key.member, key.attempt] = size

    def drop(self, key: RequestKey) -> None:
        self._lengths.pop((key.group_id, key.member, key.attempt), None)

    def clear(self) -> None:
        self._lengths.clear()
