"""The published figures of ROLL Flash (arXiv 2510.11345) and AsyncFlow (arXiv 2507.01663), on the virtual clock: what the
paper says, what the paper's policy gives in this simulation, and what the production pipeline gives on the same setting.

The settings that the papers state are kept: counts of GPUs, prompts x responses, step latencies, ratios. How ROLL schedules is
taken from its code of 27 October 2025, as plain loops over the same simulated engines, environments and seeds
(`scheduling.py`, `published_sides.py`). What the papers leave open is ASSUMED below, before any figure was computed.

Machines. A decode step takes 1.5 ms + weights / bandwidth + 2 x parameters / FLOP/s for each request + cache bytes / bandwidth
for each token in the cache. A trained token costs 10 x parameters FLOP (forward, backward, recomputation, log-probabilities of
the old policy), a scored one 2. Weights travel at 5 GB/s; an optimizer step takes 1 s.

- GPU (ROLL Flash): 80 GB, 2.4 TB/s, 400 TFLOP/s generating, 350 training; one GPU is one engine, with at most 64 requests.
- NPU (AsyncFlow): 64 GB, 1.1 TB/s, 200 TFLOP/s generating, 150 training; an engine has 2 of them for 7B, 8 for 32B.
- 85% of the memory is for weights and cache. A token of cache: 147 KB (8B), 57 KB (7B), 262 KB (32B); 112 KB (0.6B, 1.7B),
  147 KB (4B).

RLVR (ROLL Flash, Qwen3-8B, 16 to 128 GPUs). A batch is 256 prompts x 16 responses, prompts of 256 tokens, a reward takes 1 s.
Base: log-normal, mean 2,000 tokens, sigma 1, cut at 16,384. Think: mean 11,000, sigma 0.8, cut at 32,768. *Synchronous*: all
GPUs generate, prompts are dealt to the engines in turn, then all GPUs train. *ROLL Flash*: ratio 2; the GPUs are split at the
balance point of the paper's own formula; at most ratio x batch prompts are in its buffer; a batch is the oldest prompts by the
step that they were started in, trained as a whole; engines stop while they load weights, and continue their requests. *Ours*:
the same split, max_lag 2. Scaling is throughput on 128 GPUs over that on 16.

Ratio sweep: 40 GPUs, 64 prompts x 8 responses, Qwen3 of 0.6B, 1.7B, 4B, 8B with the lengths of Think; 8B with means of 1,400,
2,800 and 5,500 tokens cut at 4,096, 8,192 and 16,384. The split is that of ratio 2. A ratio is enough if no higher one of the
sweep (1, 2, 4) is more than 5% faster.

Queue scheduling, prompt replication, environment-level asynchrony: as in `scheduling.py`. ROLL's queue counts *running* prompts
only: with no additional prompts, 8 run at any time until 8 with a signal are complete; the others are then aborted. Of a normal
latency (10 s, 10 s) the paper does not say what becomes of values below 0. Both readings are shown: drawn again, and 0.

Agents (ROLL Flash, 16 groups of 8, 8B on 8 GPUs, half of them for training where that is asynchronous). ALFWorld: 10 to 50
turns of 120 tokens on average (log-normal, sigma 0.8, cut at 1,024), observations of 100 tokens, steps of 1 s on average
(log-normal, sigma 1.5, cut at 300 s). SWE: 20 to 60 turns of 300 tokens (cut at 2,048), observations of 500, steps of 4 s. The
synchronous baseline has environment-level asynchrony already, as ROLL's synchronous pipeline. *ROLL Flash*: ratio 1; every
environment plays one episode after the other and may be 1 ahead; a batch is the first groups to finish; redundant: 20 groups
of 10, of which 16 groups of 8 are used. *Ours*: max_lag 1, once with as many environments as theirs, once with as many as
max_lag allows. The grid: 16, 20 groups x 8, 10, 12 members, ALFWorld's rollouts alone, synchronous.

AsyncFlow (GRPO, Qwen2.5). A batch is 256 prompts x 16 responses, prompts of 256 tokens, responses log-normal, mean 1,000
tokens, sigma 0.6, cut at 2,048. Rollouts, reference and update have NPUs of their own, split at the balance point, reference
to update as their FLOP. *Sequential*: one task after the other. *Streaming*: groups pass through the tasks as they finish;
rollouts wait for the new weights. *Asynchronous workflow*: rollouts run one step ahead, and stop while they load weights.
*Ours*: max_lag 0 without lockstep, and max_lag 1. Linearity: throughput on 16x devices over 16x throughput, with the same
batch: 32 to 512 NPUs (7B), 64 to 1,024 (32B).

REVISED after the first figures: the formula's split left the learner as the bottleneck of every RLVR row (gains of 1.26x to
1.35x for Base and 0.96x to 1.04x for Think, the same for both policies), because its bound on the longest response is far above
what it takes. The rows of ROLL Flash are split by work instead: training to generating with full engines. AsyncFlow's split is
as assumed. RLVR simulates every second GPU with half of the batch, so that every engine has the same load in less time; so do
AsyncFlow's settings of 512 and 1,024 NPUs.

    .venv/bin/python bench/published.py [--json] [--smoke] [--seeds 3] [--only agents,grid]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, islice, product
from typing import Any, NamedTuple

from msgspec import Struct

from published_sides import SYNCHRONOUS, WINDOW, Environments, Policy, by_environments, by_pipeline, by_policy
from published_worlds import (
    ALFWORLD,
    BASE,
    GRPO,
    NPU,
    QWEN_06,
    QWEN_4,
    QWEN_7,
    QWEN_8,
    QWEN_17,
    QWEN_32,
    SWE,
    THINK,
    THINK_4,
    THINK_8,
    THINK_16,
    Agent,
    Lengths,
    Model,
    Setting,
    Split,
    agents,
    balanced,
    colocated,
    without_training,
    world_of,
)
from report import Options, Row, cost, publish, rate, say
from scheduling import (
    CHANCES,
    HEAVY,
    NORMAL,
    World,
    agentic,
    batch_by_batch,
    by_running_prompts,
    clipped,
    held_together,
    ours,
    reasoning,
)

METRIC = "seconds a step (virtual)"
GPU_COUNTS = (16, 32, 64, 128)
RATIOS = (1, 2, 4)
ENOUGH = 1.05
LONG_WINDOW = 8  # steps that are measured where a step is as long as its longest rollout
GRID_GROUPS, GRID_MEMBERS = (16, 20), (8, 10, 12)
AGENT_GPUS = 8
PARTS = ("rollouts", "rlvr", "ratios", "agents", "grid", "asyncflow")
SHARE = 2
"""One in so many devices is simulated, with as small a part of the batch: every engine has the same load."""
Run = Callable[[int], float]
"""From a seed to the seconds of a step."""


class Case(Struct, frozen=True, kw_only=True):
    """A gain over a baseline: the paper's policy, and ours."""

    workload: str
    peer: str
    """The baseline."""
    theirs: Run
    paper: Run | None = None
    """None: the paper's policy is not simulated; ours is the same."""
    ours: Run
    published: str = ""
    least: float
    """The gain of ours that a test asks for."""
    most_seeds: int = 10


