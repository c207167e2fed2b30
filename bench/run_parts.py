"""Environments, rewards and a loss that the runs of benchmarks load by path (`run_parts.py:Chaos`), some in worker processes.

Imports little and no torch: a worker starts as fast as one of the package's own parts.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.algo.advantages import BatchScale, Rewards, grpo
from millstream.env import Step
from millstream.env.games.frozen_lake import FrozenLake
from millstream.env.rewards import exact_match
from millstream.seeds import derive_seed
from millstream.types import Task

if TYPE_CHECKING:
    from internals_torch import LossInputs, TokenLoss

HERE = Path(__file__).resolve()

# ---- chaos.py: steps that go wrong -----------------------------------------------------------------------------------------

RAISE = 0.05
HANG = 0.02
KILL = 0.01
GARBAGE = 0.01
HOUR_S = 3600.0


class Chaos(FrozenLake):
    """A frozen lake on which steps go wrong, by a random number that does not depend on the walk."""

    async def reset(self, task: Task, seed: int) -> str:
        self._coins = random.Random(derive_seed(seed, "chaos"))
        return await super().reset(task, seed)

    async def step(self, action: str) -> Step:
        coin = self._coins.random()
        if coin < RAISE:
            raise ValueError("the ice cracked")
        if coin < RAISE + HANG:
            time.sleep(HOUR_S)  # noqa: ASYNC251 (with the whole process)
        if coin < RAISE + HANG + KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if coin < RAISE + HANG + KILL + GARBAGE:
            return "garbage"  # type: ignore[return-value]
        return await super().step(action)


# ---- crash_matrix.py: a game of several turns and a reward, graded, so that a model that has learned nothing yet has something
# to learn from, and slow, so that a kill finds rollouts in flight -------------------------------------------------------------

ALPHABET = "0123456789>="
TURNS = 3
STEP_S = 0.25
REWARD_S = 0.1


class Counting:
    """The next digit, and the next: a point for what comes close."""

    max_turns = TURNS

    async def reset(self, task: Task, seed: int) -> str:
        self._last = int(str(task.prompt)[0])
        return str(task.prompt)

    async def step(self, action: str) -> Step:
        await asyncio.sleep(STEP_S)
        self._last = (self._last + 1) % 10
        digit = action.strip()[:1]
        distance = abs(int(digit) - self._last) if digit.isdigit() else 10
        return Step(observation=f"{self._last}>", reward=(10 - distance) / (10 * TURNS), is_done=False)


def closeness(task: Task, completion: str) -> float:
    """How many characters are those of the answer, each in its place."""
    time.sleep(REWARD_S)
    answer = task.answer or ""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer) + min(len(completion), 8) / 80


def tasks(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Tasks of both kinds, in turn."""
    rng = random.Random(seed)
    for number in range(num):
        digits = "".join(rng.choice("0123456789") for _ in range(4))
        if number % 2:
            answer = "".join(sorted(digits))
            yield {"id": f"sort {number}", "prompt": f"{digits}>", "answer": answer, "environment": "single_turn"}
        else:
            yield {"id": f"count {number}", "prompt": f"{digits[0]}>", "environment": "counting"}


# ---- slow_reward.py --------------------------------------------------------------------------------------------------------


async def judge(task: Task, completion: str) -> float:
    """Exact match after 50 to 500 ms, as a judge behind an API answers."""
    await asyncio.sleep(random.uniform(0.05, 0.5))
    return exact_match(task, completion)


# ---- prediction.py ---------------------------------------------------------------------------------------------------------


async def late_match(task: Task, completion: str, *, mean_s: float, sigma: float) -> float:
    """Exact match after a log-normal time."""
    await asyncio.sleep(random.lognormvariate(math.log(mean_s) - sigma**2 / 2, sigma))
    return exact_match(task, completion)


# ---- advice.py -------------------------------------------------------------------------------------------------------------


async def late_reward(task: Task, completion: str, *, seconds: float) -> float:
    """Exact match after this time."""
    await asyncio.sleep(seconds)
    return exact_match(task, completion)


# ---- quality.py ------------------------------------------------------------------------------------------------------------


def uncorrected(x: LossInputs) -> TokenLoss:
    """GRPO without a correction, -A log th: `x.behaviour_N` is not read. `algo.check` refuses such a loss off policy."""
    from millstream.algo.losses import reinforce

    return reinforce(x)


uncorrected.corrects = True  # type: ignore[attr-defined]  # false, so that it is not refused: what it costs is measured


# ---- modes.py --------------------------------------------------------------------------------------------------------------


def grpo_of_a_whole_batch(rewards_G: Rewards) -> Rewards:
    """GRPO's advantages. With `over_batch`, the batch is complete before the first of its rows is trained."""
    return grpo(rewards_G)


grpo_of_a_whole_batch.over_batch = lambda rewards_R, advantages_N: BatchScale(0.0, 1.0)  # type: ignore[attr-defined]


# ---- trl_side.py -----------------------------------------------------------------------------------------------------------


def reasoning_gym_rule(args: dict[str, Any]) -> Callable[[str, dict[str, Any]], float]:
    """From the args of the environment to how it scores an answer to the task with this data."""
    from millstream.env.games.reasoning import ReasoningGym

    return ReasoningGym(**args).score
