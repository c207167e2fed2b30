"""What the runs of `bench/crash_matrix.py` are about: a game of several turns and a reward, each in processes of its own.

Both are graded, so that a model that has learned nothing yet has something to learn from, and take a moment, so that a kill
finds rollouts in flight.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

from millstream.env import Step
from millstream.types import Task

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
        said = action.strip()[:1]
        distance = abs(int(said) - self._last) if said.isdigit() else 10
        return Step(observation=f"{self._last}>", reward=(10 - distance) / (10 * TURNS), is_done=False)


def closeness(task: Task, completion: str) -> float:
    """How many characters are those of the answer, each in its place."""
    time.sleep(REWARD_S)
    answer = task.answer or ""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / len(answer) + min(len(completion), 8) / 80


def tasks(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Of both kinds, in turn."""
    rng = random.Random(seed)
    for number in range(num):
        digits = "".join(rng.choice("0123456789") for _ in range(4))
        if number % 2:
            yield {
                "id": f"sort {number}",
                "prompt": f"{digits}>",
                "answer": "".join(sorted(digits)),
                "environment": "single_turn",
            }
        else:
            yield {"id": f"count {number}", "prompt": f"{digits[0]}>", "environment": "counting"}
