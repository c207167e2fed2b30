"""The published gains of ROLL Flash's scheduling, on the virtual clock: the production pipeline against plain loops over the
same simulated engines and environments. Virtual time is exact; every figure is the median over seeds, with its range.

Ours is the production pipeline with the production store and admission rule, and a learner that takes no time: a step lasts
as long as its rollouts. Theirs is a plain loop over the same simulated engines and environments, with the same seeds: the same
group has the same lengths, latencies and rewards on both sides.

What the paper leaves open is set here, once, for all rows (how it was chosen, and what changes with it: docs/scheduling.md):

- engines: 4 replicas of 32 slots with the measured costs of one H200 (`H200`), a cache of a million tokens each;
- answers: log-normal, mean 2,000 tokens, sigma 1, cut at 16,384; prompts of 256 tokens; a reward takes 1 s;
- prompts: one in eight is never solved, one in eight always, the others with a chance between 0.1 and 0.9, whatever the length:
  a third of the groups of 8 has no signal;
- agents: 20 turns, log-normal, mean 200 tokens, sigma 1, cut at 2,048; observations of 64 tokens; 16 groups of 8.

    .venv/bin/python bench/scheduling.py [--json] [--smoke] [--seeds 10]
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from internals import (
    H200,
    H200_KV_TOKENS,
    Draw,
    Episode,
    MemorySink,
    Router,
    SimEngine,
    SimEnvironment,
    SimLearner,
    Success,
    at_most,
    by_prompt,
    constant,
    has_signal,
    lognormal,
    mixture,
    pareto,
    run_pipeline,
    truncated_normal,
    uniform,
)
from millstream import PipelineConfig, RolloutConfig
from millstream.clock import run_virtual
from millstream.engine import Engine
from millstream.types import Completion, Request, RequestKey, Sampling, Task
from report import Options, Row, cost, publish, say

METRIC = "seconds a step (virtual)"
REPLICAS = 4
SLOTS = 32
MAX_TOKENS = 16_384
TURN_TOKENS = 2_048
NUM_TURNS = 20
ANSWERS = lognormal(2_000, 1.0)
TURNS = lognormal(200, 1.0)
CHANCES = by_prompt(mixture((1, constant(0.0)), (1, constant(1.0)), (6, uniform(0.1, 0.9))))
NORMAL = truncated_normal(10.0, 10.0)
"""Step latency of the paper's ablation: mean 10 s, sigma 10 s, not below 0."""
HEAVY = at_most(300.0, pareto(2.0, 1.5))
"""Step latency with a tail: half of the steps take less than 3.2 s, one in 350 more than 100 s; mean 5.7 s."""


class World(Struct, frozen=True, kw_only=True):
    """What one step has to produce, and what it meets."""

    groups: int
    members: int
    num_turns: int = 1
    prompt_tokens: int = 256
    lengths: Draw = ANSWERS
    max_tokens: int = MAX_TOKENS
    latency_s: Draw = constant(1.0)
    success: float | Success = 0.5
    is_filtered: bool = False
    steps: int = 1

    def engines(self, seed: int) -> tuple[SimEngine, ...]:
        return tuple(
            SimEngine(
                name=f"engine-{number}",
                slots=SLOTS,
                costs=H200,
                kv_tokens=H200_KV_TOKENS,
                num_tokens=self.lengths,
                seed=seed,
            )
            for number in range(REPLICAS)
        )

    def environment(self) -> SimEnvironment:
        return SimEnvironment(
            num_turns=self.num_turns,
            latency_s=self.latency_s,
            success=self.success,
            prompt_tokens=self.prompt_tokens,
        )


def reasoning(groups: int, members: int, **changes: Any) -> World:
    return World(groups=groups, members=members, **changes)


def agentic(latency_s: Draw, **changes: Any) -> World:
    return World(
        groups=16,
        members=8,
        num_turns=NUM_TURNS,
        prompt_tokens=64,
        lengths=TURNS,
        max_tokens=TURN_TOKENS,
        latency_s=latency_s,
        **changes,
    )


# ---- ours: the production pipeline -------------------------------------------------------------------------------------


class Ours(Struct, frozen=True):
    seconds: float
    """A step, on average."""
    sink: MemorySink
    engines: tuple[SimEngine, ...]


def ours(world: World, seed: int, *, extra_members: int = 0, **knobs: Any) -> Ours:
    """`knobs` are those of `PipelineConfig`. Synchronous without a gate unless they say otherwise."""
    return run_virtual(_ours(world, seed, extra_members, {"max_lag": 0.0, "lockstep": False, **knobs}))


