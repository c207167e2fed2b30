"""Requests of OpenAI's API: their bodies, validated and converted to a `CompletionRequest`.

A parameter that would change the answer and is not supported is refused by name, and so is an unknown one. Ignored are only
`return_token_ids` and what identifies the caller (`user`, `metadata`, `safety_identifier`, `prompt_cache_key`). Values without
an effect (`best_of = 1`) are accepted.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec import Struct

from millstream.env.tools import tool_call_fields
from millstream.serve.http import HttpError
from millstream.types import TOOLS_ROLE, Message

PromptInput = str | tuple[int, ...] | tuple[Message, ...]  # text, token ids, or a chat

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MIN_TEMPERATURE = 0.001
MAX_TEMPERATURE = 2.0
MAX_CHOICES = 128  # answers to one request: `n` times its prompts
DEFAULT_MAX_TOKENS = 16  # of a completion without max_tokens; a chat may use the whole context
MAX_STOP_TOKENS = 256
MAX_CHARACTERS_PER_TOKEN = 16  # of a prompt, on average: text has 3 to 5


class BadRequest(HttpError):
    """A malformed request; `param` is the field that is wrong."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(status, message)
        self.param = param
        self.code = code


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None


class CompletionFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both kinds of completions. None is the same as left out."""

    model: str | None = None  # None: the one that is served
    max_tokens: int | None = None
    temperature: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: str | None = None  # not OpenAI's: see `serve.openai.sessions`. Or the header X-Session-Id
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None


class CompletionBody(CompletionFields, kw_only=True):
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    top_k: int | None = None  # not OpenAI's, like the following
    stop_token_ids: list[int] | None = None  # end tokens of the answer. None: the model's
    num_sampled: int | None = None  # the last tokens of the prompt that were sampled already, with this seed
    return_token_ids: bool | None = None  # always returned


class ContentPart(Struct, kw_only=True):
    """A part of a message's content. Types other than text are refused."""

    type: str
    text: str | None = None


class SentFunction(Struct, kw_only=True):
    name: str
    arguments: str = ""  # a JSON object


class SentToolCall(Struct, kw_only=True):
    id: str
    function: SentFunction
    type: str = "function"


class ChatMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    reasoning_content: Any = None
    provider_specific_fields: Any = None  # LiteLLM's, which it sends back: ignored
    tool_calls: list[SentToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(CompletionFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


# Unsupported parameters, with their values that have no effect
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "verbosity": (),
}


class ResponseInput(Struct, frozen=True, kw_only=True):
    """A call of the Responses API, as later calls of its session refer to it."""

    id: str
    previous_id: str | None
    messages: tuple[Message, ...]  # its own, without those of the previous response


class CompletionRequest(Struct, frozen=True, kw_only=True):
    prompts: tuple[PromptInput, ...]
    is_list: bool  # whether a list of prompts was sent, even of one
    is_chat: bool
    model: str | None
    max_tokens: int | None  # None: up to the context
    temperature: float
    top_p: float
    num_choices: int  # for each prompt
    stops: tuple[str, ...]
    seed: int | None
    is_streamed: bool
    has_usage: bool
    has_logprobs: bool
    session_id: str | None
    top_k: int = 0
    stop_tokens: tuple[int, ...] | None = None  # None: the model's own
    num_sampled: int = 0
    has_tools: bool = False  # answers may have calls of tools
    is_echoed: bool = False  # the prompt is part of the answer, with its log-probabilities
    response: ResponseInput | None = None  # kept in the session


def parse_request(body: CompletionBody | ChatBody, *, session_id: str | None) -> CompletionRequest:
    """Raises `BadRequest` for what is not supported or out of range."""
    check_neutral(body, NEUTRAL)
    prompts = (_chat(body),) if isinstance(body, ChatBody) else _prompts(body.prompt)
    num_choices = _within("n", 1 if body.n is None else body.n, 1, MAX_CHOICES)
    if len(prompts) * num_choices > MAX_CHOICES:
        raise BadRequest(f"{len(prompts)} prompts and n = {num_choices}: at most {MAX_CHOICES} answers at a time", "n")
    session_id = session_id or body.session_id
    if session_id is not None and len(prompts) * num_choices > 1:
        raise BadRequest("a call in a session has one prompt and one answer: leave n out, and send one prompt", "n")
    if getattr(body, "echo", False) and (body.stream or num_choices > 1 or session_id is not None):
        raise BadRequest("echo = true: expected one answer to a prompt, and neither a stream nor a session", "echo")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options goes with stream = true", "stream_options")
    return CompletionRequest(
        prompts=prompts,
        is_list=isinstance(body, CompletionBody) and _is_list(body.prompt),
        is_chat=isinstance(body, ChatBody),
        model=body.model,
        max_tokens=_max_tokens(body),
        temperature=_temperature(body.temperature),
        top_p=_top_p(body.top_p),
        num_choices=num_choices,
        stops=_stops(body.stop),
        seed=body.seed,
        is_streamed=bool(body.stream),
        has_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        has_logprobs=_has_logprobs(body),
        session_id=session_id,
        **_extensions(body),
    )


def _extensions(body: CompletionBody | ChatBody) -> dict[str, Any]:
    """Parameters of a completion beyond OpenAI's API."""
    if isinstance(body, ChatBody):
        return {"has_tools": _has_tools(body)}
    top_k, num_sampled = body.top_k or 0, body.num_sampled or 0
    if top_k < 0:
        raise BadRequest(f"top_k = {top_k}: expected at least 0, which is all tokens", "top_k")
    is_one = all(isinstance(one, int) for one in body.prompt)
    if num_sampled and not (is_one and 0 < num_sampled < len(body.prompt) and body.seed is not None):
        why = "expected a seed, and one prompt of token ids that is longer than num_sampled"
        raise BadRequest(f"num_sampled = {num_sampled}: {why}", "num_sampled")
    if len(body.stop_token_ids or ()) > MAX_STOP_TOKENS:
        why = f"stop_token_ids has {len(body.stop_token_ids or ())} tokens: expected at most {MAX_STOP_TOKENS}"
        raise BadRequest(why, "stop_token_ids")
    stops = None if body.stop_token_ids is None else tuple(body.stop_token_ids)
    return {"top_k": top_k, "stop_tokens": stops, "num_sampled": num_sampled, "is_echoed": bool(body.echo)}


def check_neutral(body: Struct, neutral: dict[str, tuple[Any, ...]]) -> None:
    """Raises `BadRequest` for a parameter with another value than those without an effect."""
    for name, values in neutral.items():
        value = getattr(body, name, None)
        if isinstance(value, dict):
            value = {key: one for key, one in value.items() if one is not None}
        if value is not None and value not in values:
            raise BadRequest(f"{name} = {value!r} is not supported here: leave {name} out"[:400], name)


def _prompts(prompt: str | list[int | str | list[int]]) -> tuple[PromptInput, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise BadRequest("prompt is empty: expected text, token ids, or a list of either", "prompt")
    if all(isinstance(one, int) for one in prompt):
        return (tuple(one for one in prompt if isinstance(one, int)),)
    if all(isinstance(one, str) for one in prompt) or all(isinstance(one, list) for one in prompt):
        return tuple(tuple(one) if isinstance(one, list) else str(one) for one in prompt)
    raise BadRequest("prompt mixes kinds: expected text, token ids, or a list of either", "prompt")


def _is_list(prompt: str | list[int | str | list[int]]) -> bool:
    return isinstance(prompt, list) and not isinstance(prompt[0], int)


def _has_tools(body: ChatBody) -> bool:
    return bool(body.tools) and body.tool_choice != "none"


def _chat(body: ChatBody) -> tuple[Message, ...]:
    if not body.messages:
        raise BadRequest("messages is empty: expected at least one", "messages")
    messages = tuple(_message(number, message) for number, message in enumerate(body.messages))
    if not _has_tools(body):
        return messages
    for number, tool in enumerate(body.tools or ()):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            expected = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
            raise BadRequest(f"tools[{number}]: expected {expected}", "tools")
    return (Message(role=TOOLS_ROLE, content=json.dumps(body.tools)), *messages)


def _message(number: int, message: ChatMessage) -> Message:
    where = f"messages[{number}]"
    for name in ("refusal", "annotations", "audio", "function_call", "reasoning_content"):
        if getattr(message, name):
            raise BadRequest(f"{where}.{name} is not supported here: leave it out", f"{where}.{name}")
    if message.role == TOOLS_ROLE:
        raise BadRequest(f"{where}.role is {TOOLS_ROLE!r}: the tools are a field of the request", f"{where}.role")
    for name, role in (("name", "tool"), ("tool_call_id", "tool"), ("tool_calls", "assistant")):
        if getattr(message, name) and message.role != role:
            raise BadRequest(f"{where}.{name} is of a message of role {role}: leave it out", f"{where}.{name}")
    fields: dict[str, Any] = {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name))}
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(one, f"{where}.tool_calls") for one in message.tool_calls]
    more = json.dumps(fields, sort_keys=True) if fields else ""
    role = "system" if message.role == "developer" else message.role  # its newer name, which few templates know
    return Message(role=role, content=_content(message, where), fields=more)


