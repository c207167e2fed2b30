"""Answers in OpenAI's format, whole and in chunks. Beyond it, a choice has `token_ids`, `token_logprobs` and `token_versions`
(in a chunk: those since the chunk before), and a reply `prompt_token_ids` (in a stream: its first chunk).

A log-probability is that of the token under the distribution that it was sampled from, temperature included.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from millstream.env import Text
from millstream.serve.openai.detokenize import Piece
from millstream.serve.openai.request_schema import Ask
from millstream.types import Finish

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


class Writer:
    """Of all that is answered to one request."""

    def __init__(self, ask: Ask, prompts: Sequence[Sequence[int]], *, model: str, text: Text) -> None:
        self._ask = ask
        self._prompts = prompts
        self._text = text
        kind, prefix = ("chat.completion", "chatcmpl") if ask.is_chat else ("text_completion", "cmpl")
        self._head: Json = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._chunk_head = self._head | {"object": "chat.completion.chunk" if ask.is_chat else kind}
        self._num_chunks = 0

    def whole(self, answers: Iterable[tuple[Piece, Finish]]) -> Json:
        """The answers in the order of their prompts, `n` to each."""
        found = list(answers)
        choices = [self._choice(index, piece, finish) for index, (piece, finish) in enumerate(found)]
        num_tokens = sum(len(piece.sampled.tokens) for piece, _ in found)
        return self._head | {"choices": choices, "usage": self.usage(num_tokens)} | self._prompt_ids()

    def chunk(self, index: int, piece: Piece | None, finish: Finish | None) -> Json:
        """More of one answer; without a piece, its end."""
        choice: Json = {"index": index, "finish_reason": None if finish is None else finish.value, "logprobs": None}
        text = "" if piece is None else piece.text
        choice |= {"delta": {"content": text} if text else {}} if self._ask.is_chat else {"text": text}
        if piece is not None:
            choice |= self._tokens(piece)
        return self._chunk({"choices": [choice]})

    def first_chunks(self) -> list[Json]:
        """A chat begins with who speaks; and the first chunk of all says what the model was shown."""
        if not self._ask.is_chat:
            return []
        roles = (
            {"index": n, "finish_reason": None, "delta": {"role": "assistant", "content": ""}} for n in self._indices()
        )
        return [self._chunk({"choices": [role]}) for role in roles]

    def last_chunk(self, num_tokens: int) -> Json | None:
        """The usage, where it is asked for."""
        return self._chunk({"choices": [], "usage": self.usage(num_tokens)}) if self._ask.has_usage else None

    def usage(self, num_tokens: int) -> Json:
        num_prompt = sum(map(len, self._prompts))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        }

    def _indices(self) -> range:
        return range(len(self._prompts) * self._ask.num_choices)

    def _chunk(self, content: Json) -> Json:
        extra = self._prompt_ids() if self._num_chunks == 0 else {}
        self._num_chunks += 1
        return self._chunk_head | content | extra

    def _prompt_ids(self) -> Json:
        """In the shape of the prompt: ids, or a list of ids for each of several."""
        return {"prompt_token_ids": self._prompts if self._ask.is_list else self._prompts[0]}

    def _choice(self, index: int, piece: Piece, finish: Finish) -> Json:
        said: Json = {"text": piece.text}
        if self._ask.is_chat:
            said = {"message": {"role": "assistant", "content": piece.text}}
        return {"index": index, "finish_reason": finish.value, "logprobs": None} | said | self._tokens(piece)

    def _tokens(self, piece: Piece) -> Json:
        sampled = piece.sampled
        found: Json = {
            "token_ids": sampled.tokens,
            "token_logprobs": sampled.logprobs,
            "token_versions": sampled.versions,
        }
        return found | ({"logprobs": self._logprobs(piece)} if self._ask.has_logprobs else {})

    def _logprobs(self, piece: Piece) -> Json:
        """`bytes` is None: of a token that is half of a character, the text does not say them."""
        names = [self._text.decode([token]) for token in piece.sampled.tokens]
        if not self._ask.is_chat:
            return {
                "tokens": names,
                "token_logprobs": piece.sampled.logprobs,
                "top_logprobs": None,
                "text_offset": piece.offsets,
            }
        pairs = zip(names, piece.sampled.logprobs, strict=True)
        return {
            "content": [{"token": t, "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs],
            "refusal": None,
        }


def refusal(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    *,
    param: str | None = None,
    code: str | None = None,
) -> Response:
    return reply({"error": fault(status, message, param=param, code=code)}, status, headers)


def fault(status: int, message: str, *, param: str | None = None, code: str | None = None) -> Json:
    kinds = {401: ("authentication_error", "invalid_api_key"), 429: ("rate_limit_error", "rate_limit_exceeded")}
    kind, usual = kinds.get(status, ("invalid_request_error" if status < 500 else "server_error", None))
    return {"message": message, "type": kind, "param": param, "code": code or usual}


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")


def event(value: Json) -> bytes:
    """As it goes into a stream."""
    return b"data: " + encode(value) + b"\n\n"


def encode(value: Any) -> bytes:
    """Half of a character, if there is one in a text, becomes a question mark."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_in_unicode(value))


def _in_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_in_unicode(key): _in_unicode(item) for key, item in value.items()}
    return [_in_unicode(item) for item in value] if isinstance(value, list | tuple) else value
