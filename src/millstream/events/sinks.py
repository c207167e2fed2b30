"""Event sinks: a list (tests, the simulator), the JSONL files of a run folder, and several at once; reading a log back."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, Generic, TypeVar

from msgspec import Struct

from millstream.decoding import json_decoder
from millstream.errors import LogError, shown
from millstream.events import AnyEvent, Event, EventSink, Resumed, decode_event, encode_event
from millstream.events.index import IndexWriter
from millstream.events.metrics import StepMetrics, is_step
from millstream.paths import program

logger = logging.getLogger(__name__)
E_ = TypeVar("E_", bound=Event)
T = TypeVar("T")
TAIL = 1 << 20
CLOSE_S = 5.0
MAX_TO_SHOW = 100_000  # events that wait for a terminal that is blocked


class MemorySink:
    """Keeps all events: the shipped fake, and the source of the golden traces on the virtual clock."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[E_]) -> list[E_]:
        return [event for event in self.events if isinstance(event, kind)]

    def trace(self) -> bytes:
        return b"\n".join(map(encode_event, self.events))


class LineFile(Generic[T]):
    """A file that items are appended to as lines. A thread encodes them with `line_of` and writes them, many at a time:
    encoding on the thread that appends takes several times as long, and one write per line would switch threads a thousand
    times a second. Lines reach the operating system within `FLUSH_S`, or at once with `flush`. A full disk loses nothing:
    lines wait in memory until there is space."""

    FLUSH_S = 0.1

    def __init__(self, path: Path, line_of: Callable[[T], bytes]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._line_of = line_of
        self._items: list[T] = []
        self.append = self._items.append
        self._unwritten = b""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_failing = False
        self._writer = threading.Thread(target=self._write, name=path.name, daemon=True)
        self._writer.start()

    def flush(self) -> None:
        """Raises `OSError` if the disk is full; the next flush tries again."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        count = len(self._items)  # other threads append to the same list meanwhile
        self._unwritten += b"".join(map(self._line_of, self._items[:count]))
        del self._items[:count]
        while self._unwritten:  # a full disk may take a part of it
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def replace(self, is_kept: Callable[[bytes], bool], item: T) -> None:
        """This item's line in place of those that are not kept. Raises as `flush` does."""
        with self._lock:
            self._flush()
            kept = [line for _, line in _lines(self._path) if is_kept(line)]
            _replace(self._path, [*kept, self._line_of(item)])
            self._file.close()
            self._file = self._path.open("ab", buffering=0)

    def sync(self) -> None:
        """Write everything so far to the disk itself: it survives a crash of the machine."""
        with self._lock:
            self._flush()
            os.fsync(self._file.fileno())

    def _write(self) -> None:
        while not self._closing.wait(self.FLUSH_S):
            try:
                self.flush()
                self._is_failing = False
            except OSError as error:  # `close` raises it if it persists
                if not self._is_failing:
                    logger.warning(
                        "cannot write %s: %s. The lines wait in memory until there is space",
                        self._file.name,
                        error.strerror,
                    )
                self._is_failing = True

    def close(self) -> None:
        """Raises `OSError` if the last lines cannot be written."""
        self._closing.set()
        self._writer.join()
        try:
            self.flush()
        finally:
            self._file.close()


class JsonlSink:
    """Writes `events.jsonl`: one numbered line per event, and its index (`events.index`). Reopened after a crash, it cuts off
    an incomplete last line and continues the numbering."""

    def __init__(self, path: Path) -> None:
        self._next = self._next_written = _cut_torn_line(path)
        self._file = LineFile(path, self._line_of)
        self._index = IndexWriter(path)
        self._append = self._file.append
        self.sync = self._file.sync

    def close(self) -> None:
        """Raises `OSError` if the last lines cannot be written."""
        try:
            self._file.close()
        finally:
            self._index.close()

    @property
    def last_seq(self) -> int:
        """The number of the last event so far; -1 before the first."""
        return self._next - 1

    def emit(self, event: Event) -> None:
        """Called by one thread at a time (`Tee` has a lock)."""
        self._append(event)
        self._next += 1

    def _line_of(self, event: Event) -> bytes:
        """Called once per event, in order."""
        line = b'{"seq":%d,%b\n' % (self._next_written, encode_event(event)[1:])
        self._index.add(self._next_written, event, len(line))
        self._next_written += 1
        return line


def _cut_torn_line(path: Path) -> int:
    """Cut off an incomplete last line. Returns the number of the next event."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        end = _last_newline(file, file.seek(0, os.SEEK_END)) + 1
        file.truncate(end)
        begin = _last_newline(file, end - 1) + 1
        file.seek(begin)
        line = file.read(end - begin)
    return _read_as(_seq, line, path, "the last line") + 1 if line else 0


def _last_newline(file: BinaryIO, end: int) -> int:
    """The position of the last one before `end`; -1 if there is none."""
    while end > 0:
        begin = max(0, end - TAIL)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found
        end = begin
    return -1


class MetricsSink:
    """Writes `metrics.jsonl`: one line per step and per evaluation of a step. A run that resumes from step `upto` writes the
    later lines again. An evaluation that is repeated replaces its earlier line."""

    def __init__(self, path: Path, *, upto: int = 0) -> None:
        kept = list[bytes]()
        if path.exists():
            kept += (line for number, line in _lines(path) if _read_as(_step, line, path, number) <= upto)
            _replace(path, kept)
        self._file = LineFile(path, _json_line)
        self._metrics = StepMetrics()
        self._evaluations = {_evaluation_of(json.loads(line)) for line in kept}  # that have a line
        self.sync = self._file.sync
        self.close = self._file.close

    def emit(self, event: Event) -> None:
        row = self._metrics.add(event)
        if row is None:
            return
        if not is_step(row):
            evaluation = _evaluation_of(row)
            if evaluation in self._evaluations:
                with suppress(OSError, LogError, ValueError):  # a full disk, or an edited file: then both have a line
                    self._file.replace(lambda line: _evaluation_of(json.loads(line)) != evaluation, row)
                    return
            self._evaluations.add(evaluation)
        self._file.append(row)


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """All lines of a file, whole or as they were."""
    new = path.with_suffix(".new")
    new.write_bytes(b"".join(lines))
    new.replace(path)


def _evaluation_of(row: dict[str, Any]) -> frozenset[str]:
    """What a row of an evaluation is of: its step and its scores. Empty for the row of a step."""
    return frozenset() if is_step(row) else frozenset((str(row.get("step")), *row))


def _json_line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


class Tee:
    """Several sinks. `files` get every event at once, one event at a time, from any thread; an error of one of them is raised
    to the caller of `emit`. `shown` (terminal, dashboard) get it soon, on a separate thread: a terminal that blocks delays
    nothing else, and misses the oldest events beyond `MAX_TO_SHOW`. A sink that raises is removed."""

    SHOW_S = 0.1

    def __init__(self, files: Iterable[EventSink], shown: Iterable[EventSink] = ()) -> None:
        self._files = list(files)
        self._shown = list(shown)
        self._lock = threading.Lock()
        self._to_show: deque[Event] = deque(maxlen=MAX_TO_SHOW)
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

    def close(self) -> None:
        """Show the rest, for at most `CLOSE_S`."""
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
            except Exception:  # a sink that only shows events must not stop the run
                logger.exception("a sink failed and was removed: %s", type(sink).__name__)
                self._shown.remove(sink)


def read_events(path: Path) -> Iterator[AnyEvent]:
    """All events of a run folder, whether the run is alive or not. An incomplete last line is left out. Raises `LogError` at a
    line that is not an event."""
    return (_read_as(decode_event, line, path, number) for number, line in _lines(path))


def read_history(path: Path, *, upto: int | None = None) -> Iterator[AnyEvent]:
    """The events behind the newest weights, up to number `upto` or all: without those undone by a crash and a resume. Raises
    as `read_events` does."""
    void = _undone(path)
    for number, line in _lines(path):
        seq = _read_as(_seq, line, path, number) if void or upto is not None else 0
        if upto is not None and seq > upto:
            return
        if not any(begin < seq < end for begin, end in void):
            yield _read_as(decode_event, line, path, number)


def _undone(path: Path) -> list[tuple[int, int]]:
    """The numbers before and after the events that each resume has undone."""
    resumes = ((seq, event) for seq, event in read_kinds(path, Resumed) if isinstance(event, Resumed))
    return [(event.from_seq, seq) for seq, event in resumes]


def read_kinds(path: Path, *kinds: type[Event], is_history: bool = False) -> Iterator[tuple[int, AnyEvent]]:
    """The events of these kinds, each with its number; `is_history`: without those undone by a crash and a resume. Other lines
    are not decoded. Raises as `read_events` does."""
    tags = [f'"kind":"{kind.__struct_config__.tag}"'.encode() for kind in kinds]
    void = _undone(path) if is_history else []
    for number, line in _lines(path):
        if any(tag in line for tag in tags):
            event, seq = _read_as(decode_event, line, path, number), _read_as(_seq, line, path, number)
            if isinstance(event, kinds) and not any(begin < seq < end for begin, end in void):
                yield seq, event


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The complete lines, numbered from 1. Raises `LogError` if the file cannot be read."""
    try:
        with path.open("rb") as lines:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.endswith(b"\n"))
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror}") from error


def _read_as(decode: Callable[[bytes], T], line: bytes, path: Path, place: int | str) -> T:
    """Raises `LogError`, which names the file and the line."""
    try:
        return decode(line)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        where = place if isinstance(place, str) else f"line {place}"
        raise LogError(
            f"{path}, {where} cannot be read: {error}. Found: {shown(line.rstrip())}. What happened up to there: "
            f"{program()} audit {quote(str(path.parent))}"
        ) from error


def _step(line: bytes) -> int:
    return int(json.loads(line)["step"])


class _Numbered(Struct):
    seq: int


def _seq(line: bytes) -> int:
    return int(_numbered.decode(line).seq)


_numbered = json_decoder(_Numbered)
