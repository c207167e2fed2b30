"""`pipeline.auto_lag` beside every fixed ratio, on random scenarios on the virtual clock: throughput and mean lag.

A scenario draws engines, slots, batch, lengths and their tail, the learner's speed, environment latency and weight loading; in
half of them lengths or the learner's speed change on the way. Each runs with fixed values of max_lag, and with auto_lag up to
the highest of these. Seconds a step are those of the last three quarters of the run. `theirs` is the fastest fixed value.

    .venv/bin/python bench/auto_lag.py [--json] [--smoke] [--steps 120] [--scenarios 20]
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from internals import MemorySink, SimEngine, SimEnvironment, SimLearner, constant, lognormal, run_pipeline, uniform
from millstream import PipelineConfig, RolloutConfig
from millstream.clock import run_virtual
from millstream.events import GroupTaken, LagMoved, Stepped
from millstream.types import TrainRow
from report import Options, Row, cost, publish, say

LAGS = (0, 0.5, 1, 2, 3, 4)
MEMBERS = 4


class Scenario(NamedTuple):
    name: str
    groups: int
    engines: int
    slots: int
    tokens: float
    sigma: float
    train_token_s: float
    latency_s: float
    load_s: float
    lengths_change: float  # factor, from the middle of the run on
    training_changes: float
    seed: int


class Result(NamedTuple):
    seconds: float
    lag: float
    moves: int


class ChangingLearner(SimLearner):
    def __init__(self, scenario: Scenario, num_rows: int) -> None:
        super().__init__(token_s=scenario.train_token_s, seed=scenario.seed)
        self._change = scenario.training_changes
        self._changes_at = num_rows // 2

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        if self.num_rows >= self._changes_at:
            self._token_s *= self._change
            self._change = 1.0
        await super().accumulate(rows)


def make_scenario(number: int) -> Scenario:
    rng = random.Random(number)
    groups, tokens = rng.choice((4, 8, 12)), rng.uniform(150, 600)
    engines, slots = rng.choice((1, 2, 4)), rng.choice((8, 16, 32, 64))
    batch_s = groups * MEMBERS * tokens * 0.01 / (engines * slots)  # of generation, if the slots are always full
    share = rng.choice((0.2, 0.5, 0.8, 1.0, 1.5, 3.0))  # of training, in that
    change = rng.choice((1.0, 1.0, 0.5, 2.0))
    of_lengths = rng.random() < 0.5
    return Scenario(
        name=f"{groups} groups, {engines} x {slots} slots, training {share:g} of generation"
        + ("" if change == 1 else f", {'lengths' if of_lengths else 'training'} x {change:g}"),
        groups=groups,
        engines=engines,
        slots=slots,
        tokens=tokens,
        sigma=rng.uniform(0.2, 1.5),
        train_token_s=share * batch_s / (groups * MEMBERS * tokens),
        latency_s=rng.choice((0.0, 0.0, 2.0)),
        load_s=rng.choice((0.0, 0.3)),
        lengths_change=change if of_lengths else 1.0,
        training_changes=1.0 if of_lengths else change,
        seed=number,
    )


async def run(scenario: Scenario, steps: int, *, max_lag: float, is_auto: bool = False) -> Result:
    sink, num_rollouts = MemorySink(), steps * scenario.groups * MEMBERS
    drawn = itertools.count()
    before = lognormal(scenario.tokens, scenario.sigma)
    after = lognormal(scenario.tokens * scenario.lengths_change, scenario.sigma)

    def num_tokens(rng: random.Random) -> float:
        return (before if next(drawn) < num_rollouts // 2 else after)(rng)

    engines = [
        SimEngine(
            name=f"e{i}",
            slots=scenario.slots,
            token_s=0.01,
            num_tokens=num_tokens,
            load_s=constant(scenario.load_s),
            seed=scenario.seed,
        )
        for i in range(scenario.engines)
    ]
    await run_pipeline(
        engines,
        SimEnvironment(latency_s=uniform(0, 2 * scenario.latency_s)),
        ChangingLearner(scenario, num_rollouts),
        config=PipelineConfig(
            steps=steps,
            groups_per_step=scenario.groups,
            max_lag=max_lag,
            auto_lag=is_auto,
            lockstep=False,
            filter_zero_signal=False,
        ),
        rollout=RolloutConfig(group_size=MEMBERS, max_tokens=8192, timeout_s=1e6),
        sink=sink,
        seed=scenario.seed,
        micro_batch_tokens=4096,
    )
    ends = [event.at for event in sink.of(Stepped)]
    first = len(ends) // 4
    lags = [event.lag for event in sink.of(GroupTaken) if event.version >= first]
    return Result((ends[-1] - ends[first]) / (len(ends) - 1 - first), statistics.mean(lags), len(sink.of(LagMoved)) - 1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 120, smoke=12)
    parser.add("--scenarios", 20, smoke=1)
    options = parser.parse(argv)
    rows: list[Row] = []
    for number in range(options.scenarios):
        scenario = make_scenario(number)
        fixed = {lag: run_virtual(run(scenario, options.steps, max_lag=lag)) for lag in LAGS}
        auto = run_virtual(run(scenario, options.steps, max_lag=max(LAGS), is_auto=True))
        best = min(fixed, key=lambda lag: fixed[lag].seconds)
        rows.append(
            cost(scenario.name, "seconds a step (virtual)", auto.seconds, f"max_lag {best:g}", fixed[best].seconds)
        )
        rows.append(cost(scenario.name, "mean lag", auto.lag, f"max_lag {best:g}", fixed[best].lag))
        shown = "  ".join(f"{lag:g}: {found.seconds:.2f}" for lag, found in fixed.items())
        say(
            f"{scenario.name:72} {shown}  auto {auto.seconds:.2f} ({fixed[best].seconds / auto.seconds:.2f} of the best), lag "
            f"{auto.lag:.2f} ({fixed[best].lag:.2f}), {auto.moves} moves"
        )
    publish(rows, options)


if __name__ == "__main__":
    main()