class Line(NamedTuple):
    """What is printed."""

    setting: str
    published: str
    baseline: str
    paper: str
    ours: str


@cache
def _seconds(world: World, seed: int, **knobs: Any) -> float:
    return ours(world, seed, **knobs).seconds


def _ours(world: World, **knobs: Any) -> Run:
    return lambda seed: _seconds(world, seed, **knobs)


# ---- rollouts alone: ROLL Flash ----------------------------------------------------------------------------------------


def queue_scheduling() -> Iterator[Case]:
    world = reasoning(8, 8, success=CHANCES, is_filtered=True, steps=3)
    theirs = partial(cache(batch_by_batch), world)
    for extra, additional, published, least in (
        (0, 0, "125 s -> 58 s (2.16x)", 1.2),
        (4, 0, "125 s -> 58 s (2.16x)", 2.16),
        (8, 8, "", 2.16),
        (16, 16, "125 s -> 37 s (3.4x)", 3.4),
    ):
        knobs = {"extra_groups": extra, "surplus": "abort"} if extra else {}
        yield Case(
            workload=f"queue scheduling, 8 x 8, {additional or 'no'} additional prompts (ours: extra_groups {extra})",
            peer="batch by batch",
            theirs=theirs,
            paper=partial(cache(by_running_prompts), world, additional=additional),
            ours=_ours(world, **knobs),
            published=published,
            least=least,
        )


def prompt_replication() -> Iterator[Case]:
    for groups, members, published in ((64, 16, 1.84), (16, 32, 1.95), (32, 16, 1.30)):
        world = reasoning(groups, members)
        yield Case(
            workload=f"prompt replication, {groups} x {members}",
            peer="one request a prompt",
            theirs=partial(held_together, world),
            ours=_ours(world),
            published=f"{published:.2f}x",
            least=published,
        )


