"""A run as a Perfetto trace: open trace.json at ui.perfetto.dev or in chrome://tracing.

    run        its phases, evaluations, weight versions; findings, stalls, failures and resumes as marks
    workers    a track for each engine, the learner, each stage, and the loading of weights; counters of lag and queues
    rollouts   a track for each slot in use: rollouts that ended, failed or were aborted, with their turns where these are
               recorded. An arrow leads from a rollout to the step of the learner that trained it

Slices of one track never overlap, unless one is inside the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from millstream.events import (
    CheckpointFailed,
    ConfigWritten,
    Evaluated,
    EvaluationStarted,
    Event,
    FindingMade,
    GroupAdmitted,
    GroupResumed,
    GroupTaken,
    LearnerRestarted,
    ReplicaJoined,
    ReplicaLeft,
    Resumed,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutSpan,
    RolloutStarted,
    RunEnded,
    RunStarted,
    Span,
    Stalled,
    Status,
    Stepped,
    StopRequested,
    WarmedUp,
    WeightsLoaded,
    WeightsPublished,
)

RUN, WORKERS, ROLLOUTS = 1, 2, 3  # the groups of tracks
PHASES, VERSIONS, MARKS, EVALUATIONS = 1, 2, 3, 4  # tracks of the run; evaluations that overlap have the next ones
SHOWN = (
    *(Span, WeightsPublished, WeightsLoaded, RolloutStarted, RolloutSpan, RolloutEnded, RolloutFailed, RolloutAborted),
    *(GroupTaken, Status, Stepped),
)
MARKED = (FindingMade, Stalled, CheckpointFailed, LearnerRestarted, ReplicaLeft, ReplicaJoined, Resumed, StopRequested)
MAX_EVENTS = 500_000
TraceEntry = dict[str, Any]
RolloutOver = RolloutEnded | RolloutFailed | RolloutAborted


def perfetto(events: Iterable[Event]) -> dict[str, list[TraceEntry]]:
    """The Chrome trace format, which Perfetto reads: complete events ("X"), marks ("i"), arrows ("s", "f"), counters ("C") and
    names ("M"). Of a long run only the last part: no viewer opens more."""
    shown, tracks = deque[Event](maxlen=MAX_EVENTS), _RunTracks()
    for event in events:
        tracks.add(event)
        if isinstance(event, SHOWN):
            shown.append(event)
    workers = _Workers()
    on_workers = list(workers.entries(shown))
    rollouts = _rollouts(shown, workers, tracks.last)
    return {"traceEvents": [*_names(), *tracks.entries(), *on_workers, *rollouts]}


def _names() -> Iterator[TraceEntry]:
    for process, name in ((RUN, "run"), (WORKERS, "workers"), (ROLLOUTS, "rollouts")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for track, name in ((PHASES, "phases"), (VERSIONS, "weight versions"), (MARKS, "what happened")):
        yield _track_name(RUN, track, name)


# ---- the run ---------------------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    begin: float
    end: float
    name: str
    args: TraceEntry


class _RunTracks:
    """Phases follow each other: a phase ends where the next begins. Those of each process of a run."""

    def __init__(self) -> None:
        self.last = 0.0
        self._phases: list[tuple[float, str]] = []
        self._stepped_at = 0.0
        self._evaluations: list[Slice] = []
        self._open: dict[str, EvaluationStarted] = {}
        self._marks: list[TraceEntry] = []

    def add(self, event: Event) -> None:
        self.last = max(self.last, event.at)
        match event:
            case ConfigWritten() | Resumed() if not self._is_in("start"):
                self._open.clear()
                self._phases.append((event.at, "start"))
            case WarmedUp() if not self._is_in("supervised training"):
                self._phases.append((event.at, "supervised training"))
            case RunStarted() | GroupAdmitted() | GroupResumed() if not self._is_in("reinforcement learning"):
                self._phases.append((event.at, "reinforcement learning"))
            case Stepped():
                self._stepped_at = event.at
                self._mark(f"version {event.version}", event, VERSIONS)
            case EvaluationStarted():
                self._open[event.name] = event
            case Evaluated() if event.name in self._open:
                args = {"accuracy": event.accuracy, "tasks": event.num_tasks, "version": event.version}
                self._evaluations.append(Slice(self._open.pop(event.name).at, event.at, event.name, args))
            case RunEnded():
                if self._is_in("reinforcement learning") and self._stepped_at < event.at:
                    self._phases.append((max(self._stepped_at, self._phases[-1][0]), "end"))
                self._phases.append((event.at, ""))
                self._mark(f"the run ended: {event.outcome}", event, MARKS)
        if isinstance(event, MARKED):
            self._mark(_words(event), event, MARKS)

    def _is_in(self, phase: str) -> bool:
        return bool(self._phases) and self._phases[-1][1] == phase

    def _mark(self, name: str, event: Event, track: int) -> None:
        entry = {"ph": "i", "s": "t", "name": name, "cat": str(event.__struct_config__.tag), "pid": RUN, "tid": track}
        self._marks.append({**entry, "ts": _microseconds(event.at)})

    def entries(self) -> Iterator[TraceEntry]:
        ends = [at for at, _ in self._phases[1:]] + [self.last]
        for (begin, phase), end in zip(self._phases, ends, strict=False):  # of no phase, no end
            if phase:
                yield _complete(RUN, PHASES, Slice(begin, max(begin, end), phase, {}))
        tracks = _free_tracks([(one.begin, one.end) for one in self._evaluations])
        for number in sorted(set(tracks)):
            yield _track_name(RUN, EVALUATIONS + number, "evaluations")
        for one, track in zip(self._evaluations, tracks, strict=True):
            yield _complete(RUN, EVALUATIONS + track, one)
        yield from self._marks[-MAX_EVENTS:]


def _words(event: Event) -> str:
    match event:
        case FindingMade():
            return f"finding: {event.name}"
        case Stalled():
            return f"{event.owner} waits for {event.what}"
        case LearnerRestarted():
            return f"{event.who} was restarted"
        case ReplicaLeft():
            return f"{event.engine} has left"
        case ReplicaJoined():
            return f"{event.engine} has joined"
        case Resumed():
            return f"resumed from version {event.version}"
        case CheckpointFailed():
            return f"the checkpoint of step {event.version} failed"
    return "stop"


# ---- workers ---------------------------------------------------------------------------------------------------------


class _Workers:
    """`steps`: the learner's slice of the step that made each version. `taken`: the version from which a group was trained."""

    def __init__(self) -> None:
        self.steps: dict[int, Slice] = {}
        self.taken: dict[int, int] = {}
        self._tracks: dict[str, int] = {}
        self._ends: dict[str, float] = {}
        self._last_step: Slice | None = None

    @property
    def learner(self) -> int:
        return self._tracks["learner"]

    def entries(self, events: Iterable[Event]) -> Iterator[TraceEntry]:
        for event in events:
            match event:
                case Span():
                    one = Slice(event.at - event.seconds, event.at, event.what, {"tokens": event.num_tokens})
                    self._last_step = one if (event.worker, event.what) == ("learner", "step") else self._last_step
                    yield from self._on(event.worker, one)
                case WeightsPublished():
                    yield from self._on("publish weights", _version_slice(event))
                case WeightsLoaded():
                    yield from self._on(f"load into {event.engine}", _version_slice(event))
                case GroupTaken():
                    self.taken[event.group_id] = event.version
                    yield _counter("lag of the group taken", event.at, event.lag)
                case Status():
                    yield _counter("requests running", event.at, event.requests_running)
                    yield _counter("requests waiting", event.at, event.requests_waiting)
                    yield _counter("rows in the store", event.at, event.rows_in_store)
                    yield _counter("groups in flight", event.at, event.groups_outstanding + event.groups_taken)
                case Stepped():
                    yield _counter("version", event.at, event.version)
                    if self._last_step is not None:
                        self.steps[event.version] = self._last_step

    def _on(self, name: str, one: Slice) -> Iterator[TraceEntry]:
        if name not in self._tracks:
            self._tracks[name] = len(self._tracks) + 1
            yield _track_name(WORKERS, self._tracks[name], name)
        begin = min(max(one.begin, self._ends.get(name, one.begin)), one.end)  # an engine's report may arrive late
        self._ends[name] = max(one.end, self._ends.get(name, one.end))
        yield _complete(WORKERS, self._tracks[name], one._replace(begin=begin))