async def _ours(world: World, seed: int, extra_members: int, knobs: dict[str, Any]) -> Ours:
    sink = MemorySink()
    engines = world.engines(seed)
    await run_pipeline(
        engines,
        world.environment(),
        SimLearner(token_s=0.0, step_s=constant(0.0)),
        config=PipelineConfig(
            steps=world.steps, groups_per_step=world.groups, filter_zero_signal=world.is_filtered, **knobs
        ),
        rollout=RolloutConfig(
            group_size=world.members, extra_members=extra_members, max_tokens=world.max_tokens, timeout_s=1e6
        ),
        sink=sink,
        seed=seed,
    )
    return Ours(asyncio.get_running_loop().time() / world.steps, sink, engines)


# ---- theirs: plain loops over the same engines and environments --------------------------------------------------------

Generate = Callable[[Request], Awaitable[Completion]]


async def play(world: World, seed: int, group_id: int, member: int, generate: Generate) -> float:
    """One rollout, with the seeds that the pipeline would give it; its reward."""

    async def waiting(what: str, work: Awaitable[Any]) -> Any:
        return await work

    episode = Episode(
        Task(id=f"task-{group_id}", prompt="?"),
        RequestKey(group_id=group_id, member=member),
        generate=generate,
        waiting=waiting,
        sampling=Sampling(max_tokens=world.max_tokens),
        run_seed=seed,
        role="train",
    )
    return await world.environment().rollout(episode)


def anywhere(engines: tuple[Engine, ...]) -> Generate:
    """The least loaded replica, as ours."""
    router = Router(engines)
    return lambda request: router.generate(request, floor=0)


async def _in_lockstep(world: World, seed: int, group_ids: range, generate: Generate) -> list[float]:
    """One batch, turn by turn: no reward and no environment step before every answer of the turn is there; no generation before
    every step is done. Returns the rewards, group by group."""
    together = asyncio.Barrier(len(group_ids) * world.members)

    async def with_the_others(request: Request) -> Completion:
        await together.wait()
        completion = await generate(request)
        await together.wait()
        return completion

    return await asyncio.gather(
        *(play(world, seed, group, member, with_the_others) for group in group_ids for member in range(world.members))
    )


async def _batch_by_batch(world: World, seed: int) -> float:
    """Whole batches, until enough of their groups have a signal; what is over is thrown away."""
    generate, next_group = anywhere(world.engines(seed)), 0
    for _ in range(world.steps):
        kept = 0
        while kept < world.groups:
            batch = range(next_group, next_group + world.groups)
            rewards_GM = np.array(await _in_lockstep(world, seed, batch, generate)).reshape(world.groups, -1)
            kept += sum(has_signal(rewards_M) for rewards_M in rewards_GM) if world.is_filtered else world.groups
            next_group += world.groups
    return asyncio.get_running_loop().time() / world.steps


def batch_by_batch(world: World, seed: int) -> float:
    """Seconds a step of synchronous training by whole batches."""
    return run_virtual(_batch_by_batch(world, seed))


