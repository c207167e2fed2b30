"""What the budget buys: throughput and lag against the budget, under the same deadline, on the virtual clock.

A full budget, floor((1 + max_lag) B), keeps the engines busiest but leaves no room to pass a straggler; a smaller one has the
room and less to run. Same simulated engines, learner and data in every row; `theirs` is synchronous training (max_lag = 0).

    .venv/bin/python bench/admission.py [--json] [--smoke] [--steps 30] [--seeds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence

from internals import MemorySink, SimEngine, SimEnvironment, SimLearner, full_budget, lognormal, run_pipeline
from millstream import PipelineConfig, RolloutConfig
from millstream.clock import run_virtual
from millstream.events import GroupTaken
from report import Options, Row, cost, publish, say

GROUPS = 16
MEMBERS = 4
SLOTS = 32
ENGINES = 4
LAGS = (1, 2, 4)
SHARES = (0.25, 0.5, 1.0)
TAILS = {"lengths log-normal, sigma 1.0": 1.0, "lengths log-normal, sigma 1.5": 1.5}


async def run(max_lag: float, budget: int, sigma: float, steps: int, seed: int) -> tuple[float, float]:
    """Seconds a step, and the mean lag."""
    sink = MemorySink()
    engines = [
        SimEngine(name=f"e{i}", slots=SLOTS, token_s=0.01, num_tokens=lognormal(400, sigma), seed=seed)
        for i in range(ENGINES)
    ]
    config = PipelineConfig(
        steps=steps, groups_per_step=GROUPS, max_lag=max_lag, extra_groups=budget - GROUPS, filter_zero_signal=False
    )
    await run_pipeline(
        engines,
        SimEnvironment(),
        SimLearner(token_s=6e-5, seed=seed),
        config=config,
        rollout=RolloutConfig(group_size=MEMBERS, max_tokens=8192, timeout_s=1e6),
        sink=sink,
        seed=seed,
        micro_batch_tokens=4096,
    )
    return asyncio.get_running_loop().time() / steps, statistics.mean(event.lag for event in sink.of(GroupTaken))


def median(max_lag: float, budget: int, sigma: float, options: argparse.Namespace) -> tuple[float, float]:
    runs = [run_virtual(run(max_lag, budget, sigma, options.steps, seed)) for seed in range(options.seeds)]
    return statistics.median(seconds for seconds, _ in runs), statistics.median(lag for _, lag in runs)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 30, smoke=3)
    parser.add("--seeds", 3, smoke=1)
    options = parser.parse(argv)
    rows: list[Row] = []
    for name, sigma in TAILS.items():
        synchronous, _ = median(0, GROUPS, sigma, options)
        for max_lag in LAGS:
            full = full_budget(GROUPS, max_lag)
            for share in SHARES:
                budget = GROUPS + round(share * (full - GROUPS))
                seconds, lag = median(max_lag, budget, sigma, options)
                workload = f"{name}, max_lag {max_lag}, budget {budget} of {full}"
                rows.append(cost(workload, "seconds a step (virtual)", seconds, "max_lag = 0", synchronous))
                say(f"{workload:68}  {seconds:8.2f} s  mean lag {lag:4.2f}  {synchronous / seconds:5.2f}x")
    publish(rows, options)


if __name__ == "__main__":
    main()
