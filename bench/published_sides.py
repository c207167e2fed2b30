"""The sides of `bench/published.py` where training takes time: the policies of the papers as plain loops, and the production
pipeline. All return the seconds of a step, in the middle of a run."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from internals import SimEngine
from millstream.clock import run_virtual
from millstream.events import Stepped
from millstream.types import Completion, Request
from scheduling import Generate, World, anywhere, ours, play

WINDOW = 3  # steps that are measured


class Policy(Struct, frozen=True, kw_only=True):
    """How a paper trains."""

    ratio: int = 0
    """How many batches rollouts may be ahead."""
    is_streaming: bool = False
    """Groups are trained as they become complete; else the batch as a whole."""
    is_dealt: bool = False
    """Prompts are dealt to the engines in turn; else each request goes to the least loaded engine."""


SYNCHRONOUS = Policy(is_dealt=True)


@cache
def by_policy(world: World, policy: Policy, seed: int, window: int = WINDOW) -> float:
    skipped = 1 + policy.ratio
    ends = run_virtual(_Loop(world, policy, seed).train(skipped + window))
    return (ends[-1] - ends[skipped - 1]) / window


@cache
def by_pipeline(world: World, seed: int, *, window: int = WINDOW, extra_members: int = 0, **knobs: Any) -> float:
    """The production pipeline. `knobs`: of `PipelineConfig`. The last batches of a run have the engines to themselves: they are
    not measured."""
    lag: int = math.ceil(knobs.get("max_lag", 0))
    skipped = 1 + lag
    found = ours(replace(world, steps=skipped + window + lag), seed, extra_members=extra_members, **knobs)
    ends: list[float] = [step.at for step in found.sink.of(Stepped)]
    return (ends[skipped + window - 1] - ends[skipped - 1]) / window


class Counted:
    """Counts the tokens of rollouts, those of all turns."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, int], int] = {}

    async def __call__(self, generate: Generate, request: Request) -> Completion:
        completion = await generate(request)
        self._tokens[request.key.group_id, request.key.member] = len(request.tokens) + len(completion.tokens)
        return completion

    def of_group(self, group_id: int, members: Iterable[int]) -> int:
        return sum(self._tokens[group_id, member] for member in members)


class _Loop:
    """One run. A batch has the oldest groups by the step that they were started in, of these the first that are complete."""

    def __init__(self, world: World, policy: Policy, seed: int) -> None:
        self._world = world
        self._policy = policy
        self._seed = seed
        self._engines = world.engines(seed)
        self._anywhere = anywhere(self._engines)
        self._counted = Counted()
        self._num_started = 0
        self._step = 0
        self._running = Counter[int]()  # groups by the step that they were started in
        self._complete: defaultdict[int, deque[int]] = defaultdict(deque)  # tokens of groups by that step
        self._changed = asyncio.Event()
        self._reference = asyncio.Lock()
        self._tasks: list[asyncio.Future[None]] = []

    async def train(self, steps: int) -> list[float]:
        """The ends of the steps."""
        training, groups, ends = self._world.training, range(self._world.groups), list[float]()
        self._start_up_to(max(1, self._policy.ratio))
        for self._step in range(steps):
            if self._policy.is_streaming:
                self._start_up_to(self._step + 1 + self._policy.ratio)
                for _ in groups:
                    await asyncio.sleep(training.token_s * await self._next())
            else:
                tokens = sum([await self._next() for _ in groups])
                if self._policy.ratio:
                    self._start_up_to(self._step + 1 + self._policy.ratio)
                await asyncio.sleep((training.score_token_s + training.token_s) * tokens)
            await asyncio.sleep(training.step_s)
            await load_weights(self._engines, self._step + 1, training.sync_s)
            ends.append(asyncio.get_running_loop().time())
            if not self._policy.ratio:
                self._start_up_to(self._step + 2)
        return ends

    def _start_up_to(self, batches: int) -> None:
        while self._num_started < batches * self._world.groups:
            self._running[self._step] += 1
            self._tasks.append(asyncio.ensure_future(self._roll_out(self._num_started, self._step)))
            self._num_started += 1

    async def _roll_out(self, group_id: int, step: int) -> None:
        members = range(self._world.members)
        engine = self._engines[group_id % len(self._engines)]
        generate = partial(self._counted, engine.generate if self._policy.is_dealt else self._anywhere)
        await asyncio.gather(*(play(self._world, self._seed, group_id, member, generate) for member in members))
        tokens = self._counted.of_group(group_id, members)
        if self._policy.is_streaming and self._world.training.score_token_s:
            async with self._reference:
                await asyncio.sleep(self._world.training.score_token_s * tokens)
        self._running[step] -= 1
        self._complete[step].append(tokens)
        self._changed.set()

    async def _next(self) -> int:
        """The tokens of the next group of the batch."""
        while True:
            for step in sorted({*self._running, *self._complete}):
                if self._complete[step]:
                    return self._complete[step].popleft()
                if self._running[step]:
                    break
            self._changed.clear()
            await self._changed.wait()


