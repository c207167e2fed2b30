"""The index of the events: `events.index` has one line, a *tile*, for every `TILE` lines of `events.jsonl`: where they are
in the file, when they happened, and what they add up to. A view of a long run reads tiles; a view of a few seconds reads the
events of a few tiles.

The index is made as the events are written, by the same thread, and is a copy: it can be deleted, and is made again
by `millstream dash`. A tile is a function of its lines alone. It counts events that a resume has undone: readers subtract them
(`EventTile.resumes`). A line that cannot be read is counted, with the reason. Each tile names its `FORMAT`; one of another
format, or with a number out of range, is not used, and made again.
"""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta, Struct

from millstream.decoding import json_decoder
from millstream.errors import shown
from millstream.events.encoding import decode_event
from millstream.events.types import (
    CheckpointSealed,
    DraftsChecked,
    Event,
    GroupAdmitted,
    GroupLeft,
    GroupRestarted,
    GroupResumed,
    GroupScored,
    GroupTaken,
    Resumed,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    Span,
    Status,
    Stepped,
    WeightsLoaded,
    WeightsPublished,
)
from millstream.types import Fate

logger = logging.getLogger(__name__)
TILE = 1000  # lines
MAX_SKIPPED = 20  # lines of a tile that are named
MAX_CATCH_UP = 4 << 20  # bytes of events without tiles that a resumed run reads before it starts
DRIVER, REWARDS = "driver", "group rewards"  # lanes of work that no worker reports
RANK_LANE = "learner rank "  # and the number of one of several ranks: all of them begin a call of the learner together
COUNTED = (
    *(fate.value for fate in Fate),
    *("admitted", "restarted", "rollouts_started", "rollouts_ended", "rollouts_failed", "rollouts_aborted"),
)
_PLACES = {name: number for number, name in enumerate(COUNTED)}
_NOT_COUNTED = len(COUNTED)
_COUNTED_KINDS: dict[type[Event], int] = {
    RolloutStarted: _PLACES["rollouts_started"],
    RolloutEnded: _PLACES["rollouts_ended"],
    RolloutFailed: _PLACES["rollouts_failed"],
    RolloutAborted: _PLACES["rollouts_aborted"],
    GroupRestarted: _PLACES["restarted"],
    **dict.fromkeys((GroupTaken, GroupResumed, DraftsChecked), _NOT_COUNTED),
}
DEPTHS = ("requests_waiting", "requests_running", "rows_in_store", "groups_outstanding", "groups_taken", "budget")
FORMAT = f"2-{zlib.crc32(' '.join((*COUNTED, *DEPTHS)).encode()):08x}"  # another for other names
MAX_NUMBER = 1 << 53  # of an event: the sum of a tile has 64 bits
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Number = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class TileWork(Struct, frozen=True, array_like=True):
    """Work of one worker and of one kind: `busy` seconds between `begin` and `end`."""

    worker: str
    what: str
    begin: float
    end: float
    busy: float
    num: Count
    num_tokens: Number


class TileWait(Struct, frozen=True, array_like=True):
    """In how many readings of the state (`Status`) it was there, and how many waited then, in all."""

    owner: str
    what: str
    num_readings: Count
    num: Number
    longest_s: float


class TileStep(Struct, frozen=True, array_like=True):
    version: Number
    at: float
    num_rollouts: Number
    num_tokens: Number


class TileMark(Struct, frozen=True, array_like=True):
    """Where an event of a rare kind is: the first byte and the number of bytes of its line."""

    kind: str
    seq: Count
    offset: Count
    size: Count


class TileSkip(Struct, frozen=True, array_like=True):
    line: Count
    why: str


