"""How many rollouts of a run are not in its files, by its log: those that were sampled away, and those that were never written
because the process was killed, the disk was full, or `rollout.keep_gb` was 0 for a while. Light: imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from millstream.events import GroupLeft, GroupTaken, RolloutAborted, RolloutEnded, RolloutFailed
from millstream.events.rollouts.reader import RolloutDump
from millstream.events.rollouts.writer import stratum_of
from millstream.events.sinks import read_kinds

ATTEMPTS = (RolloutEnded, RolloutFailed, RolloutAborted)  # each has a record


class MissingRollouts(NamedTuple):
    num_sampled_away: int  # by `rollout.keep_gb`
    num_lost: int  # were not written
    by_version: dict[int, int]  # of the groups that this version trained: sampled away or lost


class _Logged(NamedTuple):
    group_id: int
    version: int | None  # that trained it; None: none did, or not yet
    num_attempts: int


def missing_rollouts(dump: RolloutDump, events: Path) -> MissingRollouts:
    """Compares the counts of the log with those of the files. Memory holds the groups in flight and a number per step."""
    logged, kept = Counter[int | None](), Counter[int | None]()
    num_away = 0
    for one in _logged(events):
        logged[one.version] += one.num_attempts
        num_away += one.num_attempts if stratum_of(one.group_id) < dump.sampled.level else 0
    for group in dump.groups():
        is_trained = group.left is not None and group.taken is not None and group.taken.num_rows > 0
        kept[group.version if is_trained else None] += dump.num_attempts(group)
    by_version = {version: num for version, num in (logged - kept).items() if version is not None}
    return MissingRollouts(num_away, max(0, logged.total() - kept.total() - num_away), by_version)


def _logged(events: Path) -> Iterator[_Logged]:
    attempts, versions = Counter[int](), dict[int, int]()
    for _, event in read_kinds(events, *ATTEMPTS, GroupTaken, GroupLeft, is_history=True):
        if isinstance(event, ATTEMPTS):
            attempts[event.group_id] += 1
        elif isinstance(event, GroupTaken):
            versions[event.group_id] = event.version
        elif isinstance(event, GroupLeft):
            group_id = event.group_id
            yield _Logged(group_id, versions.pop(group_id, None), attempts.pop(group_id, 0))
    yield from (_Logged(group_id, None, num) for group_id, num in attempts.items())
