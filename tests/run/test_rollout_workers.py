"""Rollout workers as processes: a real model, a real engine process, the store of many processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from millstream import train
from millstream.audit import audit
from millstream.config import convert, load
from millstream.env.config import EnvironmentConfig
from millstream.env.rewards import RewardConfig
from millstream.errors import ConfigError
from millstream.events import GroupLeft, RolloutEnded, RolloutFailed, RolloutStarted, WorkerStarted
from millstream.events.sinks import read_events
from millstream.pipeline.episode import EpisodeResult, Player
from millstream.pipeline.worker_host import HostSetup
from millstream.run.check import check_combinations
from millstream.run.config import RunConfig, uses_lines
from millstream.run.rollout_worker import RolloutWorkerSetup, build_environments, wait_until_blocked
from millstream.store.coordinator import StorePlan
from millstream.types import RequestKey, Sampling, Task
from support.agents import Model
from support.commands import run_command, start_command
from support.runs import ROOT, command, step_rows, steps_of, until

AGENT = """
from openai import OpenAI

def solve(task, access):
    client = OpenAI(base_url=access.base_url, api_key=access.api_key)
    messages = [{"role": "user", "content": task.prompt}]
    say = lambda: client.chat.completions.create(model=access.model, messages=messages).choices[0].message
    messages += [say(), {"role": "user", "content": "sure?"}]
    return say().content
"""
SMALL = {"pipeline.steps": 2, "data.size": 100, "rollout.max_tokens": 8, "checkpoint.every_steps": 1}


REWARD = """
def spread(task, completion):
    return sum(map(ord, completion)) % 7
