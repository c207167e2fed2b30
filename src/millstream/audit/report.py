"""The result of an audit: the rules, the findings and the counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Fields = dict[str, Any]  # a JSON object that was read from disk: no key and no type is certain
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OSError, RecursionError)  # what reading one may raise
MAX_FINDINGS = 1000

RULES = {
    "log": "every line is an event with its fields; only the last may be torn",
    "seq": "events are numbered without a gap, over all processes of the run",
    "config": "config.toml is as a process of the run wrote it, and run_started says the same",
    "start": "run_started comes once, before the first group, with the bound that follows from its max_lag",
    "admitted": "groups are admitted as 0, 1, 2, ...: none is missing, none is repeated",
    "prompt": "an epoch has every prompt of the first epoch exactly once, and epochs follow each other",
    "deadline": "a group starts at a version that exists, and its deadline is its start plus the bound",
    "budget": "groups in flight are within the budget",
    "in flight": "every event of a group comes after its admission and before it leaves",
    "rollout": "a member's attempts follow each other, each ends once, on versions from the group's start to the newest",
    "declared": "rollouts are aborted and groups restarted only if the run declared it at its start, within its limits",
    "members": "a group is taken or leaves when each member has ended, failed for good or was aborted, and says how many ended",
    "lag": "no group is trained later than the bound and its deadline allow, and none is overdue",
    "fate": "rewards, survivors and the filter decide the fate: failed, filtered or trained; or aborted, with the batch full",
    "batch": "a group leaves as trained exactly if the batch took it; places stay empty at the limit or the end of the data",
    "step": "versions rise by one",
    "totals": "groups, rows, tokens and rewards add up",
    "weights": "each version is published once, no engine loads one that was not, and none is used that no engine loaded",
    "evaluation": "an evaluation is of one version, which its engines kept from its start to its end",
    "resume": "a resume continues from its checkpoint: that version and event, exactly those groups and members",
    "seal": "each checkpoint has an event: its digest, its version, and a last event between two batches of its run",
    "replay": "a restarted learner begins with a checkpoint of the run, and reaches the run's version",
    "checkpoint": "the files of a checkpoint are those of its manifest, byte for byte",
    "ledger": "a checkpoint's ledger agrees with the events up to the last one that it covers",
    "end": "a run that finished has made its steps and left no group without a fate; it is resumed only for more steps",
    "settings": "each setting that a resume changes has an event, and each step is made with the settings in force",
    "superseded": "groups that a resume supersedes could not be trained in time any more; their prompts are fed again first",
    "metrics": "metrics.jsonl has every step once, with the groups and the mean reward of the events",
    "rollouts": "rollouts/ has each trained rollout once, with step, versions and reward of the events, or it is counted",
    "summary": "summary.json has the same counts and accuracies",
}
# The counts that `summary.json` and a report both have.
COUNTS = (
    "steps",
    "rollouts_trained",
    "groups_admitted",
    "groups_trained",
    "groups_filtered",
    "groups_failed",
    "groups_aborted",
    "groups_restarted",
    "rollouts_aborted",
    "lag_max",
    "groups_superseded",
)


class Finding(NamedTuple):
    rule: str
    message: str


@dataclass(slots=True)
class AuditReport:
    """Counts describe the history behind the newest weights; `processes`, `events` and `checks` all that was read."""

    run_dir: Path
    findings: list[Finding] = field(default_factory=list)
    findings_left_out: int = 0  # past MAX_FINDINGS
    notes: list[str] = field(default_factory=list)
    checks: int = 0
    processes: int = 0  # 1 + resumes
    events: int = 0
    void_events: int = 0
    groups_admitted: int = 0
    groups_trained: int = 0
    groups_filtered: int = 0
    groups_failed: int = 0
    groups_aborted: int = 0
    groups_superseded: int = 0
    groups_restarted: int = 0  # restarts; a group may have several
    rollouts_aborted: int = 0
    groups_in_flight: int = 0
    steps: int = 0
    rollouts_trained: int = 0
    rollouts_verified: int = 0  # those of them that were kept
    rollouts_sampled_away: int = 0
    rollouts_not_written: int = 0
    checkpoints: int = 0
    checkpoints_verified: int = 0
    lag_max: int = 0
    lag_bound: int | None = None  # None: the run never began to train
    outcome: str | None = None  # None: the run has no end; it was killed or is still running

    @property
    def is_clean(self) -> bool:
        return not self.findings

    def holds(self, is_right: bool) -> bool:
        """Count one check."""
        self.checks += 1
        return is_right

    def expect(self, is_right: bool, rule: str, message: str) -> bool:
        """Count one check, and add a finding if it fails. Returns whether it holds."""
        if not self.holds(is_right):
            self.add_finding(rule, message)
        return is_right

    def add_finding(self, rule: str, message: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(rule, message))
        else:
            self.findings_left_out += 1

    def merge(self, part: AuditReport) -> None:
        """Add the checks and findings of a part that was checked with a report of its own."""
        self.checks += part.checks
        self.findings_left_out += part.findings_left_out
        for finding in part.findings:
            self.add_finding(finding.rule, finding.message)


def reason_of(error: Exception) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)


def report_lines(report: AuditReport) -> list[str]:
    """The report as text for a terminal."""
    num_findings = len(report.findings) + report.findings_left_out
    superseded = f"{report.groups_superseded:,} superseded + " if report.groups_superseded else ""
    left_out = [f"  FOUND        and {report.findings_left_out:,} more"] if report.findings_left_out else []
    return [
        f"{report.run_dir}: {f'{num_findings:,} findings' if num_findings else 'clean'}, {report.checks:,} checks",
        f"  events       {report.events:,}, {report.void_events:,} of them void; processes: {report.processes}",
        f"  groups       {report.groups_admitted:,} admitted = {report.groups_trained:,} trained + "
        f"{report.groups_filtered:,} filtered + {report.groups_failed:,} failed + {report.groups_aborted:,} aborted + "
        f"{superseded}{report.groups_in_flight:,} in flight",
        *_declared_lines(report),
        f"  steps        {report.steps:,} with {report.rollouts_trained:,} rollouts",
        *_kept_lines(report),
        f"  lag          at most {report.lag_max}, the bound is {report.lag_bound}",
        f"  checkpoints  {report.checkpoints_verified} of {report.checkpoints} verified",
        f"  outcome      {report.outcome or 'none: the run was killed, or is still running'}",
        *(f"  note         {note}" for note in report.notes),
        *(f"  FOUND        [{finding.rule}] {finding.message}" for finding in report.findings),
        *left_out,
    ]


def _kept_lines(report: AuditReport) -> list[str]:
    missing = report.rollouts_sampled_away + report.rollouts_not_written
    if not report.rollouts_verified and not missing:
        return []
    return [
        f"  rollouts     {report.rollouts_verified:,} of them are kept, {report.rollouts_sampled_away:,} were sampled away, "
        f"{report.rollouts_not_written:,} were not written"
    ]


def _declared_lines(report: AuditReport) -> list[str]:
    if not report.rollouts_aborted and not report.groups_restarted:
        return []
    return [f"  declared     {report.rollouts_aborted:,} rollouts aborted, {report.groups_restarted:,} group restarts"]
