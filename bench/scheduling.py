"""The worlds and the sides of `bench/published.py` where rollouts alone take time: the production pipeline, and plain loops
over the same simulated engines and environments with the same seeds, so that the same group has the same lengths, latencies
and rewards on both sides. A step lasts as long as its rollouts, unless the world says what training costs.

What ROLL Flash leaves open is set here, once, for all rows (how it was chosen, and what changes with it: docs/scheduling.md):

- engines: 4 replicas of 32 slots with the measured costs of one H200 (`H200`), a cache of a million tokens each;
- answers: log-normal, mean 2,000 tokens, sigma 1, cut at 16,384; prompts of 256 tokens; a reward takes 1 s;
- prompts: one in eight is never solved, one in eight always, the others with a chance between 0.1 and 0.9, whatever the length:
  a third of the groups of 8 has no signal;
- agents: 20 turns, log-normal, mean 200 tokens, sigma 1, cut at 2,048; observations of 64 tokens; 16 groups of 8.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from msgspec import Struct

from internals import (
    H200,
    H200_KV_TOKENS,
    Costs,
    Draw,
    Episode,
    MemorySink,
    Router,
    SimEngine,
    SimEnvironment,
    SimLearner,
    SimScorer,
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

REPLICAS = 4
SLOTS = 32
MAX_TOKENS = 16_384
TURN_TOKENS = 2_048
NUM_TURNS = 20
MICRO_BATCH_TOKENS = 1_024
ANSWERS = lognormal(2_000, 1.0)
TURNS = lognormal(200, 1.0)
CHANCES = by_prompt(mixture((1, constant(0.0)), (1, constant(1.0)), (6, uniform(0.1, 0.9))))
NORMAL = truncated_normal(10.0, 10.0)
"""Step latency of the paper's ablation: mean 10 s, sigma 10 s, not below 0."""


def clipped(rng: random.Random) -> float:
    """The same, with 0 for what is below 0."""
    return max(0.0, rng.gauss(10.0, 10.0))


HEAVY = at_most(300.0, pareto(2.0, 1.5))
"""Step latency with a tail: half of the steps take less than 3.2 s, one in 350 more than 100 s; mean 5.7 s."""


class Training(Struct, frozen=True, kw_only=True):
    """What training costs, on all devices that it has."""

    token_s: float = 0.0
    step_s: float = 0.0
    sync_s: float = 0.0
    """From an optimizer step to new weights in the engines."""
    score_token_s: float = 0.0
    """Of a reference with devices of its own. 0: there is none."""


class World(Struct, frozen=True, kw_only=True):
    """What one step has to produce, and what it meets."""

    groups: int
    members: int
    num_turns: int | Draw = 1
    prompt_tokens: int = 256
    lengths: Draw = ANSWERS
    max_tokens: int = MAX_TOKENS
    latency_s: Draw = constant(1.0)
    success: float | Success = 0.5
    is_filtered: bool = False
    steps: int = 1
    replicas: int = REPLICAS
    slots: int = SLOTS
    costs: Costs = H200
    kv_tokens: int = H200_KV_TOKENS
    has_prefix_cache: bool = False
    training: Training = Training()

    def engines(self, seed: int) -> tuple[SimEngine, ...]:
        return tuple(
            SimEngine(
                name=f"engine-{number}",
                slots=self.slots,
                costs=self.costs,
                kv_tokens=self.kv_tokens,
                num_tokens=self.lengths,
                seed=seed,
                has_prefix_cache=self.has_prefix_cache,
            )
            for number in range(self.replicas)
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
    sink, training = MemorySink(), world.training
    engines = world.engines(seed)
    await run_pipeline(
        engines,
        world.environment(),
        SimLearner(token_s=training.token_s, step_s=constant(training.step_s), publish_s=training.sync_s),
        config=PipelineConfig(
            steps=world.steps, groups_per_step=world.groups, filter_zero_signal=world.is_filtered, **knobs
        ),
        rollout=RolloutConfig(
            group_size=world.members, extra_members=extra_members, max_tokens=world.max_tokens, timeout_s=1e6
        ),
        sink=sink,
        seed=seed,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        reference=SimScorer(token_s=training.score_token_s) if training.score_token_s else None,
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
    room = [asyncio.Semaphore(world.slots // world.members) for _ in engines]

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


async def _by_running_prompts(world: World, seed: int, additional: int) -> float:
    generate, next_group = anywhere(world.engines(seed)), 0

    async def group(group_id: int) -> bool:
        members = range(world.members)
        rewards = await asyncio.gather(*(play(world, seed, group_id, member, generate) for member in members))
        return not world.is_filtered or has_signal(np.array(rewards))

    for _ in range(world.steps):
        kept, running = 0, set[asyncio.Task[bool]]()
        while kept < world.groups:
            while len(running) < world.groups + additional:
                running.add(asyncio.ensure_future(group(next_group)))
                next_group += 1
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            kept += sum(task.result() for task in done)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return asyncio.get_running_loop().time() / world.steps


def by_running_prompts(world: World, seed: int, additional: int) -> float:
    """Seconds a step of ROLL's queue scheduling: as many prompts as the batch has, and the additional ones, run at any time
    until the batch has enough of them with a signal. Complete prompts do not count; what still runs is aborted."""
    return run_virtual(_by_running_prompts(world, seed, additional))
