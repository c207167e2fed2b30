"""Does asynchrony pay when every step of an environment takes its time? Frozen lakes with a latency of 50 ms a step on average
and a heavy tail: asynchronous training with carry-over redundancy against synchronous training.

All in one run, one after the other, repeated over seeds, medians; `theirs` is ours with max_lag = 0: the same engine, learner
and environment, all rollouts of a step begun at once. With lockstep every turn is a batch that waits for the slowest rollout of
the turn before; without it only the step waits. The warm-up is done once a seed, and all modes begin with its model. Groups
without signal are not replaced, so that every mode plays as many rollouts as it trains: with replacements the synchronous runs
would wait once more for each wave of them.

    .venv/bin/python bench/frozen_lake.py [--json] [--smoke] [--steps 40] [--repeat 3] [--seed 0]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from internals import RunResult, audit, must_be_clean, recipe
from millstream import train
from report import Options, Row, publish, rate, say

LATENCY_S = 0.05
SIGMA = 1.5
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


def warm_up(seed: int, folder: Path, options: argparse.Namespace) -> Path:
    """The recipe up to its first step, which is taken at a rate that changes no weight: the model that all modes begin with."""
    changes = [
        f"seed={seed}",
        f"run_dir={folder}",
        "pipeline.steps=1",
        "pipeline.groups_per_step=1",
        "learner.learning_rate=1e-30",
        "evaluation.every_steps=",
    ]
    train(recipe("frozen_lake", *changes, is_smoke=options.smoke))
    return folder / "model"


def run(mode: str, model: Path, seed: int, folder: Path, options: argparse.Namespace) -> RunResult:
    """One mode from the model after its warm-up; its audit must be clean."""
    changes = [
        f"seed={seed}",
        f"run_dir={folder}",
        "model.tiny=",
        f"model.path={model}",
        "warmup=",
        f"environment.0.args.latency_s={LATENCY_S}",
        f"environment.0.args.latency_tail={SIGMA}",
        f"pipeline.steps={options.steps}",
        "pipeline.filter_zero_signal=false",
        f"evaluation={{tasks = {8 if options.smoke else 128}}}",
        *(change.replace("=16", "=2") if options.smoke else change for change in MODES[mode]),
    ]
    result = train(recipe("frozen_lake", *changes, is_smoke=options.smoke))
    must_be_clean(audit(folder))
    summary = result.summary
    say(
        f"seed {seed}, {mode}: {summary.rollouts_trained} rollouts in {summary.seconds:.0f} s, {summary.rollouts_per_s:.1f}/s, "
        f"lag {summary.lag_mean:.2f}, success {result.accuracy_before:.3f} -> {result.accuracy_after:.3f}"
    )
    return result


def measure(options: argparse.Namespace) -> dict[str, list[RunResult]]:
    found: dict[str, list[RunResult]] = {mode: [] for mode in MODES}
    for seed in range(options.seed, options.seed + options.repeat):
        with tempfile.TemporaryDirectory() as folder:
            model = warm_up(seed, Path(folder) / "warm", options)
            for number, (mode, results) in enumerate(found.items()):
                results.append(run(mode, model, seed, Path(folder) / str(number), options))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 40, smoke=1)
    parser.add("--repeat", 3, smoke=1)
    parser.add("--seed", 0, help="the first one")
    options = parser.parse(argv)
    found = measure(options)
    workload = f"frozen lake, {LATENCY} a step, {options.steps} steps; {OURS}"
    rows: list[Row] = []
    for peer in [mode for mode in MODES if mode != OURS]:
        for metric, value in METRICS.items():
            ours, theirs = (statistics.median(map(value, found[mode])) for mode in (OURS, peer))
            rows.append(rate(workload, metric, ours, peer, theirs))
    publish(rows, options)


if __name__ == "__main__":
    main()
