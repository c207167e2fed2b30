"""Does advice name what holds a run up, and does its promise hold? Runs with a planted bottleneck, simulated and real.

Simulated: the adviser sees the events of the planted run and not its costs. What the change gives is then simulated with the
true costs, other seeds and more steps. Real: the demo's model with random weights, on this machine, trained as planted and with
the change, `--repeat` times in turn, medians. `ours` is the promised gain, `theirs` what the change gave. Promises for other
changes of the same run are printed while it works.

    .venv/bin/python bench/advice.py [--json] [--smoke] [--steps 24] [--real-steps 30] [--repeat 3]
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

import run_parts
from internals import Advice, advise, bottleneck_of, costs_of, read_history, recipe, simulate, without_checkpoints
from millstream import RunConfig, train
from millstream.events import Stepped
from report import Options, Row, alone, publish, rate, say

TRUE_STEPS = 40
SEEDS = (11, 12)
SIMULATED = (
    "engine.replicas=2",
    "engine.slots=64",
    "learner.ranks=1",
    "rollout.group_size=4",
    "rollout.max_tokens=4096",
    "pipeline.groups_per_step=8",
    "pipeline.filter_zero_signal=false",
    "sim.floor_s=0.01",
    "sim.weights_s=0",
    "sim.context_token_s=0",
    "sim.cache_tokens=",
    "sim.train_tokens_per_s=40000",
    "sim.train_step_s=0.1",
    "sim.publish_s=0.05",
    "sim.load_s=0.05",
    "sim.lengths.mean=300",
    "sim.lengths.sigma=0.3",
    "sim.environment.latency_s.kind=fixed",
    "sim.environment.latency_s.mean=0.01",
    "sim.environment.latency_s.sigma=",
)
REAL = (
    "warmup=",
    "model.tiny.layers=2",
    "data.size=2000",
    "data.holdout=8",
    "rollout.max_tokens=32",
    "rollout.group_size=4",
    "pipeline.groups_per_step=8",
    "pipeline.max_lag=1",
    "pipeline.filter_zero_signal=false",
    "evaluation.every_steps=",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "rollout.keep_gb=0",
)


class Planted(NamedTuple):
    """`words`: of the promise that is checked; `change`: what it means for the truth, where it is no key of the config."""

    name: str
    bottleneck: str
    changes: tuple[str, ...]
    words: str
    change: tuple[str, ...] = ()


SIMULATED_RUNS = (
    Planted("long tail of lengths", "stragglers", ("sim.lengths.sigma=1.3",), "max_lag 2"),
    Planted("slow learner", "learner", ("sim.train_tokens_per_s=1500",), "2 learner ranks"),
    Planted(
        "busy engines",
        "engines",
        ("engine.replicas=1", "engine.slots=256", "sim.request_s=4e-4", "sim.lengths.sigma=0.1", "pipeline.max_lag=2"),
        "one more engine",
    ),
    Planted(
        "slow environment",
        "environment",
        ("sim.environment.latency_s.mean=6",),
        "environments and rewards that take half the time",
        ("sim.environment.latency_s.mean=3",),
    ),
    Planted(
        "environment with a long tail",
        "environment",
        (
            "sim.environment.latency_s.kind=lognormal",
            "sim.environment.latency_s.mean=4",
            "sim.environment.latency_s.sigma=1",
        ),
        "max_lag 2",
    ),
    Planted("few slots", "slots", ("engine.slots=6",), "12 slots"),
    Planted(
        "small cache",
        "cache",
        ("sim.cache_tokens=3000", "rollout.max_tokens=1024", "pipeline.max_lag=2"),
        "twice the cache",
        ("sim.cache_tokens=6000",),
    ),
    Planted(
        "prompts without signal",
        "no-signal",
        ("sim.environment.no_signal=0.6", "pipeline.filter_zero_signal=true"),
        "no prompts that are always or never solved",
        ("sim.environment.no_signal=0",),
    ),
    Planted(
        "slow publication of weights",
        "sync",
        ("sim.publish_s=6",),
        "weights that arrive in half the time",
        ("sim.publish_s=3", "sim.load_s=0.025"),
    ),
    Planted("slow loading of weights", "sync", ("sim.load_s=6",), "max_lag 2"),
    Planted(
        "failing environment",
        "failures",
        ("sim.environment.failure=0.3", "rollout.retries=3"),
        "no failures",
        ("sim.environment.failure=0",),
    ),
    Planted(
        "failing nodes",
        "failures",
        ("engine.replicas=4", "sim.failures.node_mean_s=60", "sim.failures.restart_s=30", "sim.request_s=4e-4"),
        "no failures",
        ("sim.failures.node_mean_s=",),
    ),
    Planted(
        "synchronous",
        "turns",
        ("pipeline.max_lag=0", "sim.train_tokens_per_s=3000", "sim.lengths.sigma=0.1"),
        "max_lag 1",
    ),
)


def slow_reward(seconds: float) -> str:
    return f"reward=[{{function='{run_parts.HERE}:late_reward', args={{seconds={seconds}}}}}]"


REAL_RUNS = (
    Planted(
        "slow reward",
        "environment",
        (slow_reward(1.0),),
        "environments and rewards that take half the time",
        (slow_reward(0.5),),
    ),
    Planted("slow reward, more lag", "environment", (slow_reward(1.0),), "max_lag 2"),
    Planted("few slots", "slots", ("engine.slots=4",), "8 slots"),
    Planted("synchronous", "turns", ("pipeline.max_lag=0", "learner.micro_batch_tokens=256"), "max_lag 1"),
)


class Found(NamedTuple):
    advice: Advice
    promised: float | None
    settings: tuple[str, ...]


def look_up(planted: Planted, folder: Path) -> Found:
    advice = advise(folder)
    say(f"{planted.name}: {advice.bottleneck.name}. {advice.bottleneck.message}")
    for one in advice.promises:
        say(f"    {one.gain:.2f}x ({one.low:.2f} to {one.high:.2f})  {one.words}")
    promise = next((one for one in advice.promises if one.words == planted.words), None)
    return Found(advice, None if promise is None else promise.gain, () if promise is None else promise.settings)


def rows_of(planted: Planted, where: str, found: Found, gave: float | None) -> Iterator[Row]:
    workload = f"{planted.name}, {where}"
    is_right = found.advice.bottleneck.name == planted.bottleneck
    yield alone(workload, f"bottleneck named: {planted.bottleneck}", float(is_right))
    if found.promised is not None and gave is not None:
        say(
            f"    promised {found.promised:.2f}x, {gave:.2f}x came of {planted.words}: {found.promised / gave - 1:+.0%}"
        )
        yield rate(workload, f"gain of {planted.words}", found.promised, "the change", gave)
    else:
        say(f"    nothing promised for {planted.words}")


# ---- simulated ----------------------------------------------------------------------------------------------------------


def simulated(planted: Planted, steps: int) -> Iterator[Row]:
    def config(*changes: str) -> RunConfig:
        return recipe("sim/cluster", *SIMULATED, *planted.changes, *changes)

    with tempfile.TemporaryDirectory() as place:
        run = config(f"pipeline.steps={steps}", "seed=3")
        simulate(run, costs_of(run), out=Path(place) / "run")
        found = look_up(planted, Path(place) / "run")
    changed = config(*(planted.change or found.settings))
    gave = sum(true_step_s(config(), seed) for seed in SEEDS) / sum(true_step_s(changed, seed) for seed in SEEDS)
    yield from rows_of(planted, "simulated", found, gave)


def true_step_s(config: RunConfig, seed: int) -> float:
    around = math.ceil(config.pipeline.max_lag) + 1
    pipeline = structs.replace(config.pipeline, steps=TRUE_STEPS + 2 * around)
    run = structs.replace(config, seed=seed, pipeline=pipeline)
    ends = [event.at for event in simulate(run, costs_of(run)).events if isinstance(event, Stepped)]
    return (ends[around + TRUE_STEPS - 1] - ends[around - 1]) / TRUE_STEPS


# ---- real ---------------------------------------------------------------------------------------------------------------


def real(planted: Planted, options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place:

        def step_s(name: str, *changes: str) -> float:
            folder = Path(place) / name
            settings = (f"run_dir={folder}", f"pipeline.steps={options.real_steps}", *planted.changes, *changes)
            with without_checkpoints():
                train(recipe("demo", *REAL, *settings), progress=False)
            seen = bottleneck_of(read_history(folder / "events.jsonl"))
            return math.nan if seen is None else seen.step_s

        before = [step_s("run-0")]
        found = look_up(planted, Path(place) / "run-0")
        change, after = planted.change or found.settings, list[float]()
        for number in range(1, options.repeat + 1):
            after += [step_s(f"changed-{number}", *change)] if change else []
            before += [step_s(f"run-{number}")] if number < options.repeat else []
        gave = statistics.median(before) / statistics.median(after) if after else None
    yield from rows_of(planted, "real", found, gave)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 24, smoke=6)
    parser.add("--real-steps", 30, smoke=6)
    parser.add("--repeat", 3, smoke=1)
    parser.add("--only", "", help="words of a planted run's name")
    options = parser.parse(argv)
    rows = list[Row]()
    for planted in SIMULATED_RUNS[-1:] if options.smoke else SIMULATED_RUNS:
        rows += simulated(planted, options.steps) if options.only in f"{planted.name}, simulated" else ()
    for planted in REAL_RUNS[-1:] if options.smoke else REAL_RUNS:
        rows += real(planted, options) if options.only in f"{planted.name}, real" else ()
    near = [row for row in rows if row.ratio is not None]
    wrong = max((abs(row.ratio - 1) for row in near if row.ratio is not None), default=0.0)
    named = [row for row in rows if row.ratio is None]
    say(f"{sum(row.ours == 1 for row in named)} of {len(named)} named, the promises at most {wrong:.0%} wrong")
    publish(rows, options)


if __name__ == "__main__":
    main()
