"""`millstream calibrate`: costs from the events of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from millstream.cli import main
from millstream.config import load
from millstream.errors import MillstreamError
from millstream.events import Sizes, SizesChosen
from millstream.run.calibrate import Calibration, calibrate
from millstream.run.config import RunConfig
from millstream.run.fit_costs import fit_with
from millstream.run.simulate import costs_of, simulate
from millstream.sim.config import CostsFile

ROOT = Path(__file__).parents[2]
TRUE = {
    "floor_s": 1.3e-3,
    "request_s": 4e-6,
    "context_token_s": 29e-9,
    "decode_slowdown": 2.0,
    "learner_keep": 0.6,
    "train_tokens_per_s": 104_000,
    "train_step_s": 0.3,
    "publish_s": 0.2,
    "load_s": 0.4,
    "driver_s": 2e-3,
    "prompt_tokens": 200,
}


def a_run(out: Path, *changes: str) -> None:
    costs = [f"sim.{name}={value}" for name, value in TRUE.items()]
    more = ("pipeline.steps=16", "sim.environment.no_signal=0.3", "sim.environment.latency_s.mean=1", *changes)
    path = ROOT / "recipes/sim/one_gpu.toml"
    config = load(path, RunConfig, [*costs, "pipeline.filter_zero_signal=true", *more])
    simulate(config, costs_of(config), out=out)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    folder = tmp_path_factory.mktemp("calibrate") / "run"
    a_run(folder)
    return calibrate(folder)


def test_the_costs_of_a_run_are_found_in_its_events(found: Calibration) -> None:
    value = {one.name: one.value for one in found.parameters}
    for name, true in TRUE.items():
        assert value[name] == pytest.approx(true, rel=0.15), name
    assert value["latency_s"] == pytest.approx(1, rel=0.25)
    assert value["no_signal"] == pytest.approx(0.3, abs=0.15)


def test_a_simulation_with_them_is_near_the_run(found: Calibration) -> None:
    for row in found.compared[:3]:
        assert row.ratio == pytest.approx(1, abs=0.15), row


def test_on_a_cpu_the_costs_are_those_of_undisturbed_spans_and_the_cores_make_up_for_the_rest(tmp_path: Path) -> None:
    more = ("sim.cores=1.7", "sim.decode_slowdown=1", "sim.learner_keep=1", "sim.environment.latency_s.mean=0")
    a_run(tmp_path / "run", *more)
    with (tmp_path / "run/events.jsonl").open("ab") as file:
        sizes = Sizes(dtype="float32", slots=512, cache_gb=None, micro_batch_tokens=16384, is_compiled=False)
        file.write(msgspec.json.encode(SizesChosen(at=0.0, sizes=sizes, device="cpu")) + b"\n")
    found = calibrate(tmp_path / "run")
    assert found.sim.cores is not None
    value = {one.name: one.value for one in found.parameters}
    for name in ("train_tokens_per_s", "train_step_s", "publish_s"):
        assert 0.6 < value[name] / TRUE[name] < 1.7, name
    assert {row.name: row.ratio for row in found.compared}["rollouts/s trained"] == pytest.approx(1, abs=0.1)


def test_a_learner_that_was_never_alone_on_its_gpu_has_the_share_that_was_measured_elsewhere() -> None:
    seconds_N, ones_N = np.array([2.0, 3.0, 4.0, 5.0]), np.ones(4)
    fit = fit_with(np.array([[20.0], [30.0], [40.0], [50.0]]), seconds_N, ones_N, 1 / 0.6)
    assert fit.values[0] == pytest.approx(0.06)


def test_what_the_run_does_not_show_is_said_to_be_uncertain(found: Calibration, tmp_path: Path) -> None:
    """In lockstep with one group a step, nothing is decoded while the learner works."""
    why = {one.name: one.why for one in found.parameters}
    assert not any(why[name] for name in ("floor_s", "context_token_s", "decode_slowdown", "train_tokens_per_s")), why
    a_run(tmp_path / "run", "pipeline.max_lag=0", "pipeline.groups_per_step=1", "pipeline.filter_zero_signal=false")
    why = {one.name: one.why for one in calibrate(tmp_path / "run").parameters}
    assert "same share of every span" in why["learner_keep"]


def test_a_success_of_groups_that_were_not_filtered_is_uncertain(found: Calibration, tmp_path: Path) -> None:
    assert "groups were filtered" in next(one.why for one in found.parameters if one.name == "success")
    a_run(tmp_path / "run", "pipeline.steps=4", "pipeline.filter_zero_signal=false")
    assert not next(one.why for one in calibrate(tmp_path / "run").parameters if one.name == "success")
    events = tmp_path / "run/events.jsonl"
    events.write_bytes(events.read_bytes().replace(b'"reward":1.0', b'"reward":3.0'))
    why = next(one.why for one in calibrate(tmp_path / "run").parameters if one.name == "success")
    assert why == "the run's rewards are 0 to 3: simulated ones are 0 or 1"


def test_rewards_of_many_values_leave_no_group_without_signal_by_chance(found: Calibration, tmp_path: Path) -> None:
    assert not found.sim.environment.graded
    graded = ("sim.environment.graded=true", "sim.environment.no_signal=0", "rollout.group_size=2", "pipeline.steps=6")
    a_run(tmp_path / "run", *graded)
    again = calibrate(tmp_path / "run")
    assert again.sim.environment.graded and again.sim.environment.no_signal == 0
    assert again.compared[1].ratio == pytest.approx(1, abs=0.25), "half of all pairs would be filtered"


def test_rollouts_of_several_turns_make_the_lengths_uncertain(found: Calibration, tmp_path: Path) -> None:
    assert not next(one.why for one in found.parameters if one.name == "lengths") and not found.changes
    turns = ("sim.environment.turns.mean=3", "sim.lengths.kind=fixed", "sim.lengths.mean=40", "rollout.max_tokens=50")
    a_run(tmp_path / "run", "pipeline.steps=4", *turns)
    several = calibrate(tmp_path / "run")
    lengths = next(one for one in several.parameters if one.name == "lengths")
    assert lengths.value == 120 and "have several turns (above rollout.max_tokens = 50)" in lengths.why
    assert several.changes == ["rollout.max_tokens=120"], "with it a simulation does not cut them"


def test_the_command_writes_costs_that_sim_reads(tmp_path: Path) -> None:
    a_run(tmp_path / "run", "pipeline.steps=4")
    result = CliRunner().invoke(main.app, ["calibrate", str(tmp_path / "run")])
    assert result.exit_code == 0 and "simulated" in result.stdout, result.output
    costs = load(tmp_path / "run/costs.toml", CostsFile).sim
    assert costs.lengths.kind == "run"
    again = ["sim", str(tmp_path / "run/config.toml"), "--costs", str(tmp_path / "run/costs.toml"), "--json"]
    assert msgspec.json.decode(CliRunner().invoke(main.app, again).stdout)["summary"]["steps"] == 4


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "is not a run folder: it has no config.toml"),
        (["config.toml"], "has no events.jsonl: calibrate a run that has trained"),
        (["config.toml", "events.jsonl"], "has 0 steps: at least 2 are needed"),
    ],
)
def test_a_run_with_too_little_is_refused(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_text("[model.tiny]\n" if name == "config.toml" else "")
    with pytest.raises(MillstreamError, match=message):
        calibrate(tmp_path)


def test_a_run_whose_engine_does_not_count_steps_is_refused(tmp_path: Path) -> None:
    a_run(tmp_path / "run", "pipeline.steps=3")
    lines = (tmp_path / "run/events.jsonl").read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"generate"' not in line]
    (tmp_path / "run/events.jsonl").write_bytes(b"".join(kept))
    with pytest.raises(MillstreamError, match=r"has 0 spans of decoding with counts of steps"):
        calibrate(tmp_path / "run")


def test_a_run_that_trained_nothing_is_refused(tmp_path: Path) -> None:
    a_run(tmp_path / "run", "sim.environment.no_signal=1", "pipeline.filter_zero_signal=true")
    with pytest.raises(MillstreamError, match="has trained nothing after its first steps"):
        calibrate(tmp_path / "run")
