"""Reads RUN/rollouts/ of a run that is active, killed or finished: every rollout with what became of it.

Groups are read one after the other, in the order in which they left the run: memory holds the groups that were in flight at one
moment, and the bodies that were read last. A body is read when a group's rollouts are asked for. What a crash and a resume
undid is left out.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millstream.errors import ConfigError, DataError
from millstream.events.rollouts.chunks import (
    ChunkHead,
    ChunkPlace,
    DecodedChunk,
    FateHead,
    RestartHead,
    TakenHead,
    TrainedHead,
    read_body,
    read_heads,
)
from millstream.events.rollouts.records import Attempt, TakenRows
from millstream.events.rollouts.writer import NUM_STRATA, ROLLOUTS_FOLDER, read_sampled, stratum_file, stratum_of
from millstream.types import Floats, HalfFloats, Rollout, TrainRow

_Record = TakenHead | TrainedHead | FateHead | RestartHead
MAX_BYTES_HELD = 64 << 20  # of bodies


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
    trained_logprobs: tuple[Floats, ...] | None
    """Of each part, one a token: the learner's log-probability when it trained the token. NaN: the token was not trained. None
    also where a run did not record them."""

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

    @property
    def is_whole(self) -> bool:
        return self.head.last_seq <= self.upto


class KeptGroup:
    """What the heads say of a group. `departure`: the number of the last event that changed its fate."""

    __slots__ = ("chunks", "departure", "group_id", "left", "restarts", "taken", "taken_in", "trained", "trained_in")

    def __init__(self, group_id: int) -> None:
        self.group_id = group_id
        self.chunks: list[_Chunk] = []
        self.taken: TakenHead | None = None
        self.taken_in: _Chunk | None = None
        self.trained: TrainedHead | None = None
        self.trained_in: _Chunk | None = None
        self.left: FateHead | None = None  # None: it is in flight
        self.restarts: list[RestartHead] = []
        self.departure = math.inf

    @property
    def version(self) -> int | None:
        """That it was trained at, or is about to be; None: no batch took it."""
        return None if self.taken is None else self.taken.version

    @property
    def fate(self) -> str | None:
        """None: it is in flight."""
        return None if self.left is None else self.left.fate

    @property
    def task_id(self) -> str:
        """Of a group that has left."""
        return "" if self.left is None else self.left.task_id

    @property
    def rewards(self) -> list[float]:
        return [] if self.left is None else self.left.rewards

    def restart_of(self, seq: int, member: int) -> RestartHead | None:
        """What made an attempt of this number void."""
        return next((one for one in self.restarts if seq < one.seq and member not in one.kept), None)

    def add(self, record: _Record, chunk: _Chunk) -> bool:
        """Returns whether it has left: nothing more will come of it."""
        match record:
            case TakenHead():
                self.taken = record
                self.taken_in = chunk
            case TrainedHead():
                self.trained = record
                self.trained_in = chunk
            case FateHead():
                self.left = record
            case RestartHead():
                self.restarts.append(record)
        has_left = self.left is not None and (not self.left.is_vacant or self.taken is not None)
        self.departure = record.seq if has_left else math.inf
        return has_left


class _File(NamedTuple):
    """One stratum, as far as it was written when the dump was opened."""

    path: Path
    end: int
    cuts: list[tuple[int, int]]  # where a mark stands, and the last number that it leaves valid

    def chunks(self) -> Iterator[_Chunk]:
        for head, place in read_heads(self.path, self.end) if self.end else ():
            if head.cut is None:
                upto = min((seq for where, seq in self.cuts if where > place.begin), default=math.inf)
                yield _Chunk(head, place, upto)

    def groups(self) -> Iterator[KeptGroup]:
        """Those that left, in that order; then the others."""
        in_flight: dict[int, KeptGroup] = {}
        for chunk in self.chunks():
            head = chunk.head
            for group_id in head.groups:
                in_flight.setdefault(group_id, KeptGroup(group_id)).chunks.append(chunk)
            records: list[_Record] = [*head.taken, *head.trained, *head.fates, *head.restarts]
            for record in sorted((one for one in records if one.seq <= chunk.upto), key=attrgetter("seq")):
                group_id = record.group_id
                if in_flight.setdefault(group_id, KeptGroup(group_id)).add(record, chunk):
                    yield in_flight.pop(group_id)
        yield from in_flight.values()


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
        self._files = {number: _open(stratum_file(self.folder, number)) for number in self._strata}
        self._held: dict[ChunkPlace, DecodedChunk] = {}  # the newest is last
        self._num_bytes_held = 0

    @property
    def _strata(self) -> range:
        return range(self.sampled.level, NUM_STRATA)

    def groups(self) -> Iterator[KeptGroup]:
        """Those that left, in that order; then the others."""
        return heapq.merge(*(file.groups() for file in self._files.values()), key=attrgetter("departure"))

    def group(self, group_id: int) -> KeptGroup | None:
        """None: it is not in the files."""
        file = self._files.get(stratum_of(group_id))
        return None if file is None else next((one for one in file.groups() if one.group_id == group_id), None)

    def rollouts(self, group: KeptGroup) -> list[KeptRollout]:
        """In the order of members and attempts."""
        taken, trained = self._taken(group), self._trained(group)
        attempts = sorted(self._attempts(group), key=lambda one: (one[1].member, one[1].attempt, one[0]))
        counted = [one for seq, one in attempts if _counts(seq, one, group)]
        rewards = iter(group.rewards)
        if len(group.rewards) != len(counted):  # it is in flight, was superseded, or some could not be written
            rewards = iter([one.parts[0].reward for one in counted])
        return [
            _kept(seq, one, group, taken, trained, next(rewards) if _counts(seq, one, group) else None)
            for seq, one in attempts
        ]

    def taken_rows(self, group: KeptGroup) -> TakenRows | None:
        """What the learner got of it, tokens included; None if it was not taken. Raises `DataError` if files lack some."""
        found = self._taken(group)
        if found is None:
            return None
        counted = [one for seq, one in self._attempts(group) if _counts(seq, one, group)]
        last = {(part.member, part.part): part for one in counted for part in one.parts}
        missing = [place for place in found.places if place not in last]
        if missing:
            raise DataError(
                f"{self.folder}: group {group.group_id} was trained with {len(found.places)} rows, and {len(missing)} of them "
                "are missing from the files"
            )
        joined = zip(found.places, found.rows, strict=True)
        return found._replace(rows=[_joined_row(last[place], row, group.group_id) for place, row in joined])

    def num_attempts(self, group: KeptGroup) -> int:
        """How many rollouts of it are in the files. Reads a body only where a resume has undone a part of it."""
        if all(chunk.is_whole for chunk in group.chunks):
            heads = [chunk.head for chunk in group.chunks]
            return sum(head.num_attempts[bisect_left(head.groups, group.group_id)] for head in heads)
        return sum(1 for _ in self._attempts(group))

    # ---- from the bodies -----------------------------------------------------------------------------------------------

    def _decoded(self, chunk: _Chunk) -> DecodedChunk:
        """Groups that are read one after the other are in few chunks."""
        found = self._held.pop(chunk.place, None)
        if found is None:
            found = read_body(chunk.head, chunk.place)
            self._num_bytes_held += found.num_bytes
        self._held[chunk.place] = found
        while len(self._held) > 1 and self._num_bytes_held > MAX_BYTES_HELD:
            self._num_bytes_held -= self._held.pop(next(iter(self._held))).num_bytes
        return found

    def _attempts(self, group: KeptGroup) -> Iterator[tuple[int, Attempt]]:
        """With their numbers, in the order in which they ended."""
        for chunk in group.chunks:
            own = self._decoded(chunk).attempts.get(group.group_id, ())
            yield from ((seq, attempt) for seq, attempt in own if seq <= chunk.upto)

    def _taken(self, group: KeptGroup) -> TakenRows | None:
        """Without tokens."""
        if group.taken is None or group.taken_in is None:
            return None
        return self._decoded(group.taken_in).taken[group.taken_in.head.taken.index(group.taken)]

    def _trained(self, group: KeptGroup) -> Sequence[HalfFloats]:
        """The log ratios of its rows; empty: they are not recorded."""
        if group.trained is None or group.trained_in is None:
            return []
        decoded = self._decoded(group.trained_in)
        return decoded.trained[group.trained_in.head.trained.index(group.trained)].log_ratios


def _open(path: Path) -> _File:
    """Its marks, and where it ends now."""
    end, cuts = 0, []
    try:
        for head, place in read_heads(path):
            end = place.end
            if head.cut is not None:
                cuts.append((place.begin, head.cut))
    except FileNotFoundError:  # none of its groups has come yet, or the run deletes it
        pass
    return _File(path, end, cuts)


def _counts(seq: int, one: Attempt, group: KeptGroup) -> bool:
    """Whether it is among the rollouts that the group was settled with."""
    return one.outcome == "ended" and group.restart_of(seq, one.member) is None


def _kept(
    seq: int,
    one: Attempt,
    group: KeptGroup,
    taken: TakenRows | None,
    trained: Sequence[HalfFloats],
    reward: float | None,
) -> KeptRollout:
    places = {} if taken is None else dict(zip(taken.places, taken.rows, strict=True))
    own = [places.get((part.member, part.part)) for part in one.parts] if reward is not None else []
    rows = [row for row in own if row is not None]
    is_taken = taken is not None and bool(own) and len(rows) == len(own)
    return KeptRollout(
        *one[:6],
        reward=one.parts[0].reward if reward is None and one.parts else math.nan if reward is None else reward,
        reward_parts=dict(one.reward_parts),
        fate=_fate(seq, one, group),
        why=one.why,
        step=taken.version + 1 if taken is not None and is_taken else None,
        lag=taken.version - min(part.start_version for part in one.parts) if taken is not None and is_taken else None,
        advantages=tuple(row.advantages for row in rows) if is_taken else None,
        trained_logprobs=_trained_logprobs(one, taken, trained) if is_taken else None,
    )


def _trained_logprobs(
    one: Attempt, taken: TakenRows | None, trained: Sequence[HalfFloats]
) -> tuple[Floats, ...] | None:
    """None: a part has none, or not one for each of its sampled tokens."""
    if taken is None or len(trained) != len(taken.places):
        return None
    by_place = dict(zip(taken.places, trained, strict=True))
    found = []
    for part in one.parts:
        log_ratio_M, logprobs = by_place[part.member, part.part], np.full(len(part.tokens), np.nan, np.float32)
        if len(log_ratio_M) != np.count_nonzero(part.loss_mask):
            return None
        logprobs[part.loss_mask] = part.logprobs[part.loss_mask] + log_ratio_M
        found.append(logprobs)
    return tuple(found)


def _fate(seq: int, one: Attempt, group: KeptGroup) -> str:
    if one.outcome != "ended":
        return one.outcome
    if (restart := group.restart_of(seq, one.member)) is not None:
        return restart.fate
    return group.fate or "in flight"


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
