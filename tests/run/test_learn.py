"""A run that learns from its use: the real client, rewards that are posted, steps while requests are answered."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from millstream.audit import audit
from millstream.config import load
from millstream.env.data import DataConfig
from millstream.errors import ConfigError
from millstream.events import GroupAdmitted, GroupLeft, SessionDropped, Warned
from millstream.events.sinks import read_events, read_history
from millstream.pipeline.schedule import PipelineConfig
from millstream.run.check import check_combinations
from millstream.run.config import ModelConfig, RunConfig, TinyConfig
from millstream.run.learn import LearningEndpoint, check_endpoint, waiting_message
from millstream.serve.openai.service import ModelServiceConfig
from millstream.types import Fate
from support.commands import Command, run_command, start_command
from support.lazy import lazy_module
from support.runs import ROOT, command, sealed_checkpoints, steps_of, until

if TYPE_CHECKING:
    import openai
else:
    openai = lazy_module("openai")

TOKEN = "a-token-of-the-tests"
WITHOUT_GROUPS = {
    "algorithm.name": "reinforce_plus_plus",
    "rollout.group_size": 1,
    "rollout.max_parts": 2,
    "pipeline.filter_zero_signal": "false",
}
HTTP = httpx.Client(timeout=60, trust_env=False, headers={"Authorization": f"Bearer {TOKEN}"})


def serve(source: Path, **changes: object) -> list[str]:
    overrides = [word for key, value in changes.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
    base = [sys.executable, "-m", "millstream.cli.main", "serve", str(source), "--learn", "--port", "0"]
    base += ["--token", TOKEN, "--name", "policy"]
    return [*base, *overrides]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, whose settings need no groups."""
    run_dir = tmp_path_factory.mktemp("runs") / "first"
    done = run_command(command(run_dir, {**WITHOUT_GROUPS, "pipeline.steps": 2, "pipeline.max_lag": 4}))
    assert done.returncode == 0, done.stderr
    return run_dir


class Service:
    def __init__(self, url: str, process: Command) -> None:
        self.url = url
        self.process = process

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = HTTP.get(f"{self.url.removesuffix('/v1')}/health").json()
        return found

    def session(self) -> str:
        """One session of real use: two calls of the real client."""
        session_id: str = HTTP.post(f"{self.url}/sessions").json()["id"]
        client = openai.OpenAI(
            base_url=self.url,
            api_key=TOKEN,
            max_retries=0,
            default_headers={"X-Session-Id": session_id},
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )
        first = client.completions.create(model="policy", prompt="31>", max_tokens=4).choices[0].text
        client.completions.create(model="policy", prompt=f"31>{first}>", max_tokens=4)
        return session_id

    def reward(self, session_id: str, reward: float) -> httpx.Response:
        return HTTP.post(f"{self.url}/sessions/{session_id}/reward", json={"reward": reward})


@contextmanager
def serving(words: list[str]) -> Iterator[Service]:
    process = start_command(words)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not (found := re.search(r"is at (http://\S+)/v1, and learns", lines[-1] if lines else "")):
            line = process.stdout.readline()
            assert line, lines
            lines.append(line)
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield Service(f"{found[1]}/v1", process)
    finally:
        process.kill()
        process.wait()


def trained_tasks(run_dir: Path) -> list[str]:
    """The tasks of all groups that were trained, in the run as it counts: without what a resume has undone."""
    events = list(read_history(run_dir / "events.jsonl"))
    task_of = {event.group_id: event.task_id for event in events if isinstance(event, GroupAdmitted)}
    return [task_of[event.group_id] for event in events if isinstance(event, GroupLeft) and event.fate == Fate.TRAINED]


@pytest.mark.slow
def test_sessions_are_trained_while_requests_are_answered_and_what_is_too_old_is_refused(trained: Path) -> None:
    run_dir = trained.parent / "learns"
    words = serve(trained, run_dir=run_dir, pipeline__max_lag=1, pipeline__steps=4)
    with serving(words) as service, ThreadPoolExecutor(4) as users:
        old, foreign = service.session(), "session-" + "0" * 32
        assert service.reward(foreign, 1.0).status_code == 404
        assert HTTP.post(f"{service.url}/sessions/{old}/reward", json={"reward": "good"}).status_code == 400
        assert HTTP.post(f"{service.url}/sessions/{old}/reward", content=b'{"reward": NaN}').status_code in (400, 415)
        assert (
            httpx.post(f"{service.url}/sessions/{old}/reward", json={"reward": 1}, trust_env=False).status_code == 401
        )
        while service.health()["steps"] < 3:
            ids = list(users.map(lambda _: service.session(), range(4)))
            assert all(answer.status_code in (200, 409) for answer in users.map(service.reward, ids, (0, 1, 0, 1)))
        refused = service.reward(old, 1.0)
        assert refused.status_code == 409 and "pipeline.max_lag allows 1" in refused.json()["error"]["message"]
        assert service.reward(old, 1.0).status_code == 404, "it has ended"
        answer = HTTP.post(f"{service.url}/completions", json={"prompt": "31>"}).json()
        versions = answer["choices"][0]["token_versions"]
        assert min(versions) >= 2
        while service.process.poll() is None:
            with suppress(httpx.HTTPError, openai.APIError, KeyError):  # it is ending
                service.reward(service.session(), 1.0)
    assert audit(run_dir).is_clean, audit(run_dir)
    assert steps_of(run_dir) == 4
    tasks = trained_tasks(run_dir)
    assert len(tasks) == len(set(tasks)) == 16
    dropped = [event.why for event in read_events(run_dir / "events.jsonl") if isinstance(event, SessionDropped)]
    assert any("pipeline.max_lag allows 1" in why for why in dropped)


