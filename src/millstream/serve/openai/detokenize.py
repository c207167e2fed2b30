"""One answer on its way: tokens in as they are sampled, text out as soon as it is certain.

The text that is given out, put together, is what the tokenizer makes of all tokens at once, up to the first stop string. Text
that may still change (half of a character) or may be the beginning of a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from millstream.env import Text
from millstream.types import Sampled

UNKNOWN = "\ufffd"
MAX_UNCERTAIN = 3  # bytes of a character that is not whole yet: each may show as `UNKNOWN`


class Piece(Struct, frozen=True, kw_only=True):
    """A stretch of an answer. Its text may lag behind its tokens, and catches up."""

    text: str
    sampled: Sampled
    offsets: tuple[int, ...]  # for each token, how much certain text stood before it


class TextStream:
    def __init__(self, text: Text, stops: Sequence[str] = ()) -> None:
        self._text = text
        self._stops = stops
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self._offsets: list[int] = []
        self.said = ""  # the text so far, without the stop string that ended it
        self.is_stopped = False  # by a stop string. What is heard after it was never said.
        self._begin = 0
        self._mark = 0
        # The window that is decoded again, where it begins next time, and how many of its characters are in `said`.
        self._num_seen = 0
        self._num_given = 0
        self._num_told = 0
        self._is_ended = False

    def hear(self, sampled: Sampled) -> None:
        """Token by token, so that the one that completes a stop string is the last."""
        for token, logprob, version in zip(sampled.tokens, sampled.logprobs, sampled.versions, strict=True):
            if self.is_stopped:
                return
            self._offsets.append(len(self.said))
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.versions.append(version)
            self._read(is_last=False)

    def end(self) -> None:
        """No more comes: what was uncertain is what it looks like."""
        if not self.is_stopped:
            self._read(is_last=True)
        self._is_ended = True

    def take(self) -> Piece | None:
        """What can be given out and was not yet. None: no text, and it goes on."""
        end = len(self.said) if self._is_ended or self.is_stopped else len(self.said) - self._num_held()
        if end <= self._num_given and not (self._is_ended and self._num_told < len(self.tokens)):
            return None
        begin = self._num_told
        self._num_told = len(self.tokens)
        text = self.said[self._num_given : end]
        self._num_given = end
        return Piece(text=text, sampled=self.sampled(begin), offsets=tuple(self._offsets[begin:]))

    def whole(self) -> Piece:
        return Piece(text=self.said, sampled=self.sampled(), offsets=tuple(self._offsets))

    def sampled(self, begin: int = 0) -> Sampled:
        return Sampled(tuple(self.tokens[begin:]), tuple(self.logprobs[begin:]), tuple(self.versions[begin:]))

    def _read(self, *, is_last: bool) -> None:
        window = self._text.decode(self.tokens[self._begin :])
        num_unknown = len(window) - len(window.rstrip(UNKNOWN))
        end = len(window) - (0 if is_last else min(num_unknown, MAX_UNCERTAIN))
        new = window[self._num_seen : end]
        self._num_seen = max(self._num_seen, end)
        if new and not num_unknown:
            # the tokens since the mark stay in the window: some decode differently where they come first
            self._begin = self._mark
            self._mark = len(self.tokens)
            self._num_seen = len(self._text.decode(self.tokens[self._begin :]))
        if new:
            self._say(new)

    def _say(self, new: str) -> None:
        longest = max(map(len, self._stops), default=0)
        begin = max(0, len(self.said) - longest)
        self.said += new
        places = [place for stop in self._stops if (place := self.said.find(stop, begin)) >= 0]
        if places:
            self.said = self.said[: min(places)]
            self.is_stopped = True

    def _num_held(self) -> int:
        """Characters at the end with which a stop string may begin."""
        for length in range(max(map(len, self._stops), default=1) - 1, 0, -1):
            end = self.said[-length:]
            if len(end) == length and any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
