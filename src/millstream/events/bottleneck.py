"""What a run's time goes to, seen from the learner, and what holds it up most: one name. Reads only events.

A step's time is training, publishing weights, and waiting for groups. A wait has one cause: the rules read what the events
showed during it, how many rollouts were in flight, what these waited for, whether an engine was loading weights. An event takes
a few microseconds, on the thread that shows it.
"""

from __future__ import annotations

import tomllib
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

from msgspec import Struct

from millstream.events.types import (
    ConfigWritten,
    Event,
    GroupLeft,
    GroupTaken,
    ReplicaJoined,
    ReplicaLeft,
    Resumed,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    RunStarted,
    SettingChanged,
    SizesChosen,
    Span,
    Status,
    Stepped,
    WeightsLoaded,
    WeightsPublished,
)
from millstream.types import Fate

RECENT = 50  # steps that are looked at
FEW = 0.2  # of the most rollouts that a step had in flight
MAIN = 0.5  # of a wait's time or rollouts: they are its cause
QUEUED = 0.15  # of the requests: they wait for slots, or for the cache
FULL = 0.75  # of the slots
NO_SIGNAL = 1 / 3  # of the groups
FAILED = 0.15  # of the rollouts, or of the engines' time
MIN_STEPS = 3

BottleneckName = Literal[
    "learner",
    "turns",
    "sync",
    "environment",
    "slots",
    "cache",
    "no-signal",
    "failures",
    "stragglers",
    "engines",
]


class Bottleneck(Struct, frozen=True, kw_only=True):
    """`shares`: of the time of these steps. They add up to 1, but for checkpoints and evaluations."""

    name: BottleneckName
    message: str
    steps: int
    step_s: float
    shares: dict[str, float]


class _StepUse(Struct):
    """What one step showed. Seconds are the learner's; those of waits by what the rollouts did meanwhile."""

    seconds: float = 0.0
    training_s: float = 0.0
    publishing_s: float = 0.0
    waiting_s: float = 0.0
    few_s: float = 0.0  # waits with few rollouts in flight,
    few_loading_s: float = 0.0  # of these, while an engine loaded weights
    idle_s: float = 0.0  # no rollout was in flight while the learner trained
    lost_s: float = 0.0  # engines that were gone, in engine seconds
    engines_s: float = 0.0  # all engines
    few_rollouts: float = 0.0  # rollouts in flight in waits with few, times seconds
    most: int = 0  # rollouts in flight
    num_ended: int = 0
    num_failed: int = 0
    num_trained: int = 0
    num_filtered: int = 0
    waits_seen: int = 0  # readings of the state (`Status`) in which the learner waited for a group
    in_engines: int = 0  # this and the next: rollouts, in these readings
    in_environments: int = 0
    queued: int = 0
    running: int = 0


