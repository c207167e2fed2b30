"""From events to findings. `Watch` reads events in their order and returns a `FindingMade` when a rule begins to hold, and a
`FindingEnded` when it has not held for `ENDS_AFTER` steps. The same events give the same findings, so that they can be computed
from a log as well (`findings_of`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from millstream.events import (
    Event,
    FindingEnded,
    FindingMade,
    GroupLeft,
    GroupRestarted,
    GroupScored,
    Resumed,
    RolloutEnded,
    RunEnded,
    RunStarted,
    Stepped,
)
from millstream.events.findings.facts import SoFar, StepFacts, are_equal
from millstream.events.findings.rules import OF_ABSOLUTE_REWARDS, OF_REWARDS, RULES, SAID_BY, Evidence
from millstream.types import Fate, Finish

ENDS_AFTER = 10  # steps in a row without the condition


class Watch:
    """Findings of a run from its events. Other kinds than those in `READ` may be left out. `run`: its folder, as commands in
    the advice name it."""

    READ = frozenset((RunStarted, RolloutEnded, GroupScored, GroupRestarted, GroupLeft, Resumed, Stepped, RunEnded))

    def __init__(self, run: str | Path = "RUN") -> None:
        self._run = quote(str(run))
        self.open: dict[str, FindingMade] = {}  # those that hold
        self._so_far = SoFar()
        self._now = StepFacts()
        self._rewards: dict[int, list[float]] = defaultdict(list)  # of groups in flight
        self._compares_members = False
        self._left_out: frozenset[str] = frozenset()  # rules that say nothing about this run
        self._num_without: dict[str, int] = defaultdict(int)  # steps in a row in which an open finding did not hold

    def add(self, event: Event) -> list[FindingMade | FindingEnded]:
        if type(event) not in self.READ:
            return []
        match event:
            case RunStarted():
                self._compares_members = event.compares_members
                self._left_out = frozenset() if event.learns_from_rewards else OF_REWARDS
            case RolloutEnded():
                if event.rewards:  # of several agents: what one gains, another may lose
                    self._left_out |= OF_ABSOLUTE_REWARDS
                self._rewards[event.group_id].append(event.reward)
                self._now.lengths.add(event.num_sampled)
                self._now.num_cut += event.finish is Finish.LENGTH
            case GroupScored() if event.rewards:
                self._left_out |= OF_ABSOLUTE_REWARDS  # a ranking has the same mean whatever is learned
                self._rewards[event.group_id] = list(event.rewards)
            case GroupRestarted():
                self._rewards.pop(event.group_id, None)
            case GroupLeft():
                self._add_group(event)
            case Resumed():
                self._rewards.clear()
                self._now = StepFacts()
            case Stepped():
                self._end_step(event)
                return self._judge(event.at, is_over=False)
            case RunEnded(outcome="finished"):  # one that was stopped has seen less than a rule needs
                return self._judge(event.at, is_over=True)
        return []

    def _add_group(self, event: GroupLeft) -> None:
        rewards, now = self._rewards.pop(event.group_id, []), self._now
        if event.fate not in (Fate.TRAINED, Fate.FILTERED):
            return
        now.groups.add(event.mean_reward)
        is_equal = len(rewards) > 1 and are_equal(min(rewards), max(rewards))
        now.num_silent += event.fate is Fate.FILTERED or (is_equal and self._compares_members)
        for reward in rewards or [event.mean_reward]:  # a group from a checkpoint has only its mean here
            now.rollouts.add(reward)
            now.lowest = min(now.lowest, reward)
            if now.num_highest and are_equal(reward, now.highest):
                now.num_highest += 1
            elif reward > now.highest:
                now.highest = reward
                now.num_highest = 1

    def _end_step(self, event: Stepped) -> None:
        now, metrics = self._now, event.metrics
        now.step = event.version
        now.metrics = metrics
        now.is_empty = is_empty_step(event)
        self._so_far.add(now)
        self._now = StepFacts()

    def _judge(self, at: float, *, is_over: bool) -> list[FindingMade | FindingEnded]:
        so_far, made = self._so_far, list[FindingMade | FindingEnded]()
        so_far.is_over = is_over
        if not so_far.num_steps:
            return made
        step = so_far.last[-1].step
        for name, rule in RULES.items():
            if name in self._left_out:
                continue
            verdict = rule(so_far)
            if isinstance(verdict, Evidence):
                self._num_without[name] = 0
                if name not in self.open and not any(other in self.open for other in SAID_BY.get(name, ())):
                    message, figures = verdict.message, verdict.figures
                    advice = verdict.advice.replace(" RUN", f" {self._run}")
                    found = FindingMade(at=at, name=name, step=step, message=message, advice=advice, figures=figures)
                    self.open[name] = found
                    made.append(found)
            elif verdict is False and name in self.open:
                self._num_without[name] += 1
                if self._num_without[name] >= ENDS_AFTER:
                    del self.open[name]
                    made.append(FindingEnded(at=at, name=name, step=step))
        return made


def is_empty_step(event: Stepped) -> bool:
    """Whether the step trained nothing: no rollout was left, or the gradient was 0."""
    return not event.num_rollouts or event.metrics.get("grad_norm", 1.0) == 0.0


class PastFinding(NamedTuple):
    """A finding of a log; `until` is the step at which it ended, None if it held at the end."""

    finding: FindingMade
    until: int | None


def findings_of(events: Iterable[Event], run: str | Path = "RUN") -> list[PastFinding]:
    """All findings of these events, in their order. `run`: as for `Watch`."""
    watch, found = Watch(run), list[PastFinding]()
    for event in events:
        for made in watch.add(event):
            if isinstance(made, FindingMade):
                found.append(PastFinding(made, None))
            else:
                found = [
                    PastFinding(one, made.step) if until is None and one.name == made.name else PastFinding(one, until)
                    for one, until in found
                ]
    return found
