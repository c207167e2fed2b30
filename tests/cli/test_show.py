"""What a person sees, made from events alone."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from pathlib import Path

import msgspec
import pytest
from msgspec import structs
from rich.console import Console
from typer.testing import CliRunner

import millstream
from millstream.cli import main
from millstream.cli.main import app
from millstream.cli.show import JsonLines, Lines, result_table
from millstream.cli.view import View, sparkline
from millstream.config import load
from millstream.events import (
    Estimate,
    Evaluated,
    Event,
    LearnerRestarted,
    MicroBatchLowered,
    PathChosen,
    ReplicaJoined,
    ReplicaLeft,
    RolloutEnded,
    RolloutFailed,
    RunEnded,
    RunStarted,
    Sample,
    SampleShown,
    Sizes,
    SizesChosen,
    Span,
    Stalled,
    Status,
    Stepped,
    WaitNow,
    WarmedUp,
)
from millstream.events.sinks import JsonlSink, MetricsSink
from millstream.events.summary import summarise
from millstream.events.trace import perfetto
from millstream.run.config import RunConfig
from millstream.run.folder import RunResult
from millstream.run.progress import speed_words
from support.simulated import World, simulate
from support.views import drawn

STATUS = Status(
    at=90.0,
    requests_running=40,
    requests_waiting=7,
    rows_in_store=12,
    groups_outstanding=5,
    groups_taken=1,
    budget=8,
    waits=[
        WaitNow(owner="train", what="a complete group", seconds=4.0),
        WaitNow(owner="rollouts", what="the engine", seconds=2.0, count=47),
        WaitNow(owner="feed", what="room under the lag bound", seconds=0.2),
    ],
)


ACCURACIES = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after")


def events() -> list[Event]:
    found = list(simulate(World(steps=6, failure=0.1)).sink.events)
    started = RunStarted(
        at=0.0,
        run_id="1",
        seed=0,
        steps=3,
        num_tasks=10,
        filter_zero_signal=True,
        min_group_size=2,
        groups_per_step=2,
        group_size=2,
        max_lag=1.0,
        lag_bound=1,
        budget=4,
    )
    warmed = WarmedUp(at=0.0, step=10, max_steps=20, accuracy=0.1, stop_at=0.2)
    scores = {"avg@1": Estimate(value=0.125, low=0.0, high=0.3)}
    of_table = {"table": "held_out", "scores": scores}
    evaluated = Evaluated(at=0.0, name="sampled before", version=0, accuracy=0.125, num_tasks=64, **of_table)
    stalled = Stalled(at=95.0, owner="sync of engine", what="engine to load version 3", seconds=31.0)
    return [warmed, evaluated, started, *found, STATUS, stalled]


def test_the_view_shows_progress_reward_lag_speed_queues_and_waits_in_words() -> None:
    view = View(Console(file=io.StringIO()), num_steps=6, max_lag=1)
    assert "step 0/6" in drawn(view), "before anything has happened"
    for event in events():
        view.emit(event)
    text = drawn(view)
    assert "step 6/6" in text and "left" in text and "reinforcement learning" in text
    assert "sampled before 0.125" in text and "rollouts/s" in text
    assert "tokens/s" not in text, "these events do not say"
    assert "never above 1" in text
    assert "6 of 8 groups; 40 requests decoding, 7 queued; 12 rows in the store" in text
    waits = [line for line in text.splitlines() if "waiting for" in line]
    assert [re.sub(r"[│ ]+", " ", line).strip() for line in waits] == [
        "feed waiting for room under the lag bound",
        "47 rollouts waiting for the engine since 2 s",
        "train waiting for a complete group since 4 s, the bottleneck",
    ]
    assert "bottleneck: the learner waits" in text
    assert "sync of engine has waited 31 s for engine to load version 3" in text


def test_plain_lines_say_the_same_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=200)
    lines = Lines(console, num_steps=6)
    for event in events():
        lines.emit(event)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 6/6  reward" in text and "sampled before: accuracy 0.125" in text and "has waited 31 s" in text


def test_speed_is_that_of_all_steps_since_the_last_line_and_left_out_where_it_is_not_known() -> None:
    """What an engine generates is reported from time to time: a single step may have none of it."""
    rows = [
        {"step_s": 1.0, "rollouts_per_s": 8.0, "tokens_per_s": 0.0},
        {"step_s": 3.0, "rollouts_per_s": 4.0, "tokens_per_s": 40.0},
    ]
    assert speed_words(rows) == ["5 rollouts/s", "30 tokens/s"]
    assert speed_words(rows[:1]) == ["8 rollouts/s"] and speed_words([]) == []


def test_the_view_and_the_lines_say_which_sizes_were_chosen_and_that_memory_ran_out() -> None:
    view = View(Console(file=io.StringIO()), num_steps=6, max_lag=1)
    lines = Console(file=io.StringIO(), width=200)
    shown = Lines(lines, num_steps=6)
    sizes = Sizes(
        dtype="bfloat16",
        slots=512,
        cache_gb=40.0,
        micro_batch_tokens=16384,
        is_compiled=True,
        needed_gb=70.0,
        free_gb=80.0,
    )
    chosen = SizesChosen(at=0.5, sizes=sizes, device="cuda:0", is_kept=True)
    lowered = MicroBatchLowered(at=3.0, micro_batch_tokens=8192)
    for event in (chosen, lowered):
        shown.emit(event)
        view.emit(event)
    console = Console(file=io.StringIO(), width=200)
    console.print(view)
    for text in (console.file.getvalue(), lines.file.getvalue()):  # type: ignore[attr-defined]
        line = "512 slots, 40 GB of cache, micro-batches of 16,384 tokens, compiled (about 70.0 of 80.0 GB), as at its start"
        assert f"on cuda:0: bfloat16, {line}" in text
        assert "the learner ran out of memory: micro-batches have 8,192 tokens from here on" in text


def test_the_view_and_the_lines_show_engines_that_leave_or_join_and_learners_that_restart() -> None:
    view = View(Console(file=io.StringIO()), num_steps=6, max_lag=1)
    lines = Console(file=io.StringIO(), width=200)
    shown = Lines(lines, num_steps=6)
    left = ReplicaLeft(at=1.0, engine="engine-0", why="engine-0 broke: exit code -9", num_moved=3, num_left=1)
    restarted = LearnerRestarted(
        at=2.5, why="rank 1 died", from_version=3, to_version=5, num_batches_replayed=2, num_rows=9, seconds=7.2
    )
    for event in (left, ReplicaJoined(at=2.0, engine="engine-0", version=4), restarted):
        view.emit(event)
        shown.emit(event)
    console = Console(file=io.StringIO(), width=200)
    console.print(view)
    for text in (console.file.getvalue(), lines.file.getvalue()):  # type: ignore[attr-defined]
        assert "engine-0 has left: engine-0 broke: exit code -9; 3 requests continue on other engines" in text
        assert "engine-0 has joined at version 4" in text
        assert "the learner was restarted at step 5: rank 1 died; 2 batches since step 3 were replayed, 7 s" in text


def test_the_view_the_lines_and_the_table_at_the_end_say_what_computes_and_why_it_is_not_faster() -> None:
    view = View(Console(file=io.StringIO()), num_steps=6, max_lag=1)
    lines = Console(file=io.StringIO(), width=200)
    shown = Lines(lines, num_steps=6)
    graphs, why = "pages, fused layers, decode steps as CUDA graphs", "no graph can be made: aten::nonzero"
    slower = PathChosen(at=2.0, worker="engine-1", path="pages, fused layers, decode steps kernel by kernel", why=why)
    chosen = [PathChosen(at=0.0, worker=f"engine-{number}", path=graphs) for number in (0, 1, 2)]
    found = [*chosen, chosen[0], slower, PathChosen(at=3.0, worker="learner", path="packed rows")]
    for event in found:
        view.emit(event)
        shown.emit(event)
    console = Console(file=io.StringIO(), width=200)
    console.print(view)
    summary = summarise(found)
    result = RunResult(run_dir="runs/1", summary=summary, **dict.fromkeys(ACCURACIES))
    console.print(result_table(result))
    assert summary.paths["engine-1"] == f"{slower.path} ({why})" and summary.paths["engine-0"] == graphs
    said = [line.partition("] ")[2] for line in lines.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert said == [
        *(f"engine-{number}: {graphs}" for number in (0, 1, 2)),
        f"engine-1: {slower.path} ({why})",
        "learner: packed rows",
    ], "each path once"
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(f"{slower.path} ({why})") == 2, "in the view and in the table"
    assert "engine-0, engine-2" in text and text.count("packed rows") == 2


def test_the_view_shows_the_last_sample_of_training_and_the_lines_one_a_minute_and_that_of_every_evaluation() -> None:
    sample = Sample(prompt="2+2=", completion="5[b]", reward=0.25, answer="4")
    evaluated = Evaluated(at=0.0, name="step 3", version=3, accuracy=0.5, num_tasks=2, sample=sample)
    samples = [
        SampleShown(at=at, group_id=1, member=0, sample=structs.replace(sample, completion=f"[b]{at:g}"))
        for at in (1.0, 6.0, 62.0)
    ]
    console = Console(file=io.StringIO(), width=200)
    view, lines = View(console, num_steps=6, max_lag=1), Lines(console, num_steps=6)
    for event in (evaluated, *samples):
        view.emit(event)
        lines.emit(event)
    assert "a rollout      '2+2=' -> '[b]62'  reward 0.250, answer '4'" in drawn(view) and "5[b]" not in drawn(view)
    said = [line.partition("] ")[2] for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert said[1:] == [
        "a sample of it: '2+2=' -> '5[b]'  reward 0.250, answer '4'",
        "a rollout: '2+2=' -> '[b]1'  reward 0.250, answer '4'",
        "a rollout: '2+2=' -> '[b]62'  reward 0.250, answer '4'",
    ]


def test_json_lines_are_one_object_a_line_with_its_type_and_the_numbers_of_the_metrics() -> None:
    console = Console(file=io.StringIO(), width=20)
    lines = JsonLines(console)
    sample = SampleShown(
        at=1.0, group_id=1, member=0, sample=Sample(prompt="a\ud800", completion="[b]", reward=math.nan)
    )
    for event in (*events(), sample, RunEnded(at=99.0, outcome="finished", version=6)):
        lines.emit(event)
    rows = [json.loads(line) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert [row["step"] for row in rows if row["type"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert {"reward", "lag_mean", "tokens_per_s"} <= rows[3].keys()
    assert [row["type"] for row in rows if row["type"] != "step"] == [
        *("warmed_up", "evaluated", "stalled", "sample_shown", "run_ended")
    ]
    (stalled,) = [row for row in rows if row["type"] == "stalled"]
    assert stalled["text"] == "sync of engine has waited 31 s for engine to load version 3"


def test_what_to_type_next_stands_alone_on_lines_that_are_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(main, "console", console)
    run_dir = "/a/folder/with/quite/a/long/name/for/a/terminal/that/is/eighty/columns/wide/runs/mine-1"
    main._show_result(RunResult(run_dir=run_dir, summary=summarise([]), **dict.fromkeys(ACCURACIES)), None)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert f"    millstream audit {run_dir}" in lines and f"    millstream eval {run_dir} --show 3" in lines
    assert f"run folder    {run_dir}" in lines


def failed(at: float, member: int, message: str) -> RolloutFailed:
    return RolloutFailed(
        at=at, group_id=1, member=member, attempt=1, error="RewardFailed", message=message, is_final=True
    )


def test_the_same_failure_is_said_once_and_then_counted() -> None:
    console = Console(file=io.StringIO(), width=200)
    lines = Lines(console, num_steps=6)
    view = View(Console(file=io.StringIO()), num_steps=6, max_lag=1)
    view.emit(Stalled(at=0.0, owner="feed", what="room", seconds=31.0))
    first = "reward mine.py:reward raised KeyError at mine.py:12"
    failures = [failed(0.01 * i, i, f"{first}: 'key {i}'") for i in range(38)]
    for event in [
        *failures,
        failed(1.0, 50, "another"),
        failed(6.0, 51, "another"),
        RunEnded(at=7.0, outcome="x", version=1),
    ]:
        lines.emit(event)
        view.emit(event)
    said = [line.partition("] ")[2] for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert said == [
        f"group 1 continues without member 0: {first}: 'key 0'",
        "group 1 continues without member 50: another",
        f"the same, 37 times more: RewardFailed: {first}",
        "the same, once more: RewardFailed: another",
    ]
    text = drawn(view)
    assert "40 failed rollouts; the last: another" in text and "feed has waited 31 s" in text, (
        "others are not driven out"
    )


def test_a_sparkline_follows_the_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert len(sparkline([1.0] * 1000)) <= 40
    assert sparkline([]) == "" and sparkline([0.0]) == "▁"


def test_metrics_have_a_line_a_step_that_adds_up_and_one_an_evaluation(tmp_path: Path) -> None:
    sink, found = MetricsSink(tmp_path / "metrics.jsonl"), events()
    for event in found:
        sink.emit(event)
    sink.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured, *rows = rows
    assert measured == {"step": 0, "at": 0.0, "eval/held_out/avg@1": 0.125}, "of the evaluation, under its version"
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["lag_max"] <= 1 and 0 <= row["reward"] <= 1 for row in rows)
    assert sum(row["groups"] for row in rows) == sum(e.num_groups for e in found if isinstance(e, Stepped))
    assert not any(" " in key for row in rows for key in row)


def test_the_trace_has_every_span_and_rollout_and_no_two_overlap_on_a_track(tmp_path: Path) -> None:
    sink, found = JsonlSink(tmp_path / "events.jsonl"), events()
    for event in found:
        sink.emit(event)
    sink.close()
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert result.exit_code == 0, result.output
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert trace == msgspec.to_builtins(perfetto(found))["traceEvents"]
    spans = [entry for entry in trace if entry["ph"] == "X"]
    rollouts = [entry for entry in spans if entry["pid"] == 2]
    assert len(rollouts) == sum(isinstance(event, RolloutEnded) for event in found)
    assert sum(entry["name"] == "accumulate" for entry in spans) == sum(
        isinstance(event, Span) and event.what == "accumulate" for event in found
    )
    for track in {(entry["pid"], entry["tid"]) for entry in rollouts}:
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in rollouts if (e["pid"], e["tid"]) == track)
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(times))


def test_a_folder_without_events_is_not_a_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert result.exit_code == 1 and "not a run folder" in " ".join(result.output.split())


def test_init_writes_a_config_that_is_valid_and_never_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    assert CliRunner().invoke(app, ["init", str(path)]).exit_code == 0
    assert load(path, RunConfig).data.path == "data.jsonl"
    again = CliRunner().invoke(app, ["init", str(path)])
    assert again.exit_code == 1 and "exists already" in " ".join(again.output.split())


def test_init_makes_the_folder_and_says_in_one_line_why_it_cannot(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["init", str(tmp_path / "new/folder/mine.toml")]).exit_code == 0
    assert (tmp_path / "new/folder/mine.toml").is_file()
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["init", str(tmp_path / "file/mine.toml")])
    assert (
        result.exit_code == 1
        and result.output.startswith("ConfigError: cannot write")
        and len(result.output.splitlines()) == 1
    )


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.strip() == f"millstream {millstream.__version__}"


@pytest.mark.parametrize("command", ["train", "eval", "trace", "init"])
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0 and len(result.output) > 100
