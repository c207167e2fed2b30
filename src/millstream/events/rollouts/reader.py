"""Reads RUN/rollouts/ of a run that is active, killed or finished: every rollout with what became of it.

Heads are read at once, bodies when a group is asked for. What a crash and a resume undid is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millstream.errors import ConfigError, DataError
from millstream.events.rollouts.chunks import ChunkHead, ChunkPlace, DecodedChunk, read_body, read_heads
from millstream.events.rollouts.records import Attempt, TakenRows
from millstream.events.rollouts.writer import NUM_STRATA, ROLLOUTS_FOLDER, read_sampled, stratum_file
from millstream.types import Floats, Rollout, TrainRow

MAX_CHUNKS_HELD = 64


class KeptRollout(NamedTuple):
    """One attempt of a member, and what became of it. None: it was not trained, or not yet."""

    group_id: int
    member: int
    attempt: int
    task_id: str
    epoch: int
    parts: tuple[Rollout, ...]
    reward: float  # of its first part, with that of the group as a whole; NaN if it has none
    reward_parts: dict[str, float]
    fate: str
    why: str  # it failed or was aborted
    step: int | None  # the version that it was trained into: the first step is 1
    lag: int | None
    advantages: tuple[Floats, ...] | None  # of each part, one a token

    @property
    def num_sampled(self) -> int:
        return sum(int(np.count_nonzero(part.loss_mask)) for part in self.parts)

    @property
    def advantage(self) -> float:
        """The mean over its sampled tokens; NaN if it was not trained."""
        if self.advantages is None:
            return math.nan
        pairs = zip(self.advantages, self.parts, strict=True)
        sampled_N = np.concatenate([own[part.loss_mask] for own, part in pairs])
        return float(sampled_N.mean()) if len(sampled_N) else math.nan

    @property
    def versions(self) -> tuple[int, int] | None:
        """The lowest and the highest version that sampled it; None: nothing was sampled."""
        found = [part.versions[part.loss_mask] for part in self.parts if part.loss_mask.any()]
        return (min(int(v.min()) for v in found), max(int(v.max()) for v in found)) if found else None


class _Chunk(NamedTuple):
    head: ChunkHead
    place: ChunkPlace
    upto: float  # records after this number are void


class _Group:
    """What is known of a group from the heads."""

    __slots__ = ("chunks", "fate", "first_attempt", "rewards", "taken", "task_id")

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        self.taken: tuple[int, int] | None = None  # number and version
        self.task_id = ""  # until it has left
        self.fate: str | None = None
        self.rewards: list[float] = []
        self.first_attempt = 0


class RolloutDump:
    """The rollouts of a run folder, by group."""

    def __init__(self, run_dir: Path) -> None:
        """Raises `ConfigError` if the run has kept none."""
        self.folder = run_dir / ROLLOUTS_FOLDER
        if not self.folder.is_dir():
            raise ConfigError(
                f"{run_dir} has no rollouts: it has no folder {ROLLOUTS_FOLDER}. A run keeps them unless rollout.keep_gb = 0"
            )
        self.sampled = read_sampled(self.folder)
        self._groups: dict[int, _Group] = {}
        for stratum in range(self.sampled.level, NUM_STRATA):
            self._read(stratum_file(self.folder, stratum))
        self._held: dict[ChunkPlace, DecodedChunk] = {}

    @property
    def groups(self) -> list[int]:
        return sorted(self._groups)

    def step_of(self, group_id: int) -> int | None:
        """The version that it was trained into, or is about to be; None: it was not."""
        taken = self._groups[group_id].taken
        return None if taken is None else taken[1] + 1

    def fate_of(self, group_id: int) -> str | None:
        """None: it is in flight."""
        return self._groups[group_id].fate

    def task_of(self, group_id: int) -> str:
        """Of a group that has left."""
        return self._groups[group_id].task_id

    def last_trained(self) -> dict[str, tuple[int, float]]:
        """By task: the group that was trained last, and the mean of its rewards."""
        found: dict[str, tuple[int, float]] = {}
        trained = [(group.taken, group_id) for group_id, group in self._groups.items() if group.fate == "trained"]
        for _, group_id in sorted((taken, group_id) for taken, group_id in trained if taken is not None):
            group = self._groups[group_id]
            found[group.task_id] = group_id, math.fsum(group.rewards) / max(1, len(group.rewards))
        return found

    def rollouts(self, group_id: int) -> list[KeptRollout]:
        """In the order of members and attempts."""
        group, taken = self._groups[group_id], self._taken(group_id)
        last = {(one.member, one.attempt): one for one in self._attempts(group_id)}  # a resumed run may repeat one
        attempts = [last[key] for key in sorted(last)]
        scored = self._scored(group, attempts)
        return [self._kept(one, group, taken, scored.get((one.member, one.attempt))) for one in attempts]

    def taken_rows(self, group_id: int) -> TakenRows | None:
        """What the learner got of it, tokens included; None if it was not taken. Raises `DataError` if files lack some."""
        found = self._taken(group_id)
        if found is None:
            return None
        last = self._last_parts(group_id)
        missing = [place for place in found.places if place not in last]
        if missing:
            raise DataError(
                f"{self.folder}: group {group_id} was trained with {len(found.places)} rows, and {len(missing)} of them are "
                "missing from the files"
            )
        rows = [_joined_row(last[place], row, group_id) for place, row in zip(found.places, found.rows, strict=True)]
        return found._replace(rows=rows)

    def batches(self) -> dict[int, list[int]]:
        """By version that was trained: the groups of its batch, in the order in which they joined it."""
        found: dict[int, list[tuple[int, int]]] = {}
        for group_id, group in self._groups.items():
            if group.taken is not None:
                found.setdefault(group.taken[1], []).append((group.taken[0], group_id))
        return {version: [group_id for _, group_id in sorted(found[version])] for version in sorted(found)}

    # ---- from the heads ------------------------------------------------------------------------------------------------

    def _read(self, path: Path) -> None:
        chunks: list[_Chunk] = []
        try:
            for head, place in read_heads(path):
                if head.cut is not None:
                    chunks = [one._replace(upto=min(one.upto, head.cut)) for one in chunks]
                else:
                    chunks.append(_Chunk(head, place, math.inf))
        except FileNotFoundError:  # none of its groups has come yet, or the run deletes it
            return
        for chunk in chunks:
            self._add(chunk)

    def _add(self, chunk: _Chunk) -> None:
        head, upto = chunk.head, chunk.upto
        for group_id in head.groups:
            self._group(group_id).chunks.append(chunk)
        for taken in head.taken:
            if taken.seq <= upto:
                self._group(taken.group_id).taken = taken.seq, taken.version
        for left in head.fates:
            if left.seq <= upto:
                self._group(left.group_id).task_id = left.task_id
                self._group(left.group_id).fate = left.fate
                self._group(left.group_id).rewards = left.rewards
        for restart in head.restarts:
            if restart.seq <= upto:
                self._group(restart.group_id).first_attempt = restart.first_attempt

    def _group(self, group_id: int) -> _Group:
        return self._groups.setdefault(group_id, _Group())

    # ---- from the bodies -----------------------------------------------------------------------------------------------

    def _decoded(self, chunk: _Chunk) -> DecodedChunk:
        """Groups that are read one after the other are in few chunks."""
        found = self._held.pop(chunk.place, None)
        if found is None:
            found = read_body(chunk.head, chunk.place)
        self._held[chunk.place] = found  # the newest is last
        if len(self._held) > MAX_CHUNKS_HELD:
            del self._held[next(iter(self._held))]
        return found

    def _attempts(self, group_id: int) -> Iterator[Attempt]:
        for chunk in self._groups[group_id].chunks:
            for seq, attempt in self._decoded(chunk).attempts:
                if attempt.group_id == group_id and seq <= chunk.upto:
                    yield attempt

    def _taken(self, group_id: int) -> TakenRows | None:
        """Without tokens."""
        group = self._groups[group_id]
        if group.taken is None:
            return None
        return next(
            own
            for chunk in group.chunks
            for head, own in zip(chunk.head.taken, self._decoded(chunk).taken, strict=True)
            if (head.seq, head.group_id) == (group.taken[0], group_id) and head.seq <= chunk.upto
        )

    def _last_parts(self, group_id: int) -> dict[tuple[int, int], Rollout]:
        """The parts of each member's last attempt that ended."""
        ended = [one for one in self._attempts(group_id) if one.outcome == "ended"]
        ended = [one for one in ended if one.attempt >= self._groups[group_id].first_attempt]
        return {(part.member, part.part): part for one in ended for part in one.parts}

    def _scored(self, group: _Group, attempts: list[Attempt]) -> dict[tuple[int, int], float]:
        """The final reward of each attempt that ended and counts."""
        counted = [one for one in attempts if one.outcome == "ended" and one.attempt >= group.first_attempt]
        rewards = group.rewards if len(group.rewards) == len(counted) else [one.parts[0].reward for one in counted]
        return {(one.member, one.attempt): reward for one, reward in zip(counted, rewards, strict=True)}

    def _kept(self, one: Attempt, group: _Group, taken: TakenRows | None, reward: float | None) -> KeptRollout:
        places = {} if taken is None else dict(zip(taken.places, taken.rows, strict=True))
        own = [places.get((part.member, part.part)) for part in one.parts] if reward is not None else []
        rows = [row for row in own if row is not None]
        is_taken = taken is not None and bool(own) and len(rows) == len(own)
        return KeptRollout(
            *one[:6],
            reward=one.parts[0].reward if reward is None and one.parts else math.nan if reward is None else reward,
            reward_parts=dict(one.reward_parts),
            fate=_fate(one, group),
            why=one.why,
            step=taken.version + 1 if taken is not None and is_taken else None,
            lag=taken.version - min(part.start_version for part in one.parts)
            if taken is not None and is_taken
            else None,
            advantages=tuple(row.advantages for row in rows) if is_taken else None,
        )


def _fate(one: Attempt, group: _Group) -> str:
    if one.outcome != "ended":
        return one.outcome
    if one.attempt < group.first_attempt:
        return "restarted"
    return "in flight" if group.fate is None else group.fate


def _joined_row(part: Rollout, row: TrainRow, group_id: int) -> TrainRow:
    """As `pipeline.schema.train_rows` makes it."""
    name = f", part {part.part}" if part.part else ""
    return TrainRow(
        tokens=part.tokens,
        loss_mask=part.loss_mask,
        logprobs=part.logprobs,
        advantages=row.advantages,
        reference=row.reference,
        values=row.values,
        returns=row.returns,
        label=f"group {group_id}, member {part.member}{name}",
    )
