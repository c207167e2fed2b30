"""What became of every prompt, proved from a run folder alone: none skipped, none twice, none too old, and the totals add up.

    checkpoints/     every byte against the manifest, and the ledger against the events that it covers
    events.jsonl     in order, every event against the history before it
    metrics.jsonl    a line for every step of that history
    summary.json     the same counts

An independent reader. It imports nothing of this package and counts in its own way, so that a mistake in the pipeline's
counting is not made a second time by whoever looks for it. `RULES` says what is proved; a finding names the rule that was
broken, the line or the file, and the group.

Crashes. A `resumed` event takes the history back to what it was at `from_seq`; what happened in between is void. It is checked
all the same: it had to be right in its time, and a checkpoint may cover it.

Memory is that of the groups in flight, the prompts of one epoch and a number a step; a copy of these for every resume ahead.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

Fields = dict[str, Any]
"""A JSON object of somebody else's making: nothing about it is certain."""
BROKEN = (KeyError, TypeError, ValueError, AttributeError, OSError)
"""What reading one may raise."""

RULES = {
    "log": "every line is an event with its fields; only the last may be torn",
    "seq": "events are numbered without a gap, over all lives",
    "start": "run_started comes once, before the first group, with the bound that its max_lag asks for",
    "admitted": "groups are admitted as 0, 1, 2, ...: none is missing, none comes again",
    "prompt": "an epoch has every prompt exactly once, and epochs follow each other",
    "deadline": "a group starts at a version that exists, and its deadline is its start plus the bound",
    "budget": "groups in flight are within the budget",
    "in flight": "only a group that was admitted and has not left does anything",
    "rollout": "a member's attempts follow each other, each ends once, on versions from the group's start to the newest",
    "declared": "rollouts are aborted and groups begin anew only where the run said so at its start, within its limits",
    "members": "a group is taken or leaves when each member has ended, failed for good or was aborted, and says how many ended",
    "lag": "no group is trained later than the bound and its deadline allow, and none is overdue",
    "fate": "rewards and survivors decide the fate: failed, filtered (no signal) or trained; or aborted, with the batch full",
    "batch": "a group leaves as trained exactly if the batch took it, and batches are full while groups are left",
    "step": "versions rise by one",
    "totals": "groups, rows, tokens and rewards add up",
    "weights": "each version is published once, and no engine loads one that was not",
    "resume": "a resume goes on from what its checkpoint holds: that version and event, exactly those groups and members",
    "seal": "an event tells of each checkpoint: its digest, its version, and a last event between two batches of its run",
    "replay": "a learner that is restarted begins with a checkpoint of the run, and comes to where the run is",
    "checkpoint": "the files of a checkpoint are those of its manifest, byte for byte",
    "ledger": "a checkpoint's ledger is what the events say at the last one that it covers",
    "end": "a run that finished has made its steps, left no group without a fate, and does nothing more",
    "metrics": "metrics.jsonl has every step once",
    "summary": "summary.json has the same counts",
}
FORMATS = (1, 2)
"""Of checkpoints: what is read here is the same in both."""
MAX_FINDINGS = 1000
SKIPPED = frozenset(
    (
        b"span",
        b"status",
        b"stalled",
        b"evaluated",
        b"warmed_up",
        b"warmup_sealed",
        b"checkpoint_failed",
        b"stop_requested",
    )
)
"""Kinds that say nothing of a group's fate: of them, only the number is checked."""
SUMS = ("groups", "rollouts", "rows", "tokens")
"""What a batch and its `stepped` event both have."""
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
)
"""What `summary.json` and a report both have."""
HEAD = re.compile(rb'\{"seq":(\d+),"kind":"(\w+)"')


class Finding(NamedTuple):
    rule: str
    message: str


@dataclass(slots=True)
class Report:
    """Counts are of the history behind the newest weights; `lives`, `events` and `checks` are of all that was read."""

    run_dir: Path
    findings: list[Finding] = field(default_factory=list)
    findings_left_out: int = 0
    notes: list[str] = field(default_factory=list)
    checks: int = 0
    lives: int = 0
    events: int = 0
    void_events: int = 0
    groups_admitted: int = 0
    groups_trained: int = 0
    groups_filtered: int = 0
    groups_failed: int = 0
    groups_aborted: int = 0
    groups_restarted: int = 0
    """Times that a group began anew."""
    rollouts_aborted: int = 0
    groups_in_flight: int = 0
    steps: int = 0
    rollouts_trained: int = 0
    checkpoints: int = 0
    checkpoints_verified: int = 0
    lag_max: int = 0
    lag_bound: int | None = None
    """None if the run never began to train."""
    outcome: str | None = None
    """None if the run has no end: it was killed, or is at work."""

    @property
    def is_clean(self) -> bool:
        return not self.findings

    def holds(self, is_right: bool) -> bool:
        """One check."""
        self.checks += 1
        return is_right

    def blame(self, rule: str, message: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(rule, message))
        else:
            self.findings_left_out += 1

    def take(self, part: Report) -> None:
        """What was found in a part that was looked at by itself."""
        self.checks += part.checks
        self.findings_left_out += part.findings_left_out
        for finding in part.findings:
            self.blame(finding.rule, finding.message)


def audit(run_dir: Path) -> Report:
    """Read a run folder: finished, dead or at work. Never raises for what it finds there."""
    report = Report(run_dir)
    checkpoints = _read_checkpoints(run_dir / "checkpoints", report)
    now = Replay(run_dir / "events.jsonl", checkpoints, report).run()
    report.checkpoints_verified = sum(checkpoint.is_sound for checkpoint in checkpoints)
    _count(now, report)
    _check_metrics(run_dir / "metrics.jsonl", now, report)
    _check_summary(run_dir / "summary.json", report)
    return report