class EventTile(Struct, frozen=True, array_like=True):
    format: str
    offset: Count  # of its first line
    end: Count  # the first byte after it
    line: Count  # the number of the first line
    num_lines: Count
    first_seq: Number  # -1, as the next: no line can be read
    last_seq: Number
    begin: float  # the lowest time of an event
    until: float  # the highest
    counts: Annotated[list[Count], Meta(min_length=len(COUNTED), max_length=len(COUNTED))]  # in the order of `COUNTED`
    num_readings: Count  # of the state
    depths: Annotated[
        list[Number], Meta(min_length=len(DEPTHS), max_length=len(DEPTHS))
    ]  # sums, in the order of `DEPTHS`
    work: list[TileWork]
    waits: list[TileWait]
    steps: list[TileStep]
    marks: list[TileMark]
    status: TileMark | None  # the last reading
    resumes: list[tuple[Number, Number]]  # number and `from_seq` of each `Resumed`
    groups: tuple[Number, Number] | None  # the lowest and the highest that was admitted
    sources: dict[str, list[Number]]  # groups by where their task comes from, as far as it says so
    num_skipped: Count
    skipped: list[TileSkip]


class Tiler:
    """Adds up lines, in their order; `take` returns what they are as a tile, and begins the next."""

    def __init__(self, offset: int = 0, line: int = 1) -> None:
        self._offset = offset
        self._line = line
        self._add: dict[type[Event], Callable[[Any], None]] = {
            Span: self._add_span,
            GroupAdmitted: self._admit,
            GroupLeft: lambda one: self._count(one.fate.value),
            GroupScored: lambda one: self._work(REWARDS, "score", one.at, one.seconds),
            Status: self._read_status,
            Stepped: self._step,
            WeightsLoaded: lambda one: self._work(one.engine, "load weights", one.at, one.seconds),
            WeightsPublished: lambda one: self._work(DRIVER, "publish weights", one.at, one.seconds),
        }
        self._begin_tile()

    def _begin_tile(self) -> None:
        self.num_lines = 0
        self._end = self._offset
        self._first_seq = self._last_seq = -1
        self._begin = math.inf
        self._until = -math.inf
        self._counts = [0] * (len(COUNTED) + 1)
        self._num_readings = 0
        self._depths = [0] * len(DEPTHS)
        self._works: dict[tuple[str, str], list[Any]] = {}
        self._waits: dict[tuple[str, str], list[Any]] = {}
        self._steps: list[TileStep] = []
        self._marks: list[TileMark] = []
        self._status: TileMark | None = None
        self._resumes: list[tuple[int, int]] = []
        self._groups: tuple[int, int] | None = None
        self._sources: dict[str, list[int]] = {}
        self._num_skipped = 0
        self._skipped: list[TileSkip] = []

    def add(self, seq: int, event: Event, size: int) -> None:
        """`size`: the bytes of its line."""
        if self._first_seq < 0:
            self._first_seq = seq
        self._last_seq = seq
        at = event.at
        if at < self._begin:
            self._begin = at
        if at > self._until:
            self._until = at
        kind = type(event)
        place = _COUNTED_KINDS.get(kind)
        if place is not None:
            self._counts[place] += 1
        elif (handle := self._add.get(kind)) is None:
            self._mark(seq, event, size)
        else:
            handle(event)
            if kind is Status:
                self._status = TileMark("status", seq, self._end, size)
        self._end += size
        self.num_lines += 1

    def skip(self, why: str, size: int) -> None:
        """A line that cannot be read."""
        self._num_skipped += 1
        if len(self._skipped) < MAX_SKIPPED:
            self._skipped.append(TileSkip(self._line + self.num_lines, why))
        self.pass_over(size)

    def pass_over(self, size: int) -> None:
        """A line that does not count."""
        self._end += size
        self.num_lines += 1

    def take(self) -> EventTile:
        is_read = self._first_seq >= 0
        tile = EventTile(
            format=FORMAT,
            offset=self._offset,
            end=self._end,
            line=self._line,
            num_lines=self.num_lines,
            first_seq=self._first_seq,
            last_seq=self._last_seq,
            begin=_short(self._begin) if is_read else 0.0,
            until=_short(self._until) if is_read else 0.0,
            counts=self._counts[:_NOT_COUNTED],
            num_readings=self._num_readings,
            depths=self._depths,
            work=[
                TileWork(*key, _short(begin), _short(end), _short(busy), num, tokens)
                for key, (begin, end, busy, num, tokens) in self._works.items()
            ],
            waits=[
                TileWait(*key, readings, num, _short(seconds)) for key, (readings, num, seconds) in self._waits.items()
            ],
            steps=self._steps,
            marks=self._marks,
            status=self._status,
            resumes=self._resumes,
            groups=self._groups,
            sources=self._sources,
            num_skipped=self._num_skipped,
            skipped=self._skipped,
        )
        self._offset = self._end
        self._line += self.num_lines
        self._begin_tile()
        return tile

    # ---- by kind -------------------------------------------------------------------------------------------------------

    def _count(self, name: str) -> None:
        self._counts[_PLACES[name]] += 1

    def _work(self, worker: str, what: str, at: float, seconds: float, num_tokens: int = 0) -> None:
        begin = at - seconds
        found = self._works.get((worker, what))
        if found is None:
            self._works[worker, what] = [begin, at, seconds, 1, num_tokens]
            return
        if begin < found[0]:
            found[0] = begin
        if at > found[1]:
            found[1] = at
        found[2] += seconds
        found[3] += 1
        found[4] += num_tokens

    def _add_span(self, event: Span) -> None:
        self._work(event.worker, event.what, event.at, event.seconds, event.num_tokens)
        if event.rank_seconds:
            for rank, seconds in enumerate(event.rank_seconds):
                self._work(f"{RANK_LANE}{rank}", event.what, event.at - event.seconds + seconds, seconds)

    def _admit(self, event: GroupAdmitted) -> None:
        self._count("admitted")
        group_id = event.group_id
        low, high = self._groups or (group_id, group_id)
        self._groups = (min(low, group_id), max(high, group_id))
        if event.source:
            self._sources.setdefault(event.source, []).append(group_id)

    def _read_status(self, event: Status) -> None:
        self._num_readings += 1
        for number, name in enumerate(DEPTHS):
            self._depths[number] += getattr(event, name)
        for wait in event.waits:
            found = self._waits.setdefault((wait.owner, wait.what), [0, 0, 0.0])
            found[0] += 1
            found[1] += wait.count
            found[2] = max(found[2], wait.seconds)

    def _step(self, event: Stepped) -> None:
        self._steps.append(TileStep(event.version, _short(event.at), event.num_rollouts, event.num_tokens))

    def _mark(self, seq: int, event: Event, size: int) -> None:
        kind = str(event.__struct_config__.tag)
        self._marks.append(TileMark(kind, seq, self._end, size))
        if isinstance(event, Resumed):
            self._resumes.append((seq, event.from_seq))
        elif isinstance(event, CheckpointSealed):
            self._work(DRIVER, "write a checkpoint", event.at, event.seconds)


