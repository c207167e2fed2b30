"""Incremental detokenization of one answer: tokens in as they are sampled, text out as soon as it is final.

The concatenated text equals the decoded tokens up to the first stop string. Text that may still change (a part of a character)
or may be the beginning of a stop string is held back.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from millstream.env import Text
from millstream.env.tools.parse import Parser, ToolCall, tool_call_fields
from millstream.types import Message, Sampled

UNKNOWN = "\ufffd"
MAX_UNCERTAIN = 3  # bytes of an incomplete character: each may decode to `UNKNOWN`


class TextPiece(Struct, frozen=True, kw_only=True):
    """A part of an answer. Its text may lag behind its tokens."""

    text: str
    sampled: Sampled
    offsets: tuple[int, ...]  # for each token, the length of the final text before it
    calls: tuple[dict[str, Any], ...] = ()  # of tools, as `request_schema.tool_call_fields` has them


class TextStream:
    """`add` tokens, `take` text, `end`."""

    def __init__(self, text: Text, stops: Sequence[str] = ()) -> None:
        self._text = text
        self._stops = stops
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self._offsets: list[int] = []
        self.final = ""  # the final text so far, without the stop string
        self.calls: tuple[dict[str, Any], ...] = ()
        self.is_stopped = False  # by a stop string: later tokens are ignored
        self._begin = 0  # of the window of tokens that is decoded again
        self._mark = 0  # where that window begins next time
        self._num_seen = 0  # characters of the window that are in `final`
        self._num_given = 0  # characters of `final` that were taken
        self._num_taken = 0  # tokens that were taken
        self._is_ended = False

    def add(self, sampled: Sampled) -> None:
        """Add tokens one by one, so that the one that completes a stop string is the last."""
        for token, logprob, version in zip(sampled.tokens, sampled.logprobs, sampled.versions, strict=True):
            if self.is_stopped:
                return
            self._offsets.append(len(self.final))
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.versions.append(version)
            self._read(is_last=False)

    def end(self) -> None:
        """The last token was added: text that was held back is final."""
        if not self.is_stopped:
            self._read(is_last=True)
        self._is_ended = True

    def take(self) -> TextPiece | None:
        """The final text that was not taken yet, with its tokens. None: no new text yet."""
        end = len(self.final) if self._is_ended or self.is_stopped else len(self.final) - self._num_held()
        if end <= self._num_given and not (self._is_ended and self._num_taken < len(self.tokens)):
            return None
        begin = self._num_taken
        self._num_taken = len(self.tokens)
        text = self.final[self._num_given : end]
        self._num_given = end
        return TextPiece(text=text, sampled=self.sampled(begin), offsets=tuple(self._offsets[begin:]))

    def whole(self) -> TextPiece:
        sampled, offsets = self.sampled(), tuple(self._offsets)
        return TextPiece(text=self.final, sampled=sampled, offsets=offsets, calls=self.calls)

    def find_calls(self, parse: Parser, end_tokens: Sequence[int]) -> None:
        """Calls of tools are no part of the text. Text that means to be a call and is none stays."""
        tokens = self.tokens[:-1] if self.tokens and self.tokens[-1] in end_tokens else self.tokens
        turn = parse(self._text.decode(tokens, is_raw=True))
        calls = [call for call in turn.calls if isinstance(call, ToolCall)]
        if self.is_stopped or not calls or len(calls) < len(turn.calls):
            return
        self.final = turn.content
        self.calls = tuple(tool_call_fields(secrets.token_hex(5)[1:], call.name, call.arguments) for call in calls)

    def all_text(self) -> str:
        """Of all tokens, also those of a stop string."""
        return self._text.decode(self.tokens)

    def message(self) -> Message:
        """The answer as the caller will send it back."""
        fields = json.dumps({"tool_calls": self.calls}, sort_keys=True) if self.calls else ""
        return Message(role="assistant", content=self.final, fields=fields)

    def sampled(self, begin: int = 0) -> Sampled:
        return Sampled(tuple(self.tokens[begin:]), tuple(self.logprobs[begin:]), tuple(self.versions[begin:]))

    def _read(self, *, is_last: bool) -> None:
        window = self._text.decode(self.tokens[self._begin :])
        num_unknown = len(window) - len(window.rstrip(UNKNOWN))
        end = len(window) - (0 if is_last else min(num_unknown, MAX_UNCERTAIN))
        new = window[self._num_seen : end]
        self._num_seen = max(self._num_seen, end)
        if new and not num_unknown:
            # the tokens since the mark stay in the window: some decode differently at the beginning
            self._begin = self._mark
            self._mark = len(self.tokens)
            self._num_seen = len(self._text.decode(self.tokens[self._begin :]))
        if new:
            self._append(new)

    def _append(self, new: str) -> None:
        longest = max(map(len, self._stops), default=0)
        begin = max(0, len(self.final) - longest)
        self.final += new
        places = [place for stop in self._stops if (place := self.final.find(stop, begin)) >= 0]
        if places:
            self.final = self.final[: min(places)]
            self.is_stopped = True

    def _num_held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        for length in range(max(map(len, self._stops), default=1) - 1, 0, -1):
            end = self.final[-length:]
            if len(end) == length and any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
