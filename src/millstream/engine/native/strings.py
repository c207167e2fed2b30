"""Stop strings: text that ends a request, looked for in the tokens that are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

DecodeTokens = Callable[[Sequence[int]], str]
MAX_CHARACTER_BYTES = 4  # of a character, and so, where every byte is a token, its tokens


def ends_with_one(tokens: Sequence[int], strings: Sequence[str], decode: DecodeTokens) -> bool:
    """Whether the newest token completes one of these. They are looked for in as many of the last tokens as they can have,
    and a few before them, since some tokens decode differently at the start of a text."""
    num = MAX_CHARACTER_BYTES * (max(map(len, strings)) + 2)
    text, before = decode(tokens[-num:]), decode(tokens[-num:-1])
    return any(text.count(string) > before.count(string) for string in strings)
