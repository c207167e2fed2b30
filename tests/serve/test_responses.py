"""OpenAI's Responses API, by its real client: answers, streams, tools, previous responses, an agent's rollout, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.agents import Model, play
from support.lazy import lazy_module
from support.openai_server import ScriptedEngine, client_of, listening, served
from support.talk import HERMES, text_with

if TYPE_CHECKING:
    import openai
else:
    openai = lazy_module("openai")

TOOLS: Any = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}]
CALL = '<tool_call>{"name":  "add", "arguments": {"a": 1, "b": 3}}</tool_call>'


@contextmanager
def saying(*says: str) -> Iterator[tuple[openai.OpenAI, ScriptedEngine]]:
    text = text_with(HERMES)
    engine = ScriptedEngine(text, says)
    with listening(lambda: served(text, engine, context=4096)) as url:
        yield client_of(url), engine


def shown(engine: ScriptedEngine) -> str:
    return str(text_with(HERMES).tokenizer.decode(engine.requests[-1].tokens))


def session_of(client: openai.OpenAI) -> dict[str, str]:
    return {"X-Session-Id": httpx.post(f"{client.base_url}sessions", trust_env=False).json()["id"]}


def parts_of(client: openai.OpenAI, session: dict[str, str]) -> list[Any]:
    found: list[Any] = httpx.get(f"{client.base_url}sessions/{session['X-Session-Id']}", trust_env=False).json()[
        "parts"
    ]
    return found


def test_a_response_has_its_text_its_status_and_its_tokens() -> None:
    with saying("4", "abcdef") as (client, engine):
        said = client.responses.create(model="tiny", instructions="Be brief.", input="2+2?", temperature=0.5)
        assert (said.output_text, said.status) == ("4", "completed") and said.usage is not None
        assert (said.usage.input_tokens, said.usage.output_tokens) == (len(engine.requests[0].tokens), 2)
        assert "system\nBe brief." in shown(engine) and engine.requests[0].sampling.temperature == 0.5
        asked: Any = [{"role": "developer", "content": "Short."}, {"role": "user", "content": "2+2?"}]
        cut = client.responses.create(model="tiny", input=asked, max_output_tokens=3)
        assert (cut.output_text, cut.status) == ("abc", "incomplete") and "system\nShort." in shown(engine)
        assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream_adds_up_to_the_response() -> None:
    with saying("some words", f"so: {CALL}", CALL) as (client, _):
        events = list(client.responses.create(model="tiny", input="2+2?", stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "some words"
        with client.responses.stream(model="tiny", input="2+2?", tools=TOOLS) as stream:
            text, call = stream.get_final_response().output
        assert text.type == "message" and call.type == "function_call"
        assert (text.content[0].text, call.name, json.loads(call.arguments)) == ("so:", "add", {"a": 1, "b": 3})
        with client.responses.stream(model="tiny", input="2+2?", tools=TOOLS) as stream:
            assert [item.type for item in stream.get_final_response().output] == ["function_call"]


@pytest.mark.parametrize("is_by_id", [True, False])
def test_a_session_is_one_part_whether_the_history_is_sent_or_named(is_by_id: bool) -> None:
    said = [f"so: {CALL}{CALL}", CALL, "4"]
    with saying(*said) as (client, engine):
        session = session_of(client)
        history: list[Any] = [{"role": "user", "content": "2+2?"}]
        new, before = history, None
        for _ in said:
            answer = client.responses.create(
                model="tiny",
                instructions="Add.",
                input=new if is_by_id else history,
                previous_response_id=before,
                tools=TOOLS,
                extra_headers=session,
            )
            before = answer.id if is_by_id else None
            calls = [item for item in answer.output if item.type == "function_call"]
            new = [{"type": "function_call_output", "call_id": call.call_id, "output": "4!"} for call in calls]
            reasoning: Any = {"type": "reasoning", "id": "rs_1", "summary": []}
            history += [reasoning, *(item.model_dump(exclude_none=True) for item in answer.output), *new]
        assert answer.output_text == "4" and shown(engine).count("<tool_response>4!</tool_response>") == 3
        (part,) = parts_of(client, session)
        sampled = [token for token, mask in zip(part["token_ids"], part["loss_mask"], strict=True) if mask]
        text = text_with(HERMES)
        assert sampled == [token for one in said for token in [*text.encode(one), text.end_token]]


def test_two_responses_to_one_are_two_parts_and_other_instructions_are_another() -> None:
    with saying("a", "b", "c", "d") as (client, engine):
        session = session_of(client)
        first = client.responses.create(model="tiny", input="1", extra_headers=session)
        for instructions in (None, None, "New."):
            client.responses.create(
                model="tiny",
                input="2",
                instructions=instructions,
                previous_response_id=first.id,
                extra_headers=session,
            )
        assert len(parts_of(client, session)) == 3 and "system\nNew." in shown(engine)
        assert "user\n1" in shown(engine) and "assistant\na" in shown(engine), (
            "the history without the old instructions"
        )


def test_a_response_is_known_in_its_session_only_and_only_if_it_was_stored() -> None:
    with saying("a", "b") as (client, _):
        one, other = session_of(client), session_of(client)
        stored = client.responses.create(model="tiny", input="1", extra_headers=one).id
        dropped = client.responses.create(model="tiny", input="1", store=False, extra_headers=one).id
        for session, before in ((other, stored), (one, dropped), ({}, stored)):
            with pytest.raises(openai.BadRequestError, match="previous_response_id") as caught:
                client.responses.create(model="tiny", input="2", previous_response_id=before, extra_headers=session)
            assert caught.value.param == "previous_response_id"


AGENT = """
import json
from openai import OpenAI
def solve(task, access):
    client = OpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
    answer = client.responses.create(model=access.model, input=task.prompt, tools=tools)
    while calls := [item for item in answer.output if item.type == "function_call"]:
        results = [{"type": "function_call_output", "call_id": one.call_id, "output": str(sum(json.loads(one.arguments).values()))}
                   for one in calls]
        answer = client.responses.create(model=access.model, input=results, previous_response_id=answer.id, tools=tools)
    return answer.output_text
