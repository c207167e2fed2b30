"""`millstream plan` beside an exhaustive sweep, on random scenarios on the virtual clock: throughput of what it chooses.

A scenario draws the model's shape, the kind and number of GPUs, batch, lengths and their tail, turns, the latency of the
environment and groups without signal; in one of ten, surplus groups and members may be aborted. The sweep simulates all
settings that the planner searches (how GPUs are divided, max_lag, slots, groups in flight, redundancy), with other random
numbers than the planner's. `theirs` is the fastest of them; `ours` the planner's choice in the same sweep. The planner gives up
to 2% for a lower max_lag.

    .venv/bin/python bench/plan.py [--json] [--smoke] [--steps 12] [--only 0,1,2]
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from internals import (
    DrawConfig,
    Planner,
    Settings,
    SimConfig,
    SimEnvironmentConfig,
    parse_gpus,
    plan_run,
    shape_from,
)
from millstream import ModelConfig, PipelineConfig, RolloutConfig, RunConfig
from report import Options, Row, alone, publish, rate, say

HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
SHAPES = {
    "0.5B": {**HEADS, "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "vocab_size": 32_768},
    "2B": {**HEADS, "hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "vocab_size": 151_936},
    "8B": {**HEADS, "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12_288, "vocab_size": 151_936},
}
KINDS = ("A100-80GB", "H100", "H200", "B200")
MEMBERS = 4
SEED = 1000  # of the sweep; the planner has 0 to 2


class Scenario(NamedTuple):
    name: str
    config: RunConfig
    sim: SimConfig
    shape: str
    gpus: str
    max_lag: float


def make_scenario(number: int) -> Scenario:
    rng = random.Random(number)
    shape, kind, groups = rng.choice(list(SHAPES)), rng.choice(KINDS), rng.choice((4, 6, 8))
    is_greedy = number % 10 == 4
    num_gpus = {"0.5B": rng.randint(1, 5), "2B": rng.randint(2, 6), "8B": rng.randint(4, 8)}[shape]
    tokens, sigma = rng.uniform(200, 1500), rng.uniform(0.3, 1.4)
    turns, latency_s = rng.choice((1, 1, 3)), rng.choice((0.0, 0.0, 2.0, 10.0))
    environment = SimEnvironmentConfig(
        turns=DrawConfig(mean=turns),
        latency_s=DrawConfig(kind="lognormal", mean=latency_s, sigma=1.0) if latency_s else DrawConfig(mean=0.0),
        no_signal=rng.choice((0.0, 0.0, 0.3)),
    )
    config = RunConfig(
        model=ModelConfig(path=shape),
        rollout=RolloutConfig(group_size=MEMBERS, max_tokens=4096, timeout_s=1e6),
        pipeline=PipelineConfig(groups_per_step=groups, surplus="abort" if is_greedy else "carry_over"),
        seed=number,
    )
    lengths = DrawConfig(kind="lognormal", mean=tokens / turns, sigma=sigma)
    waits = f", {turns} turns of {latency_s:g} s" if latency_s or turns > 1 else ""
    return Scenario(
        name=f"{shape} on {num_gpus}x{kind}, {groups} groups, {tokens:.0f} tokens (sigma {sigma:.1f}){waits}"
        + (", redundancy" if is_greedy else ""),
        config=config,
        sim=SimConfig(lengths=lengths, environment=environment, prompt_tokens=rng.choice((64, 256))),
        shape=shape,
        gpus=f"{num_gpus}x{kind}",
        max_lag=1.0 if is_greedy else 2.0,
    )


def planner_of(scenario: Scenario, steps: int) -> Planner:
    shape = shape_from(SHAPES[scenario.shape])
    assert shape is not None
    planner = Planner(scenario.config, scenario.sim, shape, parse_gpus(scenario.gpus), max_lag=scenario.max_lag)
    planner.steps = steps
    return planner


def sweep(planner: Planner) -> dict[Settings, float]:
    """Rollouts a second of all settings."""
    settings = dict.fromkeys(planner.settings_of(point) for point in planner.points(planner.lags))
    return {one: planner.simulate(one, seed=planner.config.seed + SEED).rollouts_per_s for one in settings}


def words(settings: Settings) -> str:
    return (
        f"{settings.placed.words}, max_lag {settings.max_lag:g}, {settings.slots} slots, {settings.extra_groups} extra"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 12, smoke=4, help="of each simulation of the sweep and of the search")
    parser.add("--only", ",".join(map(str, range(20))), smoke="1", help="numbers of scenarios")
    options = parser.parse(argv)
    rows: list[Row] = []
    for number in map(int, options.only.split(",")):
        scenario = make_scenario(number)
        planner, began = planner_of(scenario, options.steps), time.perf_counter()
        plan = plan_run(planner)
        seconds = time.perf_counter() - began
        found = sweep(planner)
        chosen, best = plan.chosen.settings, max(found, key=lambda one: found[one])
        rows.append(rate(scenario.name, "rollouts/s (virtual)", found[chosen], "best of the sweep", found[best]))
        rows.append(rate(scenario.name, "times synchronous", plan.gain, "none", 1.0))
        say(
            f"{scenario.name}: {found[chosen] / found[best]:.3f} of the best of {len(found)}, {len(plan.tried)} simulated in "
            f"{seconds:.1f} s. Plan {words(chosen)}; best {words(best)}; {plan.gain:.2f} times synchronous"
        )
    shares = [row.ratio for row in rows if row.peer != "none" and row.ratio is not None]
    rows.append(alone("all", "lowest share of the best", min(shares)))
    rows.append(alone("all", "median share of the best", statistics.median(shares)))
    publish(rows, options)


if __name__ == "__main__":
    main()
