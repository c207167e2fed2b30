"""OpenAI's Responses API on the same service: requests become chats, answers become output items and their events.

A parameter that would change the answer and is not supported is refused by name, as in `request_schema`. Ignored are items of
reasoning, `strict` of a tool, and what identifies or bills the caller. `previous_response_id` is known in the session of that
response only (`serve.openai.sessions`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct, structs

from millstream.events.encoding import encode_json
from millstream.serve.openai.detokenize import TextPiece
from millstream.serve.openai.request_schema import (
    BadRequest,
    ChatBody,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    ResponseInput,
    SentFunction,
    SentToolCall,
    check_neutral,
    parse_request,
)
from millstream.serve.openai.response_schema import ResponseJson
from millstream.types import Finish, Message

TEXTS = ("input_text", "output_text", "text")
CHAT_NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}  # fields of a chat, and of this API


class InputItem(Struct, kw_only=True):
    """One item of `input`; which fields it has depends on its type. Others, such as `status`, are ignored."""

    type: str = "message"
    role: str = ""
    content: str | list[ContentPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[ContentPart] | None = None


class FunctionSchema(Struct, kw_only=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ResponsesBody(Struct, forbid_unknown_fields=True, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionSchema] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    # refused, except for values without an effect (`NEUTRAL_FIELDS`)
    background: bool | None = None
    context_management: Any = None
    conversation: Any = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    moderation: Any = None
    prompt: Any = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    # ignored
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None


NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


def parse_responses(
    body: ResponsesBody, before: Sequence[Message], *, session_id: str | None, response_id: str
) -> CompletionRequest:
    """`before`: the messages of the previous response. Raises `BadRequest` for what is not supported or out of range."""
    check_neutral(body, NEUTRAL_FIELDS)
    new = list(_messages(body.input))
    if not new:
        raise BadRequest("input is empty: expected text, or at least one item", "input")
    system = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    chat = ChatBody(
        messages=[*system, *new],
        model=body.model,
        max_tokens=body.max_output_tokens,
        tools=[_tool(number, tool) for number, tool in enumerate(body.tools or ())],
        tool_choice=body.tool_choice,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
    )
    try:
        parsed = parse_request(chat, session_id=session_id)
    except BadRequest as wrong:
        name = CHAT_NAMES.get((wrong.param or "").partition("[")[0])
        if name is None:
            raise
        raise BadRequest(f"{name}: {wrong}", name) from wrong
    (messages,) = parsed.prompts
    sent = tuple(one for one in messages if isinstance(one, Message))
    begin = len(sent) - len(new)
    kept = ResponseInput(id=response_id, previous_id=body.previous_response_id, messages=sent[begin:])
    return structs.replace(
        parsed,
        prompts=((*sent[:begin], *before, *sent[begin:]),),
        response=kept if body.store is not False else None,
    )


def _tool(number: int, tool: FunctionSchema) -> dict[str, Any]:
    if tool.type != "function":
        raise BadRequest(f"tools[{number}] is of type {tool.type!r}: expected 'function'", "tools")
    if not tool.name:
        raise BadRequest(f"tools[{number}] has no name: expected {{'type': 'function', 'name': ...}}", "tools")
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}}
    return {"type": "function", "function": function}


def _messages(sent: str | list[InputItem]) -> Iterator[ChatMessage]:
    """Calls of functions belong to the assistant's message before them, as the model has written them in one turn."""
    if isinstance(sent, str):
        yield ChatMessage(role="user", content=sent)
        return
    turn: ChatMessage | None = None  # of the assistant: calls may follow
    for number, item in enumerate(sent):
        where = f"input[{number}]"
        if item.type == "function_call":
            call = SentToolCall(id=item.call_id, function=SentFunction(name=item.name, arguments=item.arguments))
            turn = turn or ChatMessage(role="assistant")
            turn.tool_calls = [*(turn.tool_calls or ()), call]
            continue
        if item.type == "reasoning":
            continue
        if turn is not None:
            yield turn
            turn = None
        if item.type == "function_call_output":
            yield ChatMessage(role="tool", content=_text(item.output, where), tool_call_id=item.call_id)
        elif item.type != "message" or not item.role:
            expected = "expected a message with a role, function_call, function_call_output or reasoning"
            raise BadRequest(f"{where} is of type {item.type!r}: {expected}", where)
        elif item.role == "assistant":
            turn = ChatMessage(role="assistant", content=_text(item.content, where))
        else:
            yield ChatMessage(role=item.role, content=_text(item.content, where))
    if turn is not None:
        yield turn


