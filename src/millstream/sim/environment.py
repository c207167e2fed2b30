"""An environment with turns, latencies, failures and a reward, all drawn from the rollout's own seed."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from enum import StrEnum

from millstream.env import Context
from millstream.errors import EnvironmentFailed
from millstream.seeds import derive_seed
from millstream.sim.draws import Draw, constant
from millstream.sim.sharing import Sharing
from millstream.types import Task

FREE = constant(0.0)
Success = Callable[[Task, int], float]  # (task, tokens that the rollout has sampled): the probability of a reward of 1


class SimFailure(StrEnum):
    """How a step of an environment may fail."""

    RAISE = "raise"
    HANG = "hang"  # it never returns: the rollout's time limit ends it
    GARBAGE = "garbage"  # the episode ends with a reward that is not a number


class SimDriver:
    """The event loop of a driver: first come, first served. `busy_s`: how long it has worked. `sharing`: cores that it shares
    with engines and the learner; None: it has one of its own."""

    def __init__(self, sharing: Sharing | None = None) -> None:
        self._sharing = sharing
        self._is_free = asyncio.Lock()
        self._num_jobs = 0
        self._free_at = 0.0
        self.busy_s = 0.0

    async def work(self, seconds: float) -> None:
        if not seconds:
            return
        self.busy_s += seconds
        if self._sharing is None:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now) + seconds
            await asyncio.sleep(self._free_at - now)
            return
        self._num_jobs += 1
        try:
            async with self._is_free:
                await self._sharing.drive(seconds)
        finally:
            self._num_jobs -= 1
            if not self._num_jobs:
                self._sharing.stop_driving()


class SimEnvironment:
    """Some turns, each followed by a step of some latency, which fails with some probability; a coin for a reward.

    The same seed gives the same episode: latencies, failures and reward do not depend on time. `failures` are
    equally likely. `graded`: instead of a coin, any number between 0 and 1. At most `max_concurrent` episodes are played at
    once; None: no limit. Before and after each turn, `driver` works for half of `driver_s`. The prompt begins with the number
    that the task has in its data, if any."""

    def __init__(
        self,
        *,
        num_turns: int | Draw = 1,
        latency_s: Draw = FREE,
        failure: float = 0.0,
        failures: Sequence[SimFailure] = (SimFailure.RAISE,),
        success: float | Success = 0.5,
        graded: bool = False,
        prompt_tokens: int = 4,
        max_concurrent: int | None = None,
        driver: SimDriver | None = None,
        driver_s: float = 0.0,
    ) -> None:
        self._places = None if max_concurrent is None else asyncio.Semaphore(max_concurrent)
        self._num_turns: Draw = constant(num_turns) if isinstance(num_turns, int) else num_turns
        self._latency_s = latency_s
        self._failure = failure
        self._failures = tuple(failures)
        self._success: Success = success if callable(success) else lambda task, num_sampled: success
        self._graded = graded
        self._prompt = [1] * prompt_tokens
        self._driver = SimDriver() if driver is None else driver
        self._driver_s = driver_s

    async def rollout(self, context: Context) -> float:
        if self._places is None:
            return await self._play(context)
        await context.waiting("a place in the environment", self._places.acquire(), is_timed=False)
        try:
            return await self._play(context)
        finally:
            self._places.release()

    async def _play(self, context: Context) -> float:
        rng, num_sampled = random.Random(context.seed), 0
        prompt = [context.task.data.get("number", 1), *self._prompt[1:]]
        for _ in range(max(1, round(self._num_turns(rng)))):
            await self._driver.work(self._driver_s / 2)
            completion = await context.generate(prompt)
            await self._driver.work(self._driver_s / 2)
            num_sampled += len(completion.tokens)
            await asyncio.sleep(self._latency_s(rng))
            if rng.random() < self._failure and await self._fails(rng) is SimFailure.GARBAGE:
                return math.nan
        chance = self._success(context.task, num_sampled)
        return rng.random() if self._graded and 0 < chance < 1 else float(rng.random() < chance)

    async def _fails(self, rng: random.Random) -> SimFailure:
        """Raises, never returns, or marks the reward as invalid."""
        match self._failures[0] if len(self._failures) == 1 else rng.choice(self._failures):
            case SimFailure.RAISE:
                raise EnvironmentFailed("a simulated failure")
            case SimFailure.HANG:
                await asyncio.get_running_loop().create_future()
        return SimFailure.GARBAGE


def longer_is_harder(half: float, steepness: float = 2.0) -> Success:
    """1 / (1 + (tokens / half) ^ steepness): half of the rollouts of `half` tokens succeed, fewer of the longer ones."""
    return lambda task, num_sampled: 1 / (1 + (num_sampled / half) ** steepness)


def by_prompt(chance: Draw, seed: int = 0) -> Success:
    """Each prompt has a chance of its own, the same for all of its rollouts, at any time."""

    def success(task: Task, num_sampled: int) -> float:
        return chance(random.Random(derive_seed(seed, "difficulty", task.id)))

    return success
