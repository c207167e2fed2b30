"""From events to trackers. What a tracker does with the network or a disk happens on a thread of its own: it delays neither the
run nor the terminal. One that fails is given up with one warning; the run continues."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from millstream.events import (
    Evaluated,
    Event,
    FindingEnded,
    FindingMade,
    Resumed,
    Sample,
    Stepped,
    WarmedUp,
)
from millstream.events.metrics import StepMetrics, metric_key
from millstream.run.progress import finding_text

logger = logging.getLogger(__name__)
FINISH_S = 60.0  # for what is left to be sent at the end


class TrackedRun(Struct, frozen=True, kw_only=True):
    """What a tracker is opened with."""

    project: str
    name: str
    run_id: str  # kept by resumes: the tracker continues its record of the run
    folder: Path
    config: dict[str, Any]  # by dotted keys
    version: int  # that a resumed run continues from


class Tracker(Protocol):
    """Called by one thread. May block, and may raise anything: it is then given up."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None:
        """A sample or a finding."""
        ...

    def finish(self, summary: Mapping[str, float], *, is_finished: bool) -> None: ...


class TrackerSink:
    """An event sink. Events wait until `start`, which opens the tracker, on the tracker's thread."""

    def __init__(self, name: str, open_tracker: Callable[[TrackedRun], Tracker]) -> None:
        self._name = name
        self._open = open_tracker
        self._metrics = StepMetrics()
        self._step = 0
        self._calls: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, run: TrackedRun, warn: Callable[[str], None]) -> None:
        self._step = run.version
        self._thread = threading.Thread(target=self._work, args=(run, warn), name=self._name, daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        row = self._metrics.add(event)
        if row is not None:  # of a step, or of an evaluation: under the version that was measured
            self._log({key: value for key, value in row.items() if key != "step"}, row["step"])
        match event:
            case Stepped():
                self._step = event.version
            case Evaluated() if row is not None and event.sample is not None:
                self._text(f"samples/{metric_key(event.name)}", _sample_text(event.sample), row["step"])
            case FindingMade():
                self._log({f"findings/{event.name}": 1.0})
                self._text(f"findings/{event.name}", finding_text(event))
            case FindingEnded():
                self._log({f"findings/{event.name}": 0.0})
            case Resumed():
                self._step = event.version
            case WarmedUp():
                measured = {"loss": event.loss, "held_out_loss": event.held_out_loss, "accuracy": event.accuracy}
                found = {f"supervised/{key}": value for key, value in measured.items() if value is not None}
                self._calls.put(lambda tracker: tracker.log(event.step, found))

    def _log(self, values: Mapping[str, float], step: int | None = None) -> None:
        step = self._step if step is None else step
        self._calls.put(lambda tracker: tracker.log(step, values))

    def _text(self, name: str, text: str, step: int | None = None) -> None:
        step = self._step if step is None else step
        self._calls.put(lambda tracker: tracker.text(step, name, text))

    def finish(self, summary: Mapping[str, float], *, is_finished: bool) -> None:
        """Waits for what is left to be sent, for at most `FINISH_S`."""
        if self._thread is None:
            return
        self._calls.put(lambda tracker: tracker.finish(summary, is_finished=is_finished))
        self._calls.put(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            logger.warning("%s has not finished after %g s: what is left is not sent", self._name, FINISH_S)

    def _work(self, run: TrackedRun, warn: Callable[[str], None]) -> None:
        try:
            tracker = self._open(run)
            while (call := self._calls.get()) is not None:
                call(tracker)
        except (Exception, SystemExit) as error:  # of a library that only records: the run continues
            logger.debug("%s failed", self._name, exc_info=True)
            warn(f"{self._name} failed and is not used any more: {type(error).__name__}: {str(error).strip()[:300]}")


def _sample_text(sample: Sample) -> str:
    answer = "" if sample.answer is None else f"\nanswer: {sample.answer}"
    return f"prompt: {sample.prompt}\ncompletion: {sample.completion}{answer}\nreward: {sample.reward:.3f}"
