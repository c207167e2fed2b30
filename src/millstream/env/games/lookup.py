"""Numbers that must be looked up before they are added or multiplied: three tools, one of which fails at times.

    k+m                      the task: the numbers of k and m are not known to the model
    search k        -> 7     a call of a tool, and its result
    search m        -> Error: search: RuntimeError: busy
    search m        -> 5
    add 7 5         -> 12
    12                       the answer

The reward is 1 for the right answer. How often a search fails is a part of the task, so that all members of a group meet the
same failures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from millstream.env.base import Step
from millstream.env.tools.parse import call_text
from millstream.seeds import derive_seed
from millstream.types import Task

KEYS = "abcdefghijklmnopqrstuvwxyz"
TOOL_OF = {"+": "add", "*": "multiply"}


class Lookup:
    is_quick = True
    max_turns = 1

    def __init__(self) -> None:
        self.tools: list[Callable[..., Any]] = [self.search, self.add, self.multiply]
        self._numbers: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._answer = ""

    @staticmethod
    def tasks(num: int, seed: int, failures: float = 0.25, keys: int = 8) -> Iterator[Task]:
        """`failures`: the chance that a search fails; another try of it fails with the same chance, twice at most."""
        rng = random.Random(derive_seed(seed, "lookup"))
        for number in range(num):
            first, second = rng.sample(KEYS[:keys], 2)
            numbers = {first: rng.randrange(10), second: rng.randrange(10)}
            busy = {key: next((n for n in range(2) if rng.random() >= failures), 2) for key in numbers}
            sign = rng.choice("+*")
            left, right = numbers.values()
            answer = left + right if sign == "+" else left * right
            data = {"numbers": numbers, "busy": busy, "sign": sign}
            yield Task(id=str(number), prompt=f"{first}{sign}{second}", answer=str(answer), data=data)

    @staticmethod
    def gold(task: Task) -> list[str]:
        """Searches, again where one fails; the sum or the product; the answer."""
        numbers: dict[str, int] = task.data["numbers"]
        searches = [call_text("search", key=key) for key in numbers for _ in range(1 + task.data["busy"][key])]
        left, right = numbers.values()
        return [*searches, call_text(TOOL_OF[task.data["sign"]], a=left, b=right), str(task.answer)]

    def search(self, key: str) -> int:
        """The number of a key. It may be busy: then try again."""
        if self._failures.get(key, 0):
            self._failures[key] -= 1
            raise RuntimeError("busy")
        return self._numbers[key]

    def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b

    def multiply(self, a: int, b: int) -> int:
        """The product of two numbers."""
        return a * b

    def reset(self, task: Task, seed: int) -> str:
        self._numbers = dict(task.data["numbers"])
        self._failures = dict(task.data["busy"])
        self._answer = str(task.answer)
        return str(task.prompt)

    def step(self, action: str) -> Step:
        return Step(reward=float(action.strip() == self._answer), is_done=True)
