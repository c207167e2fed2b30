"""Trackers, each against the real library in its offline mode; one that fails never ends a run. `make test-trackers` installs
them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from millstream import resume, train
from millstream.errors import ConfigError, Stopped
from millstream.events import Evaluated, Warned
from millstream.events.sinks import MemorySink, read_events
from millstream.run.tracking import adapters
from millstream.run.tracking.sink import TrackedRun
from millstream.types import Task
from support.runs import assert_clean, metric_rows, step_rows
from support.stage_runs import config
from support.stop_at import StopAt

SMALL = ("pipeline.steps=4", "pipeline.groups_per_step=4", "data.size=60", "data.holdout=4")
STOPPED = ("pipeline.steps=9", "pipeline.groups_per_step=4", "data.size=60", "data.holdout=4")


def ones(task: Task, completion: str) -> float:
    return completion.count("1") / 4


def always_zero(task: Task, completion: str) -> float:
    return 0.0


def offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{folder / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))


def warnings_of(folder: Path) -> list[str]:
    return [event.message for event in read_events(folder / "run/events.jsonl") if isinstance(event, Warned)]


def tracked(folder: Path, name: str) -> None:
    """A run that is stopped and resumed, and that has a finding."""
    keys = (*STOPPED, f'trackers.use=["{name}"]', "trackers.project=tests", "trackers.name=mine")
    with pytest.raises(Stopped):
        train(config(folder, *keys), reward=always_zero, sinks=[StopAt(5)], progress=False)
    resume(folder / "run", reward=always_zero, progress=False)
    assert warnings_of(folder) == []
    assert_clean(folder / "run")


def test_tensorboard_has_every_step_once_the_samples_and_the_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    offline(monkeypatch, tmp_path)
    tracked(tmp_path, "tensorboard")
    found = EventAccumulator(str(tmp_path / "run/tensorboard"))
    found.Reload()
    tags = found.Tags()
    assert [event.step for event in found.Scalars("reward")] == list(range(1, 10))
    assert {"entropy", "step_s", "findings/all-rewards-equal"} <= set(tags["scalars"])
    assert [event.step for event in found.Scalars("eval/held_out/pass@1")] == [0, 9], "the first and the last"
    texts = {tag.removesuffix("/text_summary") for tag in tags["tensors"]}
    assert {"config", "summary", "samples/sampled_after", "findings/all-rewards-equal"} <= texts


def test_mlflow_has_one_run_with_its_config_every_step_and_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    import mlflow

    offline(monkeypatch, tmp_path)
    tracked(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "mine"
    assert run.data.params["pipeline.steps"] == "9" and run.data.params["model.tiny.hidden"] == "32"
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "reward")]
    assert sorted(set(steps)) == list(range(1, 10))
    scores = client.get_metric_history(run.info.run_id, "eval/held_out/pass_1")
    assert sorted(metric.step for metric in scores) == [0, 9], "the first and the last"
    assert {"samples", "findings", "summary.json"} <= {one.path for one in client.list_artifacts(run.info.run_id)}


def test_trackio_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    offline(monkeypatch, tmp_path)
    import trackio.utils
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "trackio")  # read when it is imported
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    tracked(tmp_path, "trackio")
    (name,) = SQLiteStorage.get_runs("tests")
    rows = SQLiteStorage.get_logs("tests", name)
    assert name.startswith("mine-") and {row["step"] for row in rows if "reward" in row} == set(range(1, 10))
    assert [row["step"] for row in rows if "eval/held_out/pass@1" in row] == [0, 9], "the first and the last"
    assert any("summary/steps" in row for row in rows)


def test_wandb_records_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    offline(monkeypatch, tmp_path)
    tracked(tmp_path, "wandb")
    files = sorted((tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2, "one for each process of the run; they have the same id"
    ids = {file.stem.removeprefix("run-") for file in files}
    data = b"".join(file.read_bytes() for file in files)
    assert len(ids) == 1 and all(
        word in data for word in (b"reward_std", b"eval/held_out/pass@1", b"all-rewards-equal", b"tests", b"mine")
    )


class Remembering:
    """A tracker that keeps what it is called with, over all processes of a run."""

    calls: ClassVar[list[tuple[str, int, dict[str, float]]]] = []

    def __init__(self, run: TrackedRun) -> None:
        self.calls.append(("open", run.version, {}))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(values)))

    def text(self, step: int, name: str, text: str) -> None:
        self.calls.append((name, step, {}))

    def finish(self, summary: Mapping[str, float], *, is_finished: bool) -> None:
        self.calls.append(("finish", 0, dict(summary)))


def rewarded_by_rank(task: Task, completions: list[str]) -> list[float]:
    return [float(number + 1) for number in range(len(completions))]


def test_every_evaluation_is_logged_once_under_its_version_with_the_rewards_of_whole_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a resume, and to the last one at the end of the run."""
    monkeypatch.setattr("millstream.run.tracking.config.find_spec", lambda name: object())
    monkeypatch.setitem(adapters.OPENERS, "wandb", Remembering)
    monkeypatch.setattr(Remembering, "calls", calls := [])
    keys = (*STOPPED, 'trackers.use=["wandb"]', "evaluation.every_steps=2", "reward.0.group=true")
    with pytest.raises(Stopped):
        train(config(tmp_path, *keys), reward=rewarded_by_rank, sinks=[StopAt(5)], progress=False)
    again = MemorySink()
    resume(tmp_path / "run", reward=rewarded_by_rank, sinks=[again], progress=False)
    score = "eval/held_out/pass@1"
    steps = [step for what, step, values in calls if what == "log" and score in values]
    assert steps == sorted(steps) and {0, 9} < set(steps) and steps.count(0) == steps.count(9) == 1
    assert calls[-1][0] == "finish" and [what for what, _, _ in calls].count("finish") == 2
    assert ("samples/sampled_after", 9, {}) in calls
    assert all(event.version > 0 for event in again.of(Evaluated)), "a sink of ours has no evaluation twice"
    rewards = [values["reward"] for what, _, values in calls if what == "log" and "reward" in values]
    assert len(rewards) == 9 and set(rewards) == {1.5}, "of two members: 1 and 2"
    assert [row["reward_std"] for row in step_rows(tmp_path / "run")][:5] == [0.5] * 5
    assert {row["step"] for row in metric_rows(tmp_path / "run") if score in row} == set(steps)
    assert_clean(tmp_path / "run")


