"""Calls of tools over OpenAI's API, with the real client: whole answers, streams, sessions, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.lazy import lazy_module
from support.openai_server import ScriptedEngine, client_of, listening, served
from support.talk import CHATML, HERMES, text_with

if TYPE_CHECKING:
    import openai
else:
    openai = lazy_module("openai")

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>{"name":  "add", "arguments": {"a": 1, "b": "x"}}</tool_call>'
ASKED: Any = [{"role": "user", "content": "2+2?"}]


@contextmanager
def saying(*says: str, template: str = HERMES) -> Iterator[tuple[openai.OpenAI, ScriptedEngine]]:
    text = text_with(template)
    engine = ScriptedEngine(text, says)
    with listening(lambda: served(text, engine, context=4096)) as url:
        yield client_of(url), engine


def shown(engine: ScriptedEngine, number: int = -1) -> str:
    return str(text_with(HERMES).tokenizer.decode(engine.requests[number].tokens))


def test_a_call_is_no_text_and_its_result_is_shown_to_the_model() -> None:
    with saying(f"so: {CALL}{CALL}", "4") as (client, engine):
        first = client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS).choices[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", "so:")
        one, other = first.message.tool_calls or []
        assert one.type == "function" and one.function.name == "add" and one.id != other.id
        assert json.loads(one.function.arguments) == {"a": 1, "b": "x"}
        assert '"Add."' in shown(engine) and "Call: <tool_call>" in shown(engine)
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "4!"} for call in (one, other)]
        messages: Any = [*ASKED, first.message, *results]
        last = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0]
        assert (last.finish_reason, last.message.content, last.message.tool_calls) == ("stop", "4", None)
        assert shown(engine).count("<tool_response>4!</tool_response>") == 2


def test_a_stream_has_the_calls_at_its_end() -> None:
    with saying(f"so: {CALL}", "just text") as (client, _):
        chunks = list(client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS, stream=True))
        deltas = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(one.delta.content or "" for one in deltas) == "so:"
        (call,) = [call for one in deltas for call in one.delta.tool_calls or []]
        assert call.index == 0 and call.function is not None and call.function.name == "add"
        assert json.loads(call.function.arguments or "") == {"a": 1, "b": "x"}
        assert [one.finish_reason for one in deltas][-1] == "tool_calls"
        text = client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in text) == "just text"


def test_a_session_with_calls_is_one_part_token_for_token() -> None:
    with saying(f"so: {CALL}", CALL, "4") as (client, engine):
        url = str(client.base_url)
        session = httpx.post(f"{url}sessions", trust_env=False).json()["id"]
        messages = list(ASKED)
        for _ in range(3):
            chat: Any = client.chat.completions.create(
                model="tiny", messages=messages, tools=TOOLS, extra_headers={"X-Session-Id": session}
            )
            message = chat.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"annotations"}))
            for call in message.tool_calls or []:
                call = messages[-1]["tool_calls"][0]
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
        (part,) = httpx.get(f"{url}sessions/{session}", trust_env=False).json()["parts"]
        assert part["token_ids"][: len(engine.requests[-1].tokens)] == list(engine.requests[-1].tokens)
        sampled = [token for token, mask in zip(part["token_ids"], part["loss_mask"], strict=True) if mask]
        text = text_with(HERMES)
        said = [f"so: {CALL}", CALL, "4"]
        assert sampled == [token for one in said for token in [*text.encode(one), text.end_token]]


@pytest.mark.parametrize("said", ["<tool_call>add(1)</tool_call>", f'{CALL}<tool_call>{{"name": 1}}</tool_call>'])
def test_text_that_means_to_be_a_call_and_is_none_stays_text(said: str) -> None:
    with saying(said) as (client, _):
        choice = client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS).choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", said, None)


def test_without_tools_or_with_none_chosen_calls_are_text() -> None:
    with saying(CALL, CALL) as (client, engine):
        plain = client.chat.completions.create(model="tiny", messages=ASKED).choices[0]
        none = client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS, tool_choice="none").choices[0]
        assert plain.message.content == none.message.content == CALL and "Add." not in shown(engine)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": []}, {"role": "tools", "content": "[]"}]},
            "messages[1].role",
        ),
        ({"messages": [{"role": "user", "content": "a", "name": "me"}]}, "messages[0].name"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "["}}]}
                ]
            },
            "messages[0].tool_calls",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "1"}}]}
                ]
            },
            "messages[0].tool_calls",
        ),
    ],
)
def test_what_is_no_tool_or_call_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with saying() as (client, _):
        found = httpx.post(f"{client.base_url}chat/completions", json={"messages": ASKED} | body, trust_env=False)
        assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text


def test_a_template_without_tools_is_refused() -> None:
    with (
        saying(template=CHATML) as (client, _),
        pytest.raises(openai.BadRequestError, match="the model's chat template does not show them"),
    ):
        client.chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS)
