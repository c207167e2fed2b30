"""Progress of a run that is started from Python: lines on standard error, with the time left. Reads only events."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from millstream.events import (
    WARMUP,
    Evaluated,
    Event,
    FindingEnded,
    FindingMade,
    Resumed,
    RunStarted,
    Stepped,
    StopRequested,
    WarmedUp,
    Warned,
)
from millstream.events.metrics import StepMetrics, is_step


class TimeLeft:
    """The time that the rest of the steps will take, at the pace of this process."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._begun = (0.0, 0)
        self._now = (0.0, 0)

    def add(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._begun = self._now = (event.at, 0)
        elif isinstance(event, Resumed):
            self._begun = self._now = (event.at, event.version)
        elif isinstance(event, Stepped):
            self.step(event.at, event.version)

    def step(self, at: float, version: int) -> None:
        self._now = (at, version)

    def seconds(self) -> float | None:
        """None before the first step."""
        seconds, steps = self._now[0] - self._begun[0], self._now[1] - self._begun[1]
        return seconds / steps * (self._num_steps - self._now[1]) if steps else None

    def words(self) -> str:
        """Empty before the first step."""
        left_s = self.seconds()
        return "" if left_s is None else f"{clock_time(left_s)} left"


def clock_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def finding_text(finding: FindingMade) -> str:
    return f"{finding.name} at step {finding.step}: {finding.message}. {finding.advice}"


def speed_words(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What was generated a second while these rows of steps were made; nothing of what is not known."""
    rows = list(rows)
    seconds = max(sum(row["step_s"] for row in rows), 1e-9)
    rates = (
        (what, sum(row[f"{what}_per_s"] * row["step_s"] for row in rows) / seconds) for what in ("rollouts", "tokens")
    )
    return [f"{rate:.0f} {what}/s" for what, rate in rates if rate]


class ProgressLines:
    """Prints one line every few seconds, and one for every evaluation, finding and warning."""

    EVERY_S = 5.0

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._left = TimeLeft(num_steps)
        self._metrics = StepMetrics()
        self._shown_at = float("-inf")
        self._rows: list[dict[str, Any]] = []  # of steps since then

    def emit(self, event: Event) -> None:
        row = self._metrics.add(event)
        self._left.add(event)
        self._rows += [row] if row is not None and is_step(row) else []
        match event:
            case Stepped() if row is not None and self._is_due(event.at, event.version == self._num_steps):
                step = f"step {event.version}/{self._num_steps}  reward {row['reward']:.3f}"
                self._say("  ".join([step, *speed_words(self._rows), self._left.words()]))
                self._rows = []
            case WarmedUp() if self._is_due(event.at, event.step in (0, event.max_steps)):
                loss = "" if event.loss is None else f"  loss {event.loss:.3f}"
                self._say(f"supervised step {event.step}/{event.max_steps}{loss}")
            case Evaluated() if event.name != WARMUP:
                self._say(f"{event.name}: accuracy {event.accuracy:.3f} on {event.num_tasks} tasks")
            case FindingMade():
                self._say(finding_text(event))
            case FindingEnded():
                self._say(f"{event.name} no longer holds at step {event.step}")
            case Warned():
                self._say(f"warning: {event.message}")
            case StopRequested():
                self._say(f"stopping after the current batch, in at most {event.grace_s:g} s")

    recall = emit

    def _is_due(self, at: float, is_last: bool) -> bool:
        is_due = is_last or at - self._shown_at >= self.EVERY_S
        self._shown_at = at if is_due else self._shown_at
        return is_due

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(text + "\n")  # of the moment: a notebook replaces it
        sys.stderr.flush()
