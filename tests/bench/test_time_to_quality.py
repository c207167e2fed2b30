"""bench/time_to_quality.py: what a mode is, when a cell ends, what is measured, and what the report says and refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import run_parts
import time_to_quality
import trl_search
from curves import Point
from held_out import measure_configs
from internals import audit, first_epoch, recipe
from millstream import DataConfig, RunConfig, train
from millstream.env.config import EnvironmentConfig
from millstream.env.resolve import find_environment, make_tasks
from millstream.events import RolloutEnded, Span, Stepped
from millstream.events.sinks import MemorySink
from millstream.types import Task
from millstream.weights.transfer import Delivery
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.publisher import open_publisher
from millstream.weights.transfer.remote_weights import RemoteWeights
from modes import BARRIER, in_mode
from one_gpu_parts import AT_A_TIME, BENCH, plan
from task_survey import small, steps_of_sum
from time_to_quality import SMOKE, config_of, missing, run, run_together, seeds_of
from time_to_quality_cells import (
    TimedCell,
    TimedResult,
    TimedSettings,
    add_result,
    base_config,
    own_copy,
    read_results,
    run_cell,
)
from time_to_quality_data import split_by_prompt
from time_to_quality_report import difference, in_words, json_rows, table
from time_to_quality_trl import in_time, job_of, seconds_of_trl

SETTINGS = TimedSettings(recipe="demo", changes=SMOKE, seconds=100.0, points=4)


def tiny() -> RunConfig:
    return recipe("demo", *SMOKE)


def made_up(mode: str, seed: int, final: float, *, rate: float = 10.0) -> TimedResult:
    """A line from 0.1 to the final accuracy at 60 s, and level from there on."""
    curve = [
        Point(step=number, samples=100 * number, seconds=20.0 * number, accuracy=accuracy, greedy=accuracy)
        for number, accuracy in enumerate([0.1, 0.1 + (final - 0.1) / 2, final, final, final])
    ]
    return TimedResult(
        settings=SETTINGS,
        mode=mode,
        seed=seed,
        curve=curve,
        steps=4,
        rollouts_per_s=rate,
        generated_per_s=rate,
        tokens_per_s=8 * rate,
        mean_tokens=8.0,
        mean_lag=0.0,
        held_out=100,
        start_s=1.0,
        evaluation_s=1.0,
        device="a machine",
        at="2026-11-16T14:00+00:00",
    )


def by_cell(*results: TimedResult) -> dict[TimedCell, TimedResult]:
    return {result.cell: result for result in results}


# ---- modes ---------------------------------------------------------------------------------------------------------------


def first_training_and_last_rollout(mode: str, folder: Path) -> list[tuple[float, float]]:
    """For each step: when the learner began to accumulate, and when the last rollout of the step had ended."""
    sink = MemorySink()
    config = in_mode(replace(tiny(), pipeline=replace(tiny().pipeline, steps=4, groups_per_step=4)), mode)
    train(replace(config, run_dir=str(folder / mode)), sinks=[sink])
    events, found, began, ended = sink.events, [], math.inf, 0.0
    for event in events:
        match event:
            case RolloutEnded():
                ended = event.at
            case Span(what="accumulate"):
                began = min(began, event.at - event.seconds)
            case Stepped():
                found.append((began, ended))
                began = math.inf
    return found


def test_with_a_barrier_nothing_is_trained_before_the_last_rollout_of_the_batch_has_ended(tmp_path: Path) -> None:
    steps = first_training_and_last_rollout(BARRIER, tmp_path)
    assert len(steps) == 4 and all(began >= ended for began, ended in steps)


def test_modes_differ_in_the_lag_and_the_advantage_of_the_barrier_alone() -> None:
    config = tiny()
    two, barrier = in_mode(config, "2"), in_mode(config, BARRIER)
    assert (two.pipeline.max_lag, barrier.pipeline.max_lag) == (2.0, 0.0)
    assert replace(two, pipeline=config.pipeline) == config
    assert barrier.algorithm.loss == config.algorithm.loss
    assert replace(barrier, pipeline=config.pipeline, algorithm=config.algorithm) == config


# ---- the split of tasks ----------------------------------------------------------------------------------------------------


def prompts_of(tasks: Iterable[Task]) -> set[Any]:
    return {task.prompt for task in tasks}


def test_no_prompt_is_both_trained_and_held_out_however_often_it_occurs(tmp_path: Path) -> None:
    records = [{"prompt": f"{number % 10}>", "answer": str(number % 10)} for number in range(100)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = replace(tiny(), data=DataConfig(path=str(tmp_path / "all.jsonl"), holdout=15))
    found = split_by_prompt(config, tmp_path)
    trained = first_epoch(found.config)
    assert len(found.held_out) == 15 and len(prompts_of(found.held_out)) == 2 and len(trained) == 80
    assert not prompts_of(found.held_out) & prompts_of(trained)
    assert split_by_prompt(config, tmp_path).held_out == found.held_out
    assert split_by_prompt(replace(config, seed=1), tmp_path).held_out != found.held_out


def test_no_sum_of_smollm2_is_both_trained_and_held_out(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    config = recipe("smollm2", "data.size=4000")
    found, before = split_by_prompt(config, tmp_path), first_epoch(config)
    trained = first_epoch(found.config)
    assert not prompts_of(found.held_out) & prompts_of(trained)
    assert prompts_of(found.held_out) & prompts_of(before), "without the split, some of them would be trained"
    assert len(found.held_out) == 512 and len(trained) > 0.7 * len(before)
    assert trained[0].data.keys() >= {"source", "seed", "index"}


# ---- cells ---------------------------------------------------------------------------------------------------------------


def test_a_cell_ends_after_its_time_and_measures_weights_of_every_part_of_it(tmp_path: Path) -> None:
    settings = replace(SETTINGS, seconds=1.0, points=4)
    result = run_cell(settings, config_of(settings, 0), TimedCell("2", 0), tmp_path)
    seconds = [point.seconds for point in result.curve]
    assert seconds[0] == 0.0 and seconds == sorted(seconds) and 2 <= len(seconds) <= 6
    assert result.held_out == 8 and result.mean_tokens > 0
    last = result.curve[-1]
    assert 0 <= result.steps - last.step <= 2 or last.seconds >= 0.5, (
        "those of the last steps may not be published any more"
    )
    assert last.samples == 4 * last.step, "two groups of two a step, and none is replaced"


def test_every_answer_to_a_held_out_task_has_its_length(tmp_path: Path) -> None:
    found = measure_configs(small())
    assert list(found) == ["sort_digits", "add_numbers"]
    for measured in found.values():
        assert len(measured.sampled) == len(measured.greedy) == 8
        assert all(
            1 <= answer.num_tokens <= 4 and answer.is_cut == (answer.num_tokens == 4) for answer in measured.sampled
        )


def test_run_folders_are_kept_if_asked_and_none_is_in_the_way_of_another(tmp_path: Path) -> None:
    settings = replace(SETTINGS, seconds=0.5, points=2)
    for file in ("first", "second"):
        run(tmp_path / file, settings, [TimedCell("2", 0)], runs=tmp_path / "runs")
    kept = list((tmp_path / "runs").glob("2-0-*/run"))
    assert len(kept) == 2 and all(audit(folder).is_clean for folder in kept)


def test_cells_that_are_in_the_file_are_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    add_result(file, made_up("2", 0, 0.5))
    assert missing(file, SETTINGS, ("barrier", "2"), [0, 1]) == [
        TimedCell("barrier", 0),
        TimedCell("barrier", 1),
        TimedCell("2", 1),
    ]
    with pytest.raises(SystemExit, match="cannot be compared"):
        read_results(file, replace(SETTINGS, seconds=50.0))
    with pytest.raises(SystemExit, match="cannot be compared"):
        read_results(file, replace(SETTINGS, changes=(*SMOKE, "model.path=/a/model")))
    assert seeds_of("0-2") == seeds_of("0,1,2") == [0, 1, 2]


def test_a_model_may_lie_in_another_folder_when_a_file_is_continued(tmp_path: Path) -> None:
    file, here = tmp_path / "cells.jsonl", replace(SETTINGS, changes=("model.path=SmolLM2", "engine.slots=8"))
    add_result(file, replace(made_up("2", 0, 0.5), settings=here))
    for name in ("SmolLM2", "Qwen3"):
        (tmp_path / name).mkdir()
    there = replace(here, changes=(f"model.path={tmp_path}/SmolLM2", "engine.slots=8"))
    assert missing(file, there, ("2", "4"), [0]) == [TimedCell("4", 0)]
    for other in (f"{tmp_path}/Qwen3", "OnTheHub/SmolLM2"):
        with pytest.raises(SystemExit, match="cannot be compared"):
            read_results(file, replace(here, changes=(f"model.path={other}", "engine.slots=8")))


def test_bench_one_gpu_continues_the_cells_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[list[TimedCell]] = []
    for name in ("run", "run_together"):
        monkeypatch.setattr(time_to_quality, name, lambda file, settings, cells, *_, **__: left.append(cells))
    given = {"model": str(tmp_path / "SmolLM2-135M-Instruct"), "folder": str(tmp_path)}
    Path(given["model"]).mkdir()
    parts = {part.name: part for part in plan(300.0)}
    for name, recorded, part in (
        ("together", "smollm2", "quality 300 s, 1 of 3 together"),
        ("alone", "trl", "quality 2/0, alone"),
    ):
        shutil.copy(BENCH / f"time_to_quality_{recorded}.jsonl", tmp_path / f"quality-{name}.jsonl")
        time_to_quality.main(parts[part].words(given, 500.0)[2:])
    assert len(left[0]) <= AT_A_TIME and left[1] == [TimedCell("2", 0)]


# ---- the report ----------------------------------------------------------------------------------------------------------


def test_together_no_cell_begins_that_would_not_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Sequence[str]] = []

    def take_long(words: Sequence[str], **_: Any) -> SimpleNamespace:
        started.append(words)
        clock.now += 200.0
        return SimpleNamespace(returncode=0)

    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(time_to_quality, "time", clock)
    monkeypatch.setattr(time_to_quality.subprocess, "run", take_long)
    cells = missing(tmp_path / "cells.jsonl", SETTINGS, ("2",), [0, 1, 2])
    run_together(tmp_path / "cells.jsonl", SETTINGS, cells, 1, minutes=7.0)
    assert len(started) == 2, "each is expected to take 190 s of 420, and takes 200"
    assert "max_lag 2, seed 2: left, the time is over" in capsys.readouterr().err


def test_together_cells_that_fail_are_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = missing(tmp_path / "cells.jsonl", SETTINGS, ("2",), [0, 1])
    failed = SimpleNamespace(returncode=1)
    monkeypatch.setattr(time_to_quality.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="2 cells failed, and 0 were left"):
        run_together(tmp_path / "cells.jsonl", SETTINGS, cells, 2)
    with pytest.raises(SystemExit, match="0 cells failed, and 2 were left"):
        run_together(tmp_path / "cells.jsonl", SETTINGS, cells, 2, minutes=0.0)


def test_cells_that_run_together_are_processes_with_the_settings_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each process would run this same command line; here, in this process, it only says what is missing."""
    file, seen = tmp_path / "cells.jsonl", list[tuple[TimedCell, TimedSettings]]()

    def run_here(words: Sequence[str], **_: Any) -> SimpleNamespace:
        time_to_quality.main(words[2:])
        return SimpleNamespace(returncode=0)

    def record(file: Path, settings: TimedSettings, cells: Sequence[TimedCell], **_: Any) -> None:
        seen.extend((cell, settings) for cell in cells)

    monkeypatch.setattr(time_to_quality.subprocess, "run", run_here)
    monkeypatch.setattr(time_to_quality, "run", record)
    settings = replace(SETTINGS, trl_seconds=7.0, is_split_by_prompt=True)
    cells = missing(file, settings, (BARRIER, "2"), [0, 1])
    run_together(file, settings, cells, 3)
    assert sorted(seen) == sorted((cell, settings) for cell in cells)
    assert capsys.readouterr().err.count("done") == 4
    with pytest.raises(SystemExit):
        time_to_quality.main(["run", str(file), "--modes", "trl", "--together", "2"])


