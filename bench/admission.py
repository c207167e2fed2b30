"""What the budget buys: throughput and lag against the budget, under the same deadline, on the virtual clock.

A full budget, floor((1 + max_lag) B), keeps the engines busiest but leaves no room to pass a straggler; a smaller one has the
room and less to run. Same simulated engines, learner and data in every row; `theirs` is synchronous training (max_lag = 0).

    .venv/bin/python bench/admission.py [--json]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys

from millstream.algo.advantages import grpo
from millstream.clock import VirtualClock, run_virtual
from millstream.events import GroupTaken
from millstream.events.sinks import MemorySink
from millstream.pipeline.admission import full_budget
from millstream.pipeline.pipeline import (
    Algorithm,
    Parts,
    Pipeline,
)
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.schema import store_tasks
from millstream.pipeline.waits import Waits
from millstream.sim.draws import lognormal
from millstream.sim.engine import SimEngine
from millstream.sim.environment import SimEnvironment
from millstream.sim.learner import SimLearner
from millstream.store.memory import MemoryStore
from millstream.types import Sampling, Task
from millstream.weights.local import LocalChannel

GROUPS, MEMBERS, STEPS, SLOTS, ENGINES = 16, 4, 30, 32, 4
LAGS = [1, 2, 4]
SHARES = [0.25, 0.5, 1.0]
TAILS = {"lengths log-normal, sigma 1.0": 1.0, "lengths log-normal, sigma 1.5": 1.5}


async def run(max_lag: float, budget: int, sigma: float, seed: int) -> tuple[float, float]:
    """Seconds a step, and the mean lag."""
    sink, clock = MemorySink(), VirtualClock()
    channel = LocalChannel()
    await channel.publish(0, {})
    parts = Parts(
        engines=tuple(
            SimEngine(name=f"e{i}", slots=SLOTS, token_s=0.01, num_tokens=lognormal(400, sigma), seed=seed)
            for i in range(ENGINES)
        ),
        environment=SimEnvironment(),
        learner=SimLearner(token_s=6e-5, seed=seed),
        store=MemoryStore(store_tasks(), capacity_rows=budget * MEMBERS),
        channel=channel,
        clock=clock,
        sink=sink,
        waits=Waits(clock=clock, sink=sink, stall_s=1e6, deadline_s=1e6),
    )
    pipeline = Pipeline(
        parts,
        ((0, Task(id=str(number), prompt="")) for number in itertools.count()),
        Algorithm(advantage=grpo, sampling=Sampling(max_tokens=8192), micro_batch_tokens=4096),
        config=PipelineConfig(
            steps=STEPS, groups_per_step=GROUPS, max_lag=max_lag, extra_groups=budget - GROUPS, filter_zero_signal=False
        ),
        rollout=RolloutConfig(group_size=MEMBERS, timeout_s=1e6),
        seed=seed,
    )
    await pipeline.run()
    lags = [event.lag for event in sink.of(GroupTaken)]
    return asyncio.get_running_loop().time() / STEPS, statistics.mean(lags)


def median(max_lag: float, budget: int, sigma: float) -> tuple[float, float]:
    runs = [run_virtual(run(max_lag, budget, sigma, seed)) for seed in range(3)]
    return statistics.median(seconds for seconds, _ in runs), statistics.median(lag for _, lag in runs)


def main() -> None:
    rows, lines = [], []
    for name, sigma in TAILS.items():
        synchronous, _ = median(0, GROUPS, sigma)
        for max_lag in LAGS:
            full = full_budget(GROUPS, max_lag)
            for share in SHARES:
                budget = GROUPS + round(share * (full - GROUPS))
                seconds, lag = median(max_lag, budget, sigma)
                workload = f"{name}, max_lag {max_lag}, budget {budget} of {full}"
                rows.append(
                    {
                        "workload": workload,
                        "metric": "seconds a step (virtual)",
                        "ours": round(seconds, 3),
                        "peer": "max_lag = 0",
                        "theirs": round(synchronous, 3),
                        "ratio": round(synchronous / seconds, 3),
                    }
                )
                lines.append(f"{workload:68}  {seconds:8.2f} s  mean lag {lag:4.2f}  {synchronous / seconds:5.2f}x")
    print(json.dumps(rows) if "--json" in sys.argv else "\n".join(lines))


if __name__ == "__main__":
    main()
