"""The files of a new environment: a package with a small game, a test and a config that trains it."""

from __future__ import annotations

import keyword
import re
import sys

from millstream.errors import ConfigError

VALID = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
MAX_LENGTH = 64
TAKEN = {"millstream", "test", "tests", "train"}

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "An environment for Millstream"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["millstream"]

[tool.hatch.build.targets.wheel]
only-include = ["{module}.py"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""
MODULE = '''\
"""Guess a number in three turns: every guess is answered with h (higher) or l (lower)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from millstream.env import Step
from millstream.types import Task


class {kind}:
    """One object plays one episode."""

    is_quick = True  # its methods return at once and need no thread
    max_turns = 3

    def __init__(self, top: int = 7) -> None:
        self.top = top

    @staticmethod
    def tasks(num: int, seed: int, top: int = 7) -> Iterator[Task]:
        """The tasks to train on: the same for the same seed."""
        rng = random.Random(seed)
        for number in range(num):
            yield Task(id=str(number), prompt=f"1-{{top}}", answer=str(rng.randint(1, top)))

    @staticmethod
    def gold(task: Task, top: int = 7) -> list[str]:
        """The turns of a perfect player, here a binary search: for `millstream env check` and [warmup]."""
        low, high, said = 1, top, list[str]()
        while not said or said[-1] != task.answer:
            middle = (low + high) // 2
            said.append(str(middle))
            if middle < int(task.answer or 0):
                low = middle + 1
            else:
                high = middle - 1
        return said

    def reset(self, task: Task, seed: int) -> str:
        """What the model is shown first. All randomness comes from the task and the seed."""
        self.number = int(task.answer or 0)
        return f"1-{{self.top}}>"

    def step(self, action: str) -> Step:
        """What the model's turn leads to: an observation, or the end, with a reward from 0 to 1."""
        said = action.strip()
        if said == str(self.number):
            return Step(reward=1.0, is_done=True)
        is_lower = said.isdecimal() and len(said) < 10 and int(said) < self.number
        return Step(observation="h>" if is_lower else "l>")
'''
TEST = '''\
"""The environment keeps its promises."""

from __future__ import annotations

from millstream.run.env_check import run_env_check
from millstream.types import Task

from {module} import {kind}


def test_the_environment_is_fit() -> None:
    (report,) = run_env_check("{module}:{kind}", [], None)
    assert report.is_fit, report.findings


def test_a_wrong_guess_is_answered_and_a_right_one_ends_the_episode() -> None:
    game = {kind}()
    assert game.reset(Task(id="0", prompt="", answer="5"), seed=0) == "1-7>"
    assert game.step("4").observation == "h>"
    assert game.step("nothing").observation == "l>"
    assert game.step("5").is_done and game.step("5").reward == 1.0
'''
CONFIG = """\
# A tiny model learns the game from scratch: a few minutes on two cores, nothing is downloaded.
#     millstream train train.toml
# With a model of your own: [model] path = "...", without [model.tiny] and [warmup].

seed = 0

[model.tiny]
context = 48
alphabet = "0123456789-hl>"

[[environment]]
use = "{module}.py:{kind}"
args = {{ top = 7 }}

[data]                        # no path: the environment makes its tasks
size = 2000
holdout = 128

[warmup]                      # supervised training on `gold`, until some episodes are right
learning_rate = 3e-3
batch_size = 32
stop_at = 0.3
check_every = 5

[rollout]
group_size = 8
max_tokens = 2                # a digit and the end of the turn

[pipeline]
steps = 60
groups_per_step = 16
max_lag = 2

[learner]
learning_rate = 5e-4

[evaluation]
every_steps = 20
"""
README = """\
# {name}

An environment for Millstream: guess a number in three turns. Change `{module}.py` into your own game.

    pip install -e .                       # or work in this folder without it
    pytest                                 # the test
    millstream env check {module}.py:{kind}
    millstream train train.toml

| file | is |
|---|---|
| `{module}.py` | the environment: `tasks`, `gold`, `reset`, `step` |
| `test_{module}.py` | its test |
| `train.toml` | a config that trains it |

Others use it after `pip install {name}`, with `use = "{module}:{kind}"` in an `[[environment]]`.
"""


def environment_files(name: str) -> dict[str, str]:
    """The texts by file name. Raises `ConfigError` for a name that cannot be that of a package and of a module."""
    module = name.replace("-", "_")
    if not VALID.fullmatch(name) or len(name) > MAX_LENGTH:
        raise ConfigError(
            f"{name!r} cannot be the name of a package: expected small letters, digits and single hyphens, such as word-game"
        )
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or module in TAKEN:
        raise ConfigError(
            f"{name!r} is the name of a module of Python or Millstream: choose another, such as {name}-game"
        )
    words = {"name": name, "module": module, "kind": "".join(part.capitalize() for part in module.split("_"))}
    texts = {
        "pyproject.toml": PYPROJECT,
        f"{module}.py": MODULE,
        f"test_{module}.py": TEST,
        "train.toml": CONFIG,
        "README.md": README,
    }
    return {file: text.format(**words) for file, text in texts.items()}
