"""Longest first: which prompts have long rollouts, expected from those of the same prompt that have ended, in earlier epochs or
in its group.

Of the requests with one deadline, those of the longest prompt start first (`SchedulingPolicy.rank`), and the router counts a
request for as many tokens as its prompt lets expect, so that long ones go where least is to be sampled. What is admitted, its
start and its deadline do not depend on it, and where nothing is aborted (`surplus = "carry_over"`, `overdue = "wait"`) what is
trained does not either.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_PROMPTS = 1 << 17  # those that ended last
MAX_COUNT = 16  # rollouts of one prompt that its mean is of: lengths change with training
PRIOR = 2  # rollouts of average length that every prompt has from the start


class ExpectedLengths:
    """Means by task. All of the state is in `state`, for a checkpoint."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, float]] = {}  # rollouts and their mean, in the order of their changes
        self._count = 0  # these two: over all prompts
        self._sum = 0.0

    def add(self, task_id: str, num_sampled: int) -> None:
        """A rollout has ended."""
        count, mean = self._remove(task_id)
        count = min(count, MAX_COUNT - 1)
        self._put(task_id, count + 1, mean + (num_sampled - mean) / (count + 1))
        if len(self._prompts) > MAX_PROMPTS:
            self._remove(next(iter(self._prompts)))

    def relative(self, task_id: str) -> float:
        """The expected length of its next rollout, divided by the mean of all. 1 where nothing is known."""
        if not self._sum:
            return 1.0
        (count, mean), mean_of_all = self._prompts.get(task_id, (0, 0.0)), self._sum / self._count
        return (count * mean / mean_of_all + PRIOR) / (count + PRIOR)

    def state(self) -> dict[str, tuple[int, float]]:
        return dict(self._prompts)

    def restore(self, state: Mapping[str, tuple[int, float]]) -> None:
        for task_id, (count, mean) in state.items():
            self._put(task_id, count, mean)

    def _put(self, task_id: str, count: int, mean: float) -> None:
        self._prompts[task_id] = count, mean
        self._count += count
        self._sum += count * mean

    def _remove(self, task_id: str) -> tuple[int, float]:
        count, mean = self._prompts.pop(task_id, (0, 0.0))
        self._count -= count
        self._sum -= count * mean
        return count, mean
