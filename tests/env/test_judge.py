"""The judge, against a real server: slow, overloaded, talking garbage, or out of range."""

from __future__ import annotations

import asyncio
import email.utils
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from msgspec import Struct, field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from millstream.env.rewards import CompletionScorer, RewardConfig, group_scorer, prepare_rewards
from millstream.env.rewards.judge import Judge, RankingJudge
from millstream.errors import RewardFailed
from millstream.types import Message, Task

TASK = Task(id="1", prompt="2+2=", answer="4")
Answers = Callable[[int, dict[str, Any]], Response | str]


class Server(Struct):
    """A chat endpoint. `answers` gets the number of the request, from 0, and its body."""

    url: str = ""
    answers: Answers = lambda number, body: "Score: 5"
    delay_s: float = 0.0
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        self.headers.append(dict(request.headers))
        self.times.append(time.monotonic())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.at_once -= 1
        answer = self.answers(len(self.seen) - 1, body)
        if isinstance(answer, Response):
            return answer
        return JSONResponse({"choices": [{"message": {"content": answer}}], "usage": {"total_tokens": 100}})


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()
    app = Starlette(routes=[Route("/v1/chat/completions", state.chat, methods=["POST"])])
    with socket.create_server(("127.0.0.1", 0)) as line:
        state.url = f"http://127.0.0.1:{line.getsockname()[1]}/v1"
        runner = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=0))
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [line]}, daemon=True)
        thread.start()
        while not runner.started:
            time.sleep(0.005)
        yield state
        runner.should_exit = True
        thread.join(5)


def config(server: Server, *, timeout_s: float = 10.0, **args: Any) -> RewardConfig:
    return RewardConfig(function="judge", timeout_s=timeout_s, args={"url": server.url, "model": "judge-1", **args})


def score(server: Server, completion: str = "four", task: Task = TASK, **more: Any) -> float:
    return asyncio.run(CompletionScorer(prepare_rewards([config(server, **more)])).score(task, completion))


def test_the_judge_is_shown_prompt_answer_and_completion_and_its_score_is_scaled(server: Server) -> None:
    server.answers = lambda number, body: "Score: 3, at first. Thinking again:\n**Score: 7.5**"
    assert score(server) == 0.75
    (body,) = server.seen
    (message,) = body["messages"]
    assert body["model"] == "judge-1" and body["temperature"] == 0.0 and body["max_tokens"] == 512
    assert all(part in message["content"] for part in ("2+2=", "four", "\n4\n", "from 0 to 10"))


def test_template_pattern_and_range_are_the_users(server: Server) -> None:
    server.answers = lambda number, body: "<s>-1</s>"
    args = {
        "prompt": '{"q": "{prompt}", "a": "{completion}"}',
        "score_pattern": r"<s>(-?\d+)</s>",
        "low": -2,
        "high": 2,
    }
    chat = Task(id="1", prompt=(Message(role="user", content="hi"),))
    assert score(server, "{answer} {prompt}", chat, **args) == 0.25
    assert server.seen[0]["messages"][0]["content"] == '{"q": "user: hi", "a": "{answer} {prompt}"}'


def test_the_key_comes_from_the_environment_and_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert score(server, api_key_env="JUDGE_KEY") == 0.5
    assert score(server) == 0.5
    assert [headers.get("authorization") for headers in server.headers] == ["Bearer secret", None]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("I would rather not say", r"no score in the answer 'I would rather not say'"),
        ("Score: 11", r"the score 11 is not within args\.low = 0 and args\.high = 10"),
        ("Score: -1", r"the score -1 is not within"),
        (PlainTextResponse("<html>"), r"expected a chat completion, got b'<html>'"),
        (JSONResponse({"choices": []}), r"has no text"),
        (JSONResponse({"choices": [{"message": {"content": None}}]}), r"has no text"),
        (JSONResponse({"error": "no such model"}, status_code=404), r"answered 404: .*no such model"),
        (PlainTextResponse("", status_code=401), r"answered 401"),
    ],
)
def test_garbage_fails_the_rollout_at_once_and_is_shown(server: Server, answer: Response | str, message: str) -> None:
    server.answers = lambda number, body: answer
    with pytest.raises(RewardFailed, match=message):
        score(server)
    assert len(server.seen) == 1


def test_an_overloaded_server_is_asked_again_after_a_pause(server: Server) -> None:
    answers: list[Response | str] = [
        PlainTextResponse("", status_code=503),
        PlainTextResponse("", status_code=429),
        "Score: 10",
    ]
    server.answers = lambda number, body: answers[number]
    assert score(server) == 1.0
    first, second, third = server.times
    assert second - first > 0.4 and third - second > 0.9


@pytest.mark.parametrize("is_date", [False, True])
def test_the_servers_own_pause_is_honoured(server: Server, is_date: bool) -> None:
    def answers(number: int, body: dict[str, Any]) -> Response | str:
        when = email.utils.formatdate(time.time() + 0.9, usegmt=True) if is_date else "0.05"
        return "Score: 10" if number else PlainTextResponse("", status_code=429, headers={"Retry-After": when})

    server.answers = answers
    assert score(server) == 1.0
    first, second = server.times
    assert second - first < (1.5 if is_date else 0.4)


