"""`millstream sim`: the production pipeline with costs from a `[sim]` table."""

from __future__ import annotations

import ast
import gc
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import millstream
from house import parsed
from millstream.audit import audit
from millstream.cli import main
from millstream.config import load
from millstream.decoding import to_type
from millstream.errors import ConfigError, MillstreamError, StallError
from millstream.events import (
    Event,
    GroupAdmitted,
    ReplicaJoined,
    ReplicaLeft,
    Resumed,
    RolloutEnded,
    RolloutFailed,
    Span,
    Stepped,
)
from millstream.events.lanes import MAX_LANES, lanes_of, lanes_svg, lanes_text
from millstream.events.sinks import JsonlSink, read_history
from millstream.run import simulate as module
from millstream.run.config import RunConfig
from millstream.run.simulate import costs_of, simulate
from millstream.sim.config import DrawConfig, SimConfig, SimEnvironmentConfig
from millstream.sim.learner import SimLearner
from millstream.types import Finish, Metrics

ROOT = Path(__file__).parents[2]
ONE_GPU = ROOT / "recipes/sim/one_gpu.toml"
CLUSTER = ROOT / "recipes/sim/cluster.toml"
SMALL = (
    "pipeline.steps=4",
    "pipeline.groups_per_step=4",
    "rollout.group_size=4",
    "engine.replicas=3",
    "engine.slots=8",
    "learner.ranks=2",
    "sim.lengths.mean=100",
)


def config_of(path: Path, *changes: str) -> RunConfig:
    return load(path, RunConfig, changes)


def simulated(*changes: str, path: Path = CLUSTER, out: Path | None = None) -> list[Event]:
    config = config_of(path, *(SMALL if path == CLUSTER else ()), *changes)
    return simulate(config, costs_of(config), out=out).events