def environments(steps: int) -> Iterator[Case]:
    published = "892 s -> 362 s (2.46x)"
    lockstep = {latency_s: partial(cache(batch_by_batch), agentic(latency_s)) for latency_s in (NORMAL, clipped)}
    for reading, latency_s, run, least in (
        ("drawn again", NORMAL, _ours(agentic(NORMAL)), 2.1),
        ("0", clipped, _ours(agentic(clipped)), 2.46),
        ("drawn again (ours: max_lag 1)", NORMAL, _ours(agentic(NORMAL, steps=steps), max_lag=1.0), 2.46),
    ):
        yield Case(
            workload=f"environment-level asynchrony, steps normal(10 s, 10 s), below 0: {reading}",
            peer="turn by turn",
            theirs=lockstep[latency_s],
            ours=run,
            published=published,
            least=least,
        )
    yield Case(
        workload="environment-level asynchrony, steps normal(10 s, 10 s), below 0: drawn again",
        peer="our own lockstep",
        theirs=_ours(agentic(NORMAL), lockstep=True),
        ours=_ours(agentic(NORMAL)),
        published=published,
        least=1.8,
    )


def redundancy(steps: int) -> Iterator[Case]:
    """A learner that takes no time."""
    normal, heavy = (agentic(latency_s, steps=steps) for latency_s in (NORMAL, HEAVY))
    spare = {"surplus": "abort", "extra_members": 2}
    synchronous, carried = _ours(heavy), _ours(heavy, max_lag=1.0)
    for workload, peer, theirs, run, published, least in (
        ("heavy tail, max_lag 0", "16 groups of 8", synchronous, _ours(heavy, **spare, extra_groups=4), "", 1.6),
        (
            "heavy tail, max_lag 1",
            "carry-over, max_lag 1",
            carried,
            _ours(heavy, **spare, max_lag=1.0, extra_groups=20),
            "1.08x SWE, 1.20x ALFWorld",
            1.6,
        ),
        (
            "normal steps, max_lag 1",
            "carry-over, max_lag 1",
            _ours(normal, max_lag=1.0),
            _ours(normal, **spare, max_lag=1.0, extra_groups=20),
            "1.08x SWE, 1.20x ALFWorld",
            1.08,
        ),
    ):
        yield Case(
            workload=f"redundant environments, 4 more groups, 2 more members, {workload}",
            peer=peer,
            theirs=theirs,
            ours=run,
            published=published,
            least=least,
        )
    yield Case(
        workload="carry-over, 16 extra groups, heavy tail, max_lag 1",
        peer="max_lag 0",
        theirs=synchronous,
        ours=carried,
        published="async training: 1.68x SWE, 2.27x ALFWorld",
        least=1.5,
    )


def rollouts(agent_steps: int = 3) -> list[Case]:
    """Rows in which training takes no time. `agent_steps`: of a run of agents whose groups may outlive a step."""
    return [*queue_scheduling(), *prompt_replication(), *environments(agent_steps), *redundancy(agent_steps)]


# ---- with training: ROLL Flash -----------------------------------------------------------------------------------------


def _asynchronous(setting: Setting, ratio: int, window: int = WINDOW) -> tuple[Run, Run]:
    """The paper's policy and ours."""
    world = world_of(setting, balanced(setting))
    ours = partial(by_pipeline, world, window=window, max_lag=float(ratio))
    return partial(by_policy, world, Policy(ratio=ratio), window=window), ours