def test_weights_that_a_process_has_staged_are_kept_as_copies(tmp_path: Path) -> None:
    with closing(open_publisher(Delivery(ways=("shared",)), folder=tmp_path)) as publisher:
        staged = RemoteWeights(publisher.put(1, {"a": torch.ones(3)}.items()), WeightsFetcher(""))
        kept = own_copy(staged)
        assert not staged.is_fetched, "its memory may be used again"
        for version in (2, 3, 4, 5, 6):
            publisher.put(version, {"a": torch.zeros(3)}.items())
        assert kept["a"].tolist() == [1, 1, 1]
    assert own_copy(given := {"a": torch.ones(1)}) is given


def test_seconds_to_an_accuracy_are_read_between_two_points() -> None:
    result = made_up("2", 0, 0.5)
    assert result.final == 0.5
    assert result.seconds_to(0.4) == pytest.approx(30.0)
    assert result.seconds_to(0.1) == 0.0 and result.seconds_to(0.51) == math.inf


def test_a_difference_has_students_interval_over_seeds_and_a_normal_one_over_the_tasks_of_one_seed() -> None:
    seeds = [
        made_up(mode, seed, 0.5 + 0.1 * (mode == "2") + 0.01 * seed * (mode == "2"))
        for mode in ("barrier", "2")
        for seed in range(3)
    ]
    found = difference(by_cell(*seeds), "2", "barrier")
    assert (
        found is not None
        and found.mean == pytest.approx(0.11)
        and found.half_width == pytest.approx(4.303 * 0.01 / math.sqrt(3))
    )
    one = difference(by_cell(made_up("barrier", 0, 0.5), made_up("2", 0, 0.6)), "2", "barrier")
    assert one is not None and one.half_width == pytest.approx(1.96 * math.sqrt((0.25 + 0.24) / 300))
    assert difference(by_cell(made_up("barrier", 0, 0.5), made_up("2", 1, 0.6)), "2", "barrier") is None


