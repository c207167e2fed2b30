"""The log of a run: `events.jsonl` and `metrics.jsonl` in its folder, and the sinks that show the same events elsewhere.
Findings (`events.findings`) are made here, from the events as they are written."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from millstream.errors import OutputError
from millstream.events import WARMUP, Evaluated, Event, EventSink, RunEnded
from millstream.events.findings import Watch
from millstream.events.sinks import JsonlSink, MetricsSink, Tee
from millstream.run.folder import RunFolder


class RunLog:
    """An event sink. `upto`: the version that a resumed run continues from; later metrics are removed. `own`: sinks that get
    every event at once, as the files do, and not soon, as `sinks` do. Raises `OutputError` where a file cannot be written."""

    def __init__(
        self, folder: RunFolder, sinks: Sequence[EventSink], *, upto: int, own: Sequence[EventSink] = ()
    ) -> None:
        self._own = own
        self._folder = folder
        try:
            self._events = JsonlSink(folder.events)
            self._metrics = MetricsSink(folder.metrics, upto=upto)
        except OSError as error:
            raise OutputError(folder.cannot_write(folder.events, error)) from error
        self._tee = Tee([self._events, self._metrics, *own], sinks)
        self._watch = Watch()
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        if type(event) not in Watch.READ:
            self._tee.emit(event)
            return
        with self._lock:  # findings are made in the order of the file
            made = self._watch.add(event)
            for one in (*made, event) if isinstance(event, RunEnded) else (event, *made):
                self._tee.emit(one)

    def recall(self, event: Event) -> None:
        """An event of an earlier process, which is in the files already: findings continue from it, and evaluations are shown
        again."""
        self._watch.add(event)
        if isinstance(event, Evaluated) and event.name != WARMUP:
            for sink in self._own:
                sink.emit(event)
            self._tee.show(event)

    def last_seq(self) -> int:
        """The number of the last event so far; -1 before the first."""
        return self._events.last_seq

    def sync(self) -> None:
        """Returns when everything so far is on the disk."""
        self._events.sync()
        self._metrics.sync()

    def close(self) -> None:
        self._tee.close()
        try:
            self._metrics.close()
            self._events.close()
        except OSError as error:
            raise OutputError(self._folder.cannot_write(self._folder.events, error)) from error
