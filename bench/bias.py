"""What each way to treat slow rollouts does to what is trained, and what it buys: on the virtual clock. Long rollouts are hard.

The production pipeline and the bias report of a run, unchanged. Lengths are log-normal (mean 1,000 tokens, sigma 1), half of
the rollouts of 1,000 tokens succeed and fewer of the longer ones; 8 groups of 8 a step, as many slots as rollouts, max_lag 2
unless stated. The bias is that of the kept rollouts against all admitted ones, in percent, as the report computes it; where a
length is unknown, the bound that holds for every possible length.

    .venv/bin/python bench/bias.py [--json] [--smoke] [--steps 60] [--seeds 3]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from internals import (
    BiasReport,
    MemorySink,
    SimEngine,
    SimEnvironment,
    SimLearner,
    bias_report,
    lognormal,
    longer_is_harder,
    run_pipeline,
)
from millstream import PipelineConfig, RolloutConfig
from millstream.clock import run_virtual
from millstream.events import RolloutAborted, Stepped
from report import Options, Row, alone, cost, publish

GROUPS = 8
MEMBERS = 8
MAX_LAG = 2
MEAN_TOKENS = 1000
WAIT = "wait (default)"
POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    WAIT: ({}, {}),
    "carry over, max_lag 4, as many groups": ({"max_lag": 4, "extra_groups": 16}, {}),
    "drop what is stale": ({"surplus": "abort"}, {}),
    "first to finish, 24 extra groups": ({"surplus": "abort", "extra_groups": 24}, {}),
    "first to finish, 2 extra members": ({"surplus": "abort", "extra_groups": 16}, {"extra_members": 2}),
    "restart what is overdue": ({"overdue": "restart", "max_restarts": 3}, {}),
}
"""Options of the pipeline and of rollouts. To drop what is stale is first to finish with no more groups than the lag allows."""
FAIR = (WAIT, "carry over, max_lag 4, as many groups")


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
    sink = MemorySink()
    await run_pipeline(
        [SimEngine(slots=1024, token_s=0.01, num_tokens=lognormal(MEAN_TOKENS, 1.0), seed=seed)],
        SimEnvironment(success=longer_is_harder(MEAN_TOKENS)),
        SimLearner(token_s=1e-5, seed=seed),
        config=PipelineConfig(**(shared | of_pipeline)),
        rollout=RolloutConfig(group_size=MEMBERS, max_tokens=32_768, timeout_s=1e6, **of_rollouts),
        sink=sink,
        seed=seed,
    )
    last = sink.of(Stepped)[-1]
    return Found(
        seconds_per_step=last.at / last.version,
        report=bias_report(sink.events, seed=seed),
        aborted=len(sink.of(RolloutAborted)),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 60, smoke=6)
    parser.add("--seeds", 3, smoke=1)
    options = parser.parse(argv)
    found = {
        policy: [run(policy, steps=options.steps, seed=seed) for seed in range(options.seeds)] for policy in POLICIES
    }
    waiting = statistics.median(one.seconds_per_step for one in found[WAIT])
    rows: list[Row] = []
    for policy, some in found.items():
        seconds = statistics.median(one.seconds_per_step for one in some)
        rows.append(cost(policy, "seconds a step (virtual)", seconds, WAIT, waiting, digits=2))
        for metric, values in {
            "bias of the sampled tokens, percent": [one.bias("sampled tokens") for one in some],
            "bias of the difficulty, percent": [one.bias("difficulty") for one in some],
            "rollouts aborted": [float(one.aborted) for one in some],
        }.items():
            rows.append(alone(policy, metric, statistics.median(values), digits=1))
        rows.append(
            alone(policy, "share of seeds reported as biased", statistics.mean(s.report.is_biased for s in some))
        )
    publish(rows, options)


if __name__ == "__main__":
    main()
