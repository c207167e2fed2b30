"""What each way to treat the slow does to what is trained, and what it buys: on the virtual clock, the long ones being hard.

The production pipeline and the bias report of a run, unchanged. Lengths are log-normal (mean 1,000 tokens, sigma 1), half of
the rollouts of 1,000 tokens succeed and fewer of the longer ones; 8 groups of 8 a step, as many slots as rollouts, max_lag 2
unless said. The bias is that of the kept against all admitted, in percent, as the report tells it: for a length that nobody
knows, what both ends grant.

    .venv/bin/python bench/bias.py [--json] [--steps 60] [--seeds 3]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from typing import Any

from msgspec import Struct

from millstream.algo.advantages import grpo
from millstream.clock import VirtualClock, run_virtual
from millstream.events import RolloutAborted, Stepped
from millstream.events.bias import BiasReport, bias_report
from millstream.events.sinks import MemorySink
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
from millstream.sim.environment import SimEnvironment, longer_is_harder
from millstream.sim.learner import SimLearner
from millstream.store.memory import MemoryStore
from millstream.types import Sampling, Task
from millstream.weights.local import LocalChannel

GROUPS, MEMBERS, MAX_LAG, MEAN_TOKENS = 8, 8, 2, 1000
POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wait (default)": ({}, {}),
    "carry over, max_lag 4, as many groups": ({"max_lag": 4, "extra_groups": 16}, {}),
    "drop what is stale": ({"surplus": "abort"}, {}),
    "first to finish, 24 extra groups": ({"surplus": "abort", "extra_groups": 24}, {}),
    "first to finish, 2 extra members": ({"surplus": "abort", "extra_groups": 16}, {"extra_members": 2}),
    "restart what is overdue": ({"overdue": "restart", "max_restarts": 3}, {}),
}
"""Options of the pipeline and of rollouts. To drop what is stale is first to finish with no more groups than the lag allows."""
FAIR = ("wait (default)", "carry over, max_lag 4, as many groups")


class Found(Struct, frozen=True, kw_only=True):
    seconds_per_step: float
    report: BiasReport
    aborted: int

    def bias(self, quantity: str) -> float:
        return next(test.bias for test in self.report.tests if test.quantity == quantity)


def run(policy: str, *, steps: int, seed: int) -> Found:
    return run_virtual(_run(policy, steps, seed))


async def _run(policy: str, steps: int, seed: int) -> Found:
    of_pipeline, of_rollouts = POLICIES[policy]
    shared = {"steps": steps, "groups_per_step": GROUPS, "max_lag": MAX_LAG, "filter_zero_signal": False}
    config = PipelineConfig(**(shared | of_pipeline))
    rollout = RolloutConfig(group_size=MEMBERS, max_tokens=32_768, timeout_s=1e6, **of_rollouts)
    sink, clock = MemorySink(), VirtualClock()
    channel = LocalChannel()
    await channel.publish(0, {})
    parts = Parts(
        engines=(SimEngine(slots=1024, token_s=0.01, num_tokens=lognormal(MEAN_TOKENS, 1.0), seed=seed),),
        environment=SimEnvironment(success=longer_is_harder(MEAN_TOKENS)),
        learner=SimLearner(token_s=1e-5, seed=seed),
        store=MemoryStore(store_tasks(), capacity_rows=config.most_groups * rollout.most_rows),
        channel=channel,
        clock=clock,
        sink=sink,
        waits=Waits(clock=clock, sink=sink, stall_s=1e6, deadline_s=1e9),
    )
    algorithm = Algorithm(advantage=grpo, sampling=Sampling(max_tokens=rollout.max_tokens), micro_batch_tokens=1 << 20)
    tasks = ((0, Task(id=str(number), prompt="?")) for number in itertools.count())
    await Pipeline(parts, tasks, algorithm, config=config, rollout=rollout, seed=seed).run()
    last = sink.of(Stepped)[-1]
    return Found(
        seconds_per_step=last.at / last.version,
        report=bias_report(sink.events, seed=seed),
        aborted=len(sink.of(RolloutAborted)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    found = {
        policy: [run(policy, steps=options.steps, seed=seed) for seed in range(options.seeds)] for policy in POLICIES
    }
    waiting = statistics.median(one.seconds_per_step for one in found["wait (default)"])
    rows = []
    for policy, some in found.items():
        seconds = statistics.median(one.seconds_per_step for one in some)
        rows.append(
            {
                "workload": policy,
                "metric": "virtual seconds a step",
                "ours": round(seconds, 2),
                "peer": "wait (default)",
                "theirs": round(waiting, 2),
                "ratio": round(waiting / seconds, 2),
                "tokens_bias_percent": round(statistics.median(one.bias("sampled tokens") for one in some), 1),
                "difficulty_bias_percent": round(statistics.median(one.bias("difficulty") for one in some), 1),
                "aborted": round(statistics.median(one.aborted for one in some)),
                "is_biased": f"{sum(one.report.is_biased for one in some)} of {len(some)}",
            }
        )
    if options.json:
        print(json.dumps(rows))
        return
    print(
        "| what is done with the slow | s a step | speed | bias, tokens | bias, difficulty | rollouts aborted | called biased |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['workload']} | {row['ours']} | {row['ratio']:.2f}x | {row['tokens_bias_percent']:+.1f}% | "
            f"{row['difficulty_bias_percent']:+.1f}% | {row['aborted']} | {row['is_biased']} |"
        )


if __name__ == "__main__":
    main()