def test_the_table_names_what_was_not_measured_and_puts_the_ratio_of_seconds_beside_that_of_throughput() -> None:
    results = by_cell(made_up("barrier", 0, 0.5), made_up("2", 0, 0.9, rate=15.0))
    lines = table(results, 0.5).splitlines()
    assert "| max_lag = 4 | not measured |" in lines[6] and "| TRL | not measured |" in lines[7]
    assert "| 1.50x | 20 | 2.00x |" in lines[5]
    rows = {(row.workload, row.metric): row for row in json_rows(results, 0.5)}
    assert rows["max_lag = 2", "seconds to 0.50"].ratio == 2.0
    assert rows["max_lag = 2", "rollouts trained/s"].ratio == 1.5


def test_the_report_draws_accuracy_over_seconds_and_over_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "cells.jsonl"
    for mode in ("barrier", "2"):
        add_result(file, made_up(mode, 0, 0.5))
    time_to_quality.main(["report", str(file), "--docs", str(tmp_path)])
    assert "held-out tasks of one seed" in capsys.readouterr().out
    assert all("<svg" in (tmp_path / f"time-to-quality-{over}.svg").read_text() for over in ("seconds", "samples"))


# ---- TRL -----------------------------------------------------------------------------------------------------------------


def test_trl_gets_the_same_prompts_in_the_same_order_and_the_same_loss(tmp_path: Path) -> None:
    config = base_config(tiny())
    train(replace(config, run_dir=str(tmp_path / "run"), pipeline=replace(config.pipeline, steps=1)))
    config = replace(config, model=replace(config.model, tiny=None, path=str(tmp_path / "run/model")))
    job: dict[str, Any] = job_of(SETTINGS, config, tmp_path, ["temperature=0.9"])
    records = [json.loads(line) for line in (tmp_path / "trl.jsonl").read_text().splitlines()]
    assert len(records) == 56 and records[0].keys() >= {"prompt", "answer"}
    assert job["config"]["num_generations"] == 2 and job["config"]["learning_rate"] == config.learner.learning_rate
    assert job["config"]["temperature"] == 0.9 and job["keep_every_s"] == 25.0 and job["limit_s"] == 100.0
    longer: dict[str, Any] = job_of(replace(SETTINGS, trl_seconds=300.0), config, tmp_path, [])
    assert longer["keep_every_s"] == 75.0 and longer["limit_s"] == 300.0
    assert job["config"]["per_device_train_batch_size"] * job["config"]["gradient_accumulation_steps"] == 4


