"""The rows of `metrics.jsonl`: one per step, with everything worth plotting."""

from __future__ import annotations

from typing import Any

from millstream.events import (
    Evaluated,
    Event,
    GroupLeft,
    GroupTaken,
    Resumed,
    RolloutEnded,
    RolloutFailed,
    Span,
    Stepped,
)
from millstream.types import Fate

# The kinds that are read, tested first because most events are of other kinds.
READ = frozenset((RolloutEnded, RolloutFailed, GroupTaken, GroupLeft, Span, Evaluated, Resumed, Stepped))


class StepMetrics:
    """Collects between two steps; `add` returns the row of a step for its `Stepped` event, otherwise None."""

    def __init__(self) -> None:
        self._last_at = 0.0
        self._reward = 0.0
        self._accuracy: dict[str, float] = {}
        self._reset()

    def _reset(self) -> None:
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._lags: list[int] = []
        self._tokens = 0
        self._failed = 0
        self._filtered = 0

    def add(self, event: Event) -> dict[str, Any] | None:
        if type(event) not in READ:
            return None
        match event:
            case RolloutEnded():
                self._rewards.append(event.reward)
                self._lengths.append(event.num_sampled)
            case RolloutFailed():
                self._failed += 1
            case GroupTaken():
                self._lags.append(event.lag)
            case GroupLeft(fate=Fate.FILTERED):
                self._filtered += 1
            case Span(what="generate"):
                self._tokens += event.num_tokens
            case Evaluated():
                self._accuracy[f"accuracy {event.name}"] = event.accuracy
                of_table = f"eval/{event.table}{'/greedy' if event.is_greedy else ''}"
                self._accuracy |= {f"{of_table}/{name}": one.value for name, one in event.scores.items() if event.table}
            case Resumed():
                self._last_at = event.at
                self._reset()  # a new process counts from here
            case Stepped():
                return self._row(event)
        return None

    def _row(self, event: Stepped) -> dict[str, Any]:
        seconds = max(event.at - self._last_at, 1e-9)
        if self._rewards:  # otherwise as before: none ended since the last step
            self._reward = _mean(self._rewards)
        row = {
            "step": event.version,
            "at": event.at,
            "reward": self._reward,
            "length": _mean(self._lengths),
            "lag_mean": _mean(self._lags),
            "lag_max": max(self._lags, default=0),
            "rollouts_per_s": len(self._rewards) / seconds,
            "tokens_per_s": self._tokens / seconds,
            "groups": event.num_groups,
            "rollouts_failed": self._failed,
            "groups_filtered": self._filtered,
            **event.metrics,
            **self._accuracy,
        }
        self._last_at = event.at
        self._accuracy = {}
        self._reset()
        return row


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
