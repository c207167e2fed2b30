"""The table of the bias report: one line for every rollout of the log."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from millstream.events.types import (
    Event,
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupResumed,
    GroupScored,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
)
from millstream.types import Fate, Mask

MAX_SOURCES = 32  # smaller ones are counted together
CLASSES = ("trained", "filtered", "failed", "group failed", "aborted", "in flight", "open")
TRAINED, FILTERED, FAILED, GROUP_FAILED, ABORTED, IN_FLIGHT, OPEN = range(len(CLASSES))

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]


class _MemberRecord(Struct):
    """One member of a group, over all its attempts."""

    since: float | None = None  # when the attempt in flight began
    is_done: bool = False  # an attempt has ended or failed
    is_lost: bool = False
    is_aborted: bool = False
    is_first_cut: bool = False
    is_first_failed: bool = False  # cut off by a failure, not on purpose
    first_tokens: float = 0.0
    first_seconds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    reward: float | None = None

    def finish(self, tokens: float, seconds: float, reward: float | None) -> None:
        if not self.is_done:
            self.is_done = True
            self.is_first_cut = reward is None
            self.first_tokens = tokens
            self.first_seconds = seconds
        self.tokens = tokens
        self.seconds = seconds
        self.reward = reward
        self.since = None

    def draw_again(self) -> None:
        self.is_aborted = False
        self.is_lost = False
        self.reward = None
        self.since = None


class _GroupRecord(Struct):
    task: str = ""
    source: str = ""
    fate: Fate | None = None
    is_restarted: bool = False
    members: dict[int, _MemberRecord] = field(default_factory=lambda: defaultdict(_MemberRecord))

    def resume(self, event: GroupResumed) -> None:
        for number in event.to_do:  # the same draws come again, except those from before a restart
            if self.is_restarted:
                self.members[number].draw_again()
            else:
                self.members[number] = _MemberRecord()
        for number, member in self.members.items():
            if number not in event.kept and number not in event.to_do:
                member.is_lost = True
                member.since = None

    def score(self, rewards: Sequence[float]) -> None:
        """As a whole, each reward with the member's own. Empty: that failed."""
        ended = [member for _, member in sorted(self.members.items()) if member.reward is not None]
        if len(rewards) == len(ended):
            for member, reward in zip(ended, rewards, strict=True):
                member.reward = reward

    def restart(self) -> None:
        """Every member draws again; what it drew first is remembered."""
        self.is_restarted = True
        for member in self.members.values():
            member.draw_again()


class RolloutTable(NamedTuple):
    """A line for every rollout. Tokens and seconds of a rollout that was cut off are those observed; NaN is unknown."""

    group: Ints
    task: Ints
    source: Ints
    is_settled: Mask
    kind: Ints
    is_first_cut: Mask
    is_first_failed: Mask
    first_tokens: Doubles
    first_seconds: Doubles
    tokens: Doubles
    seconds: Doubles
    reward: Doubles


_KINDS = (np.int64, np.int64, np.int64, np.bool_, np.int64, np.bool_, np.bool_, *[np.float64] * 5)


class GroupLog:
    def __init__(self, events: Iterable[Event]) -> None:
        self._groups: dict[int, _GroupRecord] = defaultdict(_GroupRecord)
        self._last_at = 0.0
        for event in events:
            self._last_at = event.at
            self._add(event)

    def _add(self, event: Event) -> None:
        match event:
            case RolloutStarted():
                self._groups[event.group_id].members[event.member].since = event.at
            case RolloutEnded():
                member = self._groups[event.group_id].members[event.member]
                member.finish(event.num_sampled, event.seconds, event.reward)
            case RolloutFailed():
                self._fail(event)
            case RolloutAborted():
                member = self._groups[event.group_id].members[event.member]
                member.finish(event.num_sampled, event.seconds, None)
                member.is_aborted = True
            case GroupScored():
                self._groups[event.group_id].score(event.rewards)
            case GroupRestarted():
                self._groups[event.group_id].restart()
            case GroupAdmitted():
                group = self._groups[event.group_id]
                group.task = event.task_id
                group.source = event.source
            case GroupLeft():
                self._groups[event.group_id].fate = event.fate
            case GroupResumed():
                self._groups[event.group_id].resume(event)

    def _fail(self, event: RolloutFailed) -> None:
        member = self._groups[event.group_id].members[event.member]
        began = event.at if member.since is None else member.since
        member.is_first_failed = member.is_first_failed or not member.is_done
        member.finish(event.num_sampled, event.seconds or event.at - began, None)
        member.is_lost = event.is_final

    @property
    def sources(self) -> list[str]:
        """The largest in the order of their names, then one name for all others."""
        counts = Counter(group.source for group in self._groups.values())
        names = sorted(name for name, _ in counts.most_common(MAX_SOURCES))
        return names if len(names) == len(counts) else [*names, "others"]

    def table(self) -> RolloutTable:
        tasks, sources = dict[str, int](), {name: number for number, name in enumerate(self.sources)}
        lines = list[tuple[float, ...]]()
        for number, group in enumerate(self._groups.values()):
            task = tasks.setdefault(group.task, len(tasks))
            labels = number, task, sources.get(group.source, len(sources) - 1), group.fate is not None
            lines += [labels + self._line(member, group.fate) for member in group.members.values()]
        columns = np.array(lines, dtype=np.float64).reshape(-1, len(RolloutTable._fields)).T
        return RolloutTable._make(column.astype(kind) for column, kind in zip(columns, _KINDS, strict=True))

    def _line(self, member: _MemberRecord, fate: Fate | None) -> tuple[float, ...]:
        """The columns of a rollout from `kind` on."""
        kind, tokens, seconds = _kind(member, fate), member.tokens, member.seconds
        if kind == IN_FLIGHT and member.since is not None:
            tokens, seconds = np.nan, self._last_at - member.since
        reward = np.nan if member.reward is None else member.reward
        is_cut = member.is_first_cut or not member.is_done
        return kind, is_cut, member.is_first_failed, member.first_tokens, member.first_seconds, tokens, seconds, reward


def _kind(member: _MemberRecord, fate: Fate | None) -> int:
    if member.is_aborted or fate in (Fate.ABORTED, Fate.SUPERSEDED):
        return ABORTED
    if member.is_lost or (fate is not None and member.reward is None):
        return FAILED
    if fate is Fate.FAILED:
        return GROUP_FAILED
    if member.reward is not None:
        return OPEN if fate is None else TRAINED if fate is Fate.TRAINED else FILTERED
    return OPEN if member.since is None else IN_FLIGHT


def select(table: RolloutTable, mask: Mask) -> RolloutTable:
    return RolloutTable._make(column[mask] for column in table)


def settled_only(table: RolloutTable) -> RolloutTable:
    """The rollouts of groups with a fate; groups are renumbered."""
    found = select(table, table.is_settled)
    return found._replace(group=np.unique(found.group, return_inverse=True)[1])
