"""A run as a Perfetto trace: open trace.json at ui.perfetto.dev or in chrome://tracing.

One track per engine, for the learner and for the sync of weights; one per rollout slot in use; counters for lag and queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from heapq import heappop, heappush
from typing import Any

from millstream.events import Event, GroupTaken, RolloutEnded, Span, Status, Stepped, WeightsLoaded

WORKERS, ROLLOUTS = 1, 2  # the two groups of tracks
SHOWN = (Span, WeightsLoaded, RolloutEnded, GroupTaken, Status, Stepped)
MAX_EVENTS = 500_000


def perfetto(events: Iterable[Event]) -> dict[str, list[dict[str, Any]]]:
    """The Chrome trace format, which Perfetto reads: complete events ("X"), counters ("C") and names ("M"). Of a long
    run only the last part: no viewer opens more."""
    shown = deque((event for event in events if isinstance(event, SHOWN)), maxlen=MAX_EVENTS)
    return {"traceEvents": [*_names(), *_tracks(shown)]}


def _names() -> Iterator[dict[str, Any]]:
    for process, name in ((WORKERS, "workers"), (ROLLOUTS, "rollouts")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _tracks(events: Collection[Event]) -> Iterator[dict[str, Any]]:
    slots = _slots(event for event in events if isinstance(event, RolloutEnded))
    workers: dict[str, int] = {}
    for event in events:
        match event:
            case Span():
                yield from _worker(workers, event.worker)
                args: dict[str, Any] = {"tokens": event.num_tokens}
                yield _complete(event.what, WORKERS, workers[event.worker], event.at, event.seconds, args)
            case WeightsLoaded():
                name = f"load into {event.engine}"
                yield from _worker(workers, name)
                yield _complete(f"version {event.version}", WORKERS, workers[name], event.at, event.seconds, {})
            case RolloutEnded():
                args = {"reward": event.reward, "tokens": event.num_sampled, "start version": event.start_version}
                slot = slots[event.group_id, event.member, event.attempt, event.at]
                yield _complete(f"group {event.group_id}", ROLLOUTS, slot, event.at, event.seconds, args)
            case GroupTaken():
                yield _counter("lag of the group taken", event.at, event.lag)
            case Status():
                yield _counter("requests running", event.at, event.requests_running)
                yield _counter("rows in the store", event.at, event.rows_in_store)
            case Stepped():
                yield _counter("version", event.at, event.version)


def _worker(workers: dict[str, int], name: str) -> Iterator[dict[str, Any]]:
    if name not in workers:
        workers[name] = len(workers) + 1
        yield {"ph": "M", "name": "thread_name", "pid": WORKERS, "tid": workers[name], "args": {"name": name}}


def _complete(name: str, process: int, track: int, end: float, seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    begin = (end - seconds) * 1e6
    return {"ph": "X", "name": name, "pid": process, "tid": track, "ts": begin, "dur": seconds * 1e6, "args": args}


def _counter(name: str, at: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": WORKERS, "tid": 0, "ts": at * 1e6, "args": {"value": value}}


def _slots(rollouts: Iterable[RolloutEnded]) -> dict[tuple[int, int, int, float], int]:
    """The track of each rollout: the lowest one that is free. Rollouts that overlap lie on different tracks."""
    found: dict[tuple[int, int, int, float], int] = {}
    free: list[int] = []
    in_use: list[tuple[float, int]] = []
    for rollout in sorted(rollouts, key=lambda event: event.at - event.seconds):
        while in_use and in_use[0][0] <= rollout.at - rollout.seconds:
            heappush(free, heappop(in_use)[1])
        slot = heappop(free) if free else len(in_use) + 1
        heappush(in_use, (rollout.at, slot))
        found[rollout.group_id, rollout.member, rollout.attempt, rollout.at] = slot
    return found
