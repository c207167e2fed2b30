"""Stop strings: what is sampled is tokens, and whoever reads it looks for text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
MAX_BYTES = 4
"""Of a character, and so, where every byte is a token, its tokens."""


def ends_with_one(tokens: Sequence[int], strings: Sequence[str], decode: Decode) -> bool:
    """Whether the newest token completes one of these. It is looked for in as many of the last tokens as it can have, and a few
    before them, since some decode differently where they come first."""
    most = MAX_BYTES * (max(map(len, strings)) + 2)
    said, before = decode(tokens[-most:]), decode(tokens[-most:-1])
    return any(said.count(string) > before.count(string) for string in strings)