def rlvr(lengths: Lengths, gpus: int, *, share: int = SHARE) -> Case:
    setting = Setting(model=QWEN_8, lengths=lengths, devices=gpus // share, groups=256 // share)
    paper, run = _asynchronous(setting, 2)
    return Case(
        workload=f"RLVR, Qwen3-8B {lengths.name}, {gpus} GPUs, ratio 2",
        peer="synchronous",
        theirs=partial(by_policy, colocated(setting), SYNCHRONOUS),
        paper=paper,
        ours=run,
        published="up to 2.24x",
        least=1.0,
        most_seeds=1,
    )


def agent_cases(agent: Agent) -> Iterator[Case]:
    together = agents(agent, Split(AGENT_GPUS, AGENT_GPUS))
    half = Split(AGENT_GPUS // 2, AGENT_GPUS // 2)
    plain, more = ("1.68x", "1.81x") if agent is SWE else ("2.27x", "2.72x")
    few, many = Environments(groups=16, members=8, ratio=1), Environments(groups=20, members=10, ratio=1)
    spare: dict[str, Any] = {"max_lag": 1.0, "surplus": "abort", "extra_members": 2}
    own = Split(5, 3)
    for workload, published, paper, knobs, split in (
        ("asynchronous training, 128 environments", plain, few, {"max_lag": 1.0, "extra_groups": 0}, half),
        ("asynchronous training (ours: 256 environments)", plain, few, {"max_lag": 1.0}, half),
        ("redundant environments, 200 environments", more, many, {**spare, "extra_groups": 4}, half),
        ("redundant environments (ours: 360 environments)", more, many, {**spare, "extra_groups": 20}, half),
        (f"nothing aborted (ours: max_lag 3, {own.engines} + {own.learner} GPUs)", more, many, {"max_lag": 3.0}, own),
    ):
        yield Case(
            workload=f"agents, {agent.name}, {workload}",
            peer="synchronous",
            theirs=partial(by_environments, together, Environments(groups=16, members=8), window=LONG_WINDOW),
            paper=partial(by_environments, agents(agent, half), paper, window=LONG_WINDOW),
            ours=partial(by_pipeline, agents(agent, split), window=LONG_WINDOW, **knobs),
            published=published,
            least=1.0,
            most_seeds=1,
        )


def grid() -> Iterator[Case]:
    world = without_training(agents(ALFWORLD, Split(AGENT_GPUS, AGENT_GPUS)))
    for groups, members in product(GRID_GROUPS, GRID_MEMBERS):
        extra = {"surplus": "abort", "extra_groups": groups - 16, "extra_members": members - 8}
        yield Case(
            workload=f"redundancy grid, ALFWorld, {groups} groups x {members} members for 16 x 8, rollouts alone",
            peer="16 x 8",
            theirs=partial(by_environments, world, Environments(groups=16, members=8)),
            paper=partial(by_environments, world, Environments(groups=groups, members=members)),
            ours=partial(by_pipeline, world, **(extra if (groups, members) != (16, 8) else {})),
            least=1.0,
            most_seeds=1,
        )


# ---- with training: AsyncFlow ------------------------------------------------------------------------------------------


def _asyncflow(model: Model, npus: int, share: int) -> Setting:
    return Setting(
        model=model, lengths=GRPO, devices=npus // share, device=NPU, groups=256 // share, has_reference=True
    )


def ablation(npus: int = 512, *, share: int = SHARE) -> Iterator[Case]:
    setting = _asyncflow(QWEN_7, npus, share)
    world = world_of(setting, balanced(setting, 1))
    for workload, published, ratio in (
        ("streaming store", "2.01x", 0),
        ("streaming store and asynchronous workflow", "2.74x", 1),
    ):
        yield Case(
            workload=f"AsyncFlow, 7B, {npus} NPUs, {workload}",
            peer="sequential",
            theirs=partial(by_policy, world, Policy()),
            paper=partial(by_policy, world, Policy(ratio=ratio, is_streaming=True)),
            ours=partial(by_pipeline, world, max_lag=float(ratio)),
            published=published,
            least=1.0,
            most_seeds=1,
        )


# ---- the figures -------------------------------------------------------------------------------------------------------


class Gains(NamedTuple):
    """Medians over seeds."""

    theirs: float
    paper: float | None
    ours: float
    gain: list[float]
    """Of ours, seed by seed."""


def measure(case: Case, num_seeds: int) -> Gains:
    seeds = range(min(num_seeds, case.most_seeds))
    theirs, ours = [case.theirs(seed) for seed in seeds], [case.ours(seed) for seed in seeds]
    paper = None if case.paper is None else statistics.median(case.paper(seed) for seed in seeds)
    gains = [t / o for t, o in zip(theirs, ours, strict=True)]
    return Gains(statistics.median(theirs), paper, statistics.median(ours), gains)


def gain(case: Case, num_seeds: int, rows: list[Row]) -> Line:
    found = measure(case, num_seeds)
    rows.append(cost(case.workload, METRIC, found.ours, case.peer, found.theirs, digits=2))
    if found.paper is not None:
        rows.append(cost(case.workload, METRIC, found.ours, "the paper's policy", found.paper, digits=2))
    span = f" [{min(found.gain):.2f}, {max(found.gain):.2f}]" if len(found.gain) > 1 else ""
    return Line(
        case.workload,
        case.published,
        f"{case.peer}: {found.theirs:.0f} s",
        "" if found.paper is None else f"{found.paper:.0f} s, {found.theirs / found.paper:.2f}x",
        f"{found.ours:.0f} s, {found.theirs / found.ours:.2f}x{span}",
    )


def scaling(lengths: Lengths, rows: list[Row]) -> Line:
    few, many = (measure(rlvr(lengths, gpus), 1) for gpus in (GPU_COUNTS[0], GPU_COUNTS[-1]))
    assert few.paper is not None and many.paper is not None
    paper, ours, plain = few.paper / many.paper, few.ours / many.ours, few.theirs / many.theirs
    setting = f"scaling, Qwen3-8B {lengths.name}, {GPU_COUNTS[0]} to {GPU_COUNTS[-1]} GPUs"
    rows.append(rate(setting, "times the throughput", ours, "the paper's policy", paper))
    return Line(setting, "7.6x", f"synchronous: {plain:.2f}x", f"{paper:.2f}x", f"{ours:.2f}x")


def linearity(model: Model, few: int, published: str, rows: list[Row]) -> Line:
    found = []
    for npus, share in ((few, 1), (16 * few, SHARE)):
        setting = _asyncflow(model, npus, share)
        world, by_work = world_of(setting, balanced(setting, 1)), world_of(setting, balanced(setting))
        paper = by_policy(world, Policy(ratio=1, is_streaming=True), 0)
        found.append((paper, by_pipeline(world, 0, max_lag=1.0), by_pipeline(by_work, 0, max_lag=2.0)))
    of_paper, same, own = (before / after / 16 for before, after in zip(*found, strict=True))
    name = f"AsyncFlow, linearity, {model.name}, {few} to {16 * few} NPUs"
    rows.append(rate(name, "linearity", own, "the paper's policy", of_paper))
    seconds = ", ".join(f"{one[2]:.0f} s" for one in found)
    shown = f"{same:.2f}; max_lag 2, split by work: {own:.2f} ({seconds})"
    return Line(name, published, "", f"{of_paper:.2f} ({', '.join(f'{one[0]:.0f} s' for one in found)})", shown)


def enough(model: Model, lengths: Lengths, rows: list[Row]) -> Line:
    setting = Setting(model=model, lengths=lengths, devices=40, groups=64, members=8)
    plain = by_policy(colocated(setting), SYNCHRONOUS, 0, window=LONG_WINDOW)
    name = f"ratio sweep, Qwen3-{model.name}, cut at {lengths.most:,}, 40 GPUs"
    shown, least = [], []
    for side in (0, 1):
        seconds = {ratio: _asynchronous(setting, ratio, LONG_WINDOW)[side](0) for ratio in RATIOS}
        best = min(seconds.values())
        least.append(next(ratio for ratio in RATIOS if seconds[ratio] <= ENOUGH * best))
        gains = ", ".join(f"{ratio}: {plain / seconds[ratio]:.2f}x" for ratio in RATIOS)
        shown.append(f"{least[-1]} ({gains})")
    rows.append(cost(name, "ratio that is enough", least[1], "the paper's policy", least[0]))
    return Line(name, "2 is enough", f"synchronous: {plain:.0f} s", *shown)


def lines(part: str, num_seeds: int, rows: list[Row]) -> Iterator[Line]:
    """Of one of `PARTS`."""
    match part:
        case "rollouts":
            yield from (gain(case, num_seeds, rows) for case in rollouts())
        case "rlvr":
            for lengths in (BASE, THINK):
                yield from (gain(rlvr(lengths, gpus), num_seeds, rows) for gpus in GPU_COUNTS)
                yield scaling(lengths, rows)
        case "ratios":
            yield from (enough(model, THINK, rows) for model in (QWEN_06, QWEN_17, QWEN_4, QWEN_8))
            yield from (enough(QWEN_8, lengths, rows) for lengths in (THINK_4, THINK_8, THINK_16))
        case "agents":
            yield from (gain(case, num_seeds, rows) for agent in (SWE, ALFWORLD) for case in agent_cases(agent))
        case "grid":
            yield from (gain(case, num_seeds, rows) for case in grid())
        case "asyncflow":
            yield from (gain(case, num_seeds, rows) for case in ablation())
            yield linearity(QWEN_7, 32, "0.65", rows)
            yield linearity(QWEN_32, 64, "0.88", rows)
        case _:
            raise SystemExit(f"--only {part}: expected some of {', '.join(PARTS)}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--seeds", 3, smoke=1, help="of the rows in which rollouts alone take time; the others have one")
    parser.add("--only", ",".join(PARTS), help="parts of the table")
    options = parser.parse(argv)
    rows: list[Row] = []
    parts = options.only.split(",")
    found = chain(*(lines(part, options.seeds, rows) for part in parts))
    say("| setting | published | baseline | the paper's policy | ours |\n|---|---|---|---|---|")
    for line in islice(found, 1) if options.smoke else found:
        say(f"| {' | '.join(line)} |")
    publish(rows, options)


if __name__ == "__main__":
    main()