def test_a_pause_past_the_time_limit_is_not_waited_for(server: Server) -> None:
    server.answers = lambda number, body: PlainTextResponse("", status_code=429, headers={"Retry-After": "120"})
    began = time.monotonic()
    with pytest.raises(
        RewardFailed, match=r"answered 429, and the next attempt would be in 120 s, past reward\.timeout_s = 10"
    ):
        score(server)
    assert time.monotonic() - began < 5


def test_a_server_that_stays_broken_is_given_up(server: Server) -> None:
    server.answers = lambda number, body: PlainTextResponse("", status_code=500, headers={"Retry-After": "0"})
    with pytest.raises(RewardFailed, match=r"answered 500, 3 times; args\.retries sets how often"):
        score(server, retries=2)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as line:
        port = line.getsockname()[1]
    args = {"url": f"http://127.0.0.1:{port}/v1", "model": "m", "retries": 0}
    with pytest.raises(RewardFailed, match=rf"127\.0\.0\.1:{port}/v1 cannot be asked \(ConnectError"):
        asyncio.run(CompletionScorer(prepare_rewards([RewardConfig(function="judge", args=args)])).score(TASK, ""))


def test_a_slow_judge_meets_the_time_limit(server: Server) -> None:
    server.delay_s = 5.0
    with pytest.raises(RewardFailed, match=r"no answer from .* within 0\.3 s; reward\.timeout_s sets the limit"):
        score(server, timeout_s=0.3)


def test_calls_at_once_are_limited_and_the_wait_for_a_turn_does_not_count(server: Server) -> None:
    server.delay_s = 0.1

    async def program() -> list[float]:
        judge = CompletionScorer(prepare_rewards([config(server, timeout_s=0.5, most_at_once=2)]))
        return list(await asyncio.gather(*(judge.score(TASK, str(number)) for number in range(16))))

    assert asyncio.run(program()) == [0.5] * 16
    assert server.most_at_once == 2


def test_a_limit_on_calls_is_kept_by_many_at_once_and_refusals_are_counted(server: Server) -> None:
    judge = Judge(url=server.url, model="m", most_calls=3)

    async def program() -> list[float | BaseException]:
        return list(await asyncio.gather(*(judge(TASK, "x") for _ in range(8)), return_exceptions=True))

    results = asyncio.run(program())
    assert results.count(0.5) == 3 == len(server.seen)
    assert (judge.spent.calls, judge.spent.tokens, judge.spent.refused) == (3, 300, 5)
    assert "args.most_calls = 3 is spent (3 calls, " in str(results[-1])
    assert any("5 refused so far" in str(result) for result in results)


def test_a_limit_on_tokens_is_kept(server: Server) -> None:
    judge = Judge(url=server.url, model="m", most_tokens=150)

    async def program() -> None:
        assert [await judge(TASK, "x") for _ in range(2)] == [0.5, 0.5]
        with pytest.raises(RewardFailed, match=r"args\.most_tokens = 150 is spent \(2 calls, 200 tokens\); 1 refused"):
            await judge(TASK, "x")

    asyncio.run(program())


def test_attempts_count_as_calls(server: Server) -> None:
    server.answers = lambda number, body: PlainTextResponse("", status_code=500, headers={"Retry-After": "0"})
    with pytest.raises(RewardFailed, match=r"args\.most_calls = 2 is spent"):
        score(server, most_calls=2)
    assert len(server.seen) == 2


def test_a_judge_outlives_an_event_loop(server: Server) -> None:
    scorer = CompletionScorer(prepare_rewards([config(server)]))
    assert [asyncio.run(scorer.score(TASK, "x")) for _ in range(2)] == [0.5, 0.5]


def test_a_ranking_judge_sees_the_whole_group_and_ranks_it(server: Server) -> None:
    server.answers = lambda number, body: "Answer 2 is best. 1 > 2 is wrong.\nRanking: 2 > 3 > 1"
    args = {"url": server.url, "model": "m"}
    group = group_scorer(prepare_rewards([RewardConfig(function="ranking_judge", group=True, args=args, weight=2.0)]))
    assert group is not None
    assert asyncio.run(group.score(TASK, ["bad", "good", "fair"])) == [0.0, 2.0, 1.0]
    assert "Answer 2:\ngood" in server.seen[0]["messages"][0]["content"]
    assert asyncio.run(group.score(TASK, ["alone"])) == [2.0] and len(server.seen) == 1


@pytest.mark.parametrize("answer", ["no idea", "Ranking: 1 > 2", "Ranking: 1 > 2 > 2", "Ranking: 1 > 2 > 4"])
def test_a_ranking_that_is_none_fails(server: Server, answer: str) -> None:
    server.answers = lambda number, body: answer
    judge = RankingJudge(url=server.url, model="m")
    with pytest.raises(RewardFailed, match="expected the numbers 1 to 3, each once"):
        asyncio.run(judge(TASK, ["a", "b", "c"]))
    assert judge.spent.calls == 1
