"""What is recorded of rollouts: every attempt, the rows that a batch took and trained, and how each group left.

A record is made right after the event of the same moment, in the same step of the event loop. Its position in the log (`seq`)
says, as for events, whether a checkpoint covers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from millstream.types import HalfFloats, Rollout, Task, TrainRow

Outcome = Literal["ended", "failed", "aborted"]


class Attempt(NamedTuple):
    """One attempt of a member. One that failed or was aborted has the parts that it had played, with a reward of NaN."""

    group_id: int
    member: int
    attempt: int
    task_id: str
    epoch: int
    parts: tuple[Rollout, ...]
    outcome: Outcome = "ended"
    why: str = ""  # it failed or was aborted
    reward_parts: Mapping[str, float] = {}  # by reward function, before weights. Empty: the environment reported none
    task: Task | None = None  # None: it is not written


class TakenRows(NamedTuple):
    """A group that joined the batch of this version, as the learner gets it. No rows: its place stays empty."""

    group_id: int
    version: int
    number: int  # in the batch: 0, 1, 2, ...
    places: Sequence[tuple[int, int]]  # member and part of each row
    rewards: Sequence[float]  # of each row, with that of the group as a whole
    rows: Sequence[TrainRow]


class TrainedRows(NamedTuple):
    """A group whose rows were trained, in the order of its `TakenRows`."""

    group_id: int
    log_ratios: Sequence[HalfFloats]  # of each row: see `Learner.log_ratios`


class GroupFate(NamedTuple):
    group_id: int
    task_id: str
    fate: str  # as in `types.Fate`; "kept" in a run that trains nothing
    rewards: Sequence[float]  # of the members that ended, in their order
    is_vacant: bool = False  # a batch will take it without rows: its place stays empty


class Restart(NamedTuple):
    """All members but those that are kept are rolled out again. What was recorded of the others before does not count."""

    group_id: int
    fate: Literal["restarted", "superseded"]  # of the others, as far as they had ended
    kept: Sequence[int] = ()


Record = Attempt | TakenRows | TrainedRows | GroupFate | Restart


class RolloutSink(Protocol):
    """Keeps records. Called on the event loop, right after the event of the same moment; returns at once."""

    def add(self, record: Record) -> None: ...


class _NoRollouts:
    def add(self, record: Record) -> None:
        """Rollouts are not kept."""


NO_ROLLOUTS: RolloutSink = _NoRollouts()