def lines(report: Report) -> list[str]:
    """The report as a person reads it."""
    num_findings = len(report.findings) + report.findings_left_out
    left_out = [f"  FOUND        and {report.findings_left_out:,} more"] if report.findings_left_out else []
    return [
        f"{report.run_dir}: {f'{num_findings:,} findings' if num_findings else 'clean'}, {report.checks:,} checks",
        f"  events       {report.events:,}, {report.void_events:,} of them void; lives: {report.lives}",
        f"  groups       {report.groups_admitted:,} admitted = {report.groups_trained:,} trained + "
        f"{report.groups_filtered:,} filtered + {report.groups_failed:,} failed + {report.groups_aborted:,} aborted + "
        f"{report.groups_in_flight:,} in flight",
        *_declared(report),
        f"  steps        {report.steps:,} with {report.rollouts_trained:,} rollouts",
        f"  lag          at most {report.lag_max}, the bound is {report.lag_bound}",
        f"  checkpoints  {report.checkpoints_verified} of {report.checkpoints} verified",
        f"  outcome      {report.outcome or 'none: the run was killed, or is at work'}",
        *(f"  note         {note}" for note in report.notes),
        *(f"  FOUND        [{finding.rule}] {finding.message}" for finding in report.findings),
        *left_out,
    ]


def _declared(report: Report) -> list[str]:
    if not report.rollouts_aborted and not report.groups_restarted:
        return []
    return [
        f"  declared     {report.rollouts_aborted:,} rollouts aborted, {report.groups_restarted:,} groups began anew"
    ]


# ---- the history: what the events so far add up to ----------------------------------------------------------------------


class Promises(NamedTuple):
    """What `run_started` says of the whole run."""

    run_id: str
    steps: int
    num_tasks: int
    filter_zero_signal: bool
    min_group_size: int
    groups_per_step: int
    group_size: int
    lag_bound: int
    budget: int
    extra_members: int
    is_first_to_finish: bool
    max_restarts: int

    @property
    def num_members(self) -> int:
        return self.group_size + self.extra_members


class Ended(NamedTuple):
    """A rollout that ended well."""

    reward: float
    rewards: list[float]
    """Of each of its agents; one, as a rule."""
    num_tokens: int
    num_rows: int
    start: int


@dataclass(slots=True)
class Group:
    """A group in flight. A member is running, has ended, is out (failed for good), or waits for its next attempt."""

    task_id: str
    epoch: int
    start: int
    deadline: int
    next_attempt: dict[int, int] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    ended: dict[int, Ended] = field(default_factory=dict)
    out: set[int] = field(default_factory=set)
    """Failed for good, or aborted."""
    aborted: set[int] = field(default_factory=set)
    is_taken: bool = False
    first_attempt: int = 0
    restarts: int = 0
    has_failed_score: bool = False
    """Its reward as a whole could not be given."""

    def due_fate(self, promises: Promises) -> str:
        if len(self.ended) < promises.min_group_size or self.has_failed_score:
            return "failed"
        of_agents = zip_longest(*(member.rewards for member in self.ended.values()))
        known = ([reward for reward in rewards if reward is not None] for rewards in of_agents)
        has_signal = any(max(rewards) > min(rewards) for rewards in known)
        return "filtered" if promises.filter_zero_signal and not has_signal else "trained"

    def mean_reward(self) -> float:
        return math.fsum(member.reward for member in self.ended.values()) / len(self.ended) if self.ended else 0.0

    def objections(self, kept: list[int], to_do: list[int], size: int) -> Iterator[str]:
        """To going on with the first and rolling out the others again. One a check, empty if there is none."""
        members = [*kept, *to_do]
        lost = sorted(set(range(size)) - self.out - set(members))
        yield f"members {lost} are neither kept nor done again, and have not failed" if lost else ""
        yield "" if set(members) <= set(range(size)) else f"it has no such members: {members}"
        yield "" if len(set(members)) == len(members) else f"a member is listed twice: {members}"
        yield "" if self.ended.keys() >= set(kept) else f"members {kept} are kept, {sorted(self.ended)} have ended"

    def take_up(self, kept: list[int], to_do: list[int]) -> None:
        """What was said of a member that is rolled out again is void."""
        self.ended = {member: ended for member, ended in self.ended.items() if member in kept}
        self.out.difference_update(to_do)
        self.aborted.difference_update(to_do)
        self.next_attempt = {}
        self.running = set()

    def begin_anew(self, event: Fields) -> None:
        """What was said of its members is void."""
        self.start = event["start_version"]
        self.deadline = event["deadline"]
        self.restarts = event["restarts"]
        self.first_attempt = event["first_attempt"]
        self.next_attempt = {}
        self.ended = {}
        self.out = set()
        self.aborted = set()


@dataclass(slots=True)
class Batch:
    """Groups that left as trained since the last step."""

    groups: int = 0
    rows: int = 0
    tokens: int = 0
    rollouts: int = 0


@dataclass(slots=True)
class History:
    promises: Promises | None = None
    num_events: int = 0
    version: int = 0
    published: int = 0
    num_admitted: int = 0
    next_group: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    """Those in flight."""
    to_take_up: set[int] = field(default_factory=set)
    """Those of them that the present life has yet to take up."""
    epoch: int = 0
    prompts: set[str] = field(default_factory=set)
    """Of this epoch."""
    batch: Batch = field(default_factory=Batch)
    steps: list[int] = field(default_factory=list)
    """Groups of every step."""
    fates: Counter[str] = field(default_factory=Counter)
    num_vacant: int = 0
    rollouts_trained: int = 0
    rollouts_aborted: int = 0
    num_restarts: int = 0
    lag_max: int = 0
    outcome: str | None = None

    @property
    def is_between_batches(self) -> bool:
        return not self.batch.groups and not any(group.is_taken for group in self.groups.values())


