"""Findings of real runs: in the log, the terminal, the report, the result and the exit code. `bench/findings.py` has the planted
failures and the healthy runs; here the slow test runs all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from findings import HEALTHY, PLANTED, run
from millstream import resume, train
from millstream.cli.main import app
from millstream.errors import Stopped
from millstream.events import FindingMade, RunEnded
from millstream.events.findings import findings_of
from millstream.events.sinks import read_events, read_history
from millstream.types import Task
from support.runs import assert_clean
from support.stage_runs import CONFIG, config
from support.stop_at import StopAt

SHORT = ("pipeline.steps=6", "pipeline.groups_per_step=4", "pipeline.max_replaced_per_step=4", "data.holdout=0")
FILTERED = ("pipeline.filter_zero_signal=true", "rollout.group_size=8")


def always_zero(task: Task, completion: str) -> float:
    return 0.0


def test_a_run_without_signal_says_so_everywhere_and_fails_where_it_is_strict(tmp_path: Path) -> None:
    (tmp_path / "zero.py").write_text("def reward(task, completion):\n    return 0.0\n")
    (tmp_path / "run.toml").write_text(CONFIG + f'[[reward]]\nfunction = "{tmp_path}/zero.py:reward"\n')
    changes = [word for key in (*SHORT, *FILTERED, f"run_dir={tmp_path}/run") for word in ("--set", key)]
    shown = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), *changes, "--strict"])
    text = " ".join(shown.output.split())
    assert shown.exit_code == 3, shown.output
    assert re.search(r"all-rewards-equal at step 5: all \d+ rewards of the last 5 steps are 0", text), "while it runs"
    assert "This run did not learn as it should: all-rewards-equal, since step 5" in text, "at its end"
    assert "steps that trained nothing │ │ 6 │" in text
    *_, last = events = list(read_events(tmp_path / "run/events.jsonl"))
    assert isinstance(last, RunEnded)
    logged = [event for event in events if isinstance(event, FindingMade)]
    assert [one.name for one in logged] == ["all-rewards-equal", "empty-steps"]
    assert logged == [past.finding for past in findings_of(events, tmp_path / "run")], (
        "the log and the report say the same"
    )
    show = f"millstream eval {tmp_path}/run --show 3"
    assert show in text and show in logged[0].advice, "what to type, with the run's own folder"
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == summary["steps_empty"] == 6
    assert [one["name"] for one in summary["findings"]] == ["all-rewards-equal", "empty-steps"]
    report = CliRunner().invoke(app, ["report", str(tmp_path / "run")]).output
    assert "all-rewards-equal, since step 5: all" in report and show in report
    found = json.loads(CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--json"]).output)
    assert [(one["name"], one["until"]) for one in found["findings"]] == [
        ("all-rewards-equal", None),
        ("empty-steps", None),
    ]
    assert_clean(tmp_path / "run")


def ones(task: Task, completion: str) -> float:
    return completion.count("1") / 4


def test_a_run_that_learns_has_no_findings_and_metrics_that_add_up(tmp_path: Path) -> None:
    result = train(config(tmp_path, "pipeline.steps=12", "data.holdout=0"), reward=ones)
    assert result.findings == ()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert not any(" " in key for key in row)
        parts = [row[key] for key in ("waiting_s", "training_s", "sync_s", "other_s")]
        assert sum(parts) == pytest.approx(row["step_s"], rel=0.05, abs=0.01) and min(parts) >= 0
        assert 0 < row["entropy"] < 5 and 0 <= row["reward_std"] < 1
        assert 0 <= row["lag_flight"] <= row["lag_max"] and 0 <= row["lag_waiting"] <= row["lag_max"]
    assert any(row["reward_std"] > 0 for row in rows)
    assert any(row["training_s"] > 0 and row["waiting_s"] > 0 and row["sync_s"] > 0 for row in rows)


def test_a_finding_continues_across_a_resume(tmp_path: Path) -> None:
    """It is made once: the resumed process knows the steps before."""
    with pytest.raises(Stopped):
        train(config(tmp_path, *SHORT, *FILTERED, "pipeline.steps=14"), reward=always_zero, sinks=[StopAt(6)])
    result = resume(tmp_path / "run", reward=always_zero)
    history = list(read_history(tmp_path / "run/events.jsonl"))
    logged = [event for event in history if isinstance(event, FindingMade)]
    assert sorted(one.name for one in logged) == ["all-rewards-equal", "empty-steps"]
    assert list(result.findings) == logged == [past.finding for past in findings_of(history, tmp_path / "run")]
    assert_clean(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_failure_is_named_within_its_number_of_steps(name: str) -> None:
    case = PLANTED[name]
    found = run(case).found
    assert case.finding in found and found[case.finding] <= case.within, found


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_a_healthy_run(name: str) -> None:
    outcome = run(HEALTHY[name])
    assert outcome.found == {} and outcome.last_reward > outcome.first_reward


def test_the_healthy_runs_are_ten_or_more_and_the_planted_failures_six_or_more() -> None:
    assert len(HEALTHY) >= 10 and len({case.finding for case in PLANTED.values()}) >= 6
