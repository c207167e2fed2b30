"""bench/end_to_end.py: what its modes are, what it measures, and what it holds that against."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import end_to_end
import end_to_end_costs
from end_to_end import REQUIRED, cells, check_warm_steps, chosen, with_steps
from end_to_end_cells import (
    MODES,
    Budget,
    Failed,
    NotMeasured,
    Result,
    Sources,
    Timeline,
    Watch,
    config_of,
    measured,
    run_cell,
)
from end_to_end_costs import MeasuredCosts, Point, fitted, make_model, measure_costs
from end_to_end_loads import SMOKE_WORKLOADS, WORKLOADS, write_prompts
from end_to_end_report import (
    Measured,
    PeerResult,
    append_record,
    draw_timeline,
    in_both,
    lines_of,
    read_records,
    rows_of,
    table,
)
from millstream import RunConfig
from millstream.events import Event, GroupAdmitted, GroupTaken, RolloutEnded, Span, Stepped
from millstream.learner.torch import TorchLearner
from millstream.run.sizes import ModelDevice, ModelShape, Sizes, choose_sizes
from millstream.types import Finish
from step_model import Costs, Load, simulate

GEOMETRIC_64 = "474M-geometric-64"

# ---- the step model ------------------------------------------------------------------------------------------------------


def load_of(lengths: list[list[int]], groups_per_step: int = 1) -> Load:
    lengths_GM = np.array(lengths)
    return Load(lengths_GM=lengths_GM, prompts_G=np.zeros(len(lengths), np.int64), groups_per_step=groups_per_step)


FLAT = Costs(floor_s=0.001, slope_s=0.0, slow=1.0, rate=1000.0, keep=1.0, publish_s=0.5)
"""A decode step takes a millisecond, a trained token another."""


def test_at_a_barrier_a_step_is_its_longest_rollout_then_its_tokens_then_the_publication() -> None:
    ends = simulate(load_of([[100, 300]] * 4), FLAT, is_barrier=True, steps=3)
    assert np.diff([end.at for end in ends]) == pytest.approx([0.3 + 0.4 + 0.5] * 2, abs=0.01)
    assert ends[-1].learner_s == pytest.approx(3 * 0.4)
    assert ends[-1].engine_s == pytest.approx(3 * 0.3, abs=0.01)


def test_without_a_barrier_complete_groups_are_trained_while_others_are_generated() -> None:
    load = load_of([[100, 100], [1000, 1000]] * 3, groups_per_step=2)
    barrier, streamed = (simulate(load, FLAT, is_barrier=is_barrier, steps=2)[-1].at for is_barrier in (True, False))
    assert barrier - streamed == pytest.approx(2 * 0.2, abs=0.02)


def test_a_lag_hides_training_behind_generation() -> None:
    load = load_of([[1000, 1000]] * 8)
    alone, beside = (simulate(load, FLAT, max_lag=lag, steps=4) for lag in (0, 1))
    assert alone[-1].at - alone[0].at == pytest.approx(3 * (1.0 + 2.0 + 0.5), abs=0.02)
    assert beside[-1].at - beside[0].at == pytest.approx(3 * (2.0 + 0.5), abs=0.02)


def test_costs_are_those_of_a_learner_with_the_share_and_the_passes_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, int]] = []

    class Seen(TorchLearner):
        def __init__(self, model: Any, config: Any, objective: Any, *, gpu_share: float) -> None:
            seen.append((gpu_share, config.pass_tokens))
            super().__init__(model, config, objective, gpu_share=gpu_share)

    def small(config: RunConfig, device: ModelDevice, shape: ModelShape | None) -> Sizes:
        return replace(choose_sizes(config, device, shape), micro_batch_tokens=96)

    monkeypatch.setattr(end_to_end_costs, "TorchLearner", Seen)
    monkeypatch.setattr(end_to_end_costs, "choose_sizes", small)
    monkeypatch.setattr(end_to_end_costs, "gpu_share", lambda *_: 0.61)
    workload = SMOKE_WORKLOADS["tiny-geometric-4"]
    model = make_model(workload.shape, workload.context, tmp_path)
    sources = Sources(model=model, prompts=write_prompts(workload, tmp_path))
    config = config_of(workload, MODES["2"], sources, tmp_path / "run")
    found = measure_costs(workload.shape, config, model, end_to_end_costs.SMOKE, [])
    assert seen == [(0.61, 96)] and found.gpu_share == 0.61
    assert all((point.kept is None) == (point.beside_s is None) for point in found.points)


# ---- costs ---------------------------------------------------------------------------------------------------------------


def test_floor_and_slope_are_found_again_from_the_points() -> None:
    points = [
        Point(
            rows=rows,
            context=context,
            step_s=1e-3 + 30e-9 * rows * context,
            beside_s=beside * (1e-3 + 30e-9 * rows * context),
        )
        for rows, context, beside in ((1, 100, 1.5), (16, 1000, 1.5), (512, 300, 1.5))
    ]
    costs = fitted(points, 1e5, [0.6, float("nan"), 0.8])
    assert costs.floor_s == pytest.approx(1e-3)
    assert costs.slope_s == pytest.approx(30e-9)
    assert costs.slow == pytest.approx(1.5)
    assert costs.keep == pytest.approx(0.7)


# ---- figures of a cell -----------------------------------------------------------------------------------------------------


def ended(group_id: int, at: float, seconds: float, num_sampled: int) -> RolloutEnded:
    return RolloutEnded(
        at=at,
        group_id=group_id,
        member=0,
        attempt=0,
        reward=0.0,
        num_tokens=num_sampled + 10,
        num_sampled=num_sampled,
        start_version=0,
        end_version=0,
        finish=Finish.STOP,
        seconds=seconds,
    )


def stepped(version: int, at: float) -> Stepped:
    return Stepped(
        at=at, version=version, num_groups=1, num_rollouts=8, num_rows=8, num_tokens=100, seconds=1.0, metrics={}
    )


EVENTS: list[Event] = [
    GroupAdmitted(at=1.0, group_id=0, task_id="0", epoch=0, start_version=0, deadline=2),
    GroupAdmitted(at=1.0, group_id=1, task_id="1", epoch=0, start_version=0, deadline=2),
    ended(0, 2.0, 1.0, 100),
    stepped(1, 3.0),
    Span(at=4.0, worker="engine", what="generate", seconds=2.0, num_tokens=1000),
    Span(at=5.0, worker="engine", what="generate", seconds=1.0, num_tokens=400),
    GroupTaken(at=5.0, group_id=1, version=2, lag=2, num_rollouts=8),
    Span(at=6.0, worker="learner", what="accumulate", seconds=1.0),
    ended(1, 5.5, 4.0, 1000),
    stepped(2, 7.0),
]


def test_only_what_is_after_the_warm_up_counts() -> None:
    found = measured(EVENTS, 1)
    assert found["step_ends"] == [2.0, 6.0]
    assert found["rollouts_per_s"] == 8 / 4.0
    assert found["tokens_per_s"] == (500 + 400) / 4.0, "half of the first span is before the end of the warm-up"
    assert found["engine_share"] == 2.0 / 4.0
    assert found["learner_share"] == 1.0 / 4.0
    assert found["tail_ms_per_token"] == 4.0
    assert (found["lag_mean"], found["lag_max"]) == (2.0, 2)
    assert found["lengths"] == [[100], [1000]]
    assert found["prompts"] == [10, 10]


def test_a_cell_in_which_no_rollout_ended_in_the_measured_time_is_read_again_and_printed(tmp_path: Path) -> None:
    found = measured([event for event in EVENTS if event != ended(1, 5.5, 4.0, 1000)], 1)
    path = tmp_path / "results.jsonl"
    result = msgspec.structs.replace(result_of("2", 2.0, [[100], []]), tail_ms_per_token=found["tail_ms_per_token"])
    append_record(path, result)
    read = read_records(path)
    assert read.cells[GEOMETRIC_64, "2"] == result
    rows = list(rows_of(read, WORKLOADS, chosen(f"{GEOMETRIC_64}/2", WORKLOADS)))
    assert rows and not any("slowest percentile" in row.metric for row in rows)
    assert list(table(read, WORKLOADS, chosen(f"{GEOMETRIC_64}/2", WORKLOADS)))


def test_a_run_without_a_step_after_its_warm_up_is_not_measured() -> None:
    with pytest.raises(NotMeasured, match="2 steps"):
        measured(EVENTS, 2)


# ---- the report ------------------------------------------------------------------------------------------------------------


def result_of(mode: str, step_s: float, lengths: list[list[int]]) -> Result:
    return Result(
        workload=GEOMETRIC_64,
        mode=mode,
        settings=[],
        device="made up",
        slots=512,
        warm_steps=1,
        step_ends=[step_s, 2 * step_s, 3 * step_s],
        rollouts_per_s=64 / step_s,
        tokens_per_s=1000.0,
        tail_ms_per_token=2.0,
        engine_share=0.5,
        learner_share=0.25,
        step_rollouts=[64] * 3,
        step_tokens=[1000] * 3,
        lag_mean=0.0,
        lag_max=0,
        memory_gib=1.0,
        preempted=0,
        failed=0,
        aborted=0,
        lengths=lengths,
        prompts=[100] * len(lengths),
        warnings=[],
        timeline=Timeline(rollouts=[(0.0, 1.0), (0.5, 2.0)], learner=[(1.0, 1.5)], steps=[0.0, 2.0]),
        seconds=10.0,
    )


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two cells, one that failed, costs, and a run of the peer."""
    path = tmp_path / "results.jsonl"
    lengths = [[100 + 10 * number for number in range(8)] for _ in range(40)]
    costs = MeasuredCosts(shape="474M", settings=[], device="made up", costs=Costs(), points=[], seconds=1.0)
    peer = PeerResult(
        peer="TRL",
        workload=GEOMETRIC_64,
        settings={"micro_batch": "8"},
        device="made up",
        step_ends=[30.0, 50.0],
        rollouts_per_step=64,
        tokens=[100, 100],
        memory_gib=1.0,
    )
    failed = Failed(workload="short", mode="2", why="OutOfMemoryError: too much")
    for record in (costs, result_of("barrier", 3.0, lengths), result_of("barrier", 4.0, lengths), failed, peer):
        append_record(path, record)
    append_record(path, result_of("2", 2.0, lengths))
    return path