@dataclass(slots=True)
class Reading:
    """How far the log has been read, and what it adds up to so far."""

    report: Report
    now: History = field(default_factory=History)
    line: int = 0
    seq: int = -1
    incarnation: int = 0
    ledger: Fields = field(default_factory=dict)
    """Of the checkpoint that this life goes on from, if it is still on the disk."""

    @property
    def promises(self) -> Promises:
        assert self.now.promises is not None, "events of groups are handled after run_started only"
        return self.now.promises

    def blame(self, rule: str, message: str) -> None:
        self.report.blame(rule, f"events.jsonl:{self.line} (seq {self.seq}): {message}")


# ---- the life of a group ------------------------------------------------------------------------------------------------


class GroupRules:
    """From admission to a fate, and the steps that trained groups make."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._holds = reading.report.holds
        self._blame = reading.blame

    @property
    def _now(self) -> History:
        return self._reading.now

    def on_group_admitted(self, event: Fields) -> None:
        now, promises, group_id = self._now, self._reading.promises, event["group_id"]
        start, deadline = event["start_version"], event["deadline"]
        self._check_all_taken_up()
        if not self._holds(group_id == now.next_group):
            self._blame("admitted", f"group {group_id} was admitted, {now.next_group} was due")
        if not self._holds(start <= now.version <= deadline == start + promises.lag_bound):
            places = f"start {start}, deadline {deadline}, version {now.version}, bound {promises.lag_bound}"
            self._blame("deadline", f"group {group_id} was admitted with {places}")
        self._count_prompt(group_id, event["task_id"], event["epoch"])
        now.groups[group_id] = Group(event["task_id"], event["epoch"], start, deadline)
        now.next_group = max(now.next_group, group_id + 1)
        now.num_admitted += 1
        if not self._holds(len(now.groups) <= promises.budget):
            self._blame("budget", f"group {group_id} makes {len(now.groups)} in flight, {promises.budget} may be")

    def _count_prompt(self, group_id: int, task_id: str, epoch: int) -> None:
        now, num_tasks = self._now, self._reading.promises.num_tasks
        if epoch != now.epoch:
            if not self._holds(epoch == now.epoch + 1):
                self._blame("prompt", f"group {group_id} is of epoch {epoch}, after {now.epoch}")
            if not self._holds(num_tasks in (0, len(now.prompts))):
                self._blame("prompt", f"epoch {now.epoch} ends after {len(now.prompts)} of {num_tasks} prompts")
            now.epoch = epoch
            now.prompts = set()
        if not self._holds(task_id not in now.prompts):
            self._blame("prompt", f"group {group_id} has prompt {task_id}, which epoch {epoch} had before")
        now.prompts.add(task_id)

    def _group(self, event: Fields) -> Group | None:
        """The one that the event is about, if it is in flight."""
        now, group_id = self._now, event["group_id"]
        group = now.groups.get(group_id)
        if not self._holds(group is not None):
            why = "has left already" if group_id < now.next_group else "was never admitted"
            self._blame("in flight", f"{event['kind']} of group {group_id}, which {why}")
        if not self._holds(group_id not in now.to_take_up):
            self._blame("resume", f"{event['kind']} of group {group_id}, which was not taken up")
        return group

    # ---- its members

    def on_rollout_started(self, event: Fields) -> None:
        group, member, attempt = self._group(event), event["member"], event["attempt"]
        if group is None:
            return
        due = group.next_attempt.get(member, group.first_attempt)
        is_free = member not in group.running and member not in group.ended and member not in group.out
        if not self._holds(is_free and attempt == due and 0 <= member < self._reading.promises.num_members):
            what = f"attempt {due} was due" if is_free else "it is at work or done"
            self._blame("rollout", f"group {event['group_id']} member {member} began attempt {attempt}: {what}")
        group.running.add(member)
        group.next_attempt[member] = attempt + 1

    def on_rollout_ended(self, event: Fields) -> None:
        group = self._end_attempt(event)
        if group is None:
            return
        start, end, newest = event["start_version"], event["end_version"], self._now.version
        if not self._holds(group.start <= start <= end <= newest):
            who = f"group {event['group_id']} member {event['member']}"
            self._blame("rollout", f"{who} ran on versions {start} to {end}: {group.start} to {newest} would be right")
        reward = float(event["reward"])
        rewards, rows = event.get("rewards") or [reward], event.get("num_parts", 1)
        group.ended[event["member"]] = Ended(reward, rewards, event["num_tokens"], rows, start)

    def on_rollout_failed(self, event: Fields) -> None:
        group = self._end_attempt(event)
        if group is not None and event["is_final"]:
            group.out.add(event["member"])

    def on_rollout_aborted(self, event: Fields) -> None:
        group, promises = self._end_attempt(event), self._reading.promises
        if group is None:
            return
        if not self._holds(promises.is_first_to_finish or promises.max_restarts > 0):
            self._blame("declared", f"group {event['group_id']} member {event['member']} was aborted, undeclared")
        group.out.add(event["member"])
        group.aborted.add(event["member"])
        self._now.rollouts_aborted += 1

    def on_group_restarted(self, event: Fields) -> None:
        group, group_id, now, promises = self._group(event), event["group_id"], self._now, self._reading.promises
        if group is None:
            return
        start, deadline, restarts = event["start_version"], event["deadline"], event["restarts"]
        if not self._holds(group.restarts + 1 == restarts <= promises.max_restarts):
            what = f"for the {restarts}. time after {group.restarts}, {promises.max_restarts} are allowed"
            self._blame("declared", f"group {group_id} began anew {what}")
        if not self._holds(group.start <= start <= now.version <= deadline == start + promises.lag_bound):
            places = f"start {start}, deadline {deadline}, version {now.version}, bound {promises.lag_bound}"
            self._blame("deadline", f"group {group_id} began anew with {places}")
        is_at_rest = not group.running and not group.is_taken
        if not self._holds(is_at_rest and event["first_attempt"] >= max(group.next_attempt.values(), default=0)):
            self._blame("rollout", f"group {group_id} began anew while it was at work or done")
        group.begin_anew(event)
        now.num_restarts += 1

    def on_group_scored(self, event: Fields) -> None:
        """What each member earned in all; the fate is judged by that."""
        group, rewards = self._group(event), event["rewards"]
        if group is None:
            return
        group.has_failed_score = bool(event["failure"])
        if not self._holds(group.has_failed_score or (len(rewards) == len(group.ended) and not group.running)):
            self._blame(
                "totals", f"group {event['group_id']} has {len(rewards)} rewards for {len(group.ended)} members"
            )
        for (number, member), reward in zip(sorted(group.ended.items()), rewards, strict=False):
            more = reward - member.reward
            group.ended[number] = member._replace(reward=reward, rewards=[one + more for one in member.rewards])

    def _end_attempt(self, event: Fields) -> Group | None:
        group, member, attempt = self._group(event), event["member"], event["attempt"]
        if group is None:
            return None
        if not self._holds(member in group.running and attempt + 1 == group.next_attempt[member]):
            who = f"group {event['group_id']} member {member} attempt {attempt}"
            self._blame("rollout", f"{event['kind']} of {who}, which was not running")
        group.running.discard(member)
        return group

    # ---- its fate

    def _check_members(self, group: Group, event: Fields, said: int) -> None:
        """Every member is done, and as many have ended as the event says."""
        size, ended, out = self._reading.promises.num_members, len(group.ended), len(group.out)
        if not self._holds(ended + out == size and said == ended):
            what = f"{event['kind']} of group {event['group_id']} with {said} members"
            self._blame("members", f"{what}: of {size}, {ended} have ended and {out} failed for good or were aborted")

    def _check_complete(self, group: Group, event: Fields) -> None:
        """A group that is not thrown away lacks an aborted member only where it was complete without it."""
        promises, ended = self._reading.promises, len(group.ended)
        is_complete = promises.is_first_to_finish and ended >= promises.group_size
        if not self._holds(not group.aborted or is_complete):
            what = f"{event['kind']} of group {event['group_id']} without members {sorted(group.aborted)}"
            self._blame("declared", f"{what}, which were aborted when {ended} of {promises.group_size} had ended")

    def on_group_taken(self, event: Fields) -> None:
        group, group_id, now = self._group(event), event["group_id"], self._now
        if group is None:
            return
        self._check_members(group, event, event["num_rollouts"])
        self._check_complete(group, event)
        if not self._holds(not group.is_taken and event["version"] == now.version):
            twice = "a second time" if group.is_taken else "once"
            self._blame("batch", f"group {group_id} was taken {twice}, by {event['version']} at {now.version}")
        oldest = min((member.start for member in group.ended.values()), default=now.version)
        lag, bound = now.version - oldest, self._reading.promises.lag_bound
        if not self._holds(lag <= bound):
            self._blame("lag", f"group {group_id} was taken with lag {lag}, the bound is {bound}")
        if not self._holds(now.version <= group.deadline):
            self._blame("lag", f"group {group_id} was taken at version {now.version}, due by {group.deadline}")
        if not self._holds(event["lag"] == lag):
            self._blame("lag", f"group {group_id} says lag {event['lag']}, its oldest member has {lag}")
        group.is_taken = True
        now.lag_max = max(now.lag_max, lag)

    def on_group_left(self, event: Fields) -> None:
        group, group_id, fate = self._group(event), event["group_id"], event["fate"]
        if group is None:
            return
        self._check_members(group, event, event["num_members"])
        due, mean = group.due_fate(self._reading.promises), group.mean_reward()
        if fate == "aborted":
            self._check_aborted(group_id)
        else:
            self._check_complete(group, event)
            if not self._holds(fate == due):
                rewards = [member.reward for member in group.ended.values()]
                self._blame("fate", f"group {group_id} left as {fate}, rewards {rewards} ask for {due}")
        if not self._holds(math.isclose(event["mean_reward"], mean, rel_tol=1e-6, abs_tol=1e-9)):
            self._blame("totals", f"group {group_id} says mean reward {event['mean_reward']}, its members have {mean}")
        if not self._holds(group.is_taken == (fate == "trained")):
            was = "was taken" if group.is_taken else "was not taken"
            self._blame("batch", f"group {group_id} left as {fate}, and {was}")
        self._let_go(group_id, group, fate, event["is_replaced"])

    def _check_aborted(self, group_id: int) -> None:
        """First to finish aborts what a full batch does not need."""
        promises, now = self._reading.promises, self._now
        num_taken = sum(group.is_taken for group in now.groups.values())
        filled = now.fates["trained"] + now.num_vacant + num_taken
        is_full = filled >= promises.groups_per_step * (len(now.steps) + 1)
        if not self._holds(promises.is_first_to_finish and is_full):
            what = f"{num_taken} of {promises.groups_per_step} were taken"
            self._blame(
                "declared",
                f"group {group_id} was aborted: {what}, and first to finish is {promises.is_first_to_finish}",
            )

    def _let_go(self, group_id: int, group: Group, fate: str, is_replaced: bool) -> None:
        now = self._now
        del now.groups[group_id]
        now.fates[fate] += 1
        if fate == "trained":
            now.batch.groups += 1
            now.batch.rows += sum(member.num_rows for member in group.ended.values())
            now.batch.rollouts += len(group.ended)
            now.batch.tokens += sum(member.num_tokens for member in group.ended.values())
        elif not is_replaced:
            now.num_vacant += 1

    # ---- its step

    def on_stepped(self, event: Fields) -> None:
        now, version, batch = self._now, event["version"], self._now.batch
        self._check_all_taken_up()
        if not self._holds(version == now.version + 1):
            self._blame("step", f"version {version} after {now.version}")
        said, due = [event[f"num_{name}"] for name in SUMS], [getattr(batch, name) for name in SUMS]
        if not self._holds(said == due):
            self._blame("totals", f"step {version} says {said} {', '.join(SUMS)}; its groups have {due}")
        now.version = version
        now.batch = Batch()
        now.steps.append(batch.groups)
        now.rollouts_trained += batch.rollouts
        self._check_places(batch.groups)
        for group_id, group in now.groups.items():
            self._check_left_behind(group_id, group)

    def _check_places(self, num_groups: int) -> None:
        """A step has room for so many groups, and leaves none of it unused before the data end."""
        now, size = self._now, self._reading.promises.groups_per_step
        filled = now.fates["trained"] + now.num_vacant
        is_full = filled >= size * len(now.steps) or not now.groups
        if not self._holds(num_groups <= size and is_full):
            self._blame(
                "batch", f"step {now.version} has {num_groups} groups for {size} places, {len(now.groups)} wait"
            )

    def _check_left_behind(self, group_id: int, group: Group) -> None:
        version = self._now.version
        if not self._holds(not group.is_taken):
            self._blame("batch", f"group {group_id} was taken by the batch of step {version}, and did not leave")
        if not self._holds(group.deadline >= version):
            self._blame("lag", f"group {group_id} is in flight at version {version}, due by {group.deadline}")

    # ---- its second life

    def on_group_resumed(self, event: Fields) -> None:
        now, group_id, kept, to_do = self._now, event["group_id"], event["kept"], event["to_do"]
        if not self._holds(group_id in now.to_take_up):
            self._blame("resume", f"group {group_id} was taken up: it was not in flight, or this is the second time")
        now.to_take_up.discard(group_id)
        group = now.groups.get(group_id)
        if group is None:
            return
        for objection in group.objections(kept, to_do, self._reading.promises.num_members):
            if not self._holds(not objection):
                self._blame("resume", f"group {group_id} was taken up: {objection}")
        listed = self._reading.ledger.get("groups", {}).get(str(group_id), event)
        if not self._holds((listed["kept"], listed["to_do"]) == (kept, to_do)):
            self._blame("resume", f"group {group_id} was taken up otherwise than the checkpoint's ledger has it")
        if not self._holds(event["incarnation"] == self._reading.incarnation):
            self._blame("resume", f"group {group_id} was taken up by life {event['incarnation']}")
        group.take_up(kept, to_do)

    def _check_all_taken_up(self) -> None:
        to_take_up = self._now.to_take_up
        if not self._holds(not to_take_up):
            self._blame("resume", f"groups {sorted(to_take_up)[:10]} were in flight and were not taken up")
            to_take_up.clear()


# ---- checkpoints on the disk --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Checkpoint:
    """A folder whose manifest could be read. Sound unless something about it was found wrong."""

    path: Path
    report: Report
    version: int
    covers_seq: int
    run_id: str
    digest: str
    ledger: Fields = field(default_factory=dict)
    is_sound: bool = True
    is_passed: bool = False
    """The last event that it covers was read."""

    def expect(self, is_right: bool, rule: str, message: str) -> None:
        if not self.report.holds(is_right):
            self.is_sound = False
            self.report.blame(rule, f"checkpoints/{self.path.name}: {message}")

    def check_files(self, files: Fields) -> None:
        """Every file of the manifest, whole, and no other."""
        found = {path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()}
        for name in sorted(files.keys() | found - {"manifest.json"}):
            self.expect(name in found, "checkpoint", f"{name} is missing")
            self.expect(name in files, "checkpoint", f"{name} is not in the manifest")
            if name in found and name in files:
                self._check_file(self.path / name, files[name]["bytes"], files[name]["sha256"])

    def _check_file(self, path: Path, size: int, sha256: str) -> None:
        found = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.expect(found == size, "checkpoint", f"{path.name} has {found} bytes, not {size}")
        self.expect(digest == sha256, "checkpoint", f"{path.name} is not as it was written: its SHA-256 differs")

    def compare(self, now: History) -> None:
        """With the history at the last event that it covers."""
        self.is_passed = True
        run_id = None if now.promises is None else now.promises.run_id
        self.expect(self.run_id == run_id, "seal", f"it is of run {self.run_id}, the events are of run {run_id}")
        try:
            self._compare_ledger(now)
        except BROKEN as error:
            self.expect(False, "ledger", f"ledger.json is not as it should be: {_reason(error)}")

    def _compare_ledger(self, now: History) -> None:
        version, next_group, vacant = self.ledger["version"], self.ledger["next_group"], set(self.ledger["vacant"])
        listed = {int(group_id): group for group_id, group in self.ledger["groups"].items()}
        is_now = version == self.version == now.version
        self.expect(is_now, "ledger", f"the ledger is of version {version}, the events of {now.version}")
        is_next = next_group == now.next_group
        self.expect(is_next, "ledger", f"next_group is {next_group}, the events have {now.next_group}")
        for group_id in sorted(now.groups.keys() | listed.keys() - vacant):
            self.expect(group_id in listed.keys() - vacant, "ledger", f"group {group_id} is in flight and not listed")
            self.expect(group_id in now.groups, "ledger", f"group {group_id} is listed and not in flight")
            if group_id in listed and group_id in now.groups:
                self._compare_group(group_id, listed[group_id], now.groups[group_id], now.promises)

    def _compare_group(self, group_id: int, listed: Fields, group: Group, promises: Promises | None) -> None:
        said = [*(listed[name] for name in ("task_id", "epoch", "start", "deadline")), listed.get("restarts", 0)]
        due = [group.task_id, group.epoch, group.start, group.deadline, group.restarts]
        self.expect(said == due, "ledger", f"group {group_id} is {said} in the ledger, {due} in the events")
        for objection in group.objections(listed["kept"], listed["to_do"], promises.num_members if promises else 0):
            self.expect(not objection, "ledger", f"group {group_id}: {objection}")


def _read_checkpoints(folder: Path, report: Report) -> list[Checkpoint]:
    """Those with a right name. Others are unfinished, on their way out, or set aside by a resume: they get a note."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if re.fullmatch(r"step-\d+", path.name) is None:
            report.notes.append(f"checkpoints/{path.name} is not a checkpoint by its name: not looked at")
            continue
        before, apart = _manifest_of(path), Report(report.run_dir)
        try:
            checkpoint = _read_checkpoint(path, apart)
        except BROKEN as error:
            checkpoint = None
            apart.blame("checkpoint", f"checkpoints/{path.name} cannot be read: {_reason(error)}")
        if not path.is_dir() or _manifest_of(path) != before:
            report.notes.append(f"checkpoints/{path.name} was removed by the run while it was read")
            continue
        report.checkpoints += 1
        report.take(apart)
        if checkpoint is not None:
            checkpoint.report = report
            found.append(checkpoint)
    return found


