"""Where events go: a list (tests, the simulator), a JSONL file (a run folder), or several of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from millstream.events import AnyEvent, Event, EventSink, decode, encode
from millstream.events.metrics import StepMetrics

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
        with self._lock:
            lines, self._lines = self._lines, []
            self._file.write(b"".join(lines))

    def _write(self) -> None:
        while not self._closing.wait(self.FLUSH_S):
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
    def __init__(self, sinks: Iterable[EventSink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)


def read_events(path: Path) -> Iterator[AnyEvent]:
    """The events of a run folder, live or dead. A last line that a crash cut short is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield decode(line)