"""


TEAM = """
from openai import OpenAI
def solve(task, access):
    client = OpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)
    for name in ("planner", "solver"):
        first = client.responses.create(model=name, input=task.prompt)
        client.responses.create(model=name, input="and?", previous_response_id=first.id)
    return "4"
"""


def test_each_agent_of_a_program_continues_its_own_responses(tmp_path: Path) -> None:
    (tmp_path / "team.py").write_text(TEAM)
    result = play({"function": f"{tmp_path}/team.py:solve", "agents": ["planner", "solver"]}, Model("a", "b", "c", "d"))
    assert result.failure is None, result.failure
    assert [int(part.loss_mask.sum()) for part in result.parts] == [4, 4], "two answers in each agent's one part"


def test_an_agent_of_this_api_is_one_part_token_for_token(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    model = Model(f"so: {CALL}", "4")
    result = play({"function": f"{tmp_path}/agent.py:solve"}, model)
    assert result.failure is None, result.failure
    (part,) = result.parts
    sampled = [token for said in (f"so: {CALL}", "4") for token in [*model.text.encode(said), model.text.end_token]]
    assert part.reward == 1.0 and part.tokens[part.loss_mask].tolist() == sampled


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools"),
        ({"reasoning": {"effort": "low", "summary": None}}, "reasoning"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "text"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9.0}, "temperature"),
        ({"input": []}, "input"),
        (item(type="item_reference", id="msg_1"), "input[0]"),
        (item(role="user", content=[{"type": "input_image", "image_url": "a"}]), "input[0]"),
        (item(type="function_call", call_id="1", name="a", arguments="["), "input"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    with saying() as (client, _), pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "a", **more})
    assert caught.value.param == param, caught.value


def test_values_without_an_effect_are_accepted() -> None:
    with saying("4") as (client, _):
        said = client.responses.create(
            model="tiny",
            input="a",
            reasoning={"effort": None},
            text={"format": {"type": "text"}},
            include=["reasoning.encrypted_content"],
            truncation="disabled",
            parallel_tool_calls=False,
            metadata={"a": "b"},
            prompt_cache_key="c",
        )
        assert said.output_text == "4"
