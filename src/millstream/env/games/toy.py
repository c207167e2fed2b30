"""Small verifiable tasks, made on the spot from a seed: for the demo, the tests and first experiments."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from millstream.errors import ConfigError
from millstream.seeds import derive_seed
from millstream.types import Task

# Every character that a toy task may use: the vocabulary of a tiny model.
ALPHABET = string.digits + string.ascii_lowercase + "+=>"


def _sort_digits(rng: random.Random) -> tuple[str, str]:
    digits = [rng.choice(string.digits) for _ in range(5)]
    return "".join(digits) + ">", "".join(sorted(digits))


def _reverse_letters(rng: random.Random) -> tuple[str, str]:
    letters = "".join(rng.choice(string.ascii_lowercase) for _ in range(8))
    return letters + ">", letters[::-1]


def _add_numbers(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    return f"{a:02d}+{b:02d}=", f"{a + b:03d}"


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sort_digits": _sort_digits,
    "reverse_letters": _reverse_letters,
    "add_numbers": _add_numbers,
}


def make_toy_tasks(name: str, num_tasks: int, seed: int) -> list[Task]:
    """Distinct tasks; fewer than asked for if there are not that many."""
    if name not in TASKS:
        raise ConfigError(f"no toy task {name!r}: choose one of {', '.join(TASKS)}")
    rng = random.Random(derive_seed(seed, "toy", name))
    found: dict[str, str] = {}
    for _ in range(20 * num_tasks):
        prompt, answer = TASKS[name](rng)
        found.setdefault(prompt, answer)
        if len(found) == num_tasks:
            break
    return [Task(id=prompt, prompt=prompt, answer=answer) for prompt, answer in found.items()]
