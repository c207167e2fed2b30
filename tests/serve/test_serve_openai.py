"""The model's service, by a real server, a real engine and the real client of OpenAI: answers, streams, sessions, refusals."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel
from typer.testing import CliRunner

from millstream.cli.main import app
from millstream.clock import RealClock
from millstream.engine import EngineConfig, OnSampled
from millstream.env.bytes_text import ByteText
from millstream.errors import ConfigError, EngineError, EngineGone, RequestRefused
from millstream.events.sinks import MemorySink
from millstream.model.load import save_model, set_up_cpu
from millstream.model.safetensors_io import write_weights
from millstream.model.tiny import TinyShape, tiny_model
from millstream.run.build import build_engine
from millstream.run.text import TokenizerText
from millstream.serve.limits import HttpLimits
from millstream.serve.openai.app import host_model
from millstream.serve.openai.detokenize import TextStream
from millstream.serve.openai.service import LONG_PROMPT, ModelServiceConfig, Served
from millstream.serve.openai.sessions import SessionLimits
from millstream.types import Completion, Message, Request, Sampled, Weights
from support.commands import start_command
from support.lazy import lazy_module
from support.openai_server import CONTEXT, ScriptedEngine, client_of, listening, served
from support.talk import CHATML, NO_SYSTEM, text_with
from support.tiny import make, plain

if TYPE_CHECKING:
    import openai
else:
    openai = lazy_module("openai")

TOKEN = "a-token-of-the-tests"
Json = dict[str, Any]
DOCS = (Path(__file__).parents[2] / "docs/serving.md").read_text()
HTTP = httpx.Client(timeout=20, trust_env=False)


class BrokenEngine(ScriptedEngine):
    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        raise EngineGone("engine broke: on purpose")


class StumblingEngine(ScriptedEngine):
    """Fails its first request."""

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        if not self.has_stumbled:
            self.has_stumbled = True
            raise EngineError("a connection, on purpose")
        return await super().generate(request, on_sampled)

    has_stumbled = False


class TiredEngine(ScriptedEngine):
    """Breaks when it is given weights."""

    async def load(self, version: int, weights: Weights) -> None:
        raise EngineGone("engine broke: on purpose")


class RefusingEngine(ScriptedEngine):
    """Knows a limit that the service was not told of. Everything but the first answer goes on for long."""

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        if not self.requests:
            self.requests.append(request)
            await asyncio.sleep(0.05)
            raise RequestRefused("never, on purpose")
        return await super().generate(request, on_sampled)


@contextmanager
def scripted(
    *says: str, step_s: float = 0.0, tells: bool = True, **limits: Any
) -> Iterator[tuple[str, ScriptedEngine]]:
    text = text_with(CHATML)
    engine = ScriptedEngine(text, says, step_s=step_s, tells=tells)
    with listening(lambda: served(text, engine), **limits) as url:
        yield url, engine


TEXT = text_with(CHATML)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    set_up_cpu()
    return tiny_model(TinyShape(hidden=32, layers=2, heads=2, context=CONTEXT), TEXT.tokenizer, seed=1)


@pytest.fixture(scope="module")
def url(model: PreTrainedModel) -> Iterator[str]:
    """Of a server with a real engine."""
    config = EngineConfig(slots=8, process=False)

    def make() -> Served:
        return served(TEXT, build_engine(config, model, clock=RealClock(), sink=MemorySink()))

    with listening(make, max_body_bytes=100_000) as at:
        yield at


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return client_of(url)


def user(content: str) -> Json:
    return {"role": "user", "content": content}


def post(url: str, path: str, body: Json, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return HTTP.post(f"{url}{path}", json=body, headers=names)


def get(url: str, path: str, **headers: str) -> httpx.Response:
    return HTTP.get(f"{url}{path}", headers=headers)


@torch.no_grad()
def generated(model: PreTrainedModel, prompt: list[int], num: int) -> list[int]:
    """By transformers alone."""
    ids = torch.tensor([prompt])
    out = plain(model).generate(ids, max_new_tokens=num, do_sample=False, eos_token_id=TEXT.end_token, pad_token_id=0)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_a_greedy_chat_is_that_of_transformers_and_its_extra_fields_say_how(
    client: openai.OpenAI, model: PreTrainedModel
) -> None:
    chat: Any = client.chat.completions.create(model="tiny", messages=[user("2+2?")], temperature=0, max_tokens=24)
    prompt = TEXT.opening(_messages("2+2?"))
    assert chat.prompt_token_ids == prompt
    (choice,) = chat.choices
    assert choice.token_ids == generated(model, prompt, 24)
    assert choice.message.content == TEXT.decode(choice.token_ids) and choice.message.role == "assistant"
    logits = plain(model)(torch.tensor([[*prompt, *choice.token_ids]])).logits[0, len(prompt) - 1 : -1]
    right = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    assert choice.token_logprobs == pytest.approx(right.tolist(), abs=1e-4)
    assert choice.token_versions == [0] * len(choice.token_ids) and choice.finish_reason == "length"
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(prompt), 24)


def _messages(content: str) -> list[Any]:
    return [Message(role="user", content=content)]


def test_a_completion_takes_text_and_token_ids_and_lists_of_either(client: openai.OpenAI) -> None:
    texts, greedy = ["abc", "2+2="], {"temperature": 0, "max_tokens": 6}
    by_text: Any = client.completions.create(model="tiny", prompt=texts, **greedy)
    by_ids: Any = client.completions.create(model="tiny", prompt=[TEXT.opening(one) for one in texts], **greedy)
    assert [c.token_ids for c in by_text.choices] == [c.token_ids for c in by_ids.choices]
    assert [c.index for c in by_text.choices] == [0, 1]
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == [TEXT.opening(one) for one in texts]
    one: Any = client.completions.create(model="tiny", prompt=TEXT.opening("abc"), **greedy)
    assert one.choices[0].text == by_text.choices[0].text and one.prompt_token_ids == TEXT.opening("abc")
    several: Any = client.completions.create(model="tiny", prompt=texts, n=2, **greedy)
    assert [c.text for c in several.choices] == [by_text.choices[n].text for n in (0, 0, 1, 1)]
    usual: Any = client.completions.create(model="tiny", prompt="abc", temperature=0)
    assert len(usual.choices[0].token_ids) == 16


def test_many_at_once_get_what_each_would_get_alone(client: openai.OpenAI, url: str) -> None:
    prompts = [f"{number}+{number}=" for number in range(24)]
    greedy: Json = {"model": "tiny", "temperature": 0, "max_tokens": 12}

    async def together() -> list[str]:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as many:
            found = await asyncio.gather(*(many.completions.create(prompt=prompt, **greedy) for prompt in prompts))
        return [one.choices[0].text for one in found]

    alone = client.completions.create(prompt=prompts, **greedy)
    assert asyncio.run(together()) == [choice.text for choice in alone.choices]


def test_a_seed_repeats_an_answer_and_the_answers_of_one_request_differ(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        chat = client.chat.completions.create(model="tiny", messages=[user("a")], n=3, seed=seed, max_tokens=16)
        return [choice.message.content for choice in chat.choices]

    assert ask(5) == ask(5) != ask(-6)
    assert len(set(ask(5))) == 3


def test_log_probabilities_come_in_the_format_of_each_kind(client: openai.OpenAI) -> None:
    chat: Any = client.chat.completions.create(model="tiny", messages=[user("a")], logprobs=True, max_tokens=5)
    content = chat.choices[0].logprobs.content
    assert [one.logprob for one in content] == chat.choices[0].token_logprobs
    assert [one.token for one in content] == [TEXT.decode([token]) for token in chat.choices[0].token_ids]
    done: Any = client.completions.create(model="tiny", prompt="a", logprobs=0, max_tokens=5)
    found = done.choices[0].logprobs
    assert found.token_logprobs == done.choices[0].token_logprobs and found.text_offset[0] == 0
    assert client.completions.create(model="tiny", prompt="a").choices[0].logprobs is None


def test_models_are_listed_and_others_are_not_found(client: openai.OpenAI, url: str) -> None:
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model 'other' here: expected 'tiny'"):
        client.completions.create(model="other", prompt="a")
    assert get(url, "/health").json()["status"] == "ok"
    assert get(url, "/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert get(url, "/v1/completions").status_code == 405


def test_what_the_docs_show_runs_as_it_is(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", DOCS, flags=re.S)
    exec(shown.replace("http://127.0.0.1:8000", url), {})
    assert "[" in capsys.readouterr().out


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_is_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    asked: Json = {"model": "tiny", "messages": [user("a")], "seed": 3, "max_tokens": 24, "n": 2}
    whole: Any = client.chat.completions.create(**asked)
    chunks: list[Any] = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids and chunks[-1].usage == whole.usage
    assert len(chunks) > 10, "token by token"
    for choice in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        for name in ("token_ids", "token_logprobs", "token_versions"):
            told = [value for c in own for value in (getattr(c, name, None) or [])]
            assert told == pytest.approx(getattr(choice, name), abs=1e-5)
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]


def test_a_completion_streams_too_and_ends_with_done(client: openai.OpenAI, url: str) -> None:
    asked: Json = {"model": "tiny", "prompt": "ab", "temperature": 0, "max_tokens": 9}
    whole = client.completions.create(**asked).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == whole
    raw = post(url, "/v1/completions", asked | {"stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream") and raw.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("tells", [True, False])
def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(tells: bool) -> None:
    """Whether the engine tells its tokens as they come or all at the end."""
    with scripted("one STOP two", "one STOP two", "one STO", tells=tells) as (url, engine):
        client = client_of(url)
        asked: Json = {"model": "tiny", "messages": [user("a")], "stop": ["STOP", "#"]}
        choice: Any = client.chat.completions.create(**asked).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("one ", "stop")
        assert TEXT.decode(choice.token_ids) == "one STOP" and len(choice.token_logprobs) == len("one STOP")
        chunks: list[Any] = list(client.chat.completions.create(**asked, stream=True))
        said = [c.choices[0].delta.content or "" for c in chunks]
        assert "".join(said) == "one " and not any("S" in piece for piece in said), "what may be a stop is held back"
        assert [token for c in chunks for token in getattr(c.choices[0], "token_ids", None) or []] == choice.token_ids
        assert client.chat.completions.create(**asked).choices[0].message.content == "one STO"
        assert len(engine.aborted) == (2 if tells else 0)


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=40))
def test_text_in_pieces_is_the_text_of_all_tokens(data: bytes, cuts: list[int]) -> None:
    """Whatever bytes are sampled, and however many at a time."""
    speech, said, rest = TextStream(ByteText()), "", tuple(data)
    for cut in [*cuts, len(data) + 1]:
        now, rest = rest[:cut], rest[cut:]
        speech.add(Sampled(now, (0.0,) * len(now), (0,) * len(now)))
        piece = speech.take()
        said += "" if piece is None else piece.text
    speech.end()
    last = speech.take()
    assert said + ("" if last is None else last.text) == ByteText().decode(tuple(data)) == speech.whole().text


@given(text=st.text("abc", max_size=20), stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_a_stop_string_is_found_wherever_it_is(text: str, stops: list[str]) -> None:
    speech, said = TextStream(ByteText(), stops), ""
    for byte in text.encode():
        speech.add(Sampled((byte,), (0.0,), (0,)))
        piece = speech.take()
        said += "" if piece is None else piece.text
    speech.end()
    piece = speech.take()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    heard = text[: min(ends, default=len(text))]
    expected = min((heard[: heard.find(stop)] for stop in stops if stop in heard), key=len, default=heard)
    assert said + ("" if piece is None else piece.text) == expected == speech.final
    assert speech.is_stopped == bool(ends) and speech.tokens == list(heard.encode())


# ---- sessions --------------------------------------------------------------------------------------------------------


def new_session(url: str) -> str:
    found = post(url, "/v1/sessions", {})
    assert found.status_code == 201 and found.json()["parts"] == []
    session_id: str = found.json()["id"]
    return session_id


def test_the_calls_of_a_session_are_one_rollout_and_what_was_sampled_is_not_tokenised_again() -> None:
    """`<think>` was sampled as seven characters; the tokenizer would make one token of it."""
    with scripted("<think>hm", "five", "six") as (url, engine):
        session_id = new_session(url)
        client = client_of(url).with_options(default_headers={"X-Session-Id": session_id})
        first = client.chat.completions.create(model="tiny", messages=[user("a")])
        said = first.choices[0].message
        assert said.content == "<think>hm" and len(TEXT.encode("<think>hm")) == 3
        history = [user("a"), said.model_dump(), user("b")]
        second: Any = client.chat.completions.create(model="tiny", messages=history)
        sampled = first.choices[0].token_ids  # type: ignore[attr-defined]
        begin = [*first.prompt_token_ids, *sampled]  # type: ignore[attr-defined]
        assert second.prompt_token_ids[: len(begin)] == begin == list(engine.requests[1].tokens[: len(begin)])
        assert second.prompt_token_ids != TEXT.opening(_chat(history)), "which would have re-tokenised it"
        client.chat.completions.create(model="tiny", messages=[user("another")])
        one, other = get(url, f"/v1/sessions/{session_id}").json()["parts"]
        tokens = TEXT.tokenizer.decode(one["token_ids"])
        assert tokens == TEXT.render(_chat(history)) + "five<|im_end|>"
        masked = [token for token, is_sampled in zip(one["token_ids"], one["loss_mask"], strict=True) if is_sampled]
        assert masked == [*sampled, *second.choices[0].token_ids]
        assert {(m, p, v) for m, p, v in zip(one["loss_mask"], one["logprobs"], one["versions"], strict=True)} == {
            (True, -0.5, 3),
            (False, 0.0, -1),
        }
        assert TEXT.tokenizer.decode(other["token_ids"]).endswith("six<|im_end|>")
        assert HTTP.delete(f"{url}/v1/sessions/{session_id}").json()["deleted"]
        assert get(url, f"/v1/sessions/{session_id}").status_code == 404


def _chat(messages: Sequence[Json]) -> list[Any]:
    return [Message(role=one["role"], content=one["content"]) for one in messages]


def test_a_session_goes_on_after_answers_that_were_cut_and_over_streams_and_texts() -> None:
    with scripted("fou...", "a!", "b", "cd", "ef", "gh") as (url, _):
        client, chat_id, text_id = client_of(url), new_session(url), new_session(url)
        body = {"session_id": chat_id}
        history = [user("a")]
        for cut in ({"max_tokens": 3}, {"stop": "!"}, {}):
            stream: Any = client.chat.completions.create(
                model="tiny", messages=history, stream=True, extra_body=body, **cut
            )
            said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            history += [{"role": "assistant", "content": said}, user("next")]
        (part,) = get(url, f"/v1/sessions/{chat_id}").json()["parts"]
        shown = TEXT.tokenizer.decode(part["token_ids"])
        assert "assistant\nfou<|im_end|>\n<|im_start|>user\nnext" in shown, "an end that was not sampled is shown"
        assert "assistant\na!<|im_end|>\n<|im_start|>user\nnext" in shown
        assert shown.endswith("b<|im_end|>")
        texts: Json = {"model": "tiny", "extra_body": {"session_id": text_id}}
        first: Any = client.completions.create(prompt="x", **texts)
        second: Any = client.completions.create(prompt="x" + first.choices[0].text + "y", **texts)
        whole = [*second.prompt_token_ids, *second.choices[0].token_ids]
        client.completions.create(prompt=whole, **texts)
        parts = get(url, f"/v1/sessions/{text_id}").json()["parts"]
        shown = [TEXT.tokenizer.decode(part["token_ids"]) for part in parts]
        assert shown == ["xcd<|im_end|>", "xcdyef<|im_end|>gh<|im_end|>"], "a text has no end token: it begins again"
        assert [sum(part["loss_mask"]) for part in parts] == [3, 6]


def test_two_calls_that_go_on_from_one_place_at_once_become_two_parts_and_no_token_counts_twice() -> None:
    with scripted("one", "two", "three", step_s=0.02) as (url, _):
        session_id = new_session(url)
        first = post(url, "/v1/chat/completions", {"messages": [user("a")]}, x_session_id=session_id).json()
        history = [user("a"), first["choices"][0]["message"], user("b")]
        threads = [
            threading.Thread(
                target=post,
                args=(url, "/v1/chat/completions", {"messages": history}),
                kwargs={"x_session_id": session_id},
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        parts = get(url, f"/v1/sessions/{session_id}").json()["parts"]
        assert len(parts) == 2 and len(parts[1]["logprobs"]) == len(parts[1]["token_ids"])
        assert sum(sum(part["loss_mask"]) for part in parts) == 4 + 4 + 6


def test_sessions_are_bounded_in_number_time_and_tokens() -> None:
    limits = SessionLimits(sessions=2, idle_s=1.0, tokens=60)
    with scripted(*(["ok"] * 9), sessions=limits) as (url, _):

        def ask(session_id: str, content: str = "a", **more: Any) -> httpx.Response:
            body = {"messages": [user(content)], **more}
            return post(url, "/v1/chat/completions", body, x_session_id=session_id)

        one, other = new_session(url), new_session(url)
        assert ask(one).status_code == ask(other).status_code == 200
        full = post(url, "/v1/sessions", {})
        assert full.status_code == 429 and "2 sessions" in full.json()["error"]["message"]
        assert full.headers["retry-after"]
        crowded = ask(one, "b" * 30)
        assert crowded.status_code == 400 and "more than its 60" in crowded.json()["error"]["message"]
        assert "by 42: begin another session" in ask(one, max_tokens=59).json()["error"]["message"]
        assert ask(one, n=2).json()["error"]["param"] == "n" and ask("a/b").json()["error"]["param"] == "session_id"
        time.sleep(1.1)
        assert ask(new_session(url)).status_code == 200 and get(url, f"/v1/sessions/{one}").status_code == 404


def test_the_tokens_of_all_sessions_are_bounded_and_deleting_one_makes_room() -> None:
    with scripted(*(["ok"] * 9), sessions=SessionLimits(all_tokens=50)) as (url, _):

        def ask(session_id: str) -> httpx.Response:
            return post(url, "/v1/chat/completions", {"messages": [user("a")]}, x_session_id=session_id)

        ids = [new_session(url) for _ in range(3)]
        assert [ask(one).status_code for one in ids] == [200, 200, 429]
        assert "the limit is 50" in ask(ids[2]).json()["error"]["message"]
        HTTP.delete(f"{url}/v1/sessions/{ids[0]}")
        assert ask(ids[2]).status_code == 200


def test_the_id_of_a_session_is_a_secret_that_only_the_service_makes() -> None:
    with scripted("ok", "ok") as (url, _):
        one, other = new_session(url), new_session(url)
        assert one != other and len(one) >= len("session-") + 32
        for guess in ("episode-17", one[:-1], one.upper(), "a" * 5000):
            called = post(url, "/v1/chat/completions", {"messages": [user("a")]}, x_session_id=guess)
            for answer in (called, get(url, f"/v1/sessions/{guess}"), HTTP.delete(f"{url}/v1/sessions/{guess}")):
                assert answer.status_code == 404 and "POST /v1/sessions" in answer.json()["error"]["message"]
                assert one not in answer.text
        assert one not in get(url, "/health").text and get(url, "/v1/sessions").status_code == 405
        assert get(url, f"/v1/sessions/{one}").json()["parts"] == []


def test_an_answer_to_a_deleted_session_does_not_bring_it_back() -> None:
    with scripted("slow...", step_s=0.02) as (url, engine):
        session_id = new_session(url)
        body = {"messages": [user("a")], "max_tokens": 20}
        calling = threading.Thread(
            target=post, args=(url, "/v1/chat/completions", body), kwargs={"x_session_id": session_id}
        )
        calling.start()
        while not engine.requests:
            time.sleep(0.005)
        assert HTTP.delete(f"{url}/v1/sessions/{session_id}").status_code == 200
        calling.join()
        assert get(url, f"/v1/sessions/{session_id}").status_code == 404


# ---- refusals --------------------------------------------------------------------------------------------------------

WRONG: list[tuple[Json, str]] = [
    ({"top_p": 1.1}, "top_p"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": 1e-300}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": "two"}, "n"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"unheard_of": 1}, "unheard_of"),
]
WRONG_CHAT: list[tuple[Json, str]] = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]}, "messages[0].tool_call_id"),
    ({"messages": [user("a" * 300)]}, "messages"),
    ({"messages": [user("a")], "max_tokens": 256}, "messages"),
]
WRONG_TEXT: list[tuple[Json, str]] = [
    ({"echo": True, "stream": True}, "echo"),
    ({"echo": True, "n": 2}, "echo"),
    ({"echo": True, "session_id": "session-1"}, "echo"),
    ({"echo": True, "logprobs": 1}, "echo"),  # this server has no model for it
    ({"echo": True, "logprobs": 2}, "logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "b"}, "suffix"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5, -1]}, "prompt"),
    ({"prompt": [5, 100_000]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["a"] * 200}, "n"),
]


@pytest.mark.parametrize(("wrong", "param"), [*WRONG, *WRONG_CHAT])
def test_what_a_chat_cannot_have_is_refused_by_name(url: str, wrong: Json, param: str) -> None:
    found = post(url, "/v1/chat/completions", {"messages": [user("a")]} | wrong)
    assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text


@pytest.mark.parametrize(("wrong", "param"), [*WRONG, *WRONG_TEXT])
def test_what_a_completion_cannot_have_is_refused_by_name(url: str, wrong: Json, param: str) -> None:
    found = post(url, "/v1/completions", {"prompt": "a"} | wrong)
    assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text


def test_values_that_change_nothing_are_taken(url: str) -> None:
    nothing: Json = {
        "top_p": 1,
        "presence_penalty": 0,
        "logit_bias": None,
        "user": "me",
        "metadata": {"a": "b"},
        "stop": [],
    }
    chat: Json = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "top_logprobs": None}
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}]
    found = post(url, "/v1/chat/completions", {"messages": parts, "max_tokens": 2} | nothing | chat)
    assert found.status_code == 200 and found.json()["prompt_token_ids"] == TEXT.opening(_messages("2+2?"))
    assert post(url, "/v1/completions", {"prompt": "a", "echo": False, "best_of": 1} | nothing).status_code == 200


def test_the_context_is_named_with_what_exceeds_it(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match="a prompt of 3 tokens and max_tokens = 254 exceeds the context of 256"
    ):
        client.completions.create(model="tiny", prompt="abc", max_tokens=254)


class GatedText(TokenizerText, frozen=True, kw_only=True, eq=False):
    """Tokenizes long prompts once the gate is open."""

    gate: threading.Event

    def opening(self, content: Any) -> list[int]:
        if len(content) > LONG_PROMPT:
            assert self.gate.wait(20)
            return [1]
        return super().opening(content)


def test_a_long_prompt_holds_up_no_short_one() -> None:
    gate, text = threading.Event(), text_with(CHATML)
    gated = GatedText(tokenizer=text.tokenizer, gate=gate)
    with listening(lambda: served(gated, ScriptedEngine(text, ["ok", "ok"]), context=1 << 14)) as url:
        statuses: list[int] = []
        long = {"prompt": "a" * (LONG_PROMPT + 1)}
        waiting = threading.Thread(
            target=lambda: statuses.append(post(url, "/v1/completions", long).status_code), daemon=True
        )
        waiting.start()
        assert post(url, "/v1/completions", {"prompt": "a"}).status_code == 200 and not statuses
        gate.set()
        waiting.join()
        assert statuses == [200]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("completions", {"prompt": "a" * 4_000_000}, "4000000 characters: more than 4096"),
        ("completions", {"prompt": ["a", "b" * 4097]}, "prompt 1 has 4097 characters"),
        ("completions", {"prompt": [1] * 257}, "257 tokens: more than the context of 256"),
        ("completions", {"prompt": [[1], [1] * 257]}, "prompt 1 has 257 tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 4097}]}, "4101 characters"),
        ("chat/completions", {"messages": [{"role": "user" * 2000}]}, "8000 characters"),
        ("chat/completions", {"messages": [{"role": "user"}] * 257}, "257 messages: more than the context"),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(path: str, body: Json, words: str) -> None:
    with scripted() as (url, _):
        found = post(url, f"/v1/{path}", body)
        assert found.status_code == 400 and words in found.json()["error"]["message"], found.text
        assert found.json()["error"]["code"] == "context_length_exceeded"


def test_garbage_and_bodies_that_are_too_large_are_refused(url: str) -> None:
    def send(body: bytes, kind: str = "application/json") -> httpx.Response:
        headers = {"content-type": kind}
        return HTTP.post(f"{url}/v1/completions", content=body, headers=headers)

    assert send(b"{").status_code == send(b"[" * 50_000).status_code == send(b"").status_code == 400
    assert send(b'{"prompt": "\\ud800"}').status_code in (200, 400)
    assert send(b'{"prompt": "a", "metadata": ' + b'{"a":' * 10_000 + b"}").status_code == 400
    assert send(b"prompt=a", "application/x-www-form-urlencoded").status_code == 415
    long_name = send(json.dumps({"prompt": "a", "model": "b" * 50_000}).encode())
    assert long_name.status_code == 404 and len(long_name.text) < 5000
    large = send(json.dumps({"prompt": "a" * 200_000}).encode())
    assert large.status_code == 413 and "100000 bytes" in large.json()["error"]["message"]


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with scripted(http=HttpLimits(stall_s=0.2)) as (url, _):
        host, _, port = url.removeprefix("http://").partition(":")
        for path in ("/v1/completions", "/v1/chat/completions"):
            with socket.create_connection((host, int(port)), timeout=20) as line:
                kind = "Content-Type: application/json\r\nContent-Length: 50"
                line.sendall(f'POST {path} HTTP/1.1\r\nHost: {host}\r\n{kind}\r\n\r\n{{"prompt"'.encode())
                assert line.recv(4096).startswith(b"HTTP/1.1 408")


def test_more_requests_than_the_limit_are_told_to_come_again_and_the_client_does() -> None:
    with scripted("slow...", "ok", step_s=0.02, max_requests=1) as (url, _):
        slow = threading.Thread(
            target=post, args=(url, "/v1/completions", {"prompt": "a", "max_tokens": 20}), daemon=True
        )
        slow.start()
        while get(url, "/v1/models").status_code == 200:
            time.sleep(0.005)
        full = post(url, "/v1/completions", {"prompt": "a"})
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        assert full.json()["error"]["code"] == "rate_limit_exceeded"
        assert client_of(url, retries=3).completions.create(model="tiny", prompt="b").choices[0].text == "ok"
        slow.join()


def test_a_token_is_asked_for_and_beyond_this_machine_it_is_required() -> None:
    text = text_with(CHATML)
    with listening(lambda: served(text, ScriptedEngine(text, ["ok"])), token=TOKEN) as url:
        with pytest.raises(openai.AuthenticationError, match="Bearer TOKEN"):
            client_of(url, token="another").models.list()
        assert client_of(url, token=TOKEN).completions.create(model="tiny", prompt="a").choices[0].text == "ok"
        assert get(url, "/health").status_code == 200
    with pytest.raises(ConfigError, match="set a token"):
        asyncio.run(host_model(served(text, ScriptedEngine(text)), ModelServiceConfig(host="0.0.0.0")))


def test_without_a_token_a_page_in_a_browser_is_refused(url: str) -> None:
    assert get(url, "/v1/models", origin="https://example.com").status_code == 403


def test_an_engine_that_broke_is_said_so_in_answers_streams_and_health() -> None:
    text = text_with(CHATML)
    with listening(lambda: served(text, BrokenEngine(text))) as url:
        assert get(url, "/health").status_code == 200
        with pytest.raises(openai.InternalServerError, match="on purpose"):
            client_of(url).completions.create(model="tiny", prompt="a")
        with pytest.raises(openai.APIError, match="on purpose"):
            list(client_of(url).completions.create(model="tiny", prompt="a", stream=True))
        assert get(url, "/health").status_code == 503


def test_an_engine_that_failed_once_and_goes_on_is_well() -> None:
    text = text_with(CHATML)
    with listening(lambda: served(text, StumblingEngine(text, ["b"]))) as url:
        assert post(url, "/v1/completions", {"prompt": "a"}).status_code == 503
        assert get(url, "/health").status_code == 200
        assert post(url, "/v1/completions", {"prompt": "a"}).status_code == 200


def test_an_engine_that_breaks_over_new_weights_is_said_so_in_health_and_may_be_asked_again(tmp_path: Path) -> None:
    text, model = text_with(CHATML), make("llama")
    write_weights(tmp_path / "one", 1, dict(model.named_parameters()), model.config)
    with listening(lambda: served(text, TiredEngine(text)), weights_from=str(tmp_path)) as url:
        body = {"path": str(tmp_path / "one"), "version": 1}
        assert post(url, "/v1/millstream/weights", body).status_code == 503
        assert get(url, "/health").status_code == 503


@pytest.mark.parametrize("template", [NO_SYSTEM, "{{ messages[0].role + 1 }}", "{{ messages[7].content }}", None])
def test_a_chat_that_the_template_cannot_show_is_refused(template: str | None) -> None:
    text = text_with(template)
    with listening(lambda: served(text, ScriptedEngine(text))) as url:
        found = post(url, "/v1/chat/completions", {"messages": [{"role": "system", "content": "a"}]})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "messages"), found.text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_the_engine_refuses_is_told_and_those_beside_it_are_aborted(is_streamed: bool) -> None:
    text = text_with(CHATML)
    engine = RefusingEngine(text, ["on...", "on..."], step_s=0.02)
    with listening(lambda: served(text, engine)) as url:
        body: Json = {"prompt": "a", "n": 3, "stream": is_streamed, "max_tokens": 200}
        found = post(url, "/v1/completions", body)
        assert found.status_code == (200 if is_streamed else 400) and "never, on purpose" in found.text
        assert len(engine.aborted) == 2 and get(url, "/health").status_code == 200


# ---- who hangs up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_goes_away_aborts_its_answers(is_streamed: bool) -> None:
    with scripted("on...", "on...", step_s=0.02) as (url, engine):
        body: Json = {"messages": [user("a")], "n": 2, "stream": is_streamed}
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.Client(trust_env=False, timeout=0.3) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as found,
        ):
            for _ in found.iter_lines():
                time.sleep(0.1)
                raise httpx.ReadTimeout("enough was heard")
        until = time.monotonic() + 10
        while len(engine.aborted) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert sorted(engine.aborted) == sorted(request.key for request in engine.requests)


def test_a_client_that_goes_away_frees_its_slot_in_the_real_engine(url: str) -> None:
    with httpx.Client(trust_env=False, timeout=30) as client:
        body: Json = {"messages": [user("a")], "n": 8, "stream": True, "max_tokens": 200}
        with client.stream("POST", f"{url}/v1/chat/completions", json=body) as found:
            next(found.iter_lines())
    until = time.monotonic() + 10
    while get(url, "/health").json()["running"] and time.monotonic() < until:
        time.sleep(0.01)
    assert post(url, "/v1/completions", {"prompt": "a"}).status_code == 200


# ---- whatever is sent ------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=20)
    | st.lists(st.integers(-1, 120), max_size=5)
    | st.lists(st.text(max_size=5), max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x"]), "content": st.text(max_size=9)}),
        max_size=3,
    ),
    "model": st.just("tiny") | st.none(),
    "max_tokens": st.integers(-1, 6),
    "temperature": st.floats(0, 2) | st.just(0),
    "n": st.integers(0, 3),
    "stop": st.text(max_size=2) | st.lists(st.text(max_size=3), max_size=5),
    "seed": st.integers(),
    "stream": st.booleans(),
    "logprobs": st.booleans() | st.integers(0, 2),
    "session_id": st.text("ab/", max_size=2),
}
bodies = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 6)},
    optional={name: st.one_of(usual, usual, usual, anything) for name, usual in likely.items() if name != "max_tokens"},
)


@settings(max_examples=150, deadline=None)
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    body=bodies | anything,
    garbage=st.none() | st.binary(max_size=30),
)
def test_whatever_is_sent_the_answer_is_one_or_a_refusal(url: str, path: str, body: Any, garbage: bytes | None) -> None:
    content = json.dumps(body).encode() if garbage is None else garbage
    headers = {"content-type": "application/json"}
    found = HTTP.post(f"{url}{path}", content=content, headers=headers)
    assert found.status_code in (200, 400, 404, 413), (found.status_code, found.text)
    if found.status_code == 200:
        assert found.text.endswith("data: [DONE]\n\n") or found.json()["choices"]
    else:
        assert found.json()["error"]["message"]
    assert get(url, "/health").status_code == 200


@settings(max_examples=50, deadline=None)
@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD"]),
    path=st.sampled_from(["/v1/sessions/", "/v1/models/", "/v1/chat/completions", "/health", "/"]),
    rest=st.text("ab./%?#\\é", max_size=6),
    session_id=st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=6),
)
def test_wherever_it_is_sent_and_by_whatever_name(url: str, method: str, path: str, rest: str, session_id: str) -> None:
    headers = {"x-session-id": session_id.strip().encode("latin-1")}
    found = HTTP.request(method, f"{url}{path}{rest}", headers=headers, json={"messages": [user("a")], "max_tokens": 1})
    assert found.status_code < 500, (found.status_code, found.text)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_served_by_one_command_until_it_is_stopped(model: PreTrainedModel, tmp_path: Path) -> None:
    save_model(model, TEXT.tokenizer, tmp_path / "model")
    command = [sys.executable, "-m", "millstream.cli.main", "serve", str(tmp_path / "model"), "--name", "mine"]
    options = ["--port", "0", "--max-length", "64", "--weights-from", str(tmp_path)]
    child = start_command([*command, *options], stderr=2)
    try:
        assert child.stdout is not None
        name, _, _, address = child.stdout.readline().split()
        client = client_of(address.removesuffix("/v1"))
        chat: Any = client.chat.completions.create(model=name, messages=[user("a")], temperature=0, max_tokens=5)
        assert chat.choices[0].token_ids == generated(model, TEXT.opening(_messages("a")), 5)
        assert client.models.retrieve("mine").context == 64  # type: ignore[attr-defined]
        write_weights(tmp_path / "new", 4, dict(model.named_parameters()), model.config)
        taken = {"path": str(tmp_path / "new"), "version": 4}
        assert post(address.removesuffix("/v1"), "/v1/millstream/weights", taken).json()["version"] == 4
        assert client.models.retrieve("mine").version == 4  # type: ignore[attr-defined]
    finally:
        child.send_signal(signal.SIGINT)
        assert child.wait(30) in (0, 130)


def test_a_model_that_is_not_there_is_refused_with_what_to_type(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "nothing")])
    assert result.exit_code == 1 and "no such folder" in result.output and "serve FOLDER" in result.output
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--host", "0.0.0.0"], env={"MILLSTREAM_TOKEN": ""})
    assert result.exit_code == 1 and "token" in result.output


@pytest.mark.parametrize("wrong", [{"max_body_bytes": 0}, {"max_requests": 0}, {"port": 70_000}])
def test_limits_that_cannot_be_are_refused(wrong: Json) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ModelServiceConfig(**wrong)
    with pytest.raises(ValueError, match="above 0"):
        SessionLimits(idle_s=0)
