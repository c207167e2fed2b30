"""A tokenizer without a model: one token per byte, and a chat template like ChatML. For checking environments before there is a
model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from millstream.env.base import Content
from millstream.types import Message

SPECIAL = {"<|im_end|>": 256, "<|im_start|>": 257}
SPLIT = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")


class ByteText:
    """A `millstream.env.Text`."""

    has_chat = True
    end_token = SPECIAL["<|im_end|>"]
    tool_format = "hermes"

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for piece in SPLIT.split(text):
            tokens += [SPECIAL[piece]] if piece in SPECIAL else piece.encode("utf-8", "surrogatepass")
        return tokens

    def opening(self, content: Content) -> list[int]:
        return self.encode(content if isinstance(content, str) else self.render(content))

    def render(self, messages: Sequence[Message]) -> str:
        turns = (f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in messages)
        return "".join(turns) + "<|im_start|>assistant\n"

    def decode(self, tokens: Sequence[int], *, is_raw: bool = False) -> str:
        names = {number: name.encode() if is_raw else b"" for name, number in SPECIAL.items()}
        return b"".join(names.get(token, bytes([token % 256])) for token in tokens).decode("utf-8", "replace")