def test_every_gain_is_beside_that_of_the_step_model_for_the_same_lengths(results: Path) -> None:
    found = read_records(results)
    rows = {(row.workload, row.metric, row.peer): row for row in rows_of(found, WORKLOADS, cells(WORKLOADS))}
    workload = f"{GEOMETRIC_64}, max_lag 2"
    assert rows[workload, "rollouts/s, steps 2 to 3", "barrier"].ratio == 2.0, "the last one of a cell counts"
    gain = rows[workload, "gain over barrier", "the step model"]
    assert gain.ours == 2.0
    assert gain.theirs is not None and 1.0 < gain.theirs < 3.0
    assert rows[workload, "rollouts/s", "TRL, its best settings"].ratio == 10.0


def test_a_ratio_is_over_the_steps_that_both_cells_have_measured() -> None:
    longer = replace(result_of("2", 2.0, [[100]]), step_ends=[2.0, 4.0, 6.0, 106.0], step_rollouts=[64] * 4)
    shorter = replace(result_of("barrier", 4.0, [[100]]), warm_steps=2)
    assert in_both(longer, shorter) == range(2, 3)
    found = Measured(cells={(one.workload, one.mode): one for one in (longer, shorter)}, failed={}, costs={}, peers=[])
    (line, _) = lines_of(found, WORKLOADS)
    assert line.ratios["barrier"] == (2.0, None)
    late = replace(longer, warm_steps=3)
    assert not in_both(late, shorter)
    (line, _) = lines_of(replace(found, cells={**found.cells, (late.workload, "2"): late}), WORKLOADS)
    assert line.ratios == {}