def _text(content: str | Sequence[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in TEXTS:
            raise BadRequest(f"{where} has content of type {part.type!r}: expected text", where)
    return "".join(part.text or "" for part in content)


class ResponsesWriter:
    """Writes everything that is sent in response to one request."""

    def __init__(self, body: ResponsesBody, prompt: Sequence[int], *, model: str, response_id: str) -> None:
        self._num_prompt = len(prompt)
        self._head: ResponseJson = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
        }
        self._num_events = 0
        self._output: list[ResponseJson] = []
        self._text = ""
        self._is_open = False  # whether the text may still grow
        self._finish = Finish.STOP

    def whole(self, answers: Iterable[tuple[TextPiece, Finish]], scores: object = None) -> ResponseJson:
        """There is one answer, and no scores."""
        ((piece, finish),) = answers
        text = [_message(piece.text)] if piece.text or not piece.calls else []
        return self._response(finish, [*text, *map(_function_call, piece.calls)], len(piece.sampled.tokens))

    def stream_begin(self) -> Iterator[bytes]:
        begun = self._head | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def stream_piece(self, index: int, piece: TextPiece | None, finish: Finish | None) -> Iterator[bytes]:
        if piece is not None and piece.text:
            yield from self._text_begin()
            self._text += piece.text
            yield self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=[])
        if piece is not None and piece.calls:
            yield from self._text_end()
            for call in piece.calls:
                yield from self._call(_function_call(call))
        if finish is not None:
            self._finish = finish
            if not self._output:
                yield from self._text_begin()
            yield from self._text_end()

    def stream_end(self, num_tokens: int) -> Iterator[bytes]:
        response = self._response(self._finish, self._output, num_tokens)
        yield self._event(f"response.{response['status']}", response=response)

    def _response(self, finish: Finish, output: Sequence[ResponseJson], num_tokens: int) -> ResponseJson:
        is_cut = finish is Finish.LENGTH
        return self._head | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": {
                "input_tokens": self._num_prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self._num_prompt + num_tokens,
            },
        }

    def _text_begin(self) -> Iterator[bytes]:
        """The message that has the text is the first item."""
        if self._is_open:
            return
        self._is_open = True
        item = _message("")
        self._output.append(item)
        begun = item | {"status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=begun)
        yield self._event("response.content_part.added", **self._place(), part=item["content"][0])

    def _text_end(self) -> Iterator[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._output[0]
        item["content"][0]["text"] = self._text
        yield self._event("response.output_text.done", **self._place(), text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=item["content"][0])
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _call(self, item: ResponseJson) -> Iterator[bytes]:
        place: ResponseJson = {"output_index": len(self._output)}
        self._output.append(item)
        begun = item | {"status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", **place, item=begun)
        for kind, name in (("delta", "delta"), ("done", "arguments")):
            fields = place | {"item_id": item["id"], name: item["arguments"]}
            yield self._event(f"response.function_call_arguments.{kind}", **fields)
        yield self._event("response.output_item.done", **place, item=item)

    def _place(self) -> ResponseJson:
        return {"item_id": self._output[0]["id"], "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        data = encode_json({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(16)}"


def _message(text: str) -> ResponseJson:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    head = {"type": "message", "id": f"msg_{secrets.token_hex(16)}"}
    return {**head, "status": "completed", "role": "assistant", "content": [part]}


def _function_call(call: ResponseJson) -> ResponseJson:
    function = call["function"]
    return {
        "type": "function_call",
        "id": f"fc_{secrets.token_hex(16)}",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": json.dumps(function["arguments"]),
        "status": "completed",
    }