def of(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def step_s(*changes: str) -> float:
    ends = [step.at for step in of(simulated("pipeline.steps=14", *changes, path=ONE_GPU), Stepped)]
    return (ends[-1] - ends[3]) / (len(ends) - 4)


# ---- what it is ------------------------------------------------------------------------------------------------------


def test_the_simulator_has_the_production_modules_and_no_copies() -> None:
    """Its parts are the classes that a real run has, and what it defines itself is no pipeline, router, store or rule."""
    tree = parsed(Path(str(module.__file__)).read_text())
    imported = {
        name.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert imported["Pipeline"] == "millstream.pipeline.pipeline"
    assert imported["Fleet"] == "millstream.serving.fleet"  # which makes the router
    assert imported["MemoryStore"] == "millstream.store.memory"
    assert [node.name for node in tree.body if isinstance(node, ast.ClassDef)] == [
        "Simulated",
        "_All",
        "_Scorers",
        "_SimRun",
    ]
    for path in (Path(str(millstream.__file__)).parent / "sim").glob("*.py"):
        found = ast.walk(parsed(path.read_text()))
        names = [node.module or "" for node in found if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if name.startswith(("millstream.pipeline", "millstream.serving"))], path


def test_a_simulation_imports_no_torch() -> None:
    program = "import sys, millstream.run.simulate; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_same_seed_gives_the_same_files_wherever_they_are(tmp_path: Path) -> None:
    failing = ("sim.environment.failure=0.05", "sim.failures.node_mean_s=60", "sim.failures.restart_s=5")
    for name in ("one", "two"):
        simulated(*failing, out=tmp_path / name)
    simulated(*failing, "seed=1", out=tmp_path / "other")
    for name in ("events.jsonl", "metrics.jsonl", "config.toml", "trace.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert (tmp_path / "one/events.jsonl").read_bytes() != (tmp_path / "other/events.jsonl").read_bytes()


def test_its_folder_is_read_like_that_of_a_real_run(tmp_path: Path) -> None:
    events = simulated(out=tmp_path / "run")
    assert list(read_history(tmp_path / "run/events.jsonl")) == events
    report = audit(tmp_path / "run")
    assert report.is_clean, report
    for command in ("audit", "report", "trace"):
        assert CliRunner().invoke(main.app, [command, str(tmp_path / "run")]).exit_code == 0, command


# ---- what it says ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_lag", "expected"), [(0, 5.50), (1, 3.53), (2, 2.86)])
def test_a_step_on_one_gpu_takes_what_the_step_model_says(max_lag: int, expected: float) -> None:
    """Another program, step by step, with the same five numbers: `bench/step_model.py`."""
    assert step_s(f"pipeline.max_lag={max_lag}", "pipeline.lockstep=false") == pytest.approx(expected, rel=0.12)


def test_each_cost_makes_a_run_slower() -> None:
    """On one GPU that engine and learner share."""
    base = (
        *("pipeline.steps=4", "pipeline.groups_per_step=2", "pipeline.max_lag=1", "sim.lengths.mean=100"),
        *("sim.train_tokens_per_s=8000", "sim.train_step_s=0.01", "sim.publish_s=0.01", "sim.load_s=0.01"),
    )

    def seconds(*changes: str) -> float:
        return float(of(simulated(*base, *changes, path=ONE_GPU), Stepped)[-1].at)

    fast = seconds()
    for change in (
        "sim.weights_s=2e-3",
        "sim.request_s=2e-4",
        "sim.context_token_s=1e-6",
        "sim.prefill_tokens_per_s=2000",
        "sim.has_prefix_cache=false",
        "sim.decode_slowdown=4",
        "sim.learner_keep=0.1",
        "sim.train_tokens_per_s=1000",
        "sim.train_step_s=1",
        "sim.publish_s=1",
        "sim.load_s=3",
        "sim.driver_s=0.1",
        "sim.lengths.mean=1000",
        "sim.environment.latency_s.mean=3",
        "sim.environment.turns.mean=3",
        "engine.slots=4",
    ):
        assert seconds(change) > fast, change
    assert seconds("learner.ranks=8") < fast
    crowded = ("rollout.max_tokens=1000", "sim.cache_tokens=1200")
    assert seconds(*crowded) > seconds(crowded[0]), "requests are preempted, and computed again"


def test_a_driver_limits_the_rollouts_of_all_engines_together() -> None:
    events = simulated("sim.driver_s=0.5", "engine.replicas=8", "pipeline.max_lag=2", "pipeline.steps=8")
    ended = [event.at for event in of(events, RolloutEnded)]
    assert len(ended) / ended[-1] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(
    "scorer",
    [
        ("reference.path=x", "algorithm.kl=loss", "algorithm.kl_coefficient=0.1"),
        ("algorithm.advantage=gae", "pipeline.filter_zero_signal=false"),
        ("proximal={}", "learner.mini_batches=2", "algorithm.loss=decoupled_ppo"),
    ],
)
def test_a_model_that_scores_rows_takes_its_time(scorer: tuple[str, ...]) -> None:
    fast, slow = (of(simulated(*scorer, f"sim.score_tokens_per_s={rate}"), Stepped) for rate in (1e9, 500))
    assert len(fast) == len(slow) == 4 and slow[-1].at > fast[-1].at + 1


def test_the_engines_report_every_token_that_was_sampled() -> None:
    events = simulated("pipeline.max_lag=0", "pipeline.filter_zero_signal=false")
    spans = [span for span in of(events, Span) if span.what == "generate"]
    sampled = sum(event.num_sampled for event in events if type(event).__name__ == "RolloutEnded")
    assert sum(span.num_tokens for span in spans) == pytest.approx(sampled, rel=1e-3)
    assert all(span.num_context >= span.num_tokens for span in spans if span.num_steps > 100)


def test_a_node_that_fails_takes_its_engines_with_it_and_they_come_back(tmp_path: Path) -> None:
    """Requests continue elsewhere, and the run trains all that it should."""
    config = config_of(CLUSTER, *SMALL, "pipeline.steps=8", "engine.replicas=4")
    failures = {"planned": [{"at_s": 3.0, "node": 1}], "engines_per_node": 2, "restart_s": 4.0}
    sim = to_type({**msgspec.to_builtins(costs_of(config)), "failures": failures}, SimConfig)
    events = simulate(config, sim).events
    assert {event.engine for event in of(events, ReplicaLeft)} == {"engine-2", "engine-3"}
    assert {event.engine for event in of(events, ReplicaJoined)} == {"engine-2", "engine-3"}
    assert len(of(events, Stepped)) == 8


def test_nodes_are_counted_by_the_engines_that_the_run_has() -> None:
    """Each server is an engine, whatever engine.replicas says."""
    servers = (
        "engine.kind=http",
        "engine.http.flavour=vllm",
        "engine.http.folder=weights",
        'engine.http.urls=["http://a:1", "http://b:1", "http://c:1"]',
        "engine.replicas=1",
    )
    config = config_of(CLUSTER, *SMALL, *servers)
    for node, is_there in ((2, True), (3, False)):
        failures = {"planned": [{"at_s": 1.0, "node": node}], "restart_s": 1.0}
        sim = to_type({**msgspec.to_builtins(costs_of(config)), "failures": failures}, SimConfig)
        with nullcontext() if is_there else pytest.raises(ConfigError, match=r"3 engines .* nodes 0 to 2"):
            simulate(config, sim)


def test_a_conversation_beyond_the_cache_names_the_key() -> None:
    """Of turns without a highest number, which cannot be checked before."""
    turns = ("sim.environment.turns.kind=geometric", "sim.environment.turns.mean=30")
    with pytest.raises(MillstreamError, match=r"set sim\.cache_tokens"):
        simulated(*turns, "sim.cache_tokens=600", "rollout.max_tokens=100", "rollout.retries=0")


def test_failures_of_the_environment_cost_rollouts_and_not_the_run() -> None:
    events = simulated("sim.environment.failure=0.3")
    assert len(of(events, Stepped)) == 4 and of(events, RolloutFailed)


def test_lengths_are_of_a_file_or_of_a_past_run(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("7\n9\n")
    settings = ("sim.lengths.mean=", "sim.lengths.sigma=")
    file = ("sim.lengths.kind=file", f"sim.lengths.path={tmp_path / 'lengths.txt'}")
    first = simulated(*settings, *file, out=tmp_path / "run")
    again = simulated(*settings, "sim.lengths.kind=run", f"sim.lengths.path={tmp_path / 'run'}")
    for events in (first, again):
        assert {event.num_sampled for event in events if type(event).__name__ == "RolloutEnded"} == {7, 9}


def test_a_rollout_that_the_past_run_had_too_has_the_length_that_it_had_there(tmp_path: Path) -> None:
    settings = (
        "sim.lengths.mean=",
        "sim.lengths.sigma=",
        "sim.lengths.kind=run",
        f"sim.lengths.path={tmp_path / 'run'}",
    )

    def lengths(events: list[Event]) -> dict[tuple[int, int], int]:
        return {(event.group_id, event.member): event.num_sampled for event in of(events, RolloutEnded)}

    first = lengths(simulated(out=tmp_path / "run"))
    again = lengths(simulated(*settings, "pipeline.max_lag=3"))
    assert len({*first.values()}) > 5
    assert first.items() <= again.items(), "and it has more groups"
    assert lengths(simulated(*settings, "seed=1")) != first


def test_prompts_of_a_file_come_in_epochs_and_keep_their_lengths(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("# three prompts\n7 8\n90\n300 301\n")
    file = ("sim.lengths.kind=prompts", f"sim.lengths.path={tmp_path / 'lengths.txt'}")
    events = simulated("sim.lengths.mean=", "sim.lengths.sigma=", *file)
    admitted = {event.group_id: event for event in of(events, GroupAdmitted)}
    assert [event.epoch for event in admitted.values()] == [number // 3 for number in range(len(admitted))]
    lengths: dict[str, set[int]] = {}
    for event in of(events, RolloutEnded):
        lengths.setdefault(admitted[event.group_id].task_id, set()).add(event.num_sampled)
    assert lengths == {"task-0": {7, 8}, "task-1": {90}, "task-2": {300, 301}}


def test_a_wait_beyond_its_deadline_ends_a_simulated_run_as_it_would_a_real_one(tmp_path: Path) -> None:
    with pytest.raises(StallError, match="learner"):
        simulated("sim.train_step_s=4000", out=tmp_path / "run")
    last = list(read_history(tmp_path / "run/events.jsonl"))[-1]
    assert last.outcome == "StallError" and audit(tmp_path / "run").is_clean


class InterruptedLearner(SimLearner):
    """Ctrl-C is typed in its second step."""

    num_steps = 0

    async def step(self) -> Metrics:
        self.num_steps += 1
        if self.num_steps == 2:
            signal.raise_signal(signal.SIGINT)
        return await super().step()


def test_the_log_of_an_interrupted_simulation_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SimLearner", InterruptedLearner)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever another test has left
    gc.collect()  # tasks of earlier tests
    caplog.clear()
    try:
        with pytest.raises(KeyboardInterrupt):
            simulated(out=tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    gc.collect()
    last = list(read_history(tmp_path / "run/events.jsonl"))[-1]
    assert last.outcome == "KeyboardInterrupt" and last.version == 1 and last.at > 0
    own = [one for one in caplog.records if one.name.startswith(("asyncio", "millstream"))]
    assert not own, "no task was left with an error that nobody has read"


def test_what_ends_a_simulation_before_it_begins_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = ("sim.lengths.mean=", "sim.lengths.sigma=", "sim.lengths.kind=file")
    with pytest.raises(ConfigError, match=r"cannot read no\.txt"):
        simulated(*lengths, "sim.lengths.path=no.txt", out=tmp_path / "runs/run")
    with monkeypatch.context() as patched:
        patched.setattr(module, "run_started", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            simulated(out=tmp_path / "runs/run")
    assert not list(tmp_path.iterdir())
    simulated(out=tmp_path / "runs/run")


def test_the_config_of_a_simulated_run_has_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numbers.txt").write_text("2\n3\n")
    monkeypatch.chdir(tmp_path)
    file = DrawConfig(kind="file", path="numbers.txt")
    environment = SimEnvironmentConfig(turns=file, latency_s=file)
    simulate(config_of(CLUSTER, *SMALL), SimConfig(lengths=file, environment=environment), out=Path("run"))
    sim = costs_of(config_of(Path("run/config.toml")))
    found = {sim.lengths.path, sim.environment.turns.path, sim.environment.latency_s.path}
    assert found == {str(tmp_path / "numbers.txt")}


def test_lengths_of_a_run_are_without_those_that_a_resume_has_undone(tmp_path: Path) -> None:
    log = JsonlSink(tmp_path / "events.jsonl")
    for num_sampled in (7, 50):
        numbers = {"group_id": 0, "member": 0, "attempt": 0, "start_version": 0, "end_version": 0}
        log.emit(
            RolloutEnded(
                at=1.0, reward=1.0, num_tokens=99, num_sampled=num_sampled, finish=Finish.STOP, seconds=1.0, **numbers
            )
        )
    log.emit(Resumed(at=1.0, version=0, from_seq=0, incarnation=1, digest=""))
    log.close()
    assert DrawConfig(kind="run", path=str(tmp_path)).read().most == 7


def test_rollouts_of_several_turns_are_not_cut_in_silence(tmp_path: Path) -> None:
    """Three turns of 40 tokens: a rollout of 120, which is simulated as one turn."""
    turns = ("sim.environment.turns.mean=3", "sim.lengths.kind=fixed", "sim.lengths.mean=40", "sim.lengths.sigma=")
    simulated(*turns, "rollout.max_tokens=50", out=tmp_path / "run")
    again = ("sim.lengths.mean=", "sim.lengths.sigma=", "sim.lengths.kind=run", f"sim.lengths.path={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=r"several turns and sampled up to 120.*--set rollout\.max_tokens=120"):
        simulated(*again, "rollout.max_tokens=60")
    events = simulated(*again, "rollout.max_tokens=120")
    assert {event.num_sampled for event in events if type(event).__name__ == "RolloutEnded"} == {120}


def test_a_simulated_run_has_no_model_and_that_is_what_commands_say(tmp_path: Path) -> None:
    simulated(out=tmp_path / "run")
    run = str(tmp_path / "run")
    for words in (
        ["train", "--resume", run],
        ["train", "--resume", run, "--set", "pipeline.steps=9"],
    ):
        result = CliRunner().invoke(main.app, words)
        assert result.exit_code != 0 and "is a simulated one" in result.output, result.output
        assert "train" in result.output and "config.toml" in result.output


# ---- lanes -----------------------------------------------------------------------------------------------------------


def test_lanes_show_each_engine_or_a_sample_and_all_of_them() -> None:
    few, many = lanes_of(simulated()), lanes_of(simulated("engine.replicas=12"))
    assert [line.split()[0] for line in lanes_text(few)][:4] == ["learner", "engine-0", "engine-1", "engine-2"]
    assert len(many.shown) == MAX_LANES and "all 12 engines" in "\n".join(lanes_text(many))
    for lanes in (few, many):
        picture = lanes_svg(lanes)
        assert picture.startswith("<svg") and "version 2" in picture and picture.count("<line") == 4
    assert lanes_text(lanes_of([])) == ["nothing to draw: no step has ended"]


# ---- the command, and what is refused --------------------------------------------------------------------------------


def test_the_command_prints_the_table_of_a_run_and_its_lanes(tmp_path: Path) -> None:
    small = [word for change in SMALL for word in ("--set", change)]
    result = CliRunner().invoke(main.app, ["sim", str(CLUSTER), *small, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "groups by lag" in result.stdout and "simulated with 3 engines and 2 learner ranks" in result.stdout
    assert (tmp_path / "run/lanes.svg").read_text().startswith("<svg")
    one = ["--set", "engine.replicas=1", "--set", "learner.ranks=1"]
    assert (
        "with 1 engine and 1 learner rank\n" in CliRunner().invoke(main.app, ["sim", str(CLUSTER), *small, *one]).stdout
    )
    as_json = CliRunner().invoke(main.app, ["sim", str(CLUSTER), *small, "--json"])
    assert msgspec.json.decode(as_json.stdout)["summary"]["steps"] == 4


def test_costs_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text("[sim]\nload_s = 7\n")
    assert costs_of(config_of(ONE_GPU), tmp_path / "costs.toml").load_s == 7
    (tmp_path / "costs.toml").write_text("[sim]\nlode_s = 7\n")
    with pytest.raises(ConfigError, match=r"unknown key sim\.lode_s\. Did you mean"):
        costs_of(config_of(ONE_GPU), tmp_path / "costs.toml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["sim="], r"has no \[sim\] table.*--costs FILE"),
        (["sim.floor_s=0"], "a decode step takes some time"),
        (["sim.floor_s=-1"], "floor_s = -1: expected at least 0"),
        (["sim.decode_slowdown=0.5"], "decode_slowdown must be at least 1"),
        (["sim.lengths.kind=file"], 'kind = "file" has path, found mean'),
        (["sim.lengths.sigma=2"], 'kind = "geometric" has mean, found mean and sigma'),
        (["sim.lengths.mean=-1"], "mean = -1: expected a number above 0"),
        (["sim.environment.failure=2"], "failure = 2: expected a probability"),
        (["sim.cache_tokens=100"], "a request may need 4224"),
        (["sim.cache_tokens=9000", "sim.environment.turns.mean=3"], "a request may need 12672"),
        (["sim.lengths.mean=", "sim.lengths.kind=file", "sim.lengths.path=no.txt"], "cannot read no.txt"),
        (["sim.lengths.mean=", "sim.lengths.kind=run", "sim.lengths.path=nowhere"], "cannot read nowhere/events.jsonl"),
        (["pipeline.rollouts_only=true"], "nothing to simulate"),
        (["sim.failures.engines_per_node=0"], "engines_per_node must be at least 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_what_to_type(changes: list[str], message: str) -> None:
    with pytest.raises(MillstreamError, match=message):
        simulated(*changes, path=ONE_GPU)


def test_a_folder_that_has_a_run_is_not_written_to(tmp_path: Path) -> None:
    simulated(out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"holds a simulated run already: choose another folder, or remove this one$"):
        simulated(out=tmp_path / "run")
