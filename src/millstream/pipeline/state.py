"""The pipeline's part of a checkpoint, taken between two batches: everything but the learner's state.

It holds no random state: every draw is a function of the run's seed and of ids (`millstream.seeds`), so that work that is
repeated after a crash draws the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec import Struct

from millstream.learner import Snapshot
from millstream.store import Saved

CRITIC_FOLDER = "critic"


class GroupState(Struct, frozen=True, kw_only=True):
    """One group in flight."""

    task_id: str
    epoch: int
    start: int
    deadline: int
    kept: list[int]
    """Members whose rollouts are among the store's rows."""
    to_do: list[int]
    """Members that have to be rolled out, again or for the first time. A member in neither list has failed for good, or was
    aborted."""
    restarts: int = 0
    """How often its rollouts were aborted and started again."""
    prompt: int = -1
    """The number of its prompt in the data. -1: that of the group."""
    first_attempt: int = -1
    """The number of its rollouts' first attempts since its last restart. -1: it follows from `rollout.retries`."""

    def prompt_of(self, group_id: int) -> int:
        return group_id if self.prompt < 0 else self.prompt


class Ledger(Struct, frozen=True, kw_only=True):
    version: int
    next_group: int
    """The id of the next group."""
    groups: dict[int, GroupState]
    vacant: list[int]
    """Groups among them whose place in the batch stays empty: their fate has been recorded."""
    num_replaced: int
    num_failed_in_a_row: int
    next_prompt: int = -1
    """The data cursor: the number of the next prompt. -1: that of the next group, as it is until a prompt is fed again."""
    to_feed: list[int] = []
    """Prompts before it that are fed again: those of superseded groups."""
    lengths: dict[str, tuple[int, float]] = {}
    """Longest first: by task, how many rollouts have ended and their mean length (`pipeline.lengths`)."""


class PipelineState(NamedTuple):
    """The ledger and the store's rows, of one moment."""

    ledger: Ledger
    rows: Saved


class LearnerAndCritic(NamedTuple):
    """The states of a learner and of a critic. The critic's has a folder of its own inside the learner's."""

    learner: Snapshot
    critic: Snapshot

    def write(self, folder: Path) -> None:
        self.learner.write(folder)
        (folder / CRITIC_FOLDER).mkdir()
        self.critic.write(folder / CRITIC_FOLDER)


class Checkpointer(Protocol):
    """Writes checkpoints."""

    @property
    def version(self) -> int | None:
        """Of the newest one that is written; None if there is none."""
        ...

    def is_due(self, version: int, *, is_last: bool) -> bool:
        """Asked between two batches, before the first, and after the last; `is_last`: the run stops here."""
        ...

    def mark(self) -> int:
        """The position in the event log at the moment of the state."""
        ...

    async def keep(self, standing: PipelineState, mark: int, snapshot: Snapshot, held_s: float) -> None:
        """Returns as soon as training may continue. Never raises because a checkpoint could not be written."""
        ...
