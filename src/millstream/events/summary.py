"""The summary of a run, from its events alone: the table at its end, and `summary.json`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from millstream.events import (
    DraftsChecked,
    Event,
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupTaken,
    LearnerRestarted,
    PathChosen,
    RolloutAborted,
    RolloutFailed,
    Sizes,
    SizesChosen,
    Span,
    Stepped,
)
from millstream.events.bottleneck import Bottleneck, bottleneck_of
from millstream.events.findings import is_empty_step
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
    groups_aborted: int = 0  # first to finish: discarded because the batch was full
    groups_restarted: int = 0  # restarts of overdue groups
    rollouts_aborted: int = 0
    rollouts_failed: int = 0  # for good: their retries were spent
    rollouts_retried: int = 0  # attempts that failed and were tried again
    learner_restarts: int = 0  # replaced learner processes
    tokens_per_s: float  # generated while training ran
    tokens_drafted: int = 0  # speculative tokens that were checked, evaluations included
    tokens_accepted: int = 0  # those that were right
    rollouts_per_s: float
    lag_max: int
    lag_mean: float
    lag_histogram: dict[str, int]  # groups trained at each lag
    overlap_share: float  # of the learner's busy time, the share in which an engine was generating
    learner_share: float  # of all the time, the share in which the learner was busy
    engine_share: float
    paths: dict[str, str] = {}  # what computed at the end, by worker, and why it was not faster
    sizes: Sizes | None = None  # None: the log does not say
    groups_superseded: int = 0  # by a resume with another schedule: their prompts were fed again
    steps_empty: int = 0  # steps that trained nothing: no rollout was left, or the gradient was 0
    bottleneck: Bottleneck | None = None  # None: too few steps


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
    generating = merge_intervals((s.at - s.seconds, s.at) for s in spans if s.what == "generate")
    training = merge_intervals((s.at - s.seconds, s.at) for s in spans if s.worker == "learner")
    seconds = max(end - begin, 1e-9)
    drafts = [event for event in events if isinstance(event, DraftsChecked)]
    lags = Counter(event.lag for event in taken)
    failures = Counter(event.is_final for event in events if isinstance(event, RolloutFailed))
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
        groups_superseded=fates[Fate.SUPERSEDED],
        groups_restarted=sum(isinstance(event, GroupRestarted) for event in events),
        rollouts_aborted=sum(isinstance(event, RolloutAborted) for event in events),
        rollouts_failed=failures[True],
        rollouts_retried=failures[False],
        learner_restarts=sum(isinstance(event, LearnerRestarted) for event in events),
        tokens_per_s=sum(span.num_tokens for span in spans if span.what == "generate") / seconds,
        tokens_drafted=sum(event.num_drafted for event in drafts),
        tokens_accepted=sum(event.num_accepted for event in drafts),
        rollouts_per_s=rollouts / seconds,
        lag_max=max(lags, default=0),
        lag_mean=sum(lag * count for lag, count in lags.items()) / max(1, sum(lags.values())),
        lag_histogram={str(lag): lags[lag] for lag in sorted(lags)},
        overlap_share=total_length(intersect_intervals(generating, training)) / max(total_length(training), 1e-9),
        learner_share=total_length(training) / seconds,
        engine_share=total_length(generating) / seconds,
        paths={event.worker: path_words(event) for event in events if isinstance(event, PathChosen)},
        steps_empty=sum(map(is_empty_step, steps)),
        bottleneck=bottleneck_of(events),
        sizes=next((event.sizes for event in reversed(events) if isinstance(event, SizesChosen)), None),
    )


def path_words(event: PathChosen) -> str:
    return f"{event.path} ({event.why})" if event.why else event.path


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def share_within(busy: Sequence[Interval], begin: float, end: float) -> float:
    """Of this stretch of time, the part that is in one of the intervals, which are in order and apart."""
    covered = 0.0
    for number in range(max(0, bisect_left(busy, (begin, begin)) - 1), len(busy)):
        if busy[number][0] >= end:
            break
        covered += max(0.0, min(end, busy[number][1]) - max(begin, busy[number][0]))
    return min(1.0, covered / max(1e-12, end - begin))


def intersect_intervals(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """The intersection of two lists of disjoint, sorted intervals."""
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


def total_length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
