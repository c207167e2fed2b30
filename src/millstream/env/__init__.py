"""The seam to the world: an environment drives one rollout by calling `generate`, and returns its reward.

An environment is a coroutine function of its own: as many of them run at once as there are rollouts, and none waits for
another. What it raises is recorded as a failed rollout and retried; it never stops the run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

from millstream.types import Completion, Task

T = TypeVar("T")


class Context(Protocol):
    """What an environment gets for one rollout."""

    task: Task
    seed: int
    """For randomness of the environment's own: the same rollout gets the same seed."""

    async def generate(self, tokens: Sequence[int]) -> Completion:
        """Append these tokens to the trajectory (they are not trained) and let the model take its turn (it is)."""
        ...

    async def waiting(self, what: str, work: Awaitable[T]) -> T:
        """Await something of the environment's own under a name, which the terminal shows and a timeout tells."""
        ...


class Environment(Protocol):
    async def rollout(self, context: Context) -> float:
        """Play one episode and return its reward. May raise anything: the rollout has then failed."""
        ...