def _version_slice(event: WeightsPublished | WeightsLoaded) -> Slice:
    return Slice(event.at - event.seconds, event.at, f"version {event.version}", {})


# ---- rollouts --------------------------------------------------------------------------------------------------------


class _Rollout(NamedTuple):
    group_id: int
    has_ended: bool
    slice: Slice
    parts: Sequence[RolloutSpan]


def _rollouts(events: Iterable[Event], workers: _Workers, last: float) -> Iterator[TraceEntry]:
    rollouts = list(_played(events, last))
    tracks = _free_tracks([(one.slice.begin, one.slice.end) for one in rollouts])
    for number in sorted(set(tracks)):
        yield _track_name(ROLLOUTS, number + 1, f"slot {number}")
    for number, (rollout, track) in enumerate(zip(rollouts, tracks, strict=True)):
        yield _complete(ROLLOUTS, track + 1, rollout.slice)
        end = rollout.slice.begin
        for part in sorted(rollout.parts, key=lambda part: part.at - part.seconds):
            if (begin := part.at - part.seconds) >= end and part.at <= rollout.slice.end:  # not inside another one
                end, args = part.at, {"tokens": part.num_tokens} if part.num_tokens else {}
                yield _complete(ROLLOUTS, track + 1, Slice(begin, end, part.what, args))
        step = workers.steps.get(workers.taken.get(rollout.group_id, -2) + 1)
        if rollout.has_ended and step is not None and step.begin >= rollout.slice.end:
            yield from _arrow(number, (ROLLOUTS, track + 1, rollout.slice), (WORKERS, workers.learner, step))