def test_of_a_peer_with_the_same_settings_the_last_record_counts_over_whole_generations(results: Path) -> None:
    (peer,) = read_records(results).peers
    longer = replace(peer, step_ends=[30.0, 50.0, 68.0, 86.0, 90.0], tokens=[100, 100, 90, 90, 80], cycle=2)
    append_record(results, longer)
    append_record(results, replace(longer, settings={"micro_batch": "16"}, step_ends=[]))
    found, other = read_records(results).peers
    assert found == longer and other.step_s == math.inf
    assert found.step_s == 18.0 and found.tokens_per_s == 5.0


def test_cells_that_were_not_measured_are_printed_as_such(results: Path) -> None:
    lines = list(table(read_records(results), WORKLOADS, cells(WORKLOADS)))
    assert any(line.startswith("| 1.7B-log-normal-512, max_lag 4 | not measured ") for line in lines)
    assert any(line.startswith("| short, max_lag 2 | not measured: OutOfMemoryError: too much ") for line in lines)
    width = lines[next(n for n, line in enumerate(lines) if line.startswith("| load"))].count("|")
    assert all(line.count("|") == width for line in lines if line.startswith("|")), "every line has all columns"


def test_the_timeline_has_a_panel_a_cell(results: Path, tmp_path: Path) -> None:
    found = read_records(results)
    draw_timeline(list(found.cells.values()), tmp_path / "timeline.svg")
    text = (tmp_path / "timeline.svg").read_text()
    assert text.count("<polygon") == 2
    assert "max_lag 2: 2.00 s a step" in text


# ---- cells -----------------------------------------------------------------------------------------------------------------