class Broken:
    """A tracker whose server is gone after the first row."""

    def __init__(self, run: TrackedRun) -> None:
        assert run.config["pipeline.steps"] == 4
        self.rows = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows += 1
        if self.rows > 1:
            raise ConnectionError("the server is gone")

    def text(self, step: int, name: str, text: str) -> None: ...

    def finish(self, summary: Mapping[str, float], *, is_finished: bool) -> None: ...


def test_a_tracker_that_fails_is_given_up_with_one_warning_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.run.tracking.config.find_spec", lambda name: object())
    monkeypatch.setitem(adapters.OPENERS, "wandb", Broken)
    result = train(config(tmp_path, *SMALL, 'trackers.use=["wandb"]'), reward=ones, progress=False)
    assert result.summary.steps == 4
    assert warnings_of(tmp_path) == ["wandb failed and is not used any more: ConnectionError: the server is gone"]
    assert_clean(tmp_path / "run")


def test_a_library_that_refuses_to_start_is_given_up_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://nowhere")
    train(config(tmp_path, *SMALL, 'trackers.use=["mlflow"]'), reward=ones, progress=False)
    (warning,) = warnings_of(tmp_path)
    assert warning.startswith("mlflow failed and is not used any more")


def test_a_tracker_that_is_not_installed_is_refused_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.run.tracking.config.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'millstream\[mlflow\]'"):
        train(config(tmp_path, *SMALL, 'trackers.use=["mlflow"]'), reward=ones)
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trackers"):
        config(tmp_path, *SMALL, 'trackers.use=["excel"]')
