"""Where events go: a list (tests, the simulator), a JSONL file (a run folder), or several of them."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec
from msgspec import Struct

from millstream.events import AnyEvent, Event, EventSink, Resumed, decode, encode
from millstream.events.metrics import StepMetrics

logger = logging.getLogger(__name__)
E_ = TypeVar("E_", bound=Event)
T = TypeVar("T")
TAIL = 1 << 20
CLOSE_S = 5.0


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


class LineFile(Generic[T]):
    """Appends lines, each made of what was appended by `line_of`, later and many at a time: on the thread that appends, among
    all that it does, it would take several times as long. Lines reach the operating system within `FLUSH_S`, or at once with
    `flush`: a write a line would hand the interpreter to another thread a thousand times a second. A full disk loses nothing:
    lines wait in memory for room."""

    FLUSH_S = 0.1

    def __init__(self, path: Path, line_of: Callable[[T], bytes]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._line_of = line_of
        self._items: list[T] = []
        self.append = self._items.append
        self._unwritten = b""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._has_trouble = False
        self._writer = threading.Thread(target=self._write, name=path.name, daemon=True)
        self._writer.start()

    def flush(self) -> None:
        """Raises `OSError` if the disk is full; the next flush tries again."""
        with self._lock:
            count = len(self._items)  # others go on appending to the same list meanwhile
            self._unwritten += b"".join(map(self._line_of, self._items[:count]))
            del self._items[:count]
            while self._unwritten:  # a disk that fills up takes a part and then refuses
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def sync(self) -> None:
        """Everything so far is on the disk, whatever happens to the machine."""
        self.flush()
        os.fsync(self._file.fileno())

    def _write(self) -> None:
        while not self._closing.wait(self.FLUSH_S):
            try:
                self.flush()
                self._has_trouble = False
            except OSError as error:  # `close` raises it, if it lasts
                if not self._has_trouble:
                    logger.warning(
                        "cannot write %s: %s. The lines wait in memory for room", self._file.name, error.strerror
                    )
                self._has_trouble = True

    def close(self) -> None:
        """Raises `OSError` if the last lines cannot be written."""
        self._closing.set()
        self._writer.join()
        try:
            self.flush()
        finally:
            self._file.close()


class JsonlSink:
    """Writes `events.jsonl`: one line an event, numbered. Opened again after a crash it cuts off a last line that was not
    written to its end, and counts on."""

    def __init__(self, path: Path) -> None:
        self._next = self._next_written = _mend(path)
        file = LineFile(path, self._line_of)
        self._append = file.append
        self.sync = file.sync
        self.close = file.close

    @property
    def last_seq(self) -> int:
        """The number of the last event so far; -1 before the first."""
        return self._next - 1

    def emit(self, event: Event) -> None:
        """Called by one thread at a time (`Tee` sees to it)."""
        self._append(event)
        self._next += 1

    def _line_of(self, event: Event) -> bytes:
        """Called once for each, in their order."""
        line = b'{"seq":%d,%b\n' % (self._next_written, encode(event)[1:])
        self._next_written += 1
        return line


def _mend(path: Path) -> int:
    """Cuts off what a crash left half written; the number of the next event."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        end = _last_newline(file, file.seek(0, os.SEEK_END)) + 1
        file.truncate(end)
        begin = _last_newline(file, end - 1) + 1
        file.seek(begin)
        line = file.read(end - begin)
    return _seq(line) + 1 if line else 0


def _last_newline(file: BinaryIO, end: int) -> int:
    """The place of the last one before `end`; -1 if there is none."""
    while end > 0:
        begin = max(0, end - TAIL)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found
        end = begin
    return -1


class MetricsSink:
    """Writes `metrics.jsonl`: a line a step. A run that goes on from step `upto` writes the later lines anew."""

    def __init__(self, path: Path, *, upto: int = 0) -> None:
        if path.exists():
            kept = [line for line in _lines(path) if json.loads(line)["step"] <= upto]
            new = path.with_suffix(".new")
            new.write_bytes(b"".join(kept))
            new.replace(path)
        self._file = LineFile(path, _json_line)
        self._metrics = StepMetrics()
        self.sync = self._file.sync
        self.close = self._file.close

    def emit(self, event: Event) -> None:
        row = self._metrics.add(event)
        if row is not None:
            self._file.append(row)


def _json_line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


class Tee:
    """Several sinks. Those that keep the books (`files`) get every event at once, one event at a time, whichever thread it
    comes from; what one of them raises stops whoever emits. Those that show (`shown`) get it soon, on a thread of their own: a
    terminal that stands still holds nothing up, and one that raises is left out from then on."""

    SHOW_S = 0.1

    def __init__(self, files: Iterable[EventSink], shown: Iterable[EventSink] = ()) -> None:
        self._files = list(files)
        self._shown = list(shown)
        self._lock = threading.Lock()
        self._to_show: deque[Event] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._show, name="show", daemon=True)
        if self._shown:
            self._thread.start()

    def emit(self, event: Event) -> None:
        with self._lock:
            for sink in self._files:
                sink.emit(event)
            if self._shown:
                self._to_show.append(event)

    def show(self, event: Event) -> None:
        """To those that show it alone: it is in the books already."""
        if self._shown:
            self._to_show.append(event)

    def close(self) -> None:
        """Show what is left, if that does not take long."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _show(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self.SHOW_S)
            while self._to_show:
                self._show_one(self._to_show.popleft())

    def _show_one(self, event: Event) -> None:
        for sink in list(self._shown):
            try:
                sink.emit(event)
            except Exception:  # the border to whatever shows events: it must not stop what is done
                logger.exception("a sink failed and is left out: %s", type(sink).__name__)
                self._shown.remove(sink)


def read_events(path: Path) -> Iterator[AnyEvent]:
    """All events of a run folder, live or dead. A last line that a crash cut short is left out."""
    return map(decode, _lines(path))


def read_history(path: Path, *, upto: int | None = None) -> Iterator[AnyEvent]:
    """The events behind the newest weights: without those that a crash and a resume have undone. Those up to the one of this
    number, or all."""
    void: list[tuple[int, int]] = []
    for line in _lines(path):
        if b'"kind":"resumed"' in line:
            event = decode(line)
            assert isinstance(event, Resumed)
            void.append((event.from_seq, _seq(line)))
    for line in _lines(path):
        if upto is not None and _seq(line) > upto:
            return
        if not void or not any(begin < _seq(line) < end for begin, end in void):
            yield decode(line)


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        yield from (line for line in lines if line.endswith(b"\n"))


class _Numbered(Struct):
    seq: int


def _seq(line: bytes) -> int:
    return _decode_numbered(line).seq


_decode_numbered = msgspec.json.Decoder(_Numbered).decode