async def load_weights(engines: Sequence[SimEngine], version: int, seconds: float) -> None:
    """All engines stop for it, and continue their requests."""
    for engine in engines:
        await engine.pause()
    await asyncio.sleep(seconds)
    for engine in engines:
        await engine.load(version, {})
        await engine.resume()


# ---- agents: ROLL's environment groups ---------------------------------------------------------------------------------


class Environments(Struct, frozen=True, kw_only=True):
    """How many there are; what a batch needs is in the world."""

    groups: int
    members: int
    ratio: int = 0


@cache
def by_environments(world: World, environments: Environments, seed: int, window: int = WINDOW) -> float:
    skipped = 1 + environments.ratio
    ends = run_virtual(_EnvironmentLoop(world, environments, seed).train(skipped + window))
    return (ends[-1] - ends[skipped - 1]) / window


class _EnvironmentLoop:
    """One run. Every environment plays one episode after the other, up to `ratio` ahead. A batch asks every group of
    environments for its next episode, and takes the first that are complete; the others are asked for by the next batch. An
    episode is complete with the members that a batch needs; it expires when it is older than the ratio. Synchronous: what a
    batch does not take is aborted."""

    def __init__(self, world: World, environments: Environments, seed: int) -> None:
        self._world = world
        self._environments = environments
        self._seed = seed
        self._engines = world.engines(seed)
        self._counted = Counted()
        self._generate = partial(self._counted, anywhere(self._engines))
        self._step = 0
        self._changed = asyncio.Condition()
        self._ended: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # members by group and episode
        self._next = [0] * environments.groups
        self._asked: list[int] = []

    async def train(self, steps: int) -> list[float]:
        """The ends of the steps."""
        training, ends, playing = self._world.training, list[float](), list[asyncio.Task[None]]()
        for self._step in range(steps):
            if not playing:
                playing = [asyncio.ensure_future(self._play(*place)) for place in self._places()]
            async with self._changed:
                self._changed.notify_all()
            tokens = sum([await self._take() for _ in range(self._world.groups)])
            if not self._environments.ratio:
                await _cancel(playing)
                playing = []
                self._asked = []
                self._next = [self._step + 1] * self._environments.groups
            await asyncio.sleep(training.token_s * tokens + training.step_s)
            await load_weights(self._engines, self._step + 1, training.sync_s)
            ends.append(asyncio.get_running_loop().time())
        return ends

    def _places(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(self._environments.groups), range(self._environments.members))

    async def _play(self, group: int, member: int) -> None:
        for episode in itertools.count(self._step):
            async with self._changed:
                await self._changed.wait_for(partial(self._may_begin, episode))
            if self._is_expired(episode):
                continue
            await play(self._world, self._seed, self._group_id(group, episode), member, self._generate)
            async with self._changed:
                self._ended[group, episode].append(member)
                self._changed.notify_all()

    def _may_begin(self, episode: int) -> bool:
        return episode <= self._step + self._environments.ratio

    def _is_expired(self, episode: int) -> bool:
        return self._step > max(episode, self._environments.ratio)

    def _group_id(self, group: int, episode: int) -> int:
        return episode * self._environments.groups + group

    async def _take(self) -> int:
        """The tokens of the next group of the batch."""
        async with self._changed:
            while (found := self._complete_group()) is None:
                await self._changed.wait()
        return self._counted.of_group(*found)

    def _complete_group(self) -> tuple[int, list[int]] | None:
        """Its id and its members. It is taken."""
        self._asked = self._asked or list(range(self._environments.groups))
        for group in self._asked:
            while self._is_expired(self._next[group]):
                self._next[group] += 1
            episode = self._next[group]
            members = self._ended[group, episode][: self._world.members]
            if len(members) == self._world.members:
                self._asked.remove(group)
                self._next[group] += 1
                return self._group_id(group, episode), members
        return None


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
