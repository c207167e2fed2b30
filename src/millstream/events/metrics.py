"""The rows of `metrics.jsonl`: one per step and one per evaluation, with everything worth plotting. `docs/tracking.md` lists
the keys."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from millstream.events import (
    Evaluated,
    Event,
    GroupLeft,
    GroupRestarted,
    GroupScored,
    GroupTaken,
    Resumed,
    RolloutEnded,
    RolloutFailed,
    RunStarted,
    Span,
    Stepped,
    WeightsPublished,
)
from millstream.types import Fate

# The kinds that are read, tested first because most events are of other kinds.
READ = frozenset(
    (
        *(RunStarted, Resumed, RolloutEnded, RolloutFailed, GroupScored, GroupRestarted, GroupTaken, GroupLeft),
        *(Span, WeightsPublished, Evaluated, Stepped),
    )
)
LEARNING = frozenset(("begin_batch", "accumulate", "step"))  # spans of the learner in `Stepped.seconds`


def metric_key(name: str) -> str:
    """A name as a key of a row: without spaces."""
    return re.sub(r"[^\w./-]+", "_", name)


class StepMetrics:
    """Collects between two steps; `add` returns the row of a step for its `Stepped` event, that of an evaluation for its
    `Evaluated` event, otherwise None."""

    def __init__(self) -> None:
        self._last_at = 0.0
        self._reward: float | None = None
        self._reward_std = 0.0
        self._length = 0.0
        self._versions: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of groups in flight: first, last
        self._reset()

    def _reset(self) -> None:
        self._rewards: list[float] = []
        self._trained: list[float] = []  # mean rewards of groups
        self._reward_parts: dict[str, list[float]] = defaultdict(list)
        self._lengths: list[int] = []
        self._lags: list[int] = []
        self._flights: list[int] = []
        self._waitings: list[int] = []
        self._tokens = 0
        self._failed = 0
        self._retried = 0
        self._filtered = 0
        self._training_s = 0.0
        self._sync_s = 0.0

    def add(self, event: Event) -> dict[str, Any] | None:
        if type(event) not in READ:
            return None
        match event:
            case RolloutEnded():
                self._add_rollout(event)
            case GroupScored():
                self._rewards += event.rewards
            case RolloutFailed():
                self._failed += event.is_final
                self._retried += not event.is_final
            case GroupTaken():
                self._add_taken(event)
            case GroupRestarted():
                self._versions.pop(event.group_id, None)
            case GroupLeft():
                self._versions.pop(event.group_id, None)
                self._filtered += event.fate is Fate.FILTERED
                if event.fate is Fate.TRAINED:
                    self._trained.append(event.mean_reward)
            case Span(what="generate"):
                self._tokens += event.num_tokens
            case Span(worker="learner") if event.what in LEARNING:
                self._training_s += event.seconds
            case WeightsPublished():
                self._sync_s += event.seconds
            case Evaluated():
                return _evaluation_row(event)
            case RunStarted():
                self._last_at = event.at
            case Resumed():
                self._last_at = event.at
                self._versions.clear()
                self._reset()  # a new process counts from here
            case Stepped():
                return self._row(event)
        return None

    def _add_rollout(self, event: RolloutEnded) -> None:
        if event.is_partial is not True:
            self._rewards.append(event.reward)
        self._lengths.append(event.num_sampled)
        self._versions[event.group_id].append((event.start_version, event.end_version))
        if event.reward_parts is not UNSET:
            for name, value in event.reward_parts.items():
                self._reward_parts[name].append(value)

    def _add_taken(self, event: GroupTaken) -> None:
        self._lags.append(event.lag)
        for first, last in self._versions.pop(event.group_id, ()):
            self._flights.append(last - first)
            self._waitings.append(event.version - last)

    def _row(self, event: Stepped) -> dict[str, Any]:
        step_s = max(event.at - self._last_at, 1e-9)
        if self._rewards:  # otherwise as before: none became known since the last step
            self._reward = _mean(self._rewards)
            self._reward_std = statistics.pstdev(self._rewards)
        elif self._reward is None:  # the first step after a resume, of groups that the checkpoint had
            self._reward = _mean(self._trained)
        if self._lengths:
            self._length = _mean(self._lengths)
        row = {
            "step": event.version,
            "at": event.at,
            "reward": self._reward,
            "reward_std": self._reward_std,
            **{_part_key(name): _mean(values) for name, values in self._reward_parts.items()},
            "length": self._length,
            "lag_mean": _mean(self._lags),
            "lag_max": max(self._lags, default=0),
            "lag_flight": _mean(self._flights),
            "lag_waiting": _mean(self._waitings),
            "rollouts_per_s": len(self._lengths) / step_s,
            "tokens_per_s": self._tokens / step_s,
            **self._seconds(event, step_s),
            "groups": event.num_groups,
            "rollouts_failed": self._failed,
            "rollouts_retried": self._retried,
            "groups_filtered": self._filtered,
            **{metric_key(name): value for name, value in event.metrics.items()},
        }
        self._last_at = event.at
        self._reset()
        return row

    def _seconds(self, event: Stepped, step_s: float) -> dict[str, float]:
        """Where they went, seen from the learner: they add up to `step_s`. Weights are those of the step before."""
        waiting_s = max(event.seconds - self._training_s, 0.0)
        other_s = max(step_s - waiting_s - self._training_s - self._sync_s, 0.0)  # checkpoints, evaluations in lockstep
        return {
            "step_s": step_s,
            "waiting_s": waiting_s,
            "training_s": self._training_s,
            "sync_s": self._sync_s,
            "other_s": other_s,
        }


def is_step(row: Mapping[str, Any]) -> bool:
    """Whether it is the row of a step, and not of an evaluation."""
    return "reward" in row


def _evaluation_row(event: Evaluated) -> dict[str, Any] | None:
    """Under the version that was measured. None for the warm-up's, and in logs of earlier releases."""
    if not event.table or event.version is None:
        return None
    of_table = f"eval/{event.table}{'/greedy' if event.is_greedy else ''}"
    scores = {f"{of_table}/{name}": one.value for name, one in event.scores.items()}
    return {"step": event.version, "at": event.at, **scores}


def _part_key(name: str) -> str:
    """Without dots and paths."""
    return "reward/" + re.sub(r"[^\w-]+", "_", name)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
