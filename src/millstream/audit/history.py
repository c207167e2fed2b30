"""The history: what the events read so far add up to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from millstream.audit.report import AuditReport, Fields


class RunTerms(NamedTuple):
    """What `run_started` says of the whole run."""

    run_id: str
    seed: int
    steps: int
    num_tasks: int
    filter_zero_signal: bool
    min_group_size: int
    groups_per_step: int
    group_size: int
    max_lag: float
    lag_bound: int
    budget: int
    extra_members: int
    is_first_to_finish: bool
    max_restarts: int
    max_replaced: int | None = None  # of groups that a step replaces; None: the log is of a version that does not say
    rollouts_from: str = ""
    """Batches that another run recorded are trained: which of its groups were replaced is not logged, and the versions of its
    rollouts are not those of this run's engines."""

    @property
    def num_members(self) -> int:
        return self.group_size + self.extra_members


class EndedMember(NamedTuple):
    """A rollout that ended without a failure."""

    reward: float
    rewards: list[float]  # one per agent; usually one
    num_tokens: int
    num_rows: int
    start: int
    end: int
    given: float  # its own reward, without that of the group as a whole
    is_partial: bool  # the reward of its whole group is still to be added
    is_kept: bool  # as of a group


class TrainedGroup(NamedTuple):
    version: int  # that trained it: of the first step, 0
    seq: int  # of the event that it left with
    is_kept: bool  # the settings in force said so
    members: dict[int, EndedMember]


@dataclass(slots=True)
class TrackedGroup:
    """A group in flight. A member is running, has ended, is out (failed for good or aborted), or waits for its next attempt."""

    task_id: str
    epoch: int
    start: int
    deadline: int
    next_attempt: dict[int, int] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    ended: dict[int, EndedMember] = field(default_factory=dict)
    out: set[int] = field(default_factory=set)
    aborted: set[int] = field(default_factory=set)
    is_taken: bool = False
    first_attempt: int = 0
    restarts: int = 0
    has_failed_score: bool = False  # the reward of the whole group failed
    is_resumed: bool = False
    terms: RunTerms | None = None  # those that its rollouts began with

    @property
    def own_terms(self) -> RunTerms:
        assert self.terms is not None, "a group is admitted after run_started only"
        return self.terms

    def due_fate(self) -> str:
        terms = self.own_terms
        if len(self.ended) < terms.min_group_size or self.has_failed_score:
            return "failed"
        by_agent = zip_longest(*(member.rewards for member in self.ended.values()))
        known = ([reward for reward in rewards if reward is not None] for rewards in by_agent)
        has_signal = any(max(rewards) > min(rewards) for rewards in known)
        return "filtered" if terms.filter_zero_signal and not has_signal else "trained"

    def mean_reward(self) -> float:
        return math.fsum(member.reward for member in self.ended.values()) / len(self.ended) if self.ended else 0.0

    def objections(self, kept: list[int], to_do: list[int], size: int) -> Iterator[str]:
        """What speaks against resuming with members `kept` and repeating `to_do`: one string per check, empty if it holds."""
        members = [*kept, *to_do]
        lost = sorted(set(range(size)) - self.out - set(members))
        yield f"members {lost} are neither kept nor repeated, and have not failed" if lost else ""
        yield "" if set(members) <= set(range(size)) else f"it has no such members: {members}"
        yield "" if len(set(members)) == len(members) else f"a member is listed twice: {members}"
        yield "" if self.ended.keys() >= set(kept) else f"members {kept} are kept, {sorted(self.ended)} have ended"

    def resume(self, kept: list[int], to_do: list[int]) -> None:
        """Forget what was recorded of the members that are repeated."""
        self.is_resumed = True
        self.ended = {member: ended for member, ended in self.ended.items() if member in kept}
        self.out.difference_update(to_do)
        self.aborted.difference_update(to_do)
        self.next_attempt = {}
        self.running = set()

    def restart(self, event: Fields) -> None:
        """Forget what was recorded of all members."""
        self.start = event["start_version"]
        self.deadline = event["deadline"]
        self.restarts = event["restarts"]
        self.first_attempt = event["first_attempt"]
        self.next_attempt = {}
        self.ended = {}
        self.out = set()
        self.aborted = set()


@dataclass(slots=True)
class BatchTotals:
    """Groups that left as trained since the last step."""

    groups: int = 0
    rows: int = 0
    tokens: int = 0
    rollouts: int = 0


class StepTotals(NamedTuple):
    groups: int
    mean_reward: float | None  # of the rollouts that ended since the step before, trained or not; None: there were none