async def _held_together(world: World, seed: int) -> float:
    engines = world.engines(seed)
    room = [asyncio.Semaphore(SLOTS // world.members) for _ in engines]

    async def group(group_id: int) -> None:
        """Groups are dealt out in turn: all are of the same size, and all are there at the beginning."""
        replica = group_id % len(engines)
        async with room[replica]:
            members = range(world.members)
            await asyncio.gather(*(play(world, seed, group_id, m, engines[replica].generate) for m in members))

    await asyncio.gather(*map(group, range(world.groups)))
    return asyncio.get_running_loop().time()


def held_together(world: World, seed: int) -> float:
    """Seconds of one step in which the answers to a prompt are one request: they stay on one replica and give their slots back
    when the longest of them is done. A slot that is held and idle costs nothing else: the others are not slowed down by it."""
    return run_virtual(_held_together(world, seed))


# ---- the rows ----------------------------------------------------------------------------------------------------------

Run = Callable[[int], float]
"""From a seed to the seconds of a step."""


class Case(Struct, frozen=True, kw_only=True):
    workload: str
    peer: str
    theirs: Run
    ours: Run
    published: str
    least: float
    """The ratio that a test asks for."""


def _seconds(world: World, knobs: dict[str, Any]) -> Run:
    return lambda seed: ours(world, seed, **knobs).seconds


def _queue_scheduling() -> Iterator[Case]:
    world = reasoning(8, 8, success=CHANCES, is_filtered=True, steps=3)
    for extra, published, least in (
        (0, "125 s -> 58 s (2.16x)", 1.2),
        (8, "", 2.16),
        (16, "125 s -> 37 s (3.4x)", 3.4),
    ):
        knobs = {"extra_groups": extra, "surplus": "abort"} if extra else {}
        yield Case(
            workload=f"queue scheduling, 8 x 8, {extra or 'no'} extra prompts",
            peer="batch by batch",
            theirs=partial(batch_by_batch, world),
            ours=_seconds(world, knobs),
            published=published,
            least=least,
        )


def _prompt_replication() -> Iterator[Case]:
    for groups, members, published in ((64, 16, 1.84), (16, 32, 1.95), (32, 16, 1.30)):
        world = reasoning(groups, members)
        yield Case(
            workload=f"prompt replication, {groups} x {members}",
            peer="one request a prompt",
            theirs=partial(held_together, world),
            ours=_seconds(world, {}),
            published=f"{published:.2f}x",
            least=published,
        )


def _environments(steps: int) -> Iterator[Case]:
    alone = _seconds(agentic(NORMAL), {})
    lockstep: dict[str, Run] = {
        "turn by turn": partial(batch_by_batch, agentic(NORMAL)),
        "our own lockstep": _seconds(agentic(NORMAL), {"lockstep": True}),
    }
    for (peer, theirs), least in zip(lockstep.items(), (2.1, 1.8), strict=True):
        yield Case(
            workload="environment-level asynchrony, steps normal(10 s, 10 s)",
            peer=peer,
            theirs=theirs,
            ours=alone,
            published="892 s -> 362 s (2.46x)",
            least=least,
        )
    normal, heavy = (agentic(latency_s, steps=steps) for latency_s in (NORMAL, HEAVY))
    spare = {"surplus": "abort", "extra_members": 2}
    synchronous, carried = _seconds(heavy, {}), _seconds(heavy, {"max_lag": 1.0})
    yield Case(
        workload="redundant environments, 4 more groups, 2 more members, heavy tail, max_lag 0",
        peer="16 groups of 8",
        theirs=synchronous,
        ours=_seconds(heavy, {**spare, "extra_groups": 4}),
        published="",
        least=1.6,
    )
    yield Case(
        workload="carry-over, 16 extra groups, heavy tail, max_lag 1",
        peer="max_lag 0",
        theirs=synchronous,
        ours=carried,
        published="async training: 1.68x SWE, 2.27x ALFWorld",
        least=1.5,
    )
    yield Case(
        workload="redundant environments, 4 more groups, 2 more members, heavy tail, max_lag 1",
        peer="carry-over, max_lag 1",
        theirs=carried,
        ours=_seconds(heavy, {**spare, "max_lag": 1.0, "extra_groups": 20}),
        published="1.08x SWE, 1.20x ALFWorld",
        least=1.6,
    )
    yield Case(
        workload="redundant environments, 4 more groups, 2 more members, normal steps, max_lag 1",
        peer="carry-over, max_lag 1",
        theirs=_seconds(normal, {"max_lag": 1.0}),
        ours=_seconds(normal, {**spare, "max_lag": 1.0, "extra_groups": 20}),
        published="1.08x SWE, 1.20x ALFWorld",
        least=1.08,
    )


def cases(agent_steps: int = 3) -> list[Case]:
    """All rows. `agent_steps`: how many steps a run of the agents has where groups may outlive a step."""
    return [*_queue_scheduling(), *_prompt_replication(), *_environments(agent_steps)]


# ---- the figures -------------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.0f} s [{self.low:.0f}, {self.high:.0f}]"


def spread(numbers: list[float]) -> Spread:
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


class Figures(NamedTuple):
    ours: Spread
    theirs: Spread
    ratio: Spread  # seed by seed


def measure(case: Case, num_seeds: int, known: dict[Run, list[float]]) -> Figures:
    """`known` keeps what several rows share."""
    for run in (case.ours, case.theirs):
        if run not in known:
            known[run] = [run(seed) for seed in range(num_seeds)]
    ours, theirs = known[case.ours], known[case.theirs]
    return Figures(spread(ours), spread(theirs), spread([t / o for t, o in zip(theirs, ours, strict=True)]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--seeds", 10, smoke=1)
    options = parser.parse(argv)
    rows: list[Row] = []
    known = dict[Run, list[float]]()
    for case in cases()[:1] if options.smoke else cases():
        found = measure(case, options.seeds, known)
        rows.append(cost(case.workload, METRIC, found.ours.median, case.peer, found.theirs.median, digits=2))
        ratio = f"{found.ratio.median:.2f}x [{found.ratio.low:.2f}, {found.ratio.high:.2f}]"
        say(f"{case.workload:72} {case.peer:22} {found.theirs!s:20} ours {found.ours!s:20} {ratio:20} {case.published}")
    publish(rows, options)


if __name__ == "__main__":
    main()
