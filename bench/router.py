"""Where requests go: our router beside plain ones, on the virtual clock, with the same engines, conversations and seeds.

Four replicas of 32 slots with a prefix cache. Conversations come as groups of 8 with one prompt, all at the beginning; a
turn's answer is log-normal, and so the tail is long. The peers: round robin and fewest requests, which send at once and let the
engines queue; and fewest requests with one queue in front of all, which is what our router was before it counted tokens and
knew prefixes. Medians of three seeds.

    .venv/bin/python bench/router.py [--json] [--smoke]
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from internals import H200, Costs, Draw, Router, SimEngine, lognormal, uniform
from millstream.clock import run_virtual
from millstream.types import Completion, Request, RequestKey, Sampling
from report import Options, Row, cost, publish, say

REPLICAS = 4
SLOTS = 32
MEMBERS = 8
SEEDS = range(10, 13)
"""None of those with which `PROMPT_TOKEN` was chosen."""
LARGE = Costs(step_s=6e-3, request_s=5e-6, context_token_s=30e-9, prefill_token_s=40e-6)
"""A model of 8B in bf16, reckoned and not measured: 16 GB of weights, 131 KB of cache a token, 16 GFLOP a token of prompt, on
the same machine."""
Generate = Callable[[Request], Awaitable[Completion]]
Rule = Callable[[Sequence[SimEngine]], Generate]


class World(Struct, frozen=True, kw_only=True):
    groups: int
    num_turns: int
    prompt_tokens: int
    observation_tokens: int = 0
    lengths: Draw
    max_tokens: int
    latency_s: Draw = uniform(0.0, 0.0)
    costs: Costs = H200
    kv_tokens: int = 1_000_000
    slowdown: float = 1.0
    """How much longer everything takes on the first replica."""

    def engines(self) -> list[SimEngine]:
        costs = {name: getattr(self.costs, name) * self.slowdown for name in Costs.__struct_fields__}
        return [
            SimEngine(
                name=f"engine-{number}",
                slots=SLOTS,
                costs=Costs(**costs) if number == 0 else self.costs,
                kv_tokens=self.kv_tokens,
                num_tokens=self.lengths,
                news_s=0.5,
                has_prefix_cache=True,
            )
            for number in range(REPLICAS)
        ]


AGENTS = World(
    groups=8,
    num_turns=10,
    prompt_tokens=4_000,
    observation_tokens=500,
    lengths=lognormal(200, 1.0),
    max_tokens=2_048,
    latency_s=uniform(0.0, 2.0),
)
ANSWERS = World(groups=64, num_turns=1, prompt_tokens=1_000, lengths=lognormal(2_000, 1.0), max_tokens=16_384)
LONG = replace(AGENTS, groups=32, prompt_tokens=8_000)
UNEQUAL = replace(
    AGENTS,
    groups=16,
    prompt_tokens=2_000,
    observation_tokens=200,
    lengths=lognormal(400, 1.0),
    max_tokens=4_096,
    slowdown=2.0,
)
WORLDS = {
    "474M, one turn, half of the slots": replace(ANSWERS, groups=8),
    "474M, one turn, four times the slots": ANSWERS,
    "474M, one turn, a cache for a third of the slots": replace(ANSWERS, groups=48, kv_tokens=30_000),
    "474M, 10 turns, half of the slots": AGENTS,
    "474M, 10 turns, prompts of 8,000, twice the slots": LONG,
    "474M, 10 turns, one replica of half the speed": UNEQUAL,
    "8B, 10 turns, half of the slots": replace(AGENTS, costs=LARGE),
    "8B, 10 turns, one and a half times the slots": replace(AGENTS, costs=LARGE, groups=24),
    "8B, 10 turns, one replica of half the speed": replace(AGENTS, costs=LARGE, groups=12, slowdown=2.0),
}


def ours(engines: Sequence[SimEngine]) -> Generate:
    router = Router(engines)
    return lambda request: router.generate(request, floor=0)


def round_robin(engines: Sequence[SimEngine]) -> Generate:
    turns = itertools.cycle(engines)
    return lambda request: next(turns).generate(request)


class FewestRequests:
    """`most`: requests that a replica is given; the others wait in one queue, first come, first served."""

    def __init__(self, engines: Sequence[SimEngine], most: int | None) -> None:
        self._in_flight = {engine.name: 0 for engine in engines}
        self._engines = engines
        self._most = most
        self._waiting: deque[asyncio.Future[None]] = deque()

    def _free(self) -> SimEngine | None:
        engine = min(self._engines, key=lambda one: self._in_flight[one.name])
        return engine if self._most is None or self._in_flight[engine.name] < self._most else None

    async def generate(self, request: Request) -> Completion:
        while self._waiting or (engine := self._free()) is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
            if (engine := self._free()) is not None:
                break
        self._in_flight[engine.name] += 1
        try:
            return await engine.generate(request)
        finally:
            self._in_flight[engine.name] -= 1
            if self._waiting:
                self._waiting.popleft().set_result(None)


PEERS: dict[str, Rule] = {
    "round robin": round_robin,
    "fewest requests": lambda engines: FewestRequests(engines, None).generate,
    "fewest requests, one queue": lambda engines: FewestRequests(engines, SLOTS + SLOTS // 4).generate,
}


class Found(Struct, frozen=True):
    seconds: float
    """Until the last conversation has ended."""
    mean_s: float
    """Until one has, on average."""
    computed: float
    """Tokens of prompts, in millions."""
    num_preempted: int


async def converse(world: World, seed: int, group: int, member: int, generate: Generate) -> float:
    rng = random.Random(f"{seed}/{group}/{member}")
    tokens = [group] * world.prompt_tokens
    for turn in range(world.num_turns):
        key = RequestKey(group_id=group, member=member, turn=turn)
        sampling = Sampling(max_tokens=world.max_tokens)
        completion = await generate(Request(key=key, tokens=tuple(tokens), sampling=sampling, seed=rng.getrandbits(48)))
        tokens += [*completion.tokens, *([turn] * world.observation_tokens)]
        await asyncio.sleep(world.latency_s(rng))
    return asyncio.get_running_loop().time()


async def play(world: World, rule: Rule, seed: int) -> Found:
    engines = world.engines()
    generate = rule(engines)
    members = [(group, member) for group in range(world.groups) for member in range(MEMBERS)]
    ends = await asyncio.gather(*(converse(world, seed, group, member, generate) for group, member in members))
    return Found(
        max(ends),
        statistics.mean(ends),
        sum(engine.num_computed for engine in engines) / 1e6,
        sum(engine.num_preempted for engine in engines),
    )


def median(world: World, rule: Rule, seeds: Sequence[int]) -> Found:
    runs = [run_virtual(play(world, rule, seed)) for seed in seeds]
    return Found(*(statistics.median(getattr(run, name) for run in runs) for name in Found.__struct_fields__))


def main(argv: Sequence[str] | None = None) -> None:
    options = Options(__doc__).parse(argv)
    worlds = {"8 groups, one turn": replace(ANSWERS, groups=8)} if options.smoke else WORLDS
    seeds = SEEDS[:1] if options.smoke else SEEDS
    rows: list[Row] = []
    for workload, world in worlds.items():
        own = median(world, ours, seeds)
        say(f"{workload:52} {'ours':28} {_words(own)}")
        for peer, rule in PEERS.items():
            theirs = median(world, rule, seeds)
            say(f"{'':52} {peer:28} {_words(theirs)}")
            rows += [
                cost(workload, "seconds until all have ended (virtual)", own.seconds, peer, theirs.seconds),
                cost(workload, "mean seconds of a conversation (virtual)", own.mean_s, peer, theirs.mean_s),
                cost(workload, "million prompt tokens computed", own.computed, peer, theirs.computed),
            ]
    publish(rows, options)


def _words(found: Found) -> str:
    spent = f"{found.computed:5.2f}M computed  {found.num_preempted:5.0f} preempted"
    return f"{found.seconds:7.1f} s  mean {found.mean_s:6.1f} s  {spent}"


if __name__ == "__main__":
    main()