class RunningEvaluation(NamedTuple):
    version: int
    engines: set[str]
    loaded: list[str]  # other weights on these engines since it started, in words


@dataclass(slots=True)
class History:
    terms: RunTerms | None = None
    num_events: int = 0
    version: int = 0
    published: int = 0
    loaded: set[int] = field(default_factory=lambda: {0})  # versions that an engine has loaded, or began with
    unloaded: dict[int, int] = field(
        default_factory=dict
    )  # versions in use that none has loaded -> the run's version then
    num_admitted: int = 0
    next_group: int = 0
    groups: dict[int, TrackedGroup] = field(default_factory=dict)  # those in flight
    to_resume: set[int] = field(default_factory=set)  # those of them that the resumed process has not resumed yet
    epoch: int = 0
    prompts: set[str] = field(default_factory=set)  # of this epoch
    first_prompts: frozenset[str] | None = None  # of the first epoch, when it is over
    batch: BatchTotals = field(default_factory=BatchTotals)
    rewards: list[float] = field(default_factory=list)  # that became known since the last step
    num_replaced: int = 0  # groups since the last step
    is_fed: bool = False  # a place stayed empty that could have been filled: the data have ended
    steps: list[StepTotals] = field(default_factory=list)
    fates: Counter[str] = field(default_factory=Counter)
    num_vacant: int = 0
    rollouts_trained: int = 0
    rollouts_aborted: int = 0
    num_restarts: int = 0
    lag_max: int = 0
    bound_max: int = 0  # of the groups that were admitted
    evaluating: dict[str, RunningEvaluation] = field(default_factory=dict)  # by name
    first_table: str = ""  # the name of the first evaluation's table
    accuracies: dict[str, float] = field(default_factory=dict)  # the last of each evaluation, by its name
    outcome: str | None = None
    lag_moved_at: int | None = None  # the version of the last move of `auto_lag` in training
    is_training: bool = False  # this process has admitted a group or made a step
    config: Fields | None = None  # the settings in force; None: the log does not say
    changed: set[str] = field(default_factory=set)  # keys that the last resume changed
    changes_due: dict[str, tuple[Any, Any]] | None = None  # those without an event yet, by key: old and new value
    superseded: dict[int, int] = field(default_factory=dict)  # groups, by the last version that could train them
    to_feed: list[tuple[str, int]] = field(default_factory=list)  # prompts that are fed again, with their epochs
    num_places: int = 0  # of all steps, by the batch size that each had

    def use_version(self, version: int) -> None:
        """A group or a rollout began or ended on it. Versions of recorded batches are those of the run that recorded them."""
        is_recorded = self.terms is not None and bool(self.terms.rollouts_from)
        if version not in self.loaded and not is_recorded:
            self.unloaded.setdefault(version, self.version)

    def load_version(self, version: int) -> None:
        self.loaded.add(version)
        self.unloaded.pop(version, None)

    @property
    def is_between_batches(self) -> bool:
        return not self.batch.groups and not any(group.is_taken for group in self.groups.values())


@dataclass(slots=True)
class Cursor:
    """The position in the log, and the history up to there."""

    report: AuditReport
    now: History = field(default_factory=History)
    line: int = 0
    seq: int = -1
    incarnation: int = 0
    ledger: Fields = field(default_factory=dict)  # of the checkpoint that was resumed, if it is still on the disk
    # by version, with rollouts that are to be compared; not of the history, which resumes copy
    trained: dict[int, dict[int, TrainedGroup]] = field(default_factory=dict)
    are_compared: bool = False  # the run has kept rollouts

    def add_trained(self, group_id: int, group: TrackedGroup) -> None:
        """To be compared with the rollouts that were kept."""
        if self.are_compared:
            version = self.now.version
            own = TrainedGroup(version, self.seq, self.is_keeping, group.ended)
            self.trained.setdefault(version, {})[group_id] = own

    @property
    def is_keeping(self) -> bool:
        """Whether rollouts are kept by the settings in force."""
        return bool((self.now.config or {}).get("rollout", {}).get("keep_gb", True))

    @property
    def terms(self) -> RunTerms:
        assert self.now.terms is not None, "events of groups are handled after run_started only"
        return self.now.terms

    def expect(self, is_right: bool, rule: str, message: str) -> bool:
        """One check of the event at the cursor. Returns whether it holds."""
        if not self.report.holds(is_right):
            self.add_finding(rule, message)
        return is_right

    def add_finding(self, rule: str, message: str) -> None:
        self.report.add_finding(rule, f"events.jsonl:{self.line} (seq {self.seq}): {message}")
