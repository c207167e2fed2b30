"""Rollouts from outside: sampled by the run's engines in real use, and rewarded later.

Each is a group of one member. It was sampled before its group is admitted, so the group starts at the oldest version that
sampled a token of it. It is admitted while the lag bound holds for that version, or dropped: nothing is trained that is older
than max_lag, and nothing that was not admitted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from msgspec import Struct

from millstream.env import Context
from millstream.errors import InvariantError
from millstream.pipeline.admission import Admission
from millstream.pipeline.episode import EpisodePart
from millstream.types import Completion, Finish, Task

TOO_OLD = -1


class OutsideTurn(Struct, frozen=True, array_like=True):
    shown: list[int]  # tokens before the answer, that are new in its part
    answer: Completion


class OutsideRollout(Struct, frozen=True, kw_only=True):
    """One rollout with its reward; its parts, turn by turn."""

    reward: float
    parts: list[list[OutsideTurn]]

    @property
    def versions(self) -> set[int]:
        return {version for part in self.parts for turn in part for version in turn.answer.versions}


class OutsideRollouts(Protocol):
    """The tasks of rollouts in the order in which they were rewarded, from the first on, also in a resumed run. Waits for the
    next one without end."""

    def __aiter__(self) -> AsyncIterator[Task]: ...

    def oldest_version(self, task: Task) -> int: ...

    async def read(self, task: Task) -> OutsideRollout: ...

    def drop(self, task: Task, version: int) -> None:
        """It is too old at this version, and is not trained."""
        ...


class OutsideEnvironment:
    """Plays a rollout from outside again: nothing is generated."""

    def __init__(self, rollouts: OutsideRollouts) -> None:
        self._rollouts = rollouts

    async def rollout(self, context: Context) -> float:
        if not isinstance(context, EpisodePart):
            raise InvariantError("a rollout from outside is played in an episode")
        rollout = await self._rollouts.read(context.task)
        for number, turns in enumerate(rollout.parts):
            part = context.part() if number else context
            for turn in turns:
                part.add_turn(turn.shown, turn.answer)
        return rollout.reward


def outside_start(oldest: int, admission: Admission) -> int | None:
    """The version that its group starts at; None: there is no room yet."""
    start = min(oldest, admission.version)
    if start + admission.bound < admission.version:
        return TOO_OLD
    return start if admission.may_admit(start) else None


def as_turns(
    tokens: Sequence[int],
    mask: Sequence[bool],
    logprobs: Sequence[float],
    versions: Sequence[int],
    finish: Finish,
) -> list[OutsideTurn]:
    """One sequence as turns: each run of sampled tokens and what was shown before it. `finish`: of the last one."""
    begins = [n for n in range(len(mask)) if mask[n] and (n == 0 or not mask[n - 1])]
    found, after = [], 0
    for begin in begins:
        end = next((n for n in range(begin, len(mask)) if not mask[n]), len(mask))
        answer = Completion(
            tokens=tuple(tokens[begin:end]),
            logprobs=tuple(logprobs[begin:end]),
            versions=tuple(versions[begin:end]),
            finish=finish,
        )
        found.append(OutsideTurn(list(tokens[after:begin]), answer))
        after = end
    return found
