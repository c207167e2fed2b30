"""Prompt tokens that conversations compute twice, with our engine's pages and our router. The figures are counts and exact.

A conversation has 10 turns of 200 tokens: 100 that the environment shows and 100 that the model samples. Every turn sends the
whole conversation. A token is computed twice if a pass over a prompt computes it although an earlier turn did. The last sampled
token of a turn is no such token: the next turn is the first to compute it.

Batching, pages and the router are those of a run, on the virtual clock: a step takes 1 ms, the environment 20 ms. The forward
passes are left out, since no count depends on them: tokens are drawn without a model.

    .venv/bin/python bench/turn_cache.py [--json] [--smoke]
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from internals import Router
from internals_torch import Batcher, Chunk, Drawn, PagedRunner, TokenSequence, model_of, qwen3, torch
from millstream.clock import run_virtual
from millstream.engine import EngineStats, OnSampled, OnUpdate
from millstream.types import TURNS_PER_PART, Completion, Request, RequestKey, Sampling, Weights
from report import Options, Row, alone, cost, publish, say

STEP_S = 0.001
LONG = 1_000  # the number of the long conversation
WORDS = 256
SHAPE = {"hidden": 32, "layers": 1, "heads": 2, "dim": 16, "words": WORDS, "context": 8192}
TOKEN_BYTES = 2 * 1 * 1 * 16 * 4  # keys and values, layers, heads of keys, dimension, float32
Generate = Callable[[Request], Awaitable[Completion]]
Rule = Callable[[Sequence["CountingEngine"]], Generate]


class LongTalk(Struct, frozen=True, kw_only=True):
    """A conversation that is longer than the others by `tokens` in its first prompt."""

    tokens: int
    turns: int
    wait_s: float


class Load(Struct, frozen=True, kw_only=True):
    """Conversations, and the engines that they run on."""

    conversations: int = 8
    turns: int = 10
    shown: int = 100
    said: int = 100
    wait_s: float = 0.02  # of the environment, between two turns, on average
    parts: int = 1  # conversations of one rollout that take turns, as those of several agents
    long: LongTalk | None = None  # a further conversation
    replicas: int = 1
    slots: int = 8
    cache_tokens: int = 65_536
    has_pages: bool = True
    on_update: OnUpdate = "keep"
    update_s: float | None = None  # between two versions of the weights. None: there is one


class Counts(Struct, frozen=True, kw_only=True):
    sent: int  # tokens of all prompts
    twice: int  # of these, computed although an earlier turn had computed them
    long_twice: int = 0  # and those of the long conversation

    @property
    def percent(self) -> float:
        return 100 * self.twice / self.sent


class CountingEngine:
    """A `millstream.engine.Engine` that steps on the event loop and counts, by conversation, the prompt tokens it computes."""

    def __init__(self, name: str, load: Load, computed: Counter[int]) -> None:
        model = model_of(qwen3(**SHAPE), device="cpu", dtype=torch.float32)
        runner = PagedRunner(model, load.slots, cache_gb=load.cache_tokens * TOKEN_BYTES / 1e9)
        self.name = name
        self.slots = load.slots
        self.are_turns_kept = load.on_update == "keep"
        self.weights: Weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        used = runner if load.has_pages else None
        self._batcher = Batcher(model, num_slots=load.slots, on_update=load.on_update, runner=used)
        self._answers: dict[RequestKey, asyncio.Future[Completion]] = {}
        self._stepping: asyncio.Task[None] | None = None
        announce = self._batcher._runner.will_compute
        rng = random.Random(name)

        def counted(sequence: TokenSequence, end: int) -> None:
            computed[sequence.request.key.group_id] += end - sequence.num_computed
            announce(sequence, end)

        def draw(decoding: Sequence[TokenSequence], chunks: Sequence[Chunk]) -> Drawn:
            num = len(decoding) + sum(chunk.is_last for chunk in chunks)
            tokens = [rng.randrange(WORDS) for _ in range(num)]
            return lambda: (tokens, [0.0] * num)

        self._batcher._runner.will_compute = counted  # type: ignore[method-assign]
        self._batcher._runner.launch = draw  # type: ignore[method-assign]

    @property
    def version(self) -> int:
        return self._batcher.version

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        self._batcher.add(request)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._answers[request.key] = answer
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        return await answer

    async def _step(self) -> None:
        while self._batcher.has_work:
            await asyncio.sleep(STEP_S)
            for key, completion in self._batcher.step():
                self._answers.pop(key).set_result(completion)

    async def load(self, version: int, weights: Weights) -> None:
        self._batcher.load(version, weights)

    def stats(self) -> EngineStats:
        one = self._batcher
        return EngineStats(one.running, one.waiting, one.tokens_generated, 0, one.cache_used, 0.0, one.num_preempted)

    async def abort(self, key: RequestKey) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def close(self) -> None: ...


def routed(engines: Sequence[CountingEngine]) -> Generate:
    router = Router(engines)
    router.prefixes.are_kept = all(engine.are_turns_kept for engine in engines)
    return lambda request: router.generate(request, floor=0)


def round_robin(engines: Sequence[CountingEngine]) -> Generate:
    turns = itertools.cycle(engines)
    return lambda request: next(turns).generate(request)


class _Talks:
    """All conversations of a load, and what they send."""

    def __init__(self, load: Load, generate: Generate) -> None:
        self._load = load
        self._generate = generate
        self.sent: Counter[int] = Counter()
        self.new: Counter[int] = Counter()  # tokens that no earlier turn had computed

    async def talk(self, number: int, *, turns: int, wait_s: float, beginning: int = 0) -> None:
        rng, load = random.Random(number), self._load
        so_far: list[tuple[int, ...]] = [()] * load.parts
        for turn in range(turns * load.parts):
            part = turn % load.parts
            num_shown = load.shown if turn >= load.parts else load.shown + beginning
            prompt = (*so_far[part], *(rng.randrange(WORDS) for _ in range(num_shown)))
            self.sent[number] += len(prompt)
            self.new[number] += num_shown + (turn >= load.parts)
            key = RequestKey(group_id=number, member=0, turn=part * TURNS_PER_PART + turn // load.parts)
            sampling = Sampling(max_tokens=load.said)
            answer = await self._generate(Request(key=key, tokens=prompt, sampling=sampling, seed=number))
            so_far[part] = (*prompt, *answer.tokens)
            await asyncio.sleep(rng.uniform(0.5, 1.5) * wait_s)

    async def all(self) -> None:
        load = self._load
        async with asyncio.TaskGroup() as tasks:
            if load.long is not None:
                long = self.talk(LONG, turns=load.long.turns, wait_s=load.long.wait_s, beginning=load.long.tokens)
                tasks.create_task(long)
            for number in range(load.conversations):
                tasks.create_task(self.talk(number, turns=load.turns, wait_s=load.wait_s))


async def _update(engines: Sequence[CountingEngine], every_s: float) -> None:
    for version in itertools.count(1):
        await asyncio.sleep(every_s)
        for engine in engines:
            await engine.load(version, engine.weights)


def measure(load: Load, rule: Rule = routed) -> Counts:
    """Play all conversations to their end."""
    computed: Counter[int] = Counter()

    async def program() -> Counts:
        engines = [CountingEngine(f"engine-{number}", load, computed) for number in range(load.replicas)]
        talks = _Talks(load, rule(engines))
        updating = None if load.update_s is None else asyncio.create_task(_update(engines, load.update_s))
        await talks.all()
        if updating is not None:
            updating.cancel()
        twice = {number: computed[number] - talks.new[number] for number in talks.sent}
        long_twice = twice.pop(LONG, 0)
        short = sum(sent for number, sent in talks.sent.items() if number != LONG)
        return Counts(sent=short, twice=sum(twice.values()), long_twice=long_twice)

    torch.set_num_threads(1)
    return run_virtual(program())


CACHE_TOKENS = 6_400
BESIDE = {
    "beside a conversation of 4,000 tokens that waits": LongTalk(tokens=4_000, turns=2, wait_s=5.0),
    "beside a conversation of 2,000 to 4,000 tokens that takes turns": LongTalk(tokens=2_000, turns=10, wait_s=0.02),
}
"""The cache has room for the others alone."""
METRIC = "prompt tokens computed twice, % of those sent"


def rows_of(load: Load) -> list[Row]:
    def against(what: str, load: Load, peer: str, other: Load, rule: Rule = routed) -> Row:
        say(what)
        return cost(what, METRIC, measure(load).percent, peer, measure(other, rule).percent, digits=2)

    many = replace(load, replicas=3)
    rows = [
        against("one engine", load, "no prefix cache (slots)", replace(load, has_pages=False)),
        against("3 replicas", many, "round robin", many, round_robin),
        alone("3 replicas, two agents that take turns", METRIC, measure(replace(many, parts=2)).percent, digits=2),
    ]
    for update_s in (1.0, 0.25):
        what, kept = f"weights every {update_s * 1e3:g} steps", replace(load, update_s=update_s)
        rows.append(against(f"{what}, keep", kept, "recompute", replace(kept, on_update="recompute")))
    for what, beside in BESIDE.items():
        say(what)
        found = measure(replace(load, conversations=min(3, load.conversations), long=beside, cache_tokens=CACHE_TOKENS))
        rows.append(alone(what, METRIC, found.percent, digits=2))
        rows.append(alone(what, "tokens that the long conversation computes twice", found.long_twice))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    options = Options(__doc__)
    options.add("--conversations", 8, smoke=2)
    options.add("--turns", 10, smoke=3)
    given = options.parse(argv)
    publish(rows_of(Load(conversations=given.conversations, turns=given.turns)), given)


if __name__ == "__main__":
    main()
