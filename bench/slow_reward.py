"""Does asynchrony pay when the reward takes 50 to 500 ms? The demo's recipe with such a reward: max_lag 2 against 0.

Both in one run, one after the other, repeated, medians; `theirs` is ours with max_lag = 0: the same engine, learner and reward,
all requests of a step submitted at once.

    .venv/bin/python bench/slow_reward.py [--json] [--smoke] [--steps 60] [--repeat 3]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence

import run_parts
from internals import RunResult, recipe
from millstream import train
from report import Options, publish, rate


def run(max_lag: float, steps: int, seed: int, *, is_smoke: bool) -> RunResult:
    with tempfile.TemporaryDirectory() as folder:
        changes = [
            f"seed={seed}",
            f"run_dir={folder}",
            f"pipeline.max_lag={max_lag}",
            f"pipeline.steps={steps}",
            f"reward=[{{function='{run_parts.HERE}:judge'}}]",
            "evaluation.every_steps=100000",
        ]
        return train(recipe("demo", *changes, is_smoke=is_smoke))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 60, smoke=1)
    parser.add("--repeat", 3, smoke=1)
    options = parser.parse(argv)
    found: dict[float, list[RunResult]] = {0: [], 2: []}
    for seed in range(options.repeat):
        for max_lag, results in found.items():
            results.append(run(max_lag, options.steps, seed, is_smoke=options.smoke))
    speeds = {lag: statistics.median(result.summary.rollouts_per_s for result in found[lag]) for lag in found}
    accuracies = {lag: statistics.median(result.accuracy_after or 0.0 for result in found[lag]) for lag in found}
    workload = f"demo, reward of 50 to 500 ms, max_lag 2, {options.steps} steps"
    rows = [
        rate(workload, "rollouts/s trained", speeds[2], "max_lag = 0", speeds[0]),
        rate(workload, "accuracy after, sampled", accuracies[2], "max_lag = 0", accuracies[0]),
    ]
    publish(rows, options)


if __name__ == "__main__":
    main()