def _manifest_of(path: Path) -> bytes:
    with suppress(OSError):
        return (path / "manifest.json").read_bytes()
    return b""


def _read_checkpoint(path: Path, report: Report) -> Checkpoint:
    raw = (path / "manifest.json").read_bytes()
    manifest = json.loads(raw)
    version, covers_seq, run_id = int(manifest["version"]), int(manifest["covers_seq"]), str(manifest["run_id"])
    found = Checkpoint(path, report, version, covers_seq, run_id, digest=hashlib.sha256(raw).hexdigest())
    found.expect(manifest["format"] in FORMATS, "checkpoint", f"its format is {manifest['format']}, not 1 or 2")
    found.expect(path.name == f"step-{version:06d}", "checkpoint", f"its manifest is that of step {version}")
    found.check_files(manifest["files"])
    with suppress(*BROKEN):  # then nothing in it agrees with the events
        found.ledger = json.loads((path / "ledger.json").read_bytes())
    return found


# ---- the life of a run --------------------------------------------------------------------------------------------------


class RunRules:
    """Beginning, crashes, checkpoints, weights and end."""

    def __init__(self, reading: Reading, checkpoints: list[Checkpoint]) -> None:
        self._reading = reading
        self._holds = reading.report.holds
        self._blame = reading.blame
        self._checkpoints = checkpoints
        self._marks = {checkpoint.covers_seq for checkpoint in checkpoints}
        self._covered: dict[int, list[int]] = {}
        self._awaited: Counter[int] = Counter()
        self._snapshots = {-1: History()}
        self._sealed: dict[str, tuple[int, int]] = {}
        self._void: list[tuple[int, int]] = []

    @property
    def _now(self) -> History:
        return self._reading.now

    def on_run_started(self, event: Fields) -> None:
        now, max_lag, bound = self._now, event["max_lag"], event["lag_bound"]
        if not self._holds(now.promises is None):
            self._blame("start", "run_started a second time")
        if not self._holds(bound == math.ceil(max_lag)):
            self._blame("start", f"the bound is {bound}, and max_lag {max_lag}")
        now.promises = Promises(**{name: event[name] for name in Promises._fields})

    # ---- events that go back to earlier ones

    def foresee(self, event: Fields) -> None:
        """When that one passes, the history is looked at, or copied."""
        if event["kind"] == "resumed":
            self._awaited[event["from_seq"]] += 1
            self._marks.add(event["from_seq"])
        elif event["kind"] == "checkpoint_sealed":
            self._covered.setdefault(event["covers_seq"], []).append(event["version"])
            self._marks.add(event["covers_seq"])

    def pass_by(self) -> None:
        """Called after every event."""
        seq, now = self._reading.seq, self._now
        if seq not in self._marks:
            return
        for version in self._covered.pop(seq, ()):
            if not self._holds(version == now.version and now.is_between_batches):
                where = f"version {now.version}" + ("" if now.is_between_batches else ", in the middle of a batch")
                self._blame("seal", f"the checkpoint of version {version} covers this event, which is at {where}")
        for checkpoint in self._checkpoints:
            if checkpoint.covers_seq == seq and not checkpoint.is_passed:
                checkpoint.compare(now)
        if self._awaited[seq]:
            self._snapshots[seq] = copy.deepcopy(now)

    def _is_past(self, seq: int) -> bool:
        """Whether the history has this event, and no resume has undone it."""
        return seq < self._reading.seq and not any(begin < seq < end for begin, end in self._void)

    # ---- crashes

    def on_resumed(self, event: Fields) -> None:
        report, version, from_seq, digest = self._reading.report, event["version"], event["from_seq"], event["digest"]
        if not self._holds(self._now.outcome != "finished"):
            self._blame("end", "a run that finished was resumed")
        if not self._holds(event["incarnation"] == report.lives):
            self._blame("resume", f"it says {event['incarnation']} lives before, there were {report.lives}")
        due = self._sealed.get(digest) if digest else (0, -1)
        if not self._holds(due == (version, from_seq)):
            said = f"version {version} from seq {from_seq}, checkpoint {digest[:12] or 'none'}"
            self._blame("resume", f"{said}: version and seq of that checkpoint are {due}")
        report.lives += 1
        self._reading.incarnation = event["incarnation"]
        self._reading.ledger = next((found.ledger for found in self._checkpoints if found.digest == digest), {})
        self._go_back(from_seq)
        if not self._holds(self._now.version == version and self._now.is_between_batches):
            self._blame("resume", f"version {version} was resumed, the events had come to {self._now.version}")

    def _go_back(self, from_seq: int) -> None:
        """The history is again what it was, between two batches; what was published is what was resumed."""
        reading = self._reading
        is_known = from_seq in self._snapshots
        if not self._holds(is_known and self._is_past(from_seq)):
            self._blame("resume", f"seq {from_seq} is not in the history: it was undone, or is still to come")
        if is_known:
            self._awaited[from_seq] -= 1
            reading.now = copy.deepcopy(self._snapshots[from_seq])
            reading.now.num_events += 1  # this one
            self._void.append((from_seq, reading.seq))
            if from_seq >= 0 and not self._awaited[from_seq]:
                del self._snapshots[from_seq]
        now = reading.now
        now.published = now.version
        now.to_take_up = set(now.groups)
        now.outcome = None

    # ---- checkpoints

    def on_checkpoint_sealed(self, event: Fields) -> None:
        covers_seq, version = event["covers_seq"], event["version"]
        if not self._holds(covers_seq >= 0 and self._is_past(covers_seq)):
            self._blame("seal", f"the checkpoint of version {version} covers seq {covers_seq}: not in the history")
        self._sealed[event["digest"]] = (version, covers_seq)

    def finish(self) -> None:
        """Every checkpoint on the disk has its event, and covers one that was read."""
        for found in self._checkpoints:
            told = self._sealed.get(found.digest)
            is_told = told == (found.version, found.covers_seq) and found.is_passed
            found.expect(is_told, "seal", f"no event tells of digest {found.digest[:12]}, covering {found.covers_seq}")
            if is_told and not self._is_past(found.covers_seq):
                self._reading.report.notes.append(f"checkpoints/{found.path.name} is of a stretch that was undone")

    def on_learner_restarted(self, event: Fields) -> None:
        """After the first of several steps of a batch, the learner is one ahead of what was told."""
        now, begun, come = self._now, event["from_version"], event["to_version"]
        if now.promises is None:  # supervised training has no versions
            return
        if not self._holds(begun == 0 or any(version == begun for version, _ in self._sealed.values())):
            self._blame("replay", f"the learner began anew with version {begun}, of which no checkpoint was sealed")
        if not self._holds(begun <= come and come in (now.version, now.version + 1)):
            self._blame("replay", f"the learner went from version {begun} to {come}, and the run is at {now.version}")

    # ---- weights, end

    def on_weights_published(self, event: Fields) -> None:
        now, version = self._now, event["version"]
        if not self._holds(version == now.published + 1 == now.version):
            self._blame("weights", f"version {version} was published after {now.published}, at {now.version}")
        now.published = version

    def on_weights_loaded(self, event: Fields) -> None:
        version, published = event["version"], self._now.published
        if not self._holds(version <= published):
            self._blame("weights", f"{event['engine']} loaded version {version}, {published} is the newest")

    def on_run_ended(self, event: Fields) -> None:
        now, outcome = self._now, str(event["outcome"])
        if not self._holds(now.outcome is None):
            self._blame("end", f"it ended before: {now.outcome}")
        if not self._holds(event["version"] == now.version):
            self._blame("end", f"it says version {event['version']}, the events had come to {now.version}")
        if outcome == "finished":
            self._check_finished(now, now.promises)
        now.outcome = outcome

    def _check_finished(self, now: History, promises: Promises | None) -> None:
        if promises is None:
            self._blame("start", "it finished, and there was no run_started")
            return
        if not self._holds(now.published == now.version):
            self._blame("weights", f"version {now.version} was not published, {now.published} is the newest")
        if not self._holds(not now.groups):
            self._blame("end", f"groups {sorted(now.groups)[:10]} have no fate")
        is_data_over = promises.num_tasks in (0, len(now.prompts))
        if not self._holds(now.version == promises.steps or (now.version < promises.steps and is_data_over)):
            self._blame("end", f"it made {now.version} steps, {promises.steps} were planned")


