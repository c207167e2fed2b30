"""The live terminal view: progress, reward, lag, a sample of training, and what every part waits for.

Reads only events. It is drawn where it can be redrawn in place (`can_redraw`), elsewhere `show.Lines` is used. What is written
to the terminal meanwhile appears above it, and a terminal whose size changes is drawn again from the top: no
parts of earlier drawings are left.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
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
    SampleShown,
    SettingChanged,
    SizesChosen,
    Status,
    Stepped,
    WaitNow,
    WarmedUp,
)
from millstream.events.bottleneck import BottleneckName, TimeUse
from millstream.events.metrics import StepMetrics
from millstream.events.summary import path_words
from millstream.run.progress import TimeLeft, clock_time, speed_words

BLOCKS = "▁▂▃▄▅▆▇█"
RECENT = 20  # steps that the shown rates and rewards are averaged over
LABELS = 28  # columns that are not those of the sparkline
MIN_TABLE = 60  # columns of a terminal that has room for a table of waits


def can_redraw(console: Console) -> bool:
    """Whether it is a terminal that moves its cursor: not a pipe or a file, even where colors are forced, not a dumb terminal,
    and not the log of a CI system, which some give a terminal."""
    is_log = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return console.file.isatty() and not console.is_dumb_terminal and not is_log


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
        self._sample: Sample | None = None  # of training
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
        self._live = _Redrawn(self, console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)
        self._above = _LinesAbove(self._live)

    def __enter__(self) -> View:
        self._live.start()
        self._above.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._above.stop()
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
            case SampleShown():
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

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self._use.bottleneck()
        width, is_narrow = options.max_width, options.max_width < MIN_TABLE
        parts: list[RenderableType] = [self._progress(is_narrow), self._numbers(max(8, min(40, width - LABELS)))]
        parts += [] if found is None else [Text(f"bottleneck: {found.message}", style="bold")]
        notes = (note if len(note) <= 4 * width else f"{note[: 4 * width]}…" for note in (*self._notes, self._failure))
        parts += [Text(note, style="yellow") for note in notes if note]
        if self._status is not None:
            waits = self._waits(self._status, None if found is None else found.name)
            parts += [Text(), *(map(_line, waits) if is_narrow else [_grid(waits)])]
        yield Panel(Group(*parts), title="[bold]millstream[/]", subtitle=self._phase, border_style="cyan")

    def _progress(self, is_narrow: bool) -> RenderableType:
        grid = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None):
            grid.add_column(ratio=ratio)
        done, num_steps = self._version, self._num_steps
        if not num_steps and self._warmed is not None:  # supervised training alone
            done, num_steps = self._warmed.step, self._warmed.max_steps
        grid.add_row(
            Text(f"step {done}/{num_steps}", style="bold"),
            ProgressBar(total=max(1, num_steps), completed=done),
            Text((is_narrow and self._left.words()) or self._time_left()),
        )
        return grid

    def _time_left(self) -> str:
        left = self._left.words()
        return f"{clock_time(self._now)} so far, {left}" if left else f"{clock_time(self._now)} so far"

    def _numbers(self, width: int) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        reward = f"{self._mean('reward'):.3f}  [green]{sparkline(self._rewards, width)}[/]" if self._rewards else "-"
        grid.add_row("reward", reward)
        accuracies = (
            self._accuracies if len(self._accuracies) <= 4 else [self._accuracies[0], "...", *self._accuracies[-2:]]
        )
        grid.add_row("accuracy", ", ".join(accuracies) or "-")
        if self._sample is not None:
            grid.add_row("a rollout", Text(sample_line(self._sample)))
        grid.add_row("speed", ", ".join(speed_words(self._recent)) or "-")
        lags = "  ".join(f"{lag}: {count}" for lag, count in sorted(self._lags.items()))
        grid.add_row("groups by lag", f"{lags or '-'}  (never above {self._lag_bound})")
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

    def _waits(self, status: Status, bottleneck: BottleneckName | None) -> list[tuple[Text, Text, Text]]:
        rows = []
        for wait in sorted(status.waits, key=_order):
            note = Text(_since(wait), style="dim")
            if bottleneck is not None and _is_of(wait, bottleneck):
                note.append(", the bottleneck" if note else "the bottleneck", style="bold yellow")
            rows.append((Text(_owner(wait), style="bold"), Text(f"waiting for {wait.what}"), note))
        return rows


def _grid(rows: list[tuple[Text, Text, Text]]) -> Table:
    grid = Table.grid(padding=(0, 1))
    for row in rows:
        grid.add_row(*row)
    return grid


def _line(row: tuple[Text, Text, Text]) -> Text:
    return Text(" ").join(text for text in row if text)


class _Redrawn(Live):
    """When the size of the terminal has changed, what was drawn before is somewhere else: everything is cleared first."""

    def refresh(self) -> None:
        size = self.console.size
        if size != getattr(self, "_drawn_size", size):
            self.console.control(Control.clear(), Control.home())
        self._drawn_size = size
        super().refresh()

    def print_above(self, line: str) -> None:
        with self._lock:  # else a drawing in between would have another height
            self.console.out(line, highlight=False)


class _LinesAbove:
    """While the view is drawn, what is written to standard output and standard error, by this process, its libraries and its
    workers, is printed above it, line by line: all of it goes through one pipe, which one thread reads."""

    def __init__(self, live: _Redrawn) -> None:
        self._live = live

    def start(self) -> None:
        reading, writing = os.pipe()
        self._stdout = sys.stdout
        self._stderr = os.dup(2) if os.isatty(2) else None
        if self._stderr is not None:
            os.dup2(writing, 2)
        self._lines = os.fdopen(writing, "w", buffering=1, errors="replace")
        self._lines.rich_proxied_file = self._stdout  # type: ignore[attr-defined]  # a console writes to the terminal itself
        sys.stdout = self._lines
        self._thread = threading.Thread(target=self._print, args=(reading,), name="lines above", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        sys.stdout = self._stdout
        if self._stderr is not None:
            sys.stderr.flush()
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
        self._lines.close()
        self._thread.join(0.5)  # a worker that is ending may still have the other end

    def _print(self, reading: int) -> None:
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                self._live.print_above(line.rstrip("\n"))


def _is_of(wait: WaitNow, bottleneck: BottleneckName) -> bool:
    """Whether this is the wait that holds the run up."""
    match bottleneck:
        case "learner" | "turns":
            return wait.owner == "train" and wait.what.startswith("the learner")
        case "sync":
            return wait.owner.startswith("sync") and wait.what != "a newer version"
        case "environment":
            return wait.owner == "rollouts" and wait.what not in ("an engine", "the other rollouts of the step")
        case "no-signal":
            return wait.owner == "train" and wait.what == "a complete group"
    return wait.owner == "rollouts" and wait.what == "an engine"


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
