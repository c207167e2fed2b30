"""Runs whose engine or learner is a program outside: the examples of docs/outside.md, which are killed in the middle."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from millstream.audit import audit
from millstream.config import load
from millstream.errors import ConfigError
from millstream.events import GroupAdmitted, GroupLeft, RolloutEnded, Stepped, Warned
from millstream.events.sinks import read_events, read_history
from millstream.run.check import check_combinations
from millstream.run.config import RunConfig
from millstream.serve.store.verbs import OutsideClient
from millstream.types import Fate
from support.commands import Command, start_command
from support.runs import ROOT, command, recipe_in, resume_command, sealed_checkpoints, steps_of, until

SHORT: dict[str, object] = {
    "pipeline.steps": 6,
    "pipeline.groups_per_step": 2,
    "pipeline.max_lag": 1,
    "data.size": 40,
    "data.holdout": 4,
    "evaluation.tasks": 2,
    "outside.port": 0,
}


@contextmanager
def training(run_dir: Path, keys: dict[str, object]) -> Iterator[tuple[Command, str]]:
    with started(run_dir, command(run_dir, SHORT | keys)) as found:
        yield found


@contextmanager
def started(run_dir: Path, words: list[str]) -> Iterator[tuple[Command, str]]:
    """The run, and its URL."""
    with ExitStack() as closing:
        (run_dir / "outside.url").unlink(missing_ok=True)
        process = start_command(words)
        closing.callback(process.wait)
        closing.callback(process.kill)
        file = run_dir / "outside.url"
        until(lambda: file.exists() and bool(file.read_text()), process)
        yield process, file.read_text().strip()


@contextmanager
def outside(example: str, *words: object) -> Iterator[Command]:
    with ExitStack() as closing:
        process = start_command([sys.executable, str(ROOT / "examples" / example), *map(str, words)])
        closing.callback(process.wait)
        closing.callback(process.kill)
        yield process


def ended(process: Command) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


def check_run(run_dir: Path) -> list[Any]:
    """Nothing is lost, and nothing is trained twice."""
    report = audit(run_dir)
    assert report.is_clean, report
    events = list(read_events(run_dir / "events.jsonl"))
    admitted = Counter(event.group_id for event in events if isinstance(event, GroupAdmitted))
    left = Counter(event.group_id for event in events if isinstance(event, GroupLeft))
    assert set(admitted.values()) == set(left.values()) == {1} and left.keys() <= admitted.keys()
    trained = [event for event in events if isinstance(event, GroupLeft) and event.fate == Fate.TRAINED]
    steps = [event for event in events if isinstance(event, Stepped)]
    assert len(steps) == 6 and len(trained) == 12
    assert not (run_dir / "outside.url").exists() and not (run_dir / "outside").exists()
    return events


def test_a_foreign_engine_samples_for_a_run_and_nothing_is_lost_when_it_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys = {"engine.kind": "outside", "engine.process": "", "outside.lease_s": 1.0}
    with training(run_dir, keys) as (process, url), OutsideClient(url) as client:
        dead = client.get_prompts(rows=3, wait_s=60)  # a program that dies with what it has claimed
        assert dead is not None and client.init_engine()["is_engine_outside"]
        with outside("foreign_engine.py", url) as first:
            until(lambda: steps_of(run_dir) >= 2, process)
            first.send_signal(signal.SIGKILL)
            assert first.wait(20) == -signal.SIGKILL
        with outside("foreign_engine.py", url) as second:
            ended(process)
            assert "the run is over" in ended(second)
    events = check_run(run_dir)
    versions = {event.start_version for event in events if isinstance(event, RolloutEnded)}
    assert max(versions) >= 4, "it has loaded what was trained"
    assert not [event for event in events if isinstance(event, Warned) and "refused" in event.message]


def test_a_foreign_learner_trains_for_a_run_and_no_batch_is_lost_or_trained_twice_when_it_is_killed(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    keys = {"learner.kind": "outside", "outside.lease_s": 1.0}
    with training(run_dir, keys) as (process, url), OutsideClient(url) as client:
        dead = client.get_experience(wait_s=60)  # a program that dies with the first batch
        assert dead is not None and dead.group_id == 0 and len(dead) == 8
        with outside("foreign_learner.py", url) as first:
            until(lambda: steps_of(run_dir) >= 2, process)
            first.send_signal(signal.SIGKILL)
            assert first.wait(20) == -signal.SIGKILL
        with outside("foreign_learner.py", url) as second:
            ended(process)
            assert "the run is over" in ended(second)
    events = check_run(run_dir)
    assert all("loss" in event.metrics for event in events if isinstance(event, Stepped))
    assert (run_dir / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_run_that_has_both_outside_and_is_killed_itself_is_resumed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys = {"engine.kind": "outside", "learner.kind": "outside", "engine.process": "", "outside.lease_s": 5.0}
    for attempt in range(2):
        words = resume_command(run_dir) if attempt else command(run_dir, SHORT | keys)
        with started(run_dir, words) as (process, url):
            engine, learner = outside("foreign_engine.py", url), outside("foreign_learner.py", url)
            with engine as sampling, learner as learning:
                if attempt:
                    ended(process)
                    assert "the run is over" in ended(sampling) + ended(learning)
                else:
                    until(lambda: sealed_checkpoints(run_dir) >= 2 and steps_of(run_dir) >= 3, process)
                    process.kill()
                    process.wait()
    report = audit(run_dir)
    assert report.is_clean, report
    versions = [event.version for event in read_history(run_dir / "events.jsonl") if isinstance(event, Stepped)]
    assert versions == list(range(1, 7)), "each step counts once"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["outside.port=80"], "leave it out"),
        (["engine.kind=outside", "pipeline.max_lag=0"], "in no order"),
        (["engine.kind=outside", "engine.replicas=2"], "start several programs"),
        (["engine.kind=outside", "runtime=ray"], 'runtime = "local"'),
        (["engine.kind=outside", "warmup.max_steps=1"], "train --from"),
        (["engine.kind=outside", "outside.host=0.0.0.0"], "set a token"),
        (["learner.kind=outside", "learner.mini_batches=2"], "mini_batches out"),
        (["learner.kind=outside", "pipeline.rollouts_only=true"], "trains nothing"),
        (["learner.kind=outside", "outside.lease_s=0"], "lease_s above 0"),
    ],
)
def test_combinations_that_cannot_work_are_refused(
    keys: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MILLSTREAM_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=why):
        check_combinations(load(recipe_in(tmp_path), RunConfig, keys))