def _played(events: Iterable[Event], last: float) -> Iterator[_Rollout]:
    """A rollout without an end was in flight when the run ended or crashed."""
    started: dict[tuple[int, int, int], RolloutStarted] = {}
    parts: dict[tuple[int, int, int], list[RolloutSpan]] = {}
    for event in events:
        if not isinstance(event, RolloutStarted | RolloutSpan | RolloutOver):
            continue
        key = event.group_id, event.member, event.attempt
        if isinstance(event, RolloutSpan):
            parts.setdefault(key, []).append(event)
            continue
        first = started.pop(key, None)
        if isinstance(event, RolloutStarted):
            started[key] = event
            if first is not None:
                yield _unfinished(first, event.at, parts.pop(key, []))
            continue
        begin = event.at - event.seconds if first is None else first.at
        name, args = _outcome(event)
        one = Slice(begin, max(begin, event.at), name, args)
        yield _Rollout(event.group_id, isinstance(event, RolloutEnded), one, parts.pop(key, []))
    for key, event in started.items():
        yield _unfinished(event, last, parts.pop(key, []))


def _unfinished(event: RolloutStarted, end: float, parts: Sequence[RolloutSpan]) -> _Rollout:
    args = {"member": event.member, "attempt": event.attempt}
    return _Rollout(event.group_id, False, Slice(event.at, end, f"group {event.group_id}, not ended", args), parts)


def _outcome(event: RolloutOver) -> tuple[str, TraceEntry]:
    args: TraceEntry = {"member": event.member, "attempt": event.attempt, "tokens": event.num_sampled}
    match event:
        case RolloutFailed():
            return f"group {event.group_id}, failed", args | {"error": f"{event.error}: {event.message}"}
        case RolloutAborted():
            return f"group {event.group_id}, aborted", args | {"why": event.why}
        case RolloutEnded():
            return f"group {event.group_id}", args | {"reward": event.reward, "start version": event.start_version}


# ---- entries ---------------------------------------------------------------------------------------------------------


def _microseconds(at: float) -> int:
    """Whole ones: a viewer cuts off what is behind the point, and slices that touch would then overlap."""
    return round(at * 1e6)


def _track_name(process: int, track: int, name: str) -> TraceEntry:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}}


def _complete(process: int, track: int, one: Slice) -> TraceEntry:
    times = {"ts": _microseconds(one.begin), "dur": _microseconds(one.end) - _microseconds(one.begin)}
    return {"ph": "X", "name": one.name, "pid": process, "tid": track, **times, "args": one.args}


def _counter(name: str, at: float, value: float) -> TraceEntry:
    return {"ph": "C", "name": name, "pid": WORKERS, "tid": 0, "ts": _microseconds(at), "args": {"value": value}}


def _arrow(number: int, start: tuple[int, int, Slice], finish: tuple[int, int, Slice]) -> Iterator[TraceEntry]:
    """From inside one slice to inside another: a viewer finds the slices by track and time. It starts after the turns of a
    rollout."""
    for phase, (process, track, one) in (("s", start), ("f", finish)):
        begin, end = _microseconds(one.begin), _microseconds(one.end)
        at = max(begin, end - 1) if phase == "s" else (begin + end) // 2
        entry = {"ph": phase, "id": number, "name": "trained", "cat": "trained", "pid": process, "tid": track}
        yield {**entry, "ts": at, **({"bp": "e"} if phase == "f" else {})}


def _free_tracks(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """The track of each: the lowest one that is free, from 0. Intervals that overlap are on different tracks."""
    found = [0] * len(intervals)
    free: list[int] = []
    in_use: list[tuple[float, int]] = []
    for number in sorted(range(len(intervals)), key=intervals.__getitem__):
        begin, end = intervals[number]
        while in_use and in_use[0][0] <= begin:
            heappush(free, heappop(in_use)[1])
        found[number] = heappop(free) if free else len(in_use)
        heappush(in_use, (end, found[number]))
    return found