def _content(message: ChatMessage, where: str) -> str:
    parts = message.content
    if parts is None or isinstance(parts, str):
        return parts or ""
    for part in parts:
        if part.type != "text" or part.text is None:
            raise BadRequest(f"{where}.content has a part of type {part.type!r}: expected text", f"{where}.content")
    return "".join(part.text or "" for part in parts)


def _tool_call(call: SentToolCall, where: str) -> dict[str, Any]:
    """As chat templates have it: the arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError as error:
        raise BadRequest(f"{where}: the arguments of {call.function.name} are not JSON: {error}", where) from error
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}: the arguments of {call.function.name} are not a JSON object", where)
    return tool_call_fields(call.id, call.function.name, arguments)


def _within(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise BadRequest(f"{name} = {value}: expected {low} to {high}", name)
    return value


def _max_tokens(body: CompletionBody | ChatBody) -> int | None:
    name, value = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        if value is not None and value != body.max_completion_tokens:
            raise BadRequest("max_tokens and max_completion_tokens differ: send one of them", "max_tokens")
        name, value = "max_completion_tokens", body.max_completion_tokens
    if value is None:
        return None if isinstance(body, ChatBody) else DEFAULT_MAX_TOKENS
    if value < 1:
        raise BadRequest(f"{name} = {value}: expected at least 1", name)
    return value


def _top_p(value: float | None) -> float:
    if value is not None and not 0 < value <= 1:
        raise BadRequest(f"top_p = {value:g}: expected more than 0 and at most 1", "top_p")
    return 1.0 if value is None else float(value)


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    if value != 0 and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise BadRequest(
            f"temperature = {value:g}: expected 0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
            "temperature",
        )
    return float(value)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(0 < len(one) <= MAX_STOP_CHARACTERS for one in stops):
        expected = f"expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters"
        raise BadRequest(f"stop has {len(stops)} strings: {expected}", "stop")
    return stops


def _has_logprobs(body: CompletionBody | ChatBody) -> bool:
    if isinstance(body, ChatBody):
        return bool(body.logprobs)
    if body.logprobs and not (body.echo and body.logprobs == 1):
        raise BadRequest(
            f"logprobs = {body.logprobs}: the engine returns the log-probability of the chosen token only. Set logprobs = 0, "
            "or 1 with echo = true",
            "logprobs",
        )
    return body.logprobs is not None


def check_prompt(prompt: PromptInput, what: str, *, context: int) -> int:
    """Raises `BadRequest` for a prompt that does not fit into the context whatever its text is, before it is tokenized.
    Returns its number of characters."""
    num_characters, limit = num_characters_of(prompt), context * MAX_CHARACTERS_PER_TOKEN
    if not isinstance(prompt, str) and len(prompt) > context:
        kind = "messages" if isinstance(prompt[0], Message) else "tokens"
        why = f"{what} has {len(prompt)} {kind}: more than the context of {context} tokens"
    elif num_characters > limit:
        why = f"{what} has {num_characters} characters: more than {limit}, {MAX_CHARACTERS_PER_TOKEN} for each token"
        why = f"{why} of the context"
    else:
        return num_characters
    raise BadRequest(why, "prompt", code="context_length_exceeded")


def num_characters_of(prompt: PromptInput) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(one.role) + len(one.content) + len(one.fields) for one in prompt if isinstance(one, Message))
