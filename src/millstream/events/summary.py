"""A run in numbers, from its events alone: what the table at the end shows and `summary.json` holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from millstream.events import (
    Event,
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupTaken,
    LearnerRestarted,
    RolloutAborted,
    Span,
    Stepped,
)
from millstream.types import Fate


class Summary(Struct, frozen=True, kw_only=True):
    """Seconds are those of reinforcement learning: from the first admitted group to the last step."""

    seconds: float
    steps: int
    rollouts_trained: int
    groups_admitted: int
    groups_trained: int
    groups_filtered: int
    groups_failed: int
    groups_aborted: int = 0
    """First to finish: thrown away because the batch was full."""
    groups_restarted: int = 0
    """Times that an overdue group began anew."""
    rollouts_aborted: int = 0
    learner_restarts: int = 0
    """Times that the learner's processes died, and others went on from a checkpoint."""
    tokens_per_s: float
    """Generated while training ran."""
    rollouts_per_s: float
    lag_max: int
    lag_mean: float
    lag_histogram: dict[str, int]
    """How many groups were trained at each lag."""
    overlap_share: float
    """Of the time that the learner worked, the share in which an engine was generating."""
    learner_share: float
    """Of all the time, the share in which the learner worked."""
    engine_share: float


Interval = tuple[float, float]


def summarise(events: Iterable[Event]) -> Summary:
    events = list(events)
    admitted = [event for event in events if isinstance(event, GroupAdmitted)]
    steps = [event for event in events if isinstance(event, Stepped)]
    taken = [event for event in events if isinstance(event, GroupTaken)]
    fates = Counter(event.fate for event in events if isinstance(event, GroupLeft))
    begin = admitted[0].at if admitted else 0.0
    end = steps[-1].at if steps else begin
    spans = [event for event in events if isinstance(event, Span) and begin <= event.at - event.seconds <= end]
    generating = merge((s.at - s.seconds, s.at) for s in spans if s.what == "generate")
    training = merge((s.at - s.seconds, s.at) for s in spans if s.worker == "learner")
    seconds = max(end - begin, 1e-9)
    lags = Counter(event.lag for event in taken)
    rollouts = sum(step.num_rollouts for step in steps)
    return Summary(
        seconds=end - begin,
        steps=len(steps),
        rollouts_trained=rollouts,
        groups_admitted=len(admitted),
        groups_trained=fates[Fate.TRAINED],
        groups_filtered=fates[Fate.FILTERED],
        groups_failed=fates[Fate.FAILED],
        groups_aborted=fates[Fate.ABORTED],
        groups_restarted=sum(isinstance(event, GroupRestarted) for event in events),
        rollouts_aborted=sum(isinstance(event, RolloutAborted) for event in events),
        learner_restarts=sum(isinstance(event, LearnerRestarted) for event in events),
        tokens_per_s=sum(span.num_tokens for span in spans if span.what == "generate") / seconds,
        rollouts_per_s=rollouts / seconds,
        lag_max=max(lags, default=0),
        lag_mean=sum(lag * count for lag, count in lags.items()) / max(1, sum(lags.values())),
        lag_histogram={str(lag): lags[lag] for lag in sorted(lags)},
        overlap_share=total(intersect(generating, training)) / max(total(training), 1e-9),
        learner_share=total(training) / seconds,
        engine_share=total(generating) / seconds,
    )


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def intersect(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Of two lists of disjoint intervals in order."""
    found: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
