"""Small tasks for a shell, in the rollout's sandbox: write a word into a file, or compute what another file says.

    write owl                                       the task
    bash: echo owl > out                            a call of a tool, and its result
    done                                            the answer

    sum                                             the file n has 31+4+15
    bash: echo $(($(cat n))) > out
    done

The reward is 1 if the file `out` has the right content: what the model says does not count.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from millstream.env.base import Step
from millstream.env.sandbox.base import Sandbox
from millstream.env.tools.parse import call_text
from millstream.errors import EnvironmentFailed
from millstream.seeds import derive_seed
from millstream.types import Task

OUT = "out"
NUMBERS = "n"
VOWELS, CONSONANTS = "aeiou", "bdfgklmnprstw"


class ShellTasks:
    max_turns = 1
    sandbox: Sandbox | None = None  # set before `reset`

    def __init__(self) -> None:
        self._expected = ""

    @staticmethod
    def tasks(num: int, seed: int, numbers: int = 3) -> Iterator[Task]:
        """`numbers`: of a sum."""
        rng = random.Random(derive_seed(seed, "shell tasks"))
        for number in range(num):
            if rng.random() < 0.5:
                word = rng.choice(CONSONANTS) + rng.choice(VOWELS) + rng.choice(CONSONANTS)
                yield Task(id=str(number), prompt=f"write {word}", answer=word)
            else:
                terms = [rng.randrange(1, 100) for _ in range(numbers)]
                files = {NUMBERS: "+".join(map(str, terms)) + "\n"}
                yield Task(id=str(number), prompt="sum", answer=str(sum(terms)), data={"files": files})

    @staticmethod
    def gold(task: Task) -> list[str]:
        value = task.answer if str(task.prompt) != "sum" else f"$(($(cat {NUMBERS})))"
        return [call_text("bash", command=f"echo {value} > {OUT}"), "done"]

    async def reset(self, task: Task, seed: int) -> str:
        if self.sandbox is None:
            raise EnvironmentFailed("shell_tasks needs a sandbox: add a table [environment.sandbox]")
        self._expected = str(task.answer)
        return str(task.prompt)

    async def step(self, action: str) -> Step:
        assert self.sandbox is not None
        try:
            found = (await self.sandbox.read(OUT)).decode(errors="replace").strip()
        except OSError:  # it was not written
            found = ""
        return Step(reward=float(found == self._expected), is_done=True)