def test_the_cells_that_are_measured_by_default_are_cells() -> None:
    assert len(chosen(REQUIRED, WORKLOADS)) == len(REQUIRED.split(","))


def test_a_pattern_that_fits_no_cell_is_refused() -> None:
    with pytest.raises(SystemExit, match="474M-geometric-65"):
        chosen("474M-geometric-65/2", WORKLOADS)


def test_a_mode_is_not_measured_before_the_groups_that_started_at_once_are_gone() -> None:
    check_warm_steps([(GEOMETRIC_64, mode) for mode in MODES if mode != "redundant"], WORKLOADS)
    fewer = with_steps(WORKLOADS, 3, 4)
    assert fewer[GEOMETRIC_64].steps == 3
    check_warm_steps([(GEOMETRIC_64, "2")], fewer)
    with pytest.raises(SystemExit, match="--warm-steps 6"):
        check_warm_steps([(GEOMETRIC_64, "4")], fewer)


def test_all_modes_measure_the_same_steps(sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [play("tiny-geometric-4", mode, sources, tmp_path / mode, monkeypatch)[0] for mode in ("barrier", "0", "2")]
    assert all(result.measured_steps == range(4, 6) for result in found)
    assert all(result.step_rollouts == [4] * 6 and len(result.step_tokens) == 6 for result in found)


def test_a_cell_that_is_not_measured_is_recorded_and_the_status_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_to_end, "WORKLOADS", SMOKE_WORKLOADS)
    with pytest.raises(SystemExit, match=r"not measured: tiny-geometric-4/2: NotMeasured: \d steps"):
        end_to_end.main(
            ["--cells", "tiny-geometric-4/2", "--costs", "none", "--limit", "0", "--folder", str(tmp_path), "--json"]
        )
    assert "tiny-geometric-4" in capsys.readouterr().out
    assert list(read_records(tmp_path / "results.jsonl").failed) == [("tiny-geometric-4", "2")]


def test_modes_differ_in_the_lag_the_barrier_and_the_redundancy_alone(tmp_path: Path) -> None:
    sources = Sources(model=tmp_path, prompts=tmp_path / "prompts.jsonl")
    workload = WORKLOADS[GEOMETRIC_64]
    configs = {name: config_of(workload, mode, sources, tmp_path / "run") for name, mode in MODES.items()}
    assert configs["barrier"].algorithm.loss == configs["2"].algorithm.loss
    assert configs["barrier"].pipeline == configs["0"].pipeline
    assert not any(config.pipeline.is_in_lockstep for config in configs.values())
    first, *others = [(config.engine.slots, config.learner) for config in configs.values()]
    assert all(one == first for one in others)
    changed = config_of(workload, MODES["2"], sources, tmp_path / "run", settings=["engine.slots=7"])
    assert changed.engine.slots == 7
    assert changed.pipeline == configs["2"].pipeline


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    folder, workload = tmp_path_factory.mktemp("end-to-end"), SMOKE_WORKLOADS["tiny-geometric-4"]
    return Sources(model=make_model(workload.shape, workload.context, folder), prompts=write_prompts(workload, folder))


def play(
    name: str, mode: str, sources: Sources, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Result, list[Event]]:
    """A cell as it is measured, and its events."""
    seen: list[Event] = []
    emit = Watch.emit

    def watched(watch: Watch, event: Event) -> None:
        seen.append(event)
        emit(watch, event)

    monkeypatch.setattr(Watch, "emit", watched)
    budget = Budget(seconds=0.0, min_steps=2, limit_s=60.0)
    return run_cell(name, SMOKE_WORKLOADS[name], mode, sources, folder, budget, []), seen


def test_at_the_barrier_nothing_is_trained_before_the_whole_batch_is_generated(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, events = play("tiny-geometric-4", "barrier", sources, tmp_path, monkeypatch)
    batch = 0
    for event in events:
        batch += isinstance(event, RolloutEnded)
        if isinstance(event, Span) and event.what == "accumulate":
            assert batch == 4, "all rollouts of the batch have ended, and none of the next"
        if isinstance(event, Stepped):
            batch = 0
    assert len(result.steps_s) == 2
    assert result.lag_max == 0


def test_imposed_lengths_are_those_of_the_seed_in_every_mode(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        play("tiny-log-normal-4", mode, sources, tmp_path / mode, monkeypatch)[0].lengths for mode in ("barrier", "2")
    ]
    pairs = list(zip(*found, strict=False))
    assert len(pairs) >= 6
    assert all(sorted(one) == sorted(other) for one, other in pairs if len(one) == len(other) == 2)
    assert len({length for group in found[0] for length in group}) > 3
