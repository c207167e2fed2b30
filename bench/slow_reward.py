"""Does asynchrony pay when the reward takes 50 to 500 ms? The demo's recipe with such a reward: max_lag 2 against 0.

Both in one run, one after the other, repeated, medians; `theirs` is ours with max_lag = 0: the same engine, learner and reward,
all requests of a step submitted at once.

    .venv/bin/python bench/slow_reward.py [--json] [--steps 60] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from millstream import RunConfig, train
from millstream.config import load
from millstream.run.folder import RunResult

ROOT = Path(__file__).parent.parent


def run(max_lag: float, steps: int, seed: int) -> RunResult:
    with tempfile.TemporaryDirectory() as folder:
        changes = [
            f"seed={seed}",
            f"run_dir={folder}",
            f"pipeline.max_lag={max_lag}",
            f"pipeline.steps={steps}",
            f"reward=[{{function='{ROOT}/bench/judge.py:judge'}}]",
            "evaluation.every_steps=100000",
        ]
        return train(load(ROOT / "recipes/demo.toml", RunConfig, changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    found: dict[float, list[RunResult]] = {0: [], 2: []}
    for seed in range(options.repeat):
        for max_lag, results in found.items():
            results.append(run(max_lag, options.steps, seed))

    def median(max_lag: float, metric: str) -> float:
        if metric == "rollouts/s trained":
            return statistics.median(result.summary.rollouts_per_s for result in found[max_lag])
        return statistics.median(result.accuracy_after or 0.0 for result in found[max_lag])

    rows = [
        {
            "workload": f"demo, reward of 50 to 500 ms, {options.steps} steps",
            "metric": metric,
            "ours": round(median(2, metric), 3),
            "peer": "max_lag = 0",
            "theirs": round(median(0, metric), 3),
            "ratio": round(median(2, metric) / max(median(0, metric), 1e-9), 2),
        }
        for metric in ("rollouts/s trained", "accuracy after, sampled")
    ]
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['metric']:26} max_lag 2: {row['ours']:8}   max_lag 0: {row['theirs']:8}   {row['ratio']:.2f}x")


if __name__ == "__main__":
    main()
