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
from millstream.types import Task

FREE = constant(0.0)
Success = Callable[[Task, int], float]  # (task, tokens that the rollout has sampled): the probability of a reward of 1


class SimFailure(StrEnum):
    """How a step of an environment may fail."""

    RAISE = "raise"
    HANG = "hang"  # it never returns: the rollout's time limit ends it
    GARBAGE = "garbage"  # the episode ends with a reward that is not a number


class SimEnvironment:
    """Some turns, each followed by a step of some latency, which fails with some probability; a coin for a reward.

    The same seed gives the same episode: latencies, failures and reward do not depend on time. `failures` are
    equally likely. The prompt begins with the number that the task has in its data, if any."""

    def __init__(
        self,
        *,
        num_turns: int | Draw = 1,
        latency_s: Draw = FREE,
        failure: float = 0.0,
        failures: Sequence[SimFailure] = (SimFailure.RAISE,),
        success: float | Success = 0.5,
        prompt_tokens: int = 4,
    ) -> None:
        self._num_turns: Draw = constant(num_turns) if isinstance(num_turns, int) else num_turns
        self._latency_s = latency_s
        self._failure = failure
        self._failures = tuple(failures)
        self._success: Success = success if callable(success) else lambda task, num_sampled: success
        self._prompt = [1] * prompt_tokens

    async def rollout(self, context: Context) -> float:
        rng, num_sampled = random.Random(context.seed), 0
        prompt = [context.task.data.get("number", 1), *self._prompt[1:]]
        for _ in range(max(1, round(self._num_turns(rng)))):
            completion = await context.generate(prompt)
            num_sampled += len(completion.tokens)
            await asyncio.sleep(self._latency_s(rng))
            if rng.random() < self._failure and await self._fails(rng) is SimFailure.GARBAGE:
                return math.nan
        return float(rng.random() < self._success(context.task, num_sampled))

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
