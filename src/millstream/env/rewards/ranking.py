"""Rewards of a whole group: what counts is how a completion stands among the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from millstream.env.rewards.mathematics import math_answer
from millstream.env.rewards.text import exact_match
from millstream.types import Task

RIGHT = {"exact_match": exact_match, "math_answer": math_answer}


def shortest_right(
    task: Task,
    completions: Sequence[str],
    *,
    right: Literal["exact_match", "math_answer"] = "exact_match",
    longest: float = 0.5,
) -> list[float]:
    """Among the right answers the shortest gets 1 and the longest gets `longest`, the others by their place in between (equal
    lengths share the better place). Wrong answers get 0; a single right one gets 1."""
    is_right = [RIGHT[right](task, completion) >= 1.0 for completion in completions]
    lengths = sorted(len(completion) for completion, good in zip(completions, is_right, strict=True) if good)
    step = (1.0 - longest) / (len(lengths) - 1) if len(lengths) > 1 else 0.0
    return [
        1.0 - step * lengths.index(len(completion)) if good else 0.0
        for completion, good in zip(completions, is_right, strict=True)
    ]