@pytest.mark.slow
def test_rewards_that_were_acknowledged_before_a_kill_are_trained_once(trained: Path) -> None:
    run_dir = trained.parent / "killed"
    # `checkpoint.every_steps` leaves out a checkpoint soon after a slow one: on a busy machine that of the first step.
    changes = {"pipeline__steps": 3, "checkpoint__keep_every": 1}
    with serving(serve(trained, run_dir=run_dir, **changes)) as service:
        for number in range(6):  # a step takes four
            assert service.reward(service.session(), number % 2).status_code == 200
        until(lambda: sealed_checkpoints(run_dir) > 1 and service.health()["steps"] == 1, service.process)
        left = service.session()
        service.process.kill()
    with (run_dir / "sessions.jsonl").open("ab") as journal:
        journal.write(b'{"reward": 1.0, "parts": [[[')  # a reward that was not acknowledged
    with serving(serve(run_dir)) as service:
        assert service.reward(left, 1.0).status_code == 404, "sessions without a reward end with the process"
        for number in range(6):
            assert service.reward(service.session(), number % 2).status_code == 200
        assert service.process.wait(120) == 0
    assert audit(run_dir).is_clean, audit(run_dir)
    lines = (run_dir / "sessions.jsonl").read_text().splitlines()
    assert len(lines) == 13 and lines[6] == '{"resumed_at":1}', "12 sessions, and where the second process began"
    assert sorted(trained_tasks(run_dir)) == sorted(f"session-{number}" for number in range(12))
    with (run_dir / "sessions.jsonl").open("a") as journal:
        journal.writelines(f"{line}\n" for line in lines[-6:])  # rewarded while the last step was made
    with serving(serve(run_dir, pipeline__steps=4)) as service:
        assert service.process.wait(120) == 0
    assert audit(run_dir).is_clean, audit(run_dir)
    assert len(trained_tasks(run_dir)) == len(set(trained_tasks(run_dir))) == 16
    warned = [event.message for event in read_events(run_dir / "events.jsonl") if isinstance(event, Warned)]
    assert any("wait in sessions.jsonl: 2. To train them" in message for message in warned)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.name=grpo"], 'algorithm.advantage = "grpo" with rollout.group_size = 1: a session has no others'),
        (["algorithm.advantage=turns"], 'algorithm.advantage = "turns"'),
        (["rollout.group_size=4"], "rollout.group_size = 4: a session has no others"),
        (["pipeline.max_lag=0.5"], "pipeline.max_lag = 0.5: rewards come later"),
        (["pipeline.max_lag=2", "pipeline.overdue=restart"], 'pipeline.overdue = "restart"'),
        (["pipeline.max_lag=2", "pipeline.surplus=abort", "pipeline.extra_groups=2"], 'pipeline.surplus = "abort"'),
        (["pipeline.rollouts_only=true"], "leave pipeline.rollouts_only"),
    ],
)
def test_what_needs_groups_or_lockstep_is_refused_by_name(changes: list[str], message: str) -> None:
    settings = [f"{key}={value}" for key, value in {**WITHOUT_GROUPS, "data.sessions": "true"}.items()]
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_combinations(load(ROOT / "recipes/demo.toml", RunConfig, [*settings, *changes]))


def test_a_run_that_has_made_its_last_step_says_how_many_sessions_wait_and_what_trains_them() -> None:
    message = waiting_message(5, PipelineConfig(steps=10, groups_per_step=4), Path("runs/a b"))
    assert "wait in sessions.jsonl: 5. To train them" in message
    assert message.endswith("serve 'runs/a b' --learn --set pipeline.steps=12")


def test_nothing_learns_without_a_token_or_without_an_endpoint() -> None:
    config = RunConfig(model=ModelConfig(tiny=TinyConfig()), data=DataConfig(sessions=True))
    with pytest.raises(ConfigError, match="serve RUN --learn"):
        check_endpoint(config, None)
    with pytest.raises(ConfigError, match="--learn needs a token"):
        check_endpoint(config, LearningEndpoint(service=ModelServiceConfig(), token=None, name="policy"))
