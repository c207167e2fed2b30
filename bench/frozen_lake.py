"""Does asynchrony pay when every step of an environment takes its time? Frozen lakes with a latency of 50 ms a step on average
and a heavy tail: asynchronous training with carry-over redundancy against synchronous training.

All in one run, one after the other, repeated over seeds, medians; `theirs` is ours with max_lag = 0: the same engine, learner
and environment, all rollouts of a step begun at once. With lockstep every turn is a batch that waits for the slowest of the one
before; without it every rollout goes on by itself, and only the step waits. The warm-up is done once a seed, and all begin with
its model. Groups without signal are not replaced, so that everybody plays as many rollouts as it trains: with replacements the
synchronous runs would wait once more for each wave of them.

    .venv/bin/python bench/frozen_lake.py [--json] [--steps 40] [--repeat 3] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from millstream import RunConfig, train
from millstream.audit import audit
from millstream.config import load
from millstream.run.folder import RunResult

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes/frozen_lake.toml"
LATENCY_S, SIGMA = 0.05, 1.5
LATENCY = f"log-normal, mean {LATENCY_S * 1000:.0f} ms, sigma {SIGMA:g}"
OURS = "max_lag = 2, 16 extra groups"
MODES = {
    OURS: ["pipeline.max_lag=2", "pipeline.extra_groups=16", "pipeline.surplus='carry_over'"],
    "max_lag = 0, lockstep": ["pipeline.max_lag=0", "pipeline.lockstep=true"],
    "max_lag = 0": ["pipeline.max_lag=0", "pipeline.lockstep=false"],
}
METRICS: dict[str, Callable[[RunResult], float]] = {
    "rollouts/s trained": lambda result: result.summary.rollouts_per_s,
    "success before, sampled": lambda result: result.accuracy_before or 0.0,
    "success after, sampled": lambda result: result.accuracy_after or 0.0,
    "success after, greedy": lambda result: result.greedy_after or 0.0,
}


def warm_up(seed: int, folder: Path) -> Path:
    """The recipe up to its first step, which is taken at a rate that changes no weight: what is saved is where all begin."""
    changes = [
        "pipeline.steps=1",
        "pipeline.groups_per_step=1",
        "learner.learning_rate=1e-30",
        "evaluation.every_steps=",
    ]
    train(load(RECIPE, RunConfig, [f"seed={seed}", f"run_dir={folder}", *changes]))
    return folder / "model"


def run(mode: str, model: Path, steps: int, seed: int, folder: Path) -> RunResult:
    """One mode from the model after its warm-up; its books must be in order."""
    changes = [
        f"seed={seed}",
        f"run_dir={folder}",
        "model.tiny=",
        f"model.path={model}",
        "warmup=",
        f"environment.0.args.latency_s={LATENCY_S}",
        f"environment.0.args.latency_tail={SIGMA}",
        f"pipeline.steps={steps}",
        "pipeline.filter_zero_signal=false",
        "evaluation={tasks = 128}",
        *MODES[mode],
    ]
    result = train(load(RECIPE, RunConfig, changes))
    report = audit(folder)
    if not report.is_clean:
        raise SystemExit("\n".join(map(str, report.findings)))
    summary = result.summary
    print(
        f"seed {seed}, {mode}: {summary.rollouts_trained} rollouts in {summary.seconds:.0f} s, {summary.rollouts_per_s:.1f}/s, "
        f"lag {summary.lag_mean:.2f}, success {result.accuracy_before:.3f} -> {result.accuracy_after:.3f}",
        file=sys.stderr,
        flush=True,
    )
    return result


def measure(steps: int, seeds: range) -> dict[str, list[RunResult]]:
    found: dict[str, list[RunResult]] = {mode: [] for mode in MODES}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            model = warm_up(seed, Path(folder) / "warm")
            for number, (mode, results) in enumerate(found.items()):
                results.append(run(mode, model, steps, seed, Path(folder) / str(number)))
    return found


def rows_of(found: dict[str, list[RunResult]], steps: int) -> list[dict[str, str | float]]:
    rows: list[dict[str, str | float]] = []
    for peer in [mode for mode in MODES if mode != OURS]:
        for metric, value in METRICS.items():
            ours, theirs = (statistics.median(map(value, found[mode])) for mode in (OURS, peer))
            rows.append(
                {
                    "workload": f"frozen lake, {LATENCY} a step, {steps} steps",
                    "metric": metric,
                    "ours": round(ours, 3),
                    "peer": peer,
                    "theirs": round(theirs, 3),
                    "ratio": round(ours / max(theirs, 1e-9), 2),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args()
    rows = rows_of(measure(options.steps, range(options.seed, options.seed + options.repeat)), options.steps)
    if options.json:
        print(json.dumps(rows))
        return
    print(f"latency of a step: {LATENCY}; {options.steps} steps, medians of {options.repeat}; ours: {OURS}")
    for row in rows:
        print(f"{row['metric']:24} ours: {row['ours']:8}   {row['peer']:22} {row['theirs']:8}   {row['ratio']:.2f}x")


if __name__ == "__main__":
    main()