# ---- reading ------------------------------------------------------------------------------------------------------------


class Replay:
    """Reads the log twice: once for the few events that go back to earlier ones, once for everything."""

    def __init__(self, path: Path, checkpoints: list[Checkpoint], report: Report) -> None:
        self._path = path
        self._report = report
        self._size = path.stat().st_size if path.exists() else 0  # of a run at work: what is there now
        self._reading = reading = Reading(report)
        self._run = run = RunRules(reading, checkpoints)
        groups = GroupRules(reading)
        self._in_training: dict[str, Callable[[Fields], None]] = {
            "group_admitted": groups.on_group_admitted,
            "rollout_started": groups.on_rollout_started,
            "rollout_ended": groups.on_rollout_ended,
            "rollout_failed": groups.on_rollout_failed,
            "rollout_aborted": groups.on_rollout_aborted,
            "group_restarted": groups.on_group_restarted,
            "group_scored": groups.on_group_scored,
            "group_taken": groups.on_group_taken,
            "group_left": groups.on_group_left,
            "group_resumed": groups.on_group_resumed,
            "stepped": groups.on_stepped,
            "weights_published": run.on_weights_published,
            "weights_loaded": run.on_weights_loaded,
        }
        self._at_any_time: dict[str, Callable[[Fields], None]] = {
            "run_started": run.on_run_started,
            "resumed": run.on_resumed,
            "checkpoint_sealed": run.on_checkpoint_sealed,
            "learner_restarted": run.on_learner_restarted,
            "run_ended": run.on_run_ended,
        }

    def run(self) -> History:
        """The history at the end of the log."""
        report, reading = self._report, self._reading
        for _, line in self._lines():
            self._look_ahead(line)
        for number, line in self._lines():
            reading.line = number
            report.lives = max(1, report.lives)
            self._take(line)
            self._run.pass_by()
        self._run.finish()
        report.void_events = report.events - reading.now.num_events
        if not report.holds(report.events > 0):
            report.blame("log", f"{self._path} has no event: nothing is proved")
        return reading.now

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines, numbered. A last one that a kill cut short is left out."""
        left = self._size
        if not left:
            return
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                left -= len(line)
                if left < 0 or not line.endswith(b"\n"):
                    return
                yield number, line

    def _look_ahead(self, line: bytes) -> None:
        head = HEAD.match(line)
        if head is None or head[2] in (b"resumed", b"checkpoint_sealed"):
            with suppress(*BROKEN):  # the second reading says what is wrong with it
                self._run.foresee(json.loads(line))

    def _take(self, line: bytes) -> None:
        reading = self._reading
        try:
            seq, kind, event = _parse(line)
        except BROKEN as error:
            self._report.blame("log", f"events.jsonl:{reading.line} is not an event: {_reason(error)}")
            return
        due = reading.seq + 1
        reading.seq = seq
        self._report.events += 1
        reading.now.num_events += 1
        if not self._report.holds(seq == due):
            reading.blame("seq", f"seq {due} was due")
        handle = self._handler(kind)
        try:
            handle(event)
        except BROKEN as error:
            reading.blame("log", f"{kind} is not as it should be: {_reason(error)}")

    def _handler(self, kind: str) -> Callable[[Fields], None]:
        """What to do with an event; nothing, if it does not touch a group's fate or comes where nothing can be made of it."""
        now = self._reading.now
        if kind not in self._in_training:
            return self._at_any_time.get(kind, _ignore)
        if not self._report.holds(now.outcome is None):
            self._reading.blame("end", f"{kind} after the run ended: {now.outcome}")
        if not self._report.holds(now.promises is not None):
            self._reading.blame("start", f"{kind} before run_started")
            return _ignore
        return self._in_training[kind]