def test_trl_has_the_time_of_the_others_or_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = replace(SETTINGS, trl_seconds=300.0)
    assert seconds_of_trl(SETTINGS) == 100.0 and seconds_of_trl(longer) == 300.0
    assert "TRL" not in in_words(by_cell(replace(made_up("2", 0, 0.5), settings=longer)))
    assert "100 s of training a run (TRL: 300 s)" in in_words(by_cell(replace(made_up("trl", 0, 0.5), settings=longer)))
    run(tmp_path / "cells", longer, [TimedCell("trl", 0)], minutes=7.0)
    assert "the time is over: 1 cells are left" in capsys.readouterr().err


def test_trl_is_scored_by_the_rule_of_the_environment() -> None:
    pytest.importorskip("reasoning_gym")
    args = {"names": ["chain_sum"], "configs": {"chain_sum": {"max_terms": 2}}}
    (task, *_) = make_tasks([find_environment(EnvironmentConfig(use="reasoning_gym", args=args))], 2, 0)
    rule = run_parts.reasoning_gym_rule(args)
    assert rule(f"It is <answer>{task.answer}</answer>", task.data) == 1.0
    assert rule("<answer>nothing</answer>", task.data) == 0.0


def test_steps_of_trl_count_up_to_the_first_that_ends_after_the_time() -> None:
    assert in_time([1.0, 2.0, 3.0, 4.0], 2.5) == [1.0, 2.0, 3.0]
    assert in_time([1.0, 2.0], 5.0) == [1.0, 2.0]