"""


def test_with_max_lag_0_workers_a_rank_that_reads_the_store_and_rows_on_disk_give_the_weights_of_one_process_bit_for_bit(
    tmp_path: Path,
) -> None:
    weights = []
    (tmp_path / "rewards.py").write_text(REWARD)
    same = SMALL | {"pipeline.max_lag": 0, "reward": f"[{{function='{tmp_path}/rewards.py:spread'}}]"}
    on_disk = {"store.memory_gb": 1e-9, "store.spill_folder": tmp_path}
    apart = {"rollout.workers": 2, "engine.process": "true", "rollout.keep_gb": 0} | on_disk
    for name, changes in (("one", {}), ("apart", apart)):
        run_dir = tmp_path / name / "run"
        done = run_command(command(run_dir, same | changes))
        assert done.returncode == 0, done.stdout + done.stderr
        assert audit(run_dir).is_clean
        assert all(row["grad_norm"] > 0 for row in step_rows(run_dir)), "something was trained"
        weights.append((run_dir / "model/model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert not list(tmp_path.glob("*-disk")), "the files of rows are removed"


def test_a_worker_that_is_killed_is_replaced_and_the_run_ends_with_a_clean_audit(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    changes = SMALL | {"pipeline.steps": 1000, "rollout.workers": 2, "rollout.retries": 2, "engine.process": "true"}
    process = start_command(command(run_dir, changes))

    def starts() -> list[WorkerStarted]:
        return [event for event in read_events(run_dir / "events.jsonl") if isinstance(event, WorkerStarted)]

    try:
        until(lambda: steps_of(run_dir) >= 2, process)
        first, _ = sorted(starts(), key=lambda event: event.worker)
        assert first.worker == "rollouts-0"
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: len(starts()) == 3, process)
        done = steps_of(run_dir)
        until(lambda: steps_of(run_dir) >= done + 2, process)
        process.terminate()  # it ends after the current batch
        process.wait(120)
    finally:
        process.kill()
    assert audit(run_dir).is_clean
    events = list(read_events(run_dir / "events.jsonl"))
    started = starts()
    assert sorted(event.worker for event in started) == ["rollouts-0", "rollouts-0", "rollouts-1"]
    assert not any(psutil.pid_exists(event.pid) for event in started)
    assert {event.error for event in events if isinstance(event, RolloutFailed)} <= {"RolloutWorkerLost"}
    begun = [(e.group_id, e.member, e.attempt) for e in events if isinstance(e, RolloutStarted)]
    ended = [(e.group_id, e.member) for e in events if isinstance(e, RolloutEnded)]
    assert len(set(begun)) == len(begun) and len(set(ended)) == len(ended)
    assert len({event.group_id for event in events if isinstance(event, GroupLeft)}) == sum(
        isinstance(event, GroupLeft) for event in events
    )


def test_a_worker_serves_the_agents_that_it_plays(tmp_path: Path) -> None:
    """Their calls come to an endpoint in its own process."""
    model = Model("3", "4")
    model.text.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    agent = {"use": "agent", "args": {"function": f"{tmp_path}/agent.py:solve"}}
    sampling = Sampling(max_tokens=8, stop=(model.text.end_token,))
    setup = RolloutWorkerSetup(
        host=HostSetup(
            sampling=sampling,
            seed=0,
            max_parts=1,
            timeout_s=30.0,
            records_turns=False,
            has_lines=False,
            is_gated=False,
            keeps_parts=True,
            patience_s=1.0,
            are_prefixes_kept=False,
        ),
        environment=(convert(agent, EnvironmentConfig, where="environment"),),
        reward=(RewardConfig(),),
        takes_stops=True,
        tokenizer={path.name: path.read_bytes() for path in tmp_path.iterdir()},
        trusts_code=False,
        store=StorePlan(tasks={}, host="", port=0, token="", node="", memory="", journal=""),
        path=sys.path,
    )

    async def program() -> EpisodeResult:
        environments = build_environments(setup)
        player = Player(environments, sampling, run_seed=0, role="train")
        try:
            task = Task(id="1", prompt="2+2=", answer="4")
            return await player.play(task, RequestKey(group_id=0, member=0), model.generate)
        finally:
            await environments.close()

    (part,) = asyncio.run(program()).parts
    assert part.reward == 1.0 and len(model.requests) == 2


def test_a_worker_that_was_paused_does_not_count_as_blocked_and_one_whose_event_loop_stands_still_does() -> None:
    num_turns = 0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        """Sleeps 3, 6 and 9 are in a pause of the process: no turn, however long they were. From 12 on the loop is blocked."""
        nonlocal num_turns
        slept.append(seconds)
        num_turns += len(slept) % 3 != 0 and len(slept) < 12

    wait_until_blocked(lambda: num_turns, 60.0, sleep)
    assert slept == [15.0] * 15


@pytest.mark.parametrize(
    ("environment", "settings", "what"),
    [
        ({}, ["data.sessions=true"], "data.sessions: such a run plays no rollouts. Set rollout.workers = 0"),
        ({"max_concurrent": 1}, [], "set rollout.workers = 1 at most, or max_concurrent higher"),
        ({"max_concurrent": 1000}, ["pipeline.max_lag=0"], "max_concurrent = 1000, with pipeline.max_lag = 0"),
        ({"use": "__main__:play"}, [], 'which no other process imports: name it "file.py:name"'),
        ({"use": "agent", "args": {"function": "__main__:solve"}}, [], "__main__:solve is of the script that runs"),
    ],
)
def test_what_workers_cannot_do_is_refused_with_what_to_type(
    environment: dict[str, Any], settings: list[str], what: str
) -> None:
    config = load(ROOT / "recipes/demo.toml", RunConfig, ["rollout.workers=2", *settings])
    with pytest.raises(ConfigError) as error:
        check_combinations(structs.replace(config, environment=(EnvironmentConfig(**environment),)))
    found = [str(error.value), *getattr(error.value, "__notes__", [])]
    assert any(what in one for one in found), found


def test_a_reward_that_was_passed_from_python_is_refused() -> None:
    with pytest.raises(ConfigError, match="was passed to train, which no other process has"):
        train(load(ROOT / "recipes/demo.toml", RunConfig, ["rollout.workers=1"]), reward=lambda task, said: 1.0)


@pytest.mark.parametrize(
    ("engine", "max_lag", "is_used"), [("torch", 1, True), ("vllm", 1, True), ("vllm", 0, False), ("http", 1, False)]
)
def test_workers_send_requests_themselves_to_engines_of_the_run_and_never_in_lockstep(
    engine: str, max_lag: int, is_used: bool
) -> None:
    http = (
        {"http": {"urls": ["http://localhost:1"], "flavour": "vllm", "folder": "weights"}} if engine == "http" else {}
    )
    config = convert(
        {
            "model": {"path": "nowhere"},
            "engine": {"kind": engine, **http},
            "pipeline": {"max_lag": max_lag},
            "rollout": {"workers": 2},
        },
        RunConfig,
        where="a config",
    )
    assert uses_lines(config) is is_used