def _ignore(event: Fields) -> None: ...


def _parse(line: bytes) -> tuple[int, str, Fields]:
    """Number, kind and fields; of a kind that is skipped, the number alone."""
    head = HEAD.match(line)
    if head is not None and head[2] in SKIPPED and line.endswith(b"}\n"):
        return int(head[1]), "", {}
    event = json.loads(line)
    return int(event["seq"]), str(event["kind"]), event


def _reason(error: Exception) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)


# ---- the other files ----------------------------------------------------------------------------------------------------


def _count(now: History, report: Report) -> None:
    report.groups_admitted = now.num_admitted
    report.groups_in_flight = len(now.groups)
    report.groups_trained = now.fates["trained"]
    report.groups_filtered = now.fates["filtered"]
    report.groups_failed = now.fates["failed"]
    report.groups_aborted = now.fates["aborted"]
    report.groups_restarted = now.num_restarts
    report.rollouts_aborted = now.rollouts_aborted
    report.steps = len(now.steps)
    report.rollouts_trained = now.rollouts_trained
    report.lag_max = now.lag_max
    report.outcome = now.outcome
    report.lag_bound = None if now.promises is None else now.promises.lag_bound
    if not report.holds(now.num_admitted == now.fates.total() + len(now.groups)):
        report.blame(
            "totals", f"{now.num_admitted} groups were admitted: {dict(now.fates)}, {len(now.groups)} in flight"
        )


