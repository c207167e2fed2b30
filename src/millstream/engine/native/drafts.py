"""Drafts: guesses of a request's next tokens, from what followed the same few tokens before, in its prompt or its answer."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_MATCH = 4
SHORTEST_MATCH = 2
WEIGHT = 1 / 8  # of the newest draft in the average of a request


class DraftHistory:
    """All tokens of a request, found by the few tokens before them, and how much of its drafts was right.

    Every token that is read is compared with a draft: with the one that a step has checked, or with the one that a step could
    have checked. `max_draft`: tokens of the latter.
    """

    def __init__(self, prompt: Sequence[int], max_draft: int) -> None:
        self._tokens = list(prompt)
        self._num_prompt = len(prompt)
        self._num_read = 0
        self._max_draft = max_draft
        self._followed: dict[tuple[int, ...], int] = {}  # a few tokens -> where the token is that followed them last
        self._draft: tuple[int, ...] = ()
        self._num_right = 0  # tokens of the draft that were sampled
        self.accepted = 0.0  # tokens of a draft that were right, averaged over the last drafts

    def read(self, sampled: Sequence[int], most: int) -> int:
        """Read the next tokens, at most `most`, of those that were sampled until now. Returns how many it has read."""
        self._tokens += sampled[len(self._tokens) - self._num_prompt :]
        begin = self._num_read
        end = min(len(self._tokens), begin + most)
        for at in range(begin, end):
            for length in range(SHORTEST_MATCH, min(at, LONGEST_MATCH) + 1):
                self._followed[tuple(self._tokens[at - length : at])] = at
            self._num_read = at + 1
            if at >= self._num_prompt:
                self._compare(self._tokens[at])
        return end - begin

    def _compare(self, token: int) -> None:
        """A draft ends with the first token that differs from it, or with the one after it."""
        if self._num_right < len(self._draft) and self._draft[self._num_right] == token:
            self._num_right += 1
            return
        self.accepted += WEIGHT * (self._num_right - self.accepted)
        self._begin_draft(self._max_draft)

    def guess(self, length: int) -> tuple[int, ...]:
        """A draft of `length` tokens, with which the next ones are compared. Empty if nothing matches, or not all was read."""
        self._begin_draft(length if self._num_read == len(self._tokens) else 0)
        return self._draft

    def _begin_draft(self, length: int) -> None:
        """Beyond the newest token, what followed the match is repeated: a loop continues."""
        self._draft = ()
        self._num_right = 0
        end = self._num_read
        for match in range(min(end, LONGEST_MATCH), SHORTEST_MATCH - 1, -1):
            at = self._followed.get(tuple(self._tokens[end - match : end]))
            if at is not None:
                self._draft = tuple(self._tokens[at + i % (end - at)] for i in range(length))
                return