def test_a_worked_sum_is_computed_from_left_to_right() -> None:
    assert steps_of_sum({"metadata": {"expression": "3 + 4 - 12"}}) == "3 + 4 = 7. 7 - 12 = -5."


def test_changes_of_trl_that_make_its_steps_faster_are_kept_while_there_is_time() -> None:
    seconds = {"": 4.0, "batch=2": 3.0, "batch=4": math.inf, "batch=2 memory=1": 2.99, "batch=2 sleep=1": 2.0}

    def step_s_of(settings: dict[str, str], left_s: float) -> float:
        assert 0 < left_s <= 60
        return seconds[" ".join(f"{key}={value}" for key, value in settings.items())]

    changes = [{"batch": "2"}, {"batch": "4"}, {"memory": "1"}, {"sleep": "1"}]
    tried = trl_search.search({}, changes, step_s_of, 60.0)
    assert [trial.step_s for trial in tried] == [4.0, 3.0, math.inf, 2.99, 2.0]
    assert trl_search.best(tried).settings == {"batch": "2", "sleep": "1"}
    lines = list(trl_search.table(tried))
    assert "| batch=4 | failed" in lines[4] and lines[-1] == "| batch=2, sleep=1 | 2.00 (best) |"
    assert trl_search.search({}, changes, step_s_of, 0.0) == []


def test_a_step_of_trl_is_measured_over_whole_generations() -> None:
    assert trl_search.step_s([9.0, 12.0, 15.0], 1) == 3.0
    assert trl_search.step_s([9.0, 10.0, 15.0, 16.0, 21.0], 2) == 3.0, "the last generation has one step yet"
    assert trl_search.step_s([9.0, 10.0], 2) == math.inf