class TimeUse:
    """Collects events, in their order. `bottleneck` is that of the last steps since a setting was changed."""

    READ: frozenset[type[Event]] = frozenset(
        (
            *(ConfigWritten, SizesChosen, RunStarted, Resumed, SettingChanged, RolloutStarted, RolloutEnded),
            *(RolloutFailed, RolloutAborted, GroupTaken, GroupLeft, Span, WeightsPublished, WeightsLoaded),
            *(ReplicaLeft, ReplicaJoined, Status, Stepped),
        )
    )

    def __init__(self) -> None:
        self._steps: deque[_StepUse] = deque(maxlen=RECENT)
        self._slots: int | None = None  # of one engine; None: not known
        self._has_pages = True  # whether the cache has a size that requests share
        self._reset()

    def _reset(self) -> None:
        """A process of the run begins: nothing is in flight."""
        self._now = 0.0
        self._in_flight = 0
        self._published = 0
        self._versions: dict[str, int] = {}  # that engines have loaded
        self._behind: set[str] = set()  # engines that have not loaded what is published
        self._gone: set[str] = set()
        self._names: set[str] = set()  # of all engines
        self._stepped_at: float | None = None
        self._begin_interval()
        self._step = _StepUse()

    def begin_at(self, at: float, in_flight: int) -> None:
        """Leave out what came before: `in_flight` rollouts are left of it."""
        self._now = self._since = at
        self._in_flight = in_flight

    def _begin_interval(self) -> None:
        """Since the learner last took a group, or ended a call."""
        self._since = self._now
        self._few_s = 0.0
        self._few_loading_s = 0.0
        self._none_s = 0.0
        self._few_rollouts = 0.0

    def add(self, event: Event) -> None:
        if type(event) not in self.READ:
            return
        if not isinstance(event, Span) or event.worker == "learner":
            self._advance(event.at)
        match event:
            case RolloutStarted():
                self._in_flight += 1
                self._step.most = max(self._step.most, self._in_flight)
            case RolloutEnded():
                self._in_flight -= 1
                self._step.num_ended += 1
            case RolloutFailed() | RolloutAborted():
                self._in_flight -= 1
                self._step.num_failed += isinstance(event, RolloutFailed)
            case GroupTaken():
                self._end_wait()
            case GroupLeft():
                self._step.num_trained += event.fate is Fate.TRAINED
                self._step.num_filtered += event.fate is Fate.FILTERED
            case Span():
                self._add_span(event)
            case WeightsPublished():
                self._published = event.version
                self._behind = {name for name, version in self._versions.items() if version < event.version}
                self._step.publishing_s += event.seconds
                self._begin_interval()
            case WeightsLoaded():
                self._load(event.engine, event.version)
            case Status():
                self._add_status(event)
            case Stepped():
                self._end_step(event)
            case _:
                self._add_change(event)

    def _add_change(self, event: Event) -> None:
        match event:
            case ReplicaLeft():
                self._gone.add(event.engine)
                self._names.add(event.engine)
            case ReplicaJoined():
                self._gone.discard(event.engine)
                self._load(event.engine, event.version)
            case ConfigWritten():
                self._slots = _slots_in(event.text) or self._slots
            case SizesChosen():
                self._slots = event.sizes.slots
                self._has_pages = event.sizes.cache_gb is not None
            case RunStarted() | Resumed():
                self._reset()
                self._now = self._since = event.at
                self._steps.clear()
            case SettingChanged():
                self._steps.clear()

    def _load(self, engine: str, version: int) -> None:
        self._versions[engine] = version
        self._names.add(engine)
        (self._behind.add if version < self._published else self._behind.discard)(engine)

    def _advance(self, at: float) -> None:
        seconds = max(0.0, at - self._now)
        self._now = max(self._now, at)
        if not seconds:
            return
        self._step.engines_s += seconds * len(self._names)
        self._step.lost_s += seconds * len(self._gone)
        if not self._in_flight:
            self._none_s += seconds
        if self._in_flight <= max(1, FEW * self._usual_most()):
            self._few_s += seconds
            self._few_rollouts += seconds * self._in_flight
            if self._behind:
                self._few_loading_s += seconds

    def _usual_most(self) -> int:
        return self._steps[-1].most if self._steps else self._step.most

    def _end_wait(self) -> None:
        """The learner has a group that it waited for."""
        step = self._step
        step.waiting_s += self._now - self._since
        step.few_s += self._few_s
        step.few_loading_s += self._few_loading_s
        step.few_rollouts += self._few_rollouts
        self._begin_interval()

    def _add_span(self, event: Span) -> None:
        if event.worker != "learner" and event.what == "generate":
            self._load(event.worker, self._versions.get(event.worker, self._published))
        if event.worker != "learner":
            return
        if event.what != "copy weights":  # which is a part of publishing
            self._step.training_s += event.seconds
            self._step.idle_s += min(self._none_s, event.seconds)
        self._begin_interval()

    def _add_status(self, event: Status) -> None:
        if not any(wait.owner == "train" and wait.what == "a complete group" for wait in event.waits):
            return
        step = self._step
        step.waits_seen += 1
        step.running += event.requests_running
        step.queued += event.requests_waiting
        for wait in event.waits:
            if wait.owner == "rollouts" and wait.what == "an engine":
                step.in_engines += wait.count
            elif wait.owner == "rollouts" and wait.what != "the other rollouts of the step":
                step.in_environments += wait.count

    def _end_step(self, event: Stepped) -> None:
        self._step.seconds = event.at - (event.at - event.seconds if self._stepped_at is None else self._stepped_at)
        self._stepped_at = event.at
        self._steps.append(self._step)
        self._step = _StepUse(most=self._in_flight)

    # ---- the result ----------------------------------------------------------------------------------------------------

    def bottleneck(self) -> Bottleneck | None:
        """None: too few steps. Where there are enough, those in which the pipeline fills are left out."""
        steps = list(self._steps)
        if len(steps) < MIN_STEPS:
            return None
        steps = steps[min(len(steps) // 4, 4) :]
        total = _StepUse(
            **{
                name: sum(getattr(step, name) for step in steps)
                for name in _StepUse.__struct_fields__
                if name != "most"
            }
        )
        seconds = max(total.seconds, 1e-9)
        shares = {
            "training": total.training_s / seconds,
            "publishing weights": total.publishing_s / seconds,
            "waiting for groups": total.waiting_s / seconds,
        }
        name = _name(total, self._num_slots())
        most = sum(step.most for step in steps) / len(steps)
        message = _message(name, total, shares, most)
        return Bottleneck(name=name, message=message, steps=len(steps), step_s=seconds / len(steps), shares=shares)

    def _num_slots(self) -> float | None:
        """Of all engines. None: not known, or a queue is never for the cache."""
        if self._slots is None or not self._has_pages:
            return None
        return self._slots * max(1, len(self._versions.keys() - self._gone))


def bottleneck_of(events: Iterable[Event]) -> Bottleneck | None:
    use = TimeUse()
    for event in events:
        use.add(event)
    return use.bottleneck()


def _slots_in(text: str) -> int | None:
    with suppress(tomllib.TOMLDecodeError, AttributeError):
        slots = tomllib.loads(text).get("engine", {}).get("slots")
        return slots if isinstance(slots, int) else None
    return None


def _name(use: _StepUse, num_slots: float | None) -> BottleneckName:
    if use.num_filtered and not use.num_trained:  # no group was taken, so no wait has ended
        return "no-signal"
    waiting_s = use.waiting_s
    if min(use.training_s, waiting_s) > MAIN * max(use.training_s, waiting_s) and use.idle_s > MAIN * use.training_s:
        return "turns"
    loading_s = use.few_loading_s if 2 * use.few_loading_s > use.few_s else 0.0
    if use.training_s >= max(waiting_s, use.publishing_s + loading_s):
        return "learner"
    if use.publishing_s >= waiting_s:
        return "sync"
    return _cause(use, num_slots)


def _cause(use: _StepUse, num_slots: float | None) -> BottleneckName:
    """Of the waits."""
    if use.num_failed > FAILED * (use.num_ended + use.num_failed) or use.lost_s > FAILED * use.engines_s:
        return "failures"
    if use.num_filtered > NO_SIGNAL * (use.num_filtered + use.num_trained):
        return "no-signal"
    if use.in_environments > MAIN * (use.in_environments + use.in_engines):
        return "environment"
    if use.queued > QUEUED * (use.queued + use.running):
        is_room = num_slots is not None and use.running < FULL * num_slots * use.waits_seen
        return "cache" if is_room else "slots"
    if use.few_s > MAIN * use.waiting_s:
        return "sync" if 2 * use.few_loading_s > use.few_s else "stragglers"
    return "engines"


def _message(name: BottleneckName, use: _StepUse, shares: dict[str, float], most: float) -> str:
    training, publishing, waiting = (f"{share:.0%}" for share in shares.values())
    waits, seen, seconds = f"the learner waits {waiting} of the time", max(1, use.waits_seen), max(use.seconds, 1e-9)
    in_engines, in_environments = use.in_engines / seen, use.in_environments / seen
    filtered = use.num_filtered / max(1, use.num_filtered + use.num_trained)
    failed, lost = use.num_failed / max(1, use.num_failed + use.num_ended), use.lost_s / max(use.engines_s, 1e-9)
    few = max(1.0, use.few_rollouts / max(use.few_s, 1e-9))
    return {
        "learner": f"engines wait for the learner, which trains {training} of the time",
        "turns": f"engines are idle while the learner trains, {training} of the time, and it waits for them {waiting}",
        "sync": f"publishing weights takes {publishing} of the time, and {waits}, for {use.few_loading_s / seconds:.0%} while "
        "engines load them",
        "environment": f"{waits}, for environments and rewards: {in_environments:.0f} rollouts are in them meanwhile, and "
        f"{in_engines:.0f} in engines",
        "slots": f"{waits}, while {use.queued / seen:.0f} requests queue for slots and {use.running / seen:.0f} decode",
        "cache": f"{waits}, while {use.queued / seen:.0f} requests queue for room in the cache, although slots are free",
        "no-signal": f"{waits if use.num_trained else 'nothing is trained'}, and {filtered:.0%} of the groups are filtered: "
        "their rewards are all equal",
        "failures": f"{waits}: {failed:.0%} of the rollouts fail, and engines are lost {lost:.0%} of the time",
        "stragglers": f"{waits}, for {use.few_s / seconds:.0%} for stragglers: {few:.0f} of up to {most:.0f} rollouts are left "
        "then",
        "engines": f"{waits}, for engines that are busy: up to {most:.0f} rollouts are in flight",
    }[name]
