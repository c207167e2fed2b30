"""Responses of OpenAI's API, complete and in chunks. In addition, a choice has `token_ids`, `token_logprobs` and
`token_versions` (in a chunk: those since the previous chunk), and a response `prompt_token_ids` (in a stream: the first chunk).

A log-probability is that of the token under the distribution that it was sampled from, including the temperature.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from starlette.responses import Response

from millstream.env import Text
from millstream.events.encoding import encode_json
from millstream.serve.auth import MAX_MESSAGE
from millstream.serve.openai.detokenize import TextPiece
from millstream.serve.openai.prompt_scores import PromptScores
from millstream.serve.openai.request_schema import CompletionRequest
from millstream.types import Finish

ResponseJson = dict[str, Any]
DONE = b"data: [DONE]\n\n"


class ResponseWriter:
    """Writes everything that is sent in response to one request."""

    def __init__(self, request: CompletionRequest, prompts: Sequence[Sequence[int]], *, model: str, text: Text) -> None:
        self._request = request
        self._prompts = prompts
        self._text = text
        kind, prefix = ("chat.completion", "chatcmpl") if request.is_chat else ("text_completion", "cmpl")
        self._head: ResponseJson = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._chunk_head = self._head | {"object": "chat.completion.chunk" if request.is_chat else kind}
        self._num_chunks = 0
        self._calling: set[int] = set()  # answers that have calls of tools

    def whole(
        self, answers: Iterable[tuple[TextPiece, Finish]], scores: Sequence[PromptScores] | None = None
    ) -> ResponseJson:
        """The answers in the order of their prompts, `n` to each; with `echo`, each after its prompt."""
        found = list(answers)
        choices = [self._choice(index, piece, finish) for index, (piece, finish) in enumerate(found)]
        if self._request.is_echoed:
            choices = [
                choice | self._echoed(choice, self._prompts[index], None if scores is None else scores[index])
                for index, choice in enumerate(choices)
            ]
        num_tokens = sum(len(piece.sampled.tokens) for piece, _ in found)
        return self._head | {"choices": choices, "usage": self.usage(num_tokens)} | self._prompt_ids()

    def stream_begin(self) -> Iterator[bytes]:
        return map(stream_event, self._first_chunks())

    def stream_piece(self, index: int, piece: TextPiece | None, finish: Finish | None) -> Iterator[bytes]:
        yield stream_event(self.chunk(index, piece, finish))

    def stream_end(self, num_tokens: int) -> Iterator[bytes]:
        """The usage, if it was requested."""
        if self._request.has_usage:
            yield stream_event(self._chunk({"choices": [], "usage": self.usage(num_tokens)}))
        yield DONE

    def chunk(self, index: int, piece: TextPiece | None, finish: Finish | None) -> ResponseJson:
        """The next text of one answer; without a piece, its end."""
        choice: ResponseJson = {
            "index": index,
            "finish_reason": None if finish is None else self._finish_reason(index, finish),
            "logprobs": None,
        }
        if piece is not None and piece.calls:
            self._calling.add(index)
        text, calls = ("", ()) if piece is None else (piece.text, piece.calls)
        content: ResponseJson = {"content": text} if text else {}
        if calls:
            content["tool_calls"] = [{"index": n, **_sent(call)} for n, call in enumerate(calls)]
        choice |= {"delta": content} if self._request.is_chat else {"text": text}
        if piece is not None:
            choice |= self._tokens(piece)
        return self._chunk({"choices": [choice]})

    def _first_chunks(self) -> list[ResponseJson]:
        """The roles, with which a chat begins; the first chunk of all has the prompt's tokens."""
        if not self._request.is_chat:
            return []
        roles = (
            {"index": n, "finish_reason": None, "delta": {"role": "assistant", "content": ""}} for n in self._indices()
        )
        return [self._chunk({"choices": [role]}) for role in roles]

    def usage(self, num_tokens: int) -> ResponseJson:
        num_prompt = sum(map(len, self._prompts))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt + num_tokens,
        }

    def _indices(self) -> range:
        return range(len(self._prompts) * self._request.num_choices)

    def _chunk(self, content: ResponseJson) -> ResponseJson:
        extra = self._prompt_ids() if self._num_chunks == 0 else {}
        self._num_chunks += 1
        return self._chunk_head | content | extra

    def _prompt_ids(self) -> ResponseJson:
        """In the shape of the prompt: ids, or a list of ids per prompt."""
        return {"prompt_token_ids": self._prompts if self._request.is_list else self._prompts[0]}

    def _choice(self, index: int, piece: TextPiece, finish: Finish) -> ResponseJson:
        content: ResponseJson = {"text": piece.text}
        if self._request.is_chat:
            content = {"message": {"role": "assistant", "content": piece.text}}
        if piece.calls:
            self._calling.add(index)
            content["message"] |= {"content": piece.text or None, "tool_calls": [_sent(call) for call in piece.calls]}
        reason = self._finish_reason(index, finish)
        return {"index": index, "finish_reason": reason, "logprobs": None} | content | self._tokens(piece)

    def _finish_reason(self, index: int, finish: Finish) -> str:
        return "tool_calls" if index in self._calling else finish.value

    def _echoed(self, choice: ResponseJson, prompt: Sequence[int], scores: PromptScores | None) -> ResponseJson:
        """The prompt's text and, where they were asked for, its log-probabilities before those of the answer. The first token
        has none. `top_logprobs` has the most likely token and the one that is there."""
        text, answer = self._text.decode(prompt), choice["logprobs"]
        if scores is None or answer is None:
            return {"text": text + choice["text"]}
        names = [self._text.decode([token]) for token in prompt]
        tops: list[ResponseJson | None] = [None]
        for name, logprob, top in zip(names[1:], scores.logprobs, scores.top, strict=True):
            tops.append({name: logprob} | {self._text.decode([top.token]): top.logprob})
        pairs = zip(answer["tokens"], answer["token_logprobs"], strict=True)
        offsets = itertools.accumulate(map(len, names), initial=0)
        return {
            "text": text + choice["text"],
            "logprobs": {
                "tokens": [*names, *answer["tokens"]],
                "token_logprobs": [None, *scores.logprobs, *answer["token_logprobs"]],
                "top_logprobs": [*tops, *({name: logprob} for name, logprob in pairs)],
                "text_offset": [*list(offsets)[:-1], *(len(text) + offset for offset in answer["text_offset"])],
            },
        }

    def _tokens(self, piece: TextPiece) -> ResponseJson:
        sampled = piece.sampled
        found: ResponseJson = {
            "token_ids": sampled.tokens,
            "token_logprobs": sampled.logprobs,
            "token_versions": sampled.versions,
        }
        return found | ({"logprobs": self._logprobs(piece)} if self._request.has_logprobs else {})

    def _logprobs(self, piece: TextPiece) -> ResponseJson:
        """`bytes` is None: the text of a token that is a part of a character does not have them."""
        names = [self._text.decode([token]) for token in piece.sampled.tokens]
        if not self._request.is_chat:
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


def _sent(call: ResponseJson) -> ResponseJson:
    """A call of a tool as OpenAI's API has it: its arguments as a string."""
    function = call["function"]
    return call | {"function": {"name": function["name"], "arguments": json.dumps(function["arguments"])}}


def error_json(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    *,
    param: str | None = None,
    code: str | None = None,
) -> Response:
    error = error_object(status, message, param=param, code=code)
    return json_response({"type": "error", "error": error}, status, headers)  # the type: for Anthropic's clients


def error_object(status: int, message: str, *, param: str | None = None, code: str | None = None) -> ResponseJson:
    kinds = {401: ("authentication_error", "invalid_api_key"), 429: ("rate_limit_error", "rate_limit_exceeded")}
    kind, usual = kinds.get(status, ("invalid_request_error" if status < 500 else "server_error", None))
    return {"message": message[:MAX_MESSAGE], "type": kind, "param": param, "code": code or usual}


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(value), status, headers, media_type="application/json")


def stream_event(value: ResponseJson) -> bytes:
    """One server-sent event of a stream."""
    return b"data: " + encode_json(value) + b"\n\n"
