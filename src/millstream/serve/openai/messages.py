"""Anthropic's Messages API on the same service: requests become chats, answers become messages and their events.

A parameter that would change the answer and is not supported is refused by name, as in `request_schema`. `metadata`,
`service_tier` and what marks text for caching are ignored.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from millstream.events.encoding import encode_json
from millstream.serve.openai.detokenize import TextPiece
from millstream.serve.openai.request_schema import (
    BadRequest,
    ChatBody,
    ChatMessage,
    CompletionRequest,
    SentFunction,
    SentToolCall,
    parse_request,
)
from millstream.serve.openai.response_schema import ResponseJson
from millstream.types import Finish

STOP_REASONS = {Finish.STOP: "end_turn", Finish.LENGTH: "max_tokens"}


class ContentBlock(Struct, kw_only=True):
    """A part of a message, or of a tool's result. Other fields, such as `cache_control`, are ignored."""

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None


class SentMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | list[ContentBlock]


class ToolSchema(Struct, kw_only=True):
    name: str
    description: str = ""
    input_schema: dict[str, Any] = {}
    type: str | None = None


class MessagesBody(Struct, forbid_unknown_fields=True, kw_only=True):
    messages: list[SentMessage]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[ToolSchema] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


def parse_messages(body: MessagesBody, *, session_id: str | None) -> CompletionRequest:
    """Raises `BadRequest` for what is not supported or out of range."""
    choice = (body.tool_choice or {}).get("type", "auto")
    if choice not in ("auto", "none"):
        raise BadRequest(f"tool_choice = {choice!r} is not supported here: leave it out", "tool_choice")
    if (body.thinking or {}).get("type", "disabled") != "disabled":
        raise BadRequest("thinking is not supported here: leave it out", "thinking")
    messages = [ChatMessage(role="system", content=_text(body.system, "system"))] if body.system else []
    for number, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{number}]")
    tools = [
        {
            "type": "function",
            "function": {"name": one.name, "description": one.description, "parameters": one.input_schema},
        }
        for one in body.tools or ()
    ]
    chat = ChatBody(
        messages=messages,
        model=body.model,
        max_tokens=body.max_tokens,
        tools=tools,
        tool_choice=choice,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
    )
    return parse_request(chat, session_id=session_id)


def _messages(message: SentMessage, where: str) -> Iterator[ChatMessage]:
    """Results of tools are messages of their own, before the text."""
    if isinstance(message.content, str):
        yield ChatMessage(role=message.role, content=message.content)
        return
    calls = []
    for block in message.content:
        if block.type == "tool_result":
            yield ChatMessage(role="tool", content=_text(block.content, where), tool_call_id=block.tool_use_id)
        elif block.type == "tool_use":
            calls.append(
                SentToolCall(id=block.id, function=SentFunction(name=block.name, arguments=json.dumps(block.input)))
            )
    rest = [block for block in message.content if block.type not in ("tool_result", "tool_use")]
    if rest or calls:
        yield ChatMessage(role=message.role, content=_text(rest, where), tool_calls=calls or None)


def _text(content: str | Sequence[ContentBlock] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.type != "text":
            raise BadRequest(f"{where} has a block of type {block.type!r}: expected text", where)
    return "".join(block.text for block in content)


class MessageWriter:
    """Writes everything that is sent in response to one request."""

    def __init__(self, prompt: Sequence[int], *, model: str) -> None:
        self._num_prompt = len(prompt)
        self._head: ResponseJson = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._num_blocks = 0
        self._has_calls = False
        self._reason_at_end = ""

    def whole(self, answers: Iterable[tuple[TextPiece, Finish]], scores: object = None) -> ResponseJson:
        """There is one answer, and no scores."""
        ((piece, finish),) = answers
        self._has_calls = bool(piece.calls)
        text = [{"type": "text", "text": piece.text}] if piece.text or not piece.calls else []
        ended = {"stop_reason": self._reason(finish), "stop_sequence": None}
        blocks = {"content": [*text, *map(_tool_use, piece.calls)]}
        return self._head | blocks | ended | {"usage": self._usage(len(piece.sampled.tokens))}

    def stream_begin(self) -> Iterator[bytes]:
        empty: ResponseJson = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        yield _event("message_start", message=self._head | empty)
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def stream_piece(self, index: int, piece: TextPiece | None, finish: Finish | None) -> Iterator[bytes]:
        if piece is not None and piece.text:
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})
        if piece is not None and piece.calls:
            self._has_calls = True
            for number, call in enumerate(piece.calls, 1):
                block = _tool_use(call)
                yield _event("content_block_stop", index=number - 1)
                yield _event("content_block_start", index=number, content_block=block | {"input": {}})
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _event("content_block_delta", index=number, delta=delta)
                self._num_blocks = number
        if finish is not None:
            yield _event("content_block_stop", index=self._num_blocks)
            self._reason_at_end = self._reason(finish)

    def stream_end(self, num_tokens: int) -> Iterator[bytes]:
        delta = {"stop_reason": self._reason_at_end, "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage={"output_tokens": num_tokens})
        yield _event("message_stop")

    def _reason(self, finish: Finish) -> str:
        return "tool_use" if self._has_calls else STOP_REASONS[finish]

    def _usage(self, num_tokens: int) -> ResponseJson:
        return {"input_tokens": self._num_prompt, "output_tokens": num_tokens}


def _tool_use(call: ResponseJson) -> ResponseJson:
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": call["function"]["name"],
        "input": call["function"]["arguments"],
    }


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode_json({"type": name, **fields}) + b"\n\n"