def _check_metrics(path: Path, now: History, report: Report) -> None:
    """Of a run that was killed the last lines may be missing, torn, or ahead of the events."""
    is_dead, last, due = now.outcome is None, len(now.steps), 1
    rows = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, row in enumerate(rows, 1):
        if is_dead and not row.endswith(b"\n"):
            break
        try:
            step, groups = int(json.loads(row)["step"]), json.loads(row)["groups"]
        except BROKEN as error:
            report.blame("metrics", f"metrics.jsonl:{number} cannot be read: {_reason(error)}")
            continue
        if is_dead and step > last:
            report.notes.append(f"metrics.jsonl:{number} is of step {step}, which the events have not come to")
            break
        if not report.holds(step == due):
            report.blame("metrics", f"metrics.jsonl:{number} is of step {step}, {due} was due")
        if not report.holds(1 <= step <= last and now.steps[step - 1] == groups):
            report.blame("metrics", f"metrics.jsonl:{number} says that step {step} had {groups} groups")
        due = step + 1
    if not report.holds(is_dead or due == last + 1):
        report.blame("metrics", f"metrics.jsonl ends with step {due - 1}, the events with {last}")


def _check_summary(path: Path, report: Report) -> None:
    if report.outcome != "finished" or not path.exists():
        return
    try:
        summary = json.loads(path.read_bytes())
        for name in COUNTS:
            if not report.holds(summary[name] == getattr(report, name)):
                report.blame("summary", f"{name} is {summary[name]}, in the events {getattr(report, name)}")
    except BROKEN as error:
        report.blame("summary", f"summary.json cannot be read: {_reason(error)}")
