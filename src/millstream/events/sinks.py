"""Where events go: a list (tests, the simulator), a JSONL file (a run folder), or several of them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from millstream.events import AnyEvent, Event, EventSink, decode, encode
from millstream.events.metrics import StepMetrics

logger = logging.getLogger(__name__)
E_ = TypeVar("E_", bound=Event)


class MemorySink:
    """Keeps everything: the shipped fake, and what the virtual clock's golden traces are made of."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[E_]) -> list[E_]:
        return [event for event in self.events if isinstance(event, kind)]

    def trace(self) -> bytes:
        return b"\n".join(map(encode, self.events))


class JsonlSink:
    """Appends one line an event. Lines reach the operating system within `FLUSH_S`, or at once with `flush`: a write a line
    would hand the interpreter to another thread a thousand times a second."""

    FLUSH_S = 0.1

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._lines: list[bytes] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write, name="events", daemon=True)
        self._writer.start()

    def emit(self, event: Event) -> None:
        self._lines.append(encode(event) + b"\n")

    def flush(self) -> None:
        """Raises `OSError` if the disk is full; nothing is lost by that, and the next flush tries again."""
        with self._lock:
            count = len(self._lines)  # others go on appending to the same list meanwhile
            self._file.write(b"".join(self._lines[:count]))
            del self._lines[:count]

    def _write(self) -> None:
        while not self._closing.wait(self.FLUSH_S):
            with suppress(OSError):  # `close` raises it, if it lasts
                self.flush()

    def close(self) -> None:
        self._closing.set()
        self._writer.join()
        self.flush()
        self._file.close()


class MetricsSink:
    """Writes `metrics.jsonl`: a line a step."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._metrics = StepMetrics()

    def emit(self, event: Event) -> None:
        row = self._metrics.add(event)
        if row is not None:
            self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()


class Tee:
    """Several sinks, one event at a time, whichever thread it comes from. A sink that raises is left out from then on: what
    is shown must not stop what is done."""

    def __init__(self, sinks: Iterable[EventSink]) -> None:
        self._sinks = list(sinks)
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        with self._lock:
            for sink in list(self._sinks):
                try:
                    sink.emit(event)
                except Exception:  # the border to whatever shows or stores events
                    logger.exception("a sink failed and is left out: %s", type(sink).__name__)
                    self._sinks.remove(sink)


def read_events(path: Path) -> Iterator[AnyEvent]:
    """The events of a run folder, live or dead. A last line that a crash cut short is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield decode(line)
