"""The kept rollouts against the events: every trained rollout is in RUN/rollouts/ exactly once, as the events have it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from millstream.audit.history import Cursor, TrainedGroup
from millstream.audit.report import MALFORMED, AuditReport, reason_of
from millstream.audit.rollout_files import FiledGroup, read_groups, stratum_due

FATES = ("trained", "kept")  # of a group that a batch took; the second in a run that trains nothing


def check_rollouts(folder: Path, cursor: Cursor, last_covered: int, report: AuditReport) -> None:
    """`last_covered`: the last event that a checkpoint covers. A folder that is not there was not kept, or was removed. Groups
    may be sampled away as a whole. What was not on the disk when the process was killed, could not be written, or was not kept
    by the settings, is counted."""
    if not folder.is_dir():
        return
    due = {group_id: group for groups in cursor.trained.values() for group_id, group in groups.items()}
    level, num_lost = _sampled(folder, report)
    found: set[int] = set()
    for path in sorted(folder.glob("*.rollouts")):
        try:
            for kept in read_groups(path):
                if not kept.fates or kept.fates[0].seq <= cursor.seq:  # a run that is active is ahead of what was read
                    _check_group(path.name, kept, due, found, report, is_lossy=num_lost > 0)
        except MALFORMED as error:
            report.add_finding("rollouts", f"rollouts/{path.name} cannot be read: {reason_of(error)}")
    missing = {group_id: group for group_id, group in due.items() if group_id not in found}
    for group_id in [group_id for group_id in missing if stratum_due(group_id) < level]:
        report.rollouts_sampled_away += len(missing.pop(group_id).members)
    is_killed = cursor.now.outcome is None
    for group_id, group in list(missing.items()):
        if num_lost or not group.is_kept or (is_killed and group.seq > last_covered):
            report.rollouts_not_written += len(missing.pop(group_id).members)
    _report_missing(folder, missing, report)


def _check_group(
    name: str,
    kept: FiledGroup,
    due: dict[int, TrainedGroup],
    found: set[int],
    report: AuditReport,
    *,
    is_lossy: bool,
) -> None:
    """`is_lossy`: some records could not be written."""
    group = due.get(kept.group_id)
    is_trained = kept.has_left and kept.fates[0].fate in FATES
    what = f"rollouts/{name}: group {kept.group_id}"
    if group is None:
        report.expect(not is_trained, "rollouts", f"{what} was trained, by the events it was not")
        return
    if not is_trained and kept.group_id not in found:  # it is among the missing ones
        return
    if not report.holds(kept.group_id not in found):
        report.add_finding("rollouts", f"{what} is there twice")
        return
    found.add(kept.group_id)
    missing = group.members.keys() - {one.member for one in kept.attempts}
    lost = {member for member in missing if is_lossy or not group.members[member].is_kept}
    report.rollouts_verified += len(group.members) - len(missing)
    report.rollouts_not_written += len(lost)
    lacking = sorted(missing - lost)
    report.expect(
        not lacking, "rollouts", f"{what}, trained by step {group.version + 1}: members {lacking} are missing"
    )
    for objection in _objections(kept, group):
        report.expect(not objection, "rollouts", f"{what}, trained by step {group.version + 1}: {objection}")


def _objections(kept: FiledGroup, group: TrainedGroup) -> Iterator[str]:
    """One string per check, empty if it holds."""
    members = Counter(one.member for one in kept.attempts)
    twice = sorted(member for member, num in members.items() if num > 1)
    yield f"members {twice} are there twice" if twice else ""
    other = sorted(members.keys() - group.members)
    yield f"members {other} were not trained" if other else ""
    steps = [one.version + 1 for one in kept.taken]
    yield "" if steps == [group.version + 1] else f"it was taken for the steps {steps}"
    totals = [group.members[member].reward for member in sorted(group.members)]
    for left in kept.fates:
        yield "" if _are_close(left.rewards, totals) else f"its rewards are {left.rewards}, in the events {totals}"
    for one in kept.attempts:
        ended = group.members.get(one.member)
        if ended is None:
            continue
        span, tokens = (one.start, one.end), one.num_tokens
        due = ended.start, ended.end
        yield "" if span == due else f"member {one.member} has versions {span}, in the events {due}"
        yield "" if tokens == ended.num_tokens else f"member {one.member} has {tokens} tokens, not {ended.num_tokens}"
        is_given = _are_close(one.rewards[:1], [ended.given])
        yield "" if is_given else f"member {one.member} has reward {one.rewards[0]}, in the events {ended.given}"
        rows = [reward for taken in kept.taken for reward in taken.rewards.get(one.member, [])]
        are_rows = len(rows) == ended.num_rows and all(
            any(_are_close([row], [due]) for due in ended.rewards) for row in rows
        )
        yield "" if are_rows else f"member {one.member} was trained with rewards {rows}, in the events {ended.rewards}"


def _are_close(some: list[float], others: list[float]) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-9) for pair in pairs)


def _report_missing(folder: Path, missing: dict[int, TrainedGroup], report: AuditReport) -> None:
    """Groups that nothing explains."""
    by_stratum: dict[int, list[int]] = {}
    for group_id in missing:
        by_stratum.setdefault(stratum_due(group_id), []).append(group_id)
    for stratum, groups in sorted(by_stratum.items()):
        name = f"rollouts/{stratum:02d}.rollouts"
        if (folder / f"{stratum:02d}.rollouts").exists():
            for group_id in groups:
                step = missing[group_id].version + 1
                report.add_finding("rollouts", f"{name}: group {group_id}, trained by step {step}, is missing")
        else:
            report.add_finding("rollouts", f"{name} is missing: {len(groups)} groups that were trained belong there")
    report.holds(not missing)


def _sampled(folder: Path, report: AuditReport) -> tuple[int, int]:
    """The lowest stratum that is kept, and how many records could not be written."""
    path = folder / "sampled.json"
    try:
        fields = json.loads(path.read_bytes()) if path.exists() else {"level": 0, "num_lost": 0}
        return int(fields["level"]), int(fields["num_lost"])
    except MALFORMED as error:
        report.add_finding("rollouts", f"rollouts/{path.name} cannot be read: {reason_of(error)}")
        return 0, 0
