"""Small tasks with a deterministic reward, and an environment that takes a random time to give it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

from millstream.env import Context
from millstream.learner import LearnerConfig
from millstream.types import Completion, Sampling, Task

SAMPLING = Sampling(max_tokens=12, stop=(3, 4, 5))
LEARNER = LearnerConfig(learning_rate=3e-3, micro_batch_tokens=64)


def prompt(task: Task) -> list[int]:
    rng = random.Random(int(task.id))
    return [rng.randrange(6, 97) for _ in range(rng.randint(2, 9))]


def reward(completion: Completion) -> float:
    return float(sum(completion.tokens) % 3 == 0)


def tasks() -> Iterator[Task]:
    for number in range(10_000):
        yield Task(id=str(number), prompt="")


class DelayedReward:
    """A judge that takes its time, differently in every run."""

    def __init__(self, delays: random.Random) -> None:
        self._delays = delays

    async def rollout(self, context: Context) -> float:
        completion = await context.generate(prompt(context.task))
        await asyncio.sleep(self._delays.random() * 0.02)
        return reward(completion)
