"""Longest first (`pipeline.longest_first`) on and off, on lengths of a real model: gain, and what is trained.

Lengths: `gsm8k_lengths.txt`, 8 answers of SmolLM2-135M-Instruct to each of 32 problems of GSM8K. How much of their variance the
prompt explains: one-way analysis of variance. Simulated: the production pipeline on the virtual clock; rollouts have these
lengths; 8 prompts of 8 a step, 4 steps an epoch, the first epoch (in which nothing is known) not counted. Then the same with
log-normal lengths (mean 300, sigma 1) of which the prompt explains a given share. For real: a tiny model on this machine copies
words of different lengths (after one warm-up for all runs, at a learning rate that changes nothing), with longest first on and
off in turn. What is trained: means of the tokens and of the rewards of trained rollouts, and the bias report of each run.

    .venv/bin/python bench/longest_first.py [--json] [--smoke] [--steps 16] [--seeds 3] [--real-steps 16] [--repeat 3]
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from internals import MemorySink, bias_report, costs_of, recipe, simulate
from millstream import train
from millstream.events import Event, GroupAdmitted, GroupTaken, RolloutEnded, Stepped
from report import ROOT, Options, Row, alone, cost, publish, say

LENGTHS = ROOT / "bench/gsm8k_lengths.txt"
PROMPTS = 32
GROUPS = 8
MEMBERS = 8
SHARES = (0.1, 0.3, 0.6, 0.9)
EPOCH = PROMPTS // GROUPS  # steps
OFF = "in the order of admission"
OF_RECORDS = (
    "data.toy=",
    "data.passed=true",
    "data.holdout=1",
    f"rollout.group_size={MEMBERS}",
    "rollout.max_tokens=96",
    "model.tiny.context=192",
    "evaluation=",
)


class Case(NamedTuple):
    engines: int
    slots: int
    max_lag: int

    def __str__(self) -> str:
        batch = GROUPS * MEMBERS
        return f"{self.engines} x {self.slots} slots for batches of {batch}, max_lag {self.max_lag}"


CASES = [Case(4, slots, max_lag) for max_lag in (0, 1) for slots in (4, 8, 16)]
SWEEP = [Case(4, 4, 0), Case(4, 4, 1)]


class Found(NamedTuple):
    step_s: float
    tokens: float  # these two: means of the rollouts that were trained
    reward: float
    is_biased: bool


def found_in(events: Sequence[Event], first: int) -> Found:
    """Without the first steps."""
    ends = [event.at for event in events if isinstance(event, Stepped)]
    groups = {event.group_id for event in events if isinstance(event, GroupTaken) and event.version >= first}
    trained = [event for event in events if isinstance(event, RolloutEnded) and event.group_id in groups]
    return Found(
        (ends[-1] - ends[first - 1]) / (len(ends) - first),
        statistics.mean(event.num_sampled for event in trained),
        statistics.mean(event.reward for event in trained),
        bias_report(events).is_biased,
    )


# ---- the lengths -----------------------------------------------------------------------------------------------------------


def read_lengths() -> list[list[int]]:
    lines = [line.split() for line in LENGTHS.read_text().splitlines() if not line.startswith("#")]
    return [[int(word) for word in line] for line in lines]


def explained(lengths: Sequence[Sequence[int]]) -> float:
    """The share of the variance that is between prompts, without what chance puts there."""
    num = len(lengths[0])
    within = statistics.mean(statistics.variance(line) for line in lengths)
    between = statistics.variance([statistics.mean(line) for line in lengths]) - within / num
    return max(0.0, between / (between + within))


def of_lengths() -> list[Row]:
    lengths, name = read_lengths(), "SmolLM2-135M-Instruct, GSM8K"
    every = [number for line in lengths for number in line]
    return [
        alone(name, "mean length, tokens", statistics.mean(every), digits=0),
        alone(name, "standard deviation, tokens", statistics.pstdev(every), digits=0),
        alone(name, "share of the variance that the prompt explains", explained(lengths)),
    ]


# ---- simulated -------------------------------------------------------------------------------------------------------------


def write_lengths(path: Path, share: float) -> None:
    """Log-normal ones, many for each prompt, which explains this share of the variance of their logarithm."""
    rng = random.Random(0)
    lines: list[str] = []
    for _ in range(PROMPTS):
        of_prompt = rng.gauss(math.log(300) - 0.5, math.sqrt(share))
        drawn = (rng.lognormvariate(of_prompt, math.sqrt(1 - share)) for _ in range(200))
        lines.append(" ".join(f"{max(1, min(4096, number)):.0f}" for number in drawn))
    path.write_text("\n".join(lines))


def simulated(case: Case, lengths: Path, steps: int, seed: int, *, is_on: bool) -> Found:
    config = recipe(
        "sim/one_gpu",
        f"seed={seed}",
        f"pipeline.longest_first={is_on}".lower(),
        "pipeline.lockstep=false",
        f"pipeline.max_lag={case.max_lag}",
        f"pipeline.steps={steps}",
        f"pipeline.groups_per_step={GROUPS}",
        f"rollout.group_size={MEMBERS}",
        f"engine.replicas={case.engines}",
        f"engine.slots={case.slots}",
        "sim.decode_slowdown=1",
        "sim.learner_keep=1",
        "sim.lengths.kind=prompts",
        "sim.lengths.mean=",
        f"sim.lengths.path={lengths}",
    )
    return found_in(simulate(config, costs_of(config)).events, EPOCH)


# ---- for real --------------------------------------------------------------------------------------------------------------


def records(num: int) -> list[dict[str, str]]:
    """Letters to repeat: few prompts are long."""
    rng = random.Random(0)
    sizes = [min(60, round(rng.lognormvariate(2.3, 0.8)) + 1) for _ in range(num)]
    words = ["".join(rng.choice("abcdefgh") for _ in range(size)) for size in sizes]
    return [{"prompt": f"{word}>", "answer": word} for word in words]


def make_model(folder: Path, *, is_smoke: bool) -> str:
    """The tiny model after a warm-up on these records. All runs begin with it."""
    changes = (
        f"run_dir={folder}/warm",
        *OF_RECORDS,
        "pipeline.steps=1",
        "pipeline.groups_per_step=1",
        "learner.learning_rate=1e-30",
        "warmup.max_steps=2" if is_smoke else "warmup.max_steps=400",
        "warmup.stop_at=0.9",
    )
    train(recipe("demo", *changes), data=records(PROMPTS + 1), progress=False)
    return f"{folder}/warm/model"


def real(model: str, run_dir: Path, steps: int, seed: int, max_lag: int, *, is_on: bool) -> list[Event]:
    sink = MemorySink()
    config = recipe(
        "demo",
        f"seed={seed}",
        f"run_dir={run_dir}",
        *OF_RECORDS,
        "warmup=",
        "model.tiny=",
        f"model.path={model}",
        "learner.learning_rate=1e-7",
        f"pipeline.longest_first={is_on}".lower(),
        "pipeline.lockstep=false",
        "pipeline.filter_zero_signal=false",
        f"pipeline.max_lag={max_lag}",
        f"pipeline.steps={steps}",
        f"pipeline.groups_per_step={GROUPS}",
        "engine.slots=16",
    )
    train(config, data=records(PROMPTS + 1), sinks=[sink], progress=False)
    return sink.events


def lengths_in(events: Sequence[Event]) -> list[list[int]]:
    """By prompt, as many of each."""
    tasks = {event.group_id: event.task_id for event in events if isinstance(event, GroupAdmitted)}
    found: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, RolloutEnded):
            found.setdefault(tasks[event.group_id], []).append(event.num_sampled)
    fewest = min(map(len, found.values()))
    return [lengths[:fewest] for lengths in found.values()]


def for_real(steps: int, repeat: int, *, is_smoke: bool) -> list[Row]:
    rows: list[Row] = []
    first = min(EPOCH, steps - 1)
    with tempfile.TemporaryDirectory() as folder:
        model, number = make_model(Path(folder), is_smoke=is_smoke), itertools.count()
        for max_lag in (1,) if is_smoke else (0, 1):
            name, on, off = f"for real: tiny model, 16 slots, max_lag {max_lag}", list[Found](), list[Found]()
            for seed, (is_on, found) in itertools.product(range(repeat), ((True, on), (False, off))):
                events = real(model, Path(folder) / f"run-{next(number)}", steps, seed, max_lag, is_on=is_on)
                found.append(found_in(events, first))
            rows += rows_of(name, "seconds a step", on, off)
            rows.append(alone(name, "share of the variance that the prompt explains", explained(lengths_in(events))))
    return rows


# ---- the rows --------------------------------------------------------------------------------------------------------------


def rows_of(workload: str, metric: str, on: Sequence[Found], off: Sequence[Found]) -> list[Row]:
    """Medians of step times; means of what was trained."""
    times = [[one.step_s for one in some] for some in (on, off)]
    row = cost(workload, metric, statistics.median(times[0]), OFF, statistics.median(times[1]))
    rows = [row]
    for name, digits in (("tokens", 1), ("reward", 3)):
        ours, theirs = (statistics.mean(getattr(one, name) for one in some) for some in (on, off))
        rows.append(
            Row(
                workload=workload,
                metric=f"mean {name} of trained rollouts",
                ours=round(ours, digits),
                peer=OFF,
                theirs=round(theirs, digits),
                ratio=None,
            )
        )
    rows.append(alone(workload, "runs reported as biased", sum(one.is_biased for one in on), digits=0))
    ratios = sorted(theirs.step_s / ours.step_s for ours, theirs in zip(on, off, strict=True))
    say(f"{workload:60} {row.theirs} -> {row.ours} s a step ({row.ratio}x [{ratios[0]:.3f}, {ratios[-1]:.3f}])")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 16, smoke=6)
    parser.add("--seeds", 3, smoke=1)
    parser.add("--real-steps", 16, smoke=2)
    parser.add("--repeat", 3, smoke=1)
    options = parser.parse(argv)
    rows = of_lengths()

    def compare(workload: str, case: Case, lengths: Path) -> list[Row]:
        on, off = (
            [simulated(case, lengths, options.steps, seed, is_on=is_on) for seed in range(options.seeds)]
            for is_on in (True, False)
        )
        return rows_of(workload, "seconds a step (virtual)", on, off)

    for case in CASES[:1] if options.smoke else CASES:
        rows += compare(f"GSM8K: {case}", case, LENGTHS)
    with tempfile.TemporaryDirectory() as folder:
        for share in SHARES[:1] if options.smoke else SHARES:
            write_lengths(path := Path(folder) / "lengths.txt", share)
            for case in SWEEP:
                rows += compare(f"log-normal, {share:.0%} explained: {case}", case, path)
    rows += for_real(options.real_steps, options.repeat, is_smoke=options.smoke)
    publish(rows, options)


if __name__ == "__main__":
    main()
