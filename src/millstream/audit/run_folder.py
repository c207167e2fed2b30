"""The audit of a run folder: checkpoints, log, metrics and summary."""

from __future__ import annotations

import json
import math
from pathlib import Path

from millstream.audit.checkpoints import read_checkpoints
from millstream.audit.config_rules import compare_config
from millstream.audit.history import History
from millstream.audit.replay import Replay
from millstream.audit.report import COUNTS, MALFORMED, AuditReport, reason_of

NEW_COUNTS = {"groups_superseded"}  # a summary of an earlier version does not have them
HELD_OUT = "held_out"  # the evaluation whose name is left out
ACCURACIES = {"accuracy_before", "accuracy_after", "greedy_before", "greedy_after"}  # in summary.json


def audit(run_dir: Path) -> AuditReport:
    """Read the folder of a run that has finished, was killed, or is still running. Never raises for what it finds there."""
    report = AuditReport(run_dir)
    checkpoints = read_checkpoints(run_dir / "checkpoints", report)
    rollouts = run_dir / "rollouts"
    replay = Replay(run_dir / "events.jsonl", checkpoints, report, has_rollouts=rollouts.is_dir())
    now = replay.run()
    replay.compare_rollouts(rollouts)
    written = replay.settings
    compare_config(run_dir / "config.toml", now, written.config_digests, written.last_digest, report)
    report.checkpoints_verified = sum(checkpoint.is_sound for checkpoint in checkpoints)
    _count(now, report)
    _check_metrics(run_dir / "metrics.jsonl", now, report)
    _check_summary(run_dir / "summary.json", now, report)
    return report


def _count(now: History, report: AuditReport) -> None:
    report.groups_admitted = now.num_admitted
    report.groups_in_flight = len(now.groups)
    report.groups_trained = now.fates["trained"]
    report.groups_filtered = now.fates["filtered"]
    report.groups_failed = now.fates["failed"]
    report.groups_aborted = now.fates["aborted"]
    report.groups_superseded = now.fates["superseded"]
    report.groups_restarted = now.num_restarts
    report.rollouts_aborted = now.rollouts_aborted
    report.steps = len(now.steps)
    report.rollouts_trained = now.rollouts_trained
    report.lag_max = now.lag_max
    report.outcome = now.outcome
    report.lag_bound = None if now.terms is None else max(now.terms.lag_bound, now.bound_max)
    if not report.holds(now.num_admitted == now.fates.total() + len(now.groups)):
        report.add_finding(
            "totals", f"{now.num_admitted} groups were admitted: {dict(now.fates)}, {len(now.groups)} in flight"
        )


def _check_metrics(path: Path, now: History, report: AuditReport) -> None:
    """The last lines of a run that was killed may be missing, torn, or ahead of the events."""
    is_killed, last, due = now.outcome is None, len(now.steps), 1
    rows = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, row in enumerate(rows, 1):
        where = f"metrics.jsonl:{number}"
        if is_killed and not row.endswith(b"\n"):
            break
        try:
            fields = json.loads(row)
            if any(key.startswith("eval/") for key in fields):  # the row of an evaluation
                continue
            step, groups, reward = int(fields["step"]), fields["groups"], float(fields["reward"])
        except MALFORMED as error:
            report.add_finding("metrics", f"{where} cannot be read: {reason_of(error)}")
            continue
        if is_killed and step > last:
            report.notes.append(f"{where} is of step {step}, which the events have not reached")
            break
        report.expect(step == due, "metrics", f"{where} is of step {step}, {due} was expected")
        totals = now.steps[step - 1] if 1 <= step <= last else None
        is_right = totals is not None and totals.groups == groups
        report.expect(is_right, "metrics", f"{where} says that step {step} had {groups} groups")
        mean = None if totals is None else totals.mean_reward
        is_mean = mean is None or math.isclose(reward, mean, rel_tol=1e-6, abs_tol=1e-9)
        report.expect(is_mean, "metrics", f"{where} says mean reward {reward}, the events have {mean}")
        due = step + 1
    is_complete = is_killed or due == last + 1
    report.expect(is_complete, "metrics", f"metrics.jsonl ends with step {due - 1}, the events with {last}")


def _check_summary(path: Path, now: History, report: AuditReport) -> None:
    if report.outcome != "finished" or not path.exists():
        return
    try:
        summary = json.loads(path.read_bytes())
        for name in COUNTS:
            counted, found = getattr(report, name), summary.get(name, 0) if name in NEW_COUNTS else summary[name]
            if not report.holds(found == counted):
                report.add_finding("summary", f"{name} is {found}, in the events {counted}")
        for name in ACCURACIES & summary.keys():
            how, _, when = name.partition("_")
            table = "" if now.first_table in ("", HELD_OUT) else f"{now.first_table} "
            found = now.accuracies.get(f"{table}{'sampled' if how == 'accuracy' else how} {when}")
            report.expect(summary[name] == found, "summary", f"{name} is {summary[name]}, in the events {found}")
    except MALFORMED as error:
        report.add_finding("summary", f"summary.json cannot be read: {reason_of(error)}")
