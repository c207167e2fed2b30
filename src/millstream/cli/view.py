"""The live terminal view: progress, reward, lag, and what every part waits for.

Reads only events. Where there is no terminal, `show.Lines` is used.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millstream.cli.show import Alarm, alarm, joined, resumed, sample_line, sizes_line, warmed_words
from millstream.events import (
    WARMUP,
    Evaluated,
    Event,
    GroupTaken,
    LagMoved,
    PathChosen,
    ReplicaJoined,
    Resumed,
    RolloutFailed,
    RunStarted,
    Sample,
    SettingChanged,
    SizesChosen,
    Status,
    Stepped,
    WaitNow,
    WarmedUp,
)
from millstream.events.bottleneck import TimeUse
from millstream.events.metrics import StepMetrics
from millstream.events.summary import path_words
from millstream.run.progress import TimeLeft, clock_time, speed_words

BLOCKS = "▁▂▃▄▅▆▇█"
RECENT = 20  # steps that the shown rates and rewards are averaged over


class View:
    """An event sink that draws, within its `with` block."""

    def __init__(self, console: Console, *, num_steps: int, max_lag: float) -> None:
        self._num_steps = num_steps
        self._lag_bound = math.ceil(max_lag)
        self._metrics = StepMetrics()
        self._use = TimeUse()
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._rewards: list[float] = []
        self._lags: dict[int, int] = {}
        self._accuracies: list[str] = []
        self._sample: Sample | None = None
        self._notes: deque[str] = deque(maxlen=3)
        self._status: Status | None = None
        self._warmed: WarmedUp | None = None
        self._left = TimeLeft(num_steps)
        self._paths: dict[str, str] = {}
        self._failure = ""
        self._phase = "loading the model and the data"
        self._version = 0
        self._now = 0.0
        self._num_failed = 0
        self._live = Live(self, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> View:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def emit(self, event: Event) -> None:
        self._now = max(self._now, event.at)
        row = self._metrics.add(event)
        self._left.add(event)
        self._use.add(event)
        match event:
            case WarmedUp():
                self._phase = f"supervised training: step {warmed_words(event)}"
                self._warmed = event
            case RunStarted():
                self._phase = "reinforcement learning"
            case Stepped() if row is not None:
                self._version = event.version
                self._recent.append(row)
                self._rewards.append(row["reward"])
            case GroupTaken():
                self._lags[event.lag] = self._lags.get(event.lag, 0) + 1
            case Status():
                self._status = event
            case Evaluated() if event.name != WARMUP:
                self._accuracies.append(f"{event.name} {event.accuracy:.3f}")
                self._sample = event.sample
            case Resumed():
                self._phase = "reinforcement learning"
                self._notes.append(resumed(event))
                self._version = event.version
            case SettingChanged(key="pipeline.max_lag"):
                self._lag_bound = math.ceil(event.new)
            case LagMoved():
                self._lag_bound = event.lag_bound
            case SizesChosen():
                self._notes.append(sizes_line(event))
            case _ if isinstance(event, Alarm):
                self._notes.append(alarm(event))
            case ReplicaJoined():
                self._notes.append(joined(event))
            case PathChosen():
                self._paths[event.worker] = path_words(event)
            case RolloutFailed() if event.is_final:
                self._num_failed += 1
                self._failure = f"{self._num_failed} failed rollouts; the last: {event.message}"

    recall = emit

    # ---- drawing -------------------------------------------------------------------------------------------------------

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress(), self._numbers()]
        if self._status is not None:
            parts += [Text(), self._waits(self._status)]
        parts += [Text(note, style="yellow") for note in (*self._notes, self._failure) if note]
        return Panel(Group(*parts), title="[bold]millstream[/]", subtitle=self._phase, border_style="cyan")

    def _progress(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None):
            grid.add_column(ratio=ratio)
        done, num_steps = self._version, self._num_steps
        if not num_steps and self._warmed is not None:  # supervised training alone
            done, num_steps = self._warmed.step, self._warmed.max_steps
        grid.add_row(
            Text(f"step {done}/{num_steps}", style="bold"),
            ProgressBar(total=max(1, num_steps), completed=done),
            Text(self._time_left()),
        )
        return grid

    def _time_left(self) -> str:
        left = self._left.words()
        return f"{clock_time(self._now)} so far, {left}" if left else f"{clock_time(self._now)} so far"

    def _numbers(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        reward = f"{self._mean('reward'):.3f}  [green]{sparkline(self._rewards)}[/]" if self._rewards else "-"
        grid.add_row("reward", reward)
        grid.add_row("accuracy", ", ".join(self._accuracies) or "-")
        if self._sample is not None:
            grid.add_row("a sample", Text(sample_line(self._sample)))
        grid.add_row("speed", ", ".join(speed_words(self._recent)) or "-")
        lags = "  ".join(f"{lag}: {count}" for lag, count in sorted(self._lags.items()))
        grid.add_row("groups by lag", f"{lags or '-'}  (never above {self._lag_bound})")
        if (found := self._use.bottleneck()) is not None:
            grid.add_row("bottleneck", Text(found.message))
        for worker, path in self._paths.items():
            grid.add_row(worker, Text(path))
        if self._status is not None:
            s = self._status
            grid.add_row(
                "in flight",
                f"{s.groups_outstanding + s.groups_taken} of {s.budget} groups; {s.requests_running} requests decoding, "
                f"{s.requests_waiting} queued; {s.rows_in_store} rows in the store",
            )
        return grid

    def _mean(self, name: str) -> float:
        values: list[float] = [row[name] for row in self._recent]
        return sum(values) / max(1, len(values))

    def _waits(self, status: Status) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        for wait in sorted(status.waits, key=_order):
            grid.add_row(
                Text(_owner(wait), style="bold"), Text(f"waiting for {wait.what}"), Text(_since(wait), style="dim")
            )
        return grid


def _owner(wait: WaitNow) -> str:
    return wait.owner if wait.owner != "rollouts" else f"{wait.count} rollouts"


def _order(wait: WaitNow) -> tuple[int, str]:
    places = ["feed", "rollouts", "settle", "train"]
    return (places.index(wait.owner) if wait.owner in places else len(places), wait.what)


def _since(wait: WaitNow) -> str:
    return f"since {wait.seconds:.0f} s" if wait.seconds >= 1 else ""


def sparkline(values: list[float], width: int = 40) -> str:
    """A graph of values from 0 to their maximum, in block characters."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    top = max(max(means), 1e-9)
    return "".join(BLOCKS[max(0, min(len(BLOCKS) - 1, int(mean / top * (len(BLOCKS) - 1))))] for mean in means)
