"""Anthropic's Messages API, by its real client: answers, streams, tools, an agent's rollout, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.agents import Model, play
from support.lazy import lazy_module
from support.openai_server import ScriptedEngine, listening, served
from support.talk import HERMES, text_with

anthropic = lazy_module("anthropic")

TOOLS: Any = [{"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}]
CALL = '<tool_call>{"name":  "add", "arguments": {"a": 1, "b": 3}}</tool_call>'
ASKED: Any = [{"role": "user", "content": "2+2?"}]


@contextmanager
def saying(*says: str, token: str | None = None) -> Iterator[tuple[Any, ScriptedEngine]]:
    text = text_with(HERMES)
    engine = ScriptedEngine(text, says)
    with listening(lambda: served(text, engine, context=4096), token=token) as url:
        yield anthropic.Anthropic(base_url=url, api_key=token or "none", max_retries=0), engine


def shown(engine: ScriptedEngine) -> str:
    return str(text_with(HERMES).tokenizer.decode(engine.requests[-1].tokens))


def test_a_message_has_its_text_its_reason_and_its_tokens() -> None:
    with saying("4", "abcdef") as (client, engine):
        said = client.messages.create(model="tiny", max_tokens=9, system="Be brief.", messages=ASKED)
        assert (said.content[0].text, said.stop_reason, said.usage.output_tokens) == ("4", "end_turn", 2)
        assert "system\nBe brief." in shown(engine) and said.usage.input_tokens == len(engine.requests[0].tokens)
        colder = {"temperature": 0.5}
        cut = client.messages.create(
            model="tiny", max_tokens=3, messages=ASKED, stop_sequences=["x"], extra_body=colder
        )
        assert (cut.content[0].text, cut.stop_reason) == ("abc", "max_tokens")
        assert engine.requests[1].sampling.temperature == 0.5


def test_a_stream_adds_up_to_the_message() -> None:
    with saying("some words", f"so: {CALL}") as (client, _):
        with client.messages.stream(model="tiny", max_tokens=99, messages=ASKED) as stream:
            assert "".join(stream.text_stream) == "some words"
            assert stream.get_final_message().stop_reason == "end_turn"
        with client.messages.stream(model="tiny", max_tokens=99, messages=ASKED, tools=TOOLS) as stream:
            text, call = stream.get_final_message().content
        assert (text.text, call.name, call.input) == ("so:", "add", {"a": 1, "b": 3})


def test_calls_of_tools_are_blocks_and_their_results_are_shown() -> None:
    with saying(f"so: {CALL}", CALL, "4") as (client, engine):
        messages = list(ASKED)
        for _ in range(2):
            answer = client.messages.create(model="tiny", max_tokens=99, messages=messages, tools=TOOLS)
            (call,) = [block for block in answer.content if block.type == "tool_use"]
            assert answer.stop_reason == "tool_use" and call.input == {"a": 1, "b": 3}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "4!"}]}
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(model="tiny", max_tokens=99, messages=messages, tools=TOOLS)
        assert last.content[0].text == "4" and shown(engine).count("<tool_response>4!</tool_response>") == 2


AGENT = """
import anthropic
def solve(task, access):
    client = anthropic.Anthropic(base_url=access.base_url.removesuffix("/v1"), api_key=access.api_key, max_retries=0)
    tools = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]
    messages = [{"role": "user", "content": task.prompt}]
    while True:
        answer = client.messages.create(model=access.model, max_tokens=200, messages=messages, tools=tools)
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return answer.content[0].text
        results = [{"type": "tool_result", "tool_use_id": one.id, "content": str(sum(one.input.values()))} for one in calls]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
"""


def test_an_agent_of_this_client_is_one_part_token_for_token(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    model = Model(f"so: {CALL}", "4")
    result = play({"function": f"{tmp_path}/agent.py:solve"}, model)
    assert result.failure is None, result.failure
    (part,) = result.parts
    sampled = [token for said in (f"so: {CALL}", "4") for token in [*model.text.encode(said), model.text.end_token]]
    assert part.reward == 1.0 and part.tokens[part.loss_mask].tolist() == sampled


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": {"type": "any"}, "tools": TOOLS}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "a block of type 'image'"),
        ({"messages": []}, "messages is empty"),
        ({"model": "other"}, "no model 'other' here"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(more: dict[str, Any], message: str) -> None:
    with saying() as (client, _), pytest.raises(anthropic.APIStatusError, match=message) as caught:
        client.messages.create(**{"model": "tiny", "max_tokens": 9, "messages": ASKED, **more})
    assert json.loads(caught.value.response.text)["type"] == "error"


def test_the_token_is_asked_for_in_its_header() -> None:
    with saying("4", token="a-token") as (client, _):
        assert client.messages.create(model="tiny", max_tokens=9, messages=ASKED).content[0].text == "4"
        url, body = f"{str(client.base_url).rstrip('/')}/v1/messages", {"max_tokens": 9, "messages": ASKED}
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Basic a-token"}):
            assert httpx.post(url, json=body, headers=headers, trust_env=False).status_code == 401
