"""`millstream eval` on runs and checkpoints of runs, and the best checkpoint, which is kept and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream import export
from millstream.cli.main import app
from millstream.clock import RealClock
from millstream.config import load
from millstream.errors import ConfigError
from millstream.events import Estimate, Evaluated, Resumed
from millstream.events.sinks import JsonlSink, MemorySink, read_events
from millstream.run.best import BestCheckpoint, best_step
from millstream.run.check import check_combinations
from millstream.run.checkpoint import CheckpointConfig, Checkpoints, RunState, steps_in
from millstream.run.config import RunConfig
from support.runs import recipe_in

TABLES = """
[[evaluation]]
every_steps = 2
samples = 2
tasks = 8
[[evaluation]]
name = "other"
data = {toy = "sort_digits", size = 6}
decoding = "sampled"
temperature = 0.5
[[evaluation.reward]]
function = "fuzzy_match"
"""
CHANGES = {
    "data.size": 200, "data.holdout": 16, "pipeline.steps": 7, "pipeline.groups_per_step": 2, "engine.process": "false",
    "pipeline.filter_zero_signal": "false", "pipeline.max_lag": 1, "checkpoint.keep": 1, "checkpoint.keep_best": "held_out:pass@2",
}  # fmt: skip


def eval_command(*words: str) -> str:
    result = CliRunner().invoke(app, ["eval", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    text = recipe_in(folder).read_text()
    before, _, rest = text.partition("[evaluation]")
    (folder / "two.toml").write_text(
        before + TABLES + (f"\n[{rest.partition(chr(10) + '[')[2]}" if "\n[" in rest else "")
    )
    changes = [word for key, value in CHANGES.items() for word in ("--set", f"{key}={value}")]
    words = ["train", str(folder / "two.toml"), *changes, "--set", f"run_dir={folder / 'run'}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    (folder / "said.txt").write_text(result.output)
    return folder / "run"


def evaluated(run_dir: Path) -> list[Evaluated]:
    return [event for event in read_events(run_dir / "events.jsonl") if isinstance(event, Evaluated)]


def test_every_table_is_measured_when_it_says_with_its_own_data_reward_and_samples(finished: Path) -> None:
    events = {event.name: event for event in evaluated(finished)}
    at_ends = {f"{name} {when}" for when in ("before", "after") for name in ("sampled", "greedy", "other sampled")}
    assert at_ends <= events.keys() and {"step 2"} <= events.keys() - at_ends
    assert all(event.version is not None for event in events.values())
    first, other = events["sampled after"], events["other sampled after"]
    assert (first.table, first.num_tasks, first.num_samples) == ("held_out", 8, 2)
    assert list(first.scores) == ["pass@1", "pass@2", "avg@2"]
    assert (other.table, other.num_tasks, other.num_samples) == ("other", 6, 1)
    assert events["greedy after"].is_greedy and events["greedy after"].num_samples == 1
    summary = json.loads((finished / "summary.json").read_text())
    assert (
        summary["accuracy_after"] == first.accuracy and summary["scores"]["sampled after"].keys() == first.scores.keys()
    )
    assert CliRunner().invoke(app, ["audit", str(finished)]).exit_code == 0


def test_a_checkpoint_of_a_run_is_evaluated_by_its_step_and_gets_the_figure_of_the_run_again(finished: Path) -> None:
    last = steps_in(finished)[-1]
    found = json.loads(eval_command(f"{finished}@{last}", "--json"))
    expected = {event.name: event.accuracy for event in evaluated(finished)}
    assert found["accuracy"] == pytest.approx(expected["sampled after"], abs=0.13)
    assert [(one["result"]["table"], one["result"]["is_greedy"]) for one in found["evaluations"]] == [
        ("held_out", False),
        ("held_out", True),
        ("other", False),
    ]


def test_eval_has_options_for_data_samples_tasks_and_greedy_and_prints_intervals(
    finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "31>", "answer": "13"}\n{"prompt": "42>", "answer": "24"}\n')
    shown = eval_command(str(finished), "--data", str(tmp_path / "mine.jsonl"), "--samples", "4")
    assert "mine, sampled: 2 tasks x 4" in shown and "pass@4" in shown and " to " in shown
    shown = eval_command(str(finished), "--name", "held_out", "--greedy", "--tasks", "3")
    assert "held_out, greedy: 3 tasks x 1" in shown and "sampled" not in shown
    refused = CliRunner().invoke(app, ["eval", str(finished), "--name", "no"])
    assert refused.exit_code == 1 and "expected one of held_out, other" in refused.output


def test_two_checkpoints_are_compared_on_the_same_tasks(finished: Path) -> None:
    words = [str(finished), "--against", f"{finished}@{steps_in(finished)[-1]}", "--name", "held_out", "--greedy"]
    found = json.loads(eval_command(*words, "--json"))["differences"]["held_out, greedy"]
    assert found["pass@1"] == {"value": 0.0, "low": 0.0, "high": 0.0}, "it is the same model"
    assert "minus" in eval_command(*words)


def test_the_best_checkpoint_is_kept_exported_and_evaluated(finished: Path, tmp_path: Path) -> None:
    scores = {
        e.version: e.scores["pass@2"].value for e in evaluated(finished) if e.table == "held_out" and not e.is_greedy
    }
    steps = steps_in(finished)
    best, score = best_step(finished)
    assert score == scores[best] == max(scores[step] for step in scores if step is not None), (
        "no better one was removed"
    )
    assert best in steps and len(steps) <= 3, "the others were removed"
    assert export(finished, tmp_path / "best", is_best=True).step == best
    result = CliRunner().invoke(app, ["export", str(finished), str(tmp_path / "again"), "--best"])
    assert result.exit_code == 0 and f"step {best}" in result.output
    assert "tasks x 2" in eval_command(f"{finished}@best", "--name", "held_out")
    said = (finished.parent / "said.txt").read_text().splitlines()
    assert f"best step     {best}, held_out:pass@2 {score:.3f}" in said, "at the end of the run"
    assert f"    millstream export {finished} {finished}-best --best" in said


def test_a_run_that_keeps_no_best_checkpoint_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[model.tiny]\n[data]\ntoy = "sort_digits"\n')
    with pytest.raises(ConfigError, match=r"set checkpoint\.keep_best, such as held_out:pass@1"):
        best_step(tmp_path)


@pytest.mark.parametrize(
    ("keep_best", "message"),
    [
        ("no:pass@1", "no evaluation is named 'no': expected one of held_out, other"),
        ("held_out:pass@3", "has no score 'pass@3': expected held_out:pass@1, held_out:pass@2, held_out:avg@2"),
        ("pass@7", "has no score 'pass@7'"),
    ],
)
def test_keep_best_names_a_score_that_there_is(keep_best: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model.tiny]\n[data]\ntoy = "sort_digits"\n' + TABLES)
    with pytest.raises(ConfigError, match=message):
        check_combinations(load(path, RunConfig, [f"checkpoint.keep_best={keep_best}"]))
    check_combinations(load(path, RunConfig, ["checkpoint.keep_best=pass@2"]))


def test_keep_best_needs_scores_to_choose_from(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model.tiny]\n[data]\ntoy = "sort_digits"\n' + TABLES)
    with pytest.raises(ConfigError, match=r"held_out has no tasks: data\.holdout = 0\. Set data\.holdout"):
        check_combinations(load(path, RunConfig, ["checkpoint.keep_best=pass@2", "data.holdout=0"]))
    with pytest.raises(ConfigError, match="other is not made while training runs"):
        check_combinations(load(path, RunConfig, ["checkpoint.keep_best=other:pass@1"]))
    with_steps = ["checkpoint.keep_best=other:pass@1", "evaluation.1.every_steps=5", "data.holdout=0"]
    check_combinations(load(path, RunConfig, with_steps))


def test_a_resume_forgets_the_scores_of_later_versions_and_no_others(tmp_path: Path) -> None:
    """Also those that were measured after the checkpoint: a slow evaluation ends steps later."""
    path = tmp_path / "config.toml"
    path.write_text('[model.tiny]\n[data]\ntoy = "sort_digits"\n[checkpoint]\nkeep_best = "pass@2"' + TABLES)
    sink = JsonlSink(tmp_path / "events.jsonl")
    for version, value in ((0, 0.1), (2, 0.9), (4, 0.95)):
        scores = {"pass@2": Estimate(value=value, low=0.0, high=1.0)}
        sink.emit(
            Evaluated(at=0.0, name="", version=version, accuracy=0.0, num_tasks=1, table="held_out", scores=scores)
        )
        (tmp_path / f"checkpoints/step-{version:06d}").mkdir(parents=True)
    sink.emit(Resumed(at=0.0, incarnation=1, version=3, from_seq=0, digest=""))
    sink.close()
    assert best_step(tmp_path) == (2, 0.9)


def test_a_checkpoint_is_kept_until_its_score_is_known_and_then_only_the_best(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model.tiny]\n[data]\ntoy = "sort_digits"\n' + TABLES)
    best = BestCheckpoint(load(path, RunConfig, ["checkpoint.keep_best=held_out:pass@1"]))

    def score(version: int, value: float) -> None:
        scores = {"pass@1": Estimate(value=value, low=0.0, high=1.0)}
        best.emit(
            Evaluated(at=0.0, name="", version=version, accuracy=0.0, num_tasks=1, table="held_out", scores=scores)
        )

    assert best.kept([2, 3, 4]) == {2, 4}, "both are to be evaluated"
    score(2, 0.5)
    assert best.kept([2, 3, 4]) == {2, 4}
    score(6, 0.4)
    assert best.kept([2, 3, 4, 6]) == {2}, "the evaluation of step 4 was left out"
    score(8, 0.5)
    assert best.kept([2, 6, 8]) == {8}, "of equal ones the newest"
    assert best.is_due(4) and not best.is_due(5)
    config = CheckpointConfig(every_s=None, every_steps=1000, keep=1)
    sink = MemorySink()
    checkpoints = Checkpoints(
        tmp_path, config, last_step=1000, clock=RealClock(), sink=sink,
        last_seq=lambda: 0, sync=lambda: None, run_state=lambda: RunState(run_id="", data_digest="", generators={}), best=best,
    )  # fmt: skip
    checkpoints.resume_from(1)
    assert checkpoints.is_due(4, is_last=False) and not checkpoints.is_due(5, is_last=False)
    best.is_awaited = lambda: True
    assert checkpoints.is_due(9, is_last=False), (
        "the evaluation of step 8 waits for weights: they may be those of step 9"
    )
    assert best.kept([8, 9]) == {8, 9}
    score(9, 0.6)
    assert best.kept([8, 9]) == {9}