def _short(seconds: float) -> float:
    """In microseconds; a file has no number that is not finite."""
    return round(seconds, 6) if math.isfinite(seconds) else 0.0


# ---- from the lines of a file ------------------------------------------------------------------------------------------


def seq_of(line: bytes) -> int:
    """The number of an event, without decoding it. Raises `ValueError`."""
    if not line.startswith(b'{"seq":'):
        raise ValueError("it has no number")
    seq = int(line[7 : line.index(b",", 7)])
    if not 0 <= seq <= MAX_NUMBER:
        raise ValueError("its number is out of range")
    return seq


_MAY_BE_LARGE = re.compile(rb"[:,\[]-?[0-9]{16}")


def _check_numbers(value: Any) -> None:
    """Raises `ValueError` for an integer that cannot be added up in 64 bits."""
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise ValueError(f"an integer beyond {MAX_NUMBER}")
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_numbers(one)


def add_line(tiler: Tiler, line: bytes, is_counted: Callable[[int], bool] | None = None) -> None:
    """`is_counted`: of an event's number; others add nothing."""
    try:
        seq = seq_of(line)
        if is_counted is not None and not is_counted(seq):
            tiler.pass_over(len(line))
            return
        event = decode_event(line)
        if _MAY_BE_LARGE.search(line):
            _check_numbers(msgspec.to_builtins(event))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        tiler.skip(f"{error}. Found: {shown(line[:200].rstrip())}", len(line))
        return
    tiler.add(seq, event, len(line))


