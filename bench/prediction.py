"""Does the simulator predict what a run will do? One run is calibrated, and other configs are simulated with its costs and
measured.

A config is a change of the base: another ratio, batch size, length or reward latency. `--device cpu`: the demo, from its model
after the warm-up, at a learning rate that changes nothing. `--device gpu`: the 474M model of `bench/end_to_end.py` on one GPU,
with a learner that is not compiled; lengths are log-normal (mean 670, sigma 0.9, at most 4,096). The base is trained once and
calibrated (`millstream calibrate`); its own row is the error of the fit. Every config is trained `--repeat` times, in turn;
measured is from the end of the warm-up steps to the last step, the median counts. A config is then simulated with the costs of
that one calibration; of the config only its own settings, the latency of its reward and the number of its steps are known.

A few steps are as long as their longest rollouts happen to be. So that this luck is the same on both sides, all runs have one
seed: a simulated rollout that the base had too has the length that it had there (`kind = "run"`), and as many steps are
simulated as were measured. On the GPU lengths and latencies are imposed, by the rollout's seed. On the CPU the model decides,
with the same random numbers, and latencies are drawn again.

The two halves can be done on two machines: `--measure FILE` writes the events of all runs to an archive (written again after
every run), `--predict FILE` reads it and prints the table.

    .venv/bin/python bench/prediction.py [--json] [--smoke] [--device cpu] [--seconds 15] [--repeat 3]
    .venv/bin/python bench/prediction.py --device gpu --repeat 1 --measure runs/gpu.tar.gz      # about five minutes of one H200
    .venv/bin/python bench/prediction.py --predict runs/gpu.tar.gz
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from msgspec import Struct, structs

import run_parts
from end_to_end_cells import MODES, Budget, NotMeasured, Sources, Watch, config_of, measured
from end_to_end_costs import free_memory, make_model
from end_to_end_loads import SMOKE_WORKLOADS, WORKLOADS, write_prompts
from internals import (
    DrawConfig,
    SimConfig,
    as_it_ran,
    calibrate,
    load,
    read_history,
    recipe,
    simulate,
    without_checkpoints,
)
from millstream import MillstreamError, RunConfig, train
from millstream.errors import Stopped
from millstream.events import Stepped
from report import Options, Row, alone, not_measured, publish, rate, say

BASE = "calibration"
KEPT = ("config.toml", "events.jsonl")
CLOSE = 0.15
"""Predictions are to be this near, and configs further apart than this are to be in the right order."""


class Trial(Struct, frozen=True, kw_only=True):
    """A config, as changes of the base. `latency_s`: that its reward has in addition to what the base has."""

    name: str
    changes: tuple[str, ...] = ()
    latency_s: DrawConfig | None = None


class Measured(Struct, frozen=True, kw_only=True):
    """A run in the archive."""

    trial: Trial
    folder: str
    warm_steps: int
    device: str


class Index(Struct, frozen=True, kw_only=True):
    """The file `index.json` of the archive."""

    runs: list[Measured] = []
    failed: dict[str, str] = {}
    """Why, by the name of the trial."""


def trials(device: str, *, is_smoke: bool) -> list[Trial]:
    """The base first. All of them differ from it in something that it does not show."""
    reward = DrawConfig(kind="lognormal", mean=0.01 if is_smoke else 0.3 if device == "cpu" else 2.0, sigma=1.0)
    cut: tuple[str, ...]
    if device == "gpu":
        small, large, cut = 4, 16, ("rollout.max_tokens=1024", "environment.0.args.max_tokens=1024")
        slow = f"environment.0.args.latency_s={reward.mean}"
    else:
        small, large, cut = 4, 64, ("rollout.max_tokens=4",)
        args = f"args={{mean_s={reward.mean}, sigma={reward.sigma}}}"
        slow = f"reward=[{{function='{run_parts.HERE}:late_match', {args}}}]"
    found = [
        Trial(name=BASE),
        Trial(name="max_lag 0", changes=("pipeline.max_lag=0", "pipeline.lockstep=false")),
        Trial(name="max_lag 1", changes=("pipeline.max_lag=1",)),
        Trial(name="small batch", changes=(f"pipeline.groups_per_step={small}",)),
        Trial(name="large batch, max_lag 1", changes=(f"pipeline.groups_per_step={large}", "pipeline.max_lag=1")),
        Trial(name="short", changes=(*cut, "pipeline.filter_zero_signal=false")),
        Trial(name="slow reward, max_lag 1", changes=(slow, "pipeline.max_lag=1"), latency_s=reward),
    ]
    return [found[0], found[1], found[-1]] if is_smoke else found


# ---- measure ------------------------------------------------------------------------------------------------------------


def base_of(device: str, folder: Path, *, is_smoke: bool) -> Callable[[Path, Sequence[str]], RunConfig]:
    """The config of a run in this folder, with these changes of the base. Makes the model that all runs begin with."""
    if device == "gpu":
        whole = WORKLOADS["474M-log-normal-64"]
        moderate = structs.replace(whole, max_tokens=4096, context=4608, mean_tokens=670.0, sigma=0.9)
        workload = SMOKE_WORKLOADS["tiny-log-normal-4"] if is_smoke else moderate
        model = make_model(workload.shape, workload.context, folder)
        sources = Sources(model=model, prompts=write_prompts(workload, folder))
        plain = "learner.compile=false"  # nothing waits for a compiler
        return lambda run_dir, changes: config_of(workload, MODES["2"], sources, run_dir, settings=[plain, *changes])
    still = ("pipeline.steps=1", "pipeline.groups_per_step=1", "learner.learning_rate=1e-30", "evaluation.every_steps=")
    train(recipe("demo", f"run_dir={folder / 'warm'}", *still, is_smoke=is_smoke))
    common = (
        "warmup=",
        "model.tiny=",
        f"model.path={folder / 'warm/model'}",
        "learner.learning_rate=1e-7",
        "learner.schedule=constant",
        "pipeline.steps=100000",
        "evaluation=",
        "checkpoint.grace_s=0",
    )
    return lambda run_dir, changes: recipe("demo", *common, f"run_dir={run_dir}", *changes, is_smoke=is_smoke)


def measure(archive: Path, options: argparse.Namespace) -> None:
    """Trains every config and writes the archive, after every run. One that fails is in it as failed."""
    wanted, index = trials(options.device, is_smoke=options.smoke), Index()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_config = base_of(options.device, folder, is_smoke=options.smoke)
        rounds = [wanted[:1], *([wanted[1:]] * options.repeat)]
        for number, trial in enumerate(itertools.chain(*rounds)):
            run_dir = folder / f"run-{number}"
            try:
                config = make_config(run_dir, [*trial.changes, *options.set])
                index.runs.append(measure_run(trial, config, options))
            except (NotMeasured, MillstreamError, torch.OutOfMemoryError) as error:
                index.failed[trial.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                say(f"{trial.name}: {index.failed[trial.name]}")
            write_archive(archive, folder, index)
            free_memory()


def measure_run(trial: Trial, config: RunConfig, options: argparse.Namespace) -> Measured:
    """Raises `NotMeasured`, and what the run raises."""
    warm_steps = options.warm if options.warm else 2 + int(config.pipeline.max_lag)
    seconds = options.seconds * (2 if trial.name == BASE else 1)  # the costs of all others rest on it
    watch = Watch(warm_steps, Budget(seconds=seconds, min_steps=options.steps, limit_s=options.limit))
    with without_checkpoints(), suppress(Stopped):
        train(config, sinks=[watch], progress=False)
    figures = measured(watch.events, warm_steps)
    assert config.run_dir is not None
    say(f"{trial.name}: {len(figures['step_ends'])} steps, {figures['rollouts_per_s']:.1f} rollouts/s")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return Measured(trial=trial, folder=Path(config.run_dir).name, warm_steps=warm_steps, device=device)


def write_archive(archive: Path, folder: Path, index: Index) -> None:
    """What the predictions need of the runs so far."""
    (folder / "index.json").write_bytes(msgspec.json.encode(index))
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder / "index.json", "index.json")
        for run, name in itertools.product(index.runs, KEPT):
            file.add(folder / run.folder / name, f"{run.folder}/{name}")


# ---- predict ------------------------------------------------------------------------------------------------------------


class Prediction(Struct, frozen=True, kw_only=True):
    name: str
    rollouts: float
    """Of a step, on average."""
    real_per_s: list[float]
    """Rollouts/s of each run."""
    predicted_per_s: float

    @property
    def real(self) -> float:
        return statistics.median(self.real_per_s)

    @property
    def error(self) -> float:
        return self.predicted_per_s / self.real - 1


def predict(folder: Path, index: Index, steps: int) -> list[Prediction]:
    """Of every config, the base first."""
    by_name: dict[str, list[Measured]] = {}
    for run in index.runs:
        by_name.setdefault(run.trial.name, []).append(run)
    if BASE not in by_name:
        raise SystemExit(f"the archive has no run to calibrate: {index.failed.get(BASE, 'measure it again')}")
    sim = calibrate(folder / by_name[BASE][0].folder).sim
    return [predict_one(folder, runs, sim, steps) for runs in by_name.values()]


def predict_one(folder: Path, runs: Sequence[Measured], sim: SimConfig, steps: int) -> Prediction:
    """`steps`: simulated ones after the warm-up; 0: as many as were measured."""
    trial, warm_steps, real, counts, rollouts = runs[0].trial, runs[0].warm_steps, list[float](), list[int](), 0.0
    for run in runs:
        events = list(read_history(folder / run.folder / "events.jsonl"))
        figures = measured(events, warm_steps)
        real.append(figures["rollouts_per_s"])
        counts.append(len(figures["step_ends"]))
        seconds = figures["step_ends"][-1] - figures["step_ends"][warm_steps - 1]
        rollouts += real[-1] * seconds / (counts[-1] - warm_steps) / len(runs)
    last = warm_steps + steps if steps else statistics.median_low(counts)
    config = load(folder / runs[0].folder / "config.toml", RunConfig)
    ahead = math.ceil(config.pipeline.max_lag)  # steps at the end, when the engines have less and less to do
    if trial.latency_s is not None:
        latency_s = added(trial.latency_s, sim.environment.latency_s)
        sim = structs.replace(sim, environment=structs.replace(sim.environment, latency_s=latency_s))
    simulated = simulate(as_it_ran(config, events, last + ahead), sim).events
    ends = [number for number, event in enumerate(simulated, 1) if isinstance(event, Stepped)]
    predicted = measured(simulated[: ends[last - 1]], warm_steps)["rollouts_per_s"]
    return Prediction(name=trial.name, rollouts=rollouts, real_per_s=real, predicted_per_s=predicted)


def added(latency_s: DrawConfig, base: DrawConfig) -> DrawConfig:
    """The log-normal latency, later by the mean of the base: the same deviation around the sum of both means."""
    mean, sigma = latency_s.mean or 0.0, latency_s.sigma or 0.0
    both = mean + (base.mean or 0.0)
    variation = math.sqrt(math.expm1(sigma**2)) * mean / both
    return DrawConfig(kind="lognormal", mean=both, sigma=math.sqrt(math.log1p(variation**2)))


def pairs(found: Sequence[Prediction]) -> tuple[int, list[tuple[str, str]]]:
    """Of the configs that are more than `CLOSE` apart in reality: how many pairs, and those that are predicted the wrong way
    round."""
    apart = [(slow, fast) for slow, fast in itertools.permutations(found, 2) if fast.real > (1 + CLOSE) * slow.real]
    return len(apart), [(slow.name, fast.name) for slow, fast in apart if fast.predicted_per_s <= slow.predicted_per_s]


def rows_of(found: Sequence[Prediction], index: Index, workload: str) -> list[Row]:
    rows: list[Row] = []
    for one in found:
        name = f"{workload}, {one.name}"
        rows.append(rate(name, "rollouts/s, predicted", one.predicted_per_s, "measured", one.real))
        step_s = one.rollouts / one.predicted_per_s, one.rollouts / one.real
        rows.append(rate(name, "seconds a step, predicted", step_s[0], "measured", step_s[1]))
        rows.append(alone(name, "error of rollouts/s", one.error))
        rows.append(alone(name, "spread of the runs", (max(one.real_per_s) - min(one.real_per_s)) / one.real))
    rows += [not_measured(f"{workload}, {name}", why) for name, why in index.failed.items()]
    num_pairs, wrong = pairs(found)
    near = [one for one in found if one.name != BASE and abs(one.error) <= CLOSE]
    rows.append(alone(workload, f"configs within {CLOSE:.0%}, of {len(found) - 1}", len(near)))
    rows.append(alone(workload, f"pairs in the right order, of {num_pairs}", num_pairs - len(wrong)))
    for slow, fast in wrong:
        say(f"in the wrong order: {slow} is slower than {fast}")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--device", "cpu", help="cpu: the demo; gpu: the 474M load on one GPU")
    parser.add("--seconds", 15.0, smoke=1.5, help="measured of a run, after its warm-up; of the base twice as many")
    parser.add("--steps", 4, smoke=10, help="measured of a run at least")
    parser.add("--warm", 0, smoke=1, help="steps before the measured ones; 0: two more than max_lag")
    parser.add("--limit", 90.0, smoke=60.0, help="seconds after which a run ends with what it has")
    parser.add("--repeat", 3, smoke=1, help="runs of every config but the base")
    parser.add(
        "--simulated", 0, smoke=10, help="simulated steps of a config, after the warm-up; 0: those that were measured"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in the config of every run")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="only measure, and write this archive (.tar.gz)")
    parser.add_argument("--predict", type=Path, metavar="FILE", help="only predict what this archive has measured")
    options = parser.parse(argv)
    with tempfile.TemporaryDirectory() as scratch:
        archive = options.predict or options.measure or Path(scratch) / "runs.tar.gz"
        if options.predict is None:
            measure(archive, options)
        if options.measure is not None:
            return
        with tarfile.open(archive) as file:
            file.extractall(scratch, filter="data")
        index = msgspec.json.decode((Path(scratch) / "index.json").read_bytes(), type=Index)
        found = predict(Path(scratch), index, options.simulated)
        publish(rows_of(found, index, "demo" if index.runs[0].device == "cpu" else "474M"), options)


if __name__ == "__main__":
    main()
