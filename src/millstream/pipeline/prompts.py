"""The prompts that `feed` admits: tasks of the data in their order, or rollouts from outside in the order of their rewards.

Every prompt has a number, its place in that order. A resumed run reads them from the first on: those that were admitted before
the checkpoint continue (`Resumption.take_up`), and only the others are yielded.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable

from millstream.pipeline.admission import Admission
from millstream.pipeline.context import RunContext
from millstream.pipeline.outside import TOO_OLD, OutsideRollouts, outside_start
from millstream.pipeline.policy import SchedulingPolicy
from millstream.pipeline.resume import Resumption
from millstream.types import Task


class Prompts:
    """`tasks`: (epoch, task), read one ahead, as room appears. `outside`: rollouts from outside, which are read instead."""

    def __init__(
        self,
        tasks: Iterable[tuple[int, Task]],
        outside: OutsideRollouts | None,
        context: RunContext,
        *,
        admission: Admission,
        policy: SchedulingPolicy,
        resumption: Resumption,
    ) -> None:
        self._tasks = tasks
        self._outside = outside
        self._context = context
        self._admission = admission
        self._policy = policy
        self._resumption = resumption

    async def room_for(self, task: Task) -> int:
        """The version that its group starts at, as soon as there is room. `TOO_OLD`: a rollout from outside that is dropped."""
        until, outside = self._context.notifier.until, self._outside
        if outside is None:
            return await until(self._policy.may_start)
        start = await until(lambda: outside_start(outside.oldest_version(task), self._admission))
        if start == TOO_OLD:
            outside.drop(task, self._admission.version)
        return start

    async def __aiter__(self) -> AsyncIterator[tuple[int, int, Task]]:
        """The prompts to admit, each with its number and epoch: in a resumed run, first those that are fed again."""
        again: list[tuple[int, int, Task]] = []
        async for prompt, (epoch, task) in self._numbered():
            if prompt >= self._context.next_prompt:
                yield prompt, epoch, task
            elif prompt in self._context.to_feed:
                again.append((prompt, epoch, task))
            else:  # it was admitted before the checkpoint
                self._resumption.take_up(prompt, task)
            if prompt + 1 >= self._context.next_prompt:  # before the next task is waited for
                for one in again:
                    yield one
                again = []
        for one in again:
            yield one

    async def _numbered(self) -> AsyncIterator[tuple[int, tuple[int, Task]]]:
        if self._outside is None:
            for numbered in enumerate(self._tasks):
                yield numbered
        else:
            rewarded = aiter(self._outside)
            for prompt in itertools.count():
                with self._context.waits.idle("feed", "a rewarded session"):
                    task = await anext(rewarded)
                yield prompt, (0, task)
