"""Rewards that runs of tests name in their configs."""

from __future__ import annotations

from millstream.types import Task


def digits(task: Task, completion: str) -> float:
    """A model that has learned nothing gets a part of it, and not always the same."""
    return sum(letter.isdigit() for letter in completion) / 8