# ---- the file ----------------------------------------------------------------------------------------------------------


_decoder = json_decoder(EventTile)
_encoder = msgspec.json.Encoder()


def index_of(events: Path) -> Path:
    return events.with_suffix(".index")


def encode_tile(tile: EventTile) -> bytes:
    return _encoder.encode(tile) + b"\n"


def read_tiles(path: Path, begin: int = 0) -> Iterator[tuple[EventTile, int]]:
    """The whole tiles from this byte on, each with the first byte after it. What is damaged, or of another version, ends it.
    Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(begin)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                tile = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return
            if not _is_sound(tile):
                return
            begin += len(line)
            yield tile, begin


def _is_sound(tile: EventTile) -> bool:
    marks = [*tile.marks, *([] if tile.status is None else [tile.status])]
    return (
        tile.format == FORMAT
        and tile.offset < tile.end
        and all(tile.offset <= mark.offset < mark.offset + mark.size <= tile.end for mark in marks)
    )


def is_in_place(tile: EventTile, events: BinaryIO) -> bool:
    """Whether the file has these events where the tile says."""
    events.seek(max(0, tile.offset - 1))
    before = events.read(1) if tile.offset else b"\n"
    first = events.readline()
    events.seek(tile.end - 1)
    if before != b"\n" or events.read(1) != b"\n":
        return False
    try:
        return bool(tile.num_skipped) or seq_of(first) == tile.first_seq
    except ValueError:
        return False


class IndexWriter:
    """Writes the tiles of a log that is appended to. A disk that takes nothing, or a log with too much that has no tiles, costs
    the rest of the index, which `millstream dash` makes, and not the run."""

    def __init__(self, events: Path) -> None:
        self._path = index_of(events)
        self._file: BinaryIO | None = None
        self._tiler = Tiler()
        try:
            self._open(events)
        except OSError as error:
            self._give_up(error)

    def _open(self, events: Path) -> None:
        size = events.stat().st_size if events.exists() else 0
        last, end = None, 0
        if size and self._path.exists():
            with events.open("rb") as log:
                for tile, behind in read_tiles(self._path):
                    if tile.offset != (last.end if last else 0) or tile.end > size or tile.num_lines != TILE:
                        break
                    last, end = tile, behind
                if last is not None and not is_in_place(last, log):
                    last, end = None, 0
        begin = 0 if last is None else last.end
        if size - begin > MAX_CATCH_UP:
            return
        self._file = self._path.open("ab", buffering=0)
        self._file.truncate(end)
        self._tiler = Tiler(begin, 1 if last is None else last.line + last.num_lines)
        if size > begin:
            with events.open("rb") as log:
                log.seek(begin)
                for line in log:
                    add_line(self._tiler, line)
                    self._write_whole()

    def add(self, seq: int, event: Event, size: int) -> None:
        """In the order of the file."""
        if self._file is None:
            return
        try:
            self._tiler.add(seq, event, size)
            self._write_whole()
        except Exception as error:  # an index must not stop the run
            self._give_up(error)

    def _write_whole(self) -> None:
        if self._tiler.num_lines >= TILE and self._file is not None:
            line = encode_tile(self._tiler.take())
            if self._file.write(line) < len(line):
                raise OSError(28, "no space left")

    def _give_up(self, error: Exception) -> None:
        logger.info("%s is not continued: %s", self._path, error)
        if self._file is not None:
            self._file.close()
        self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
