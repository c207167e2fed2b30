"""The tiles of one run (`events.index`) in memory, as columns: what every view of a run reads. Events that a resume has undone
are taken back. Tiles that the index lacks are made from the events.

A run of 10 million events has 10,000 tiles, which are some ten megabytes here.
"""

from __future__ import annotations

import io
import os
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from millstream.events import Event, Status
from millstream.events.encoding import AnyEvent, decode_event
from millstream.events.index import (
    COUNTED,
    DEPTHS,
    TILE,
    EventTile,
    TileMark,
    Tiler,
    TileSkip,
    add_line,
    encode_tile,
    index_of,
    is_in_place,
    read_tiles,
    seq_of,
)

MAX_LINE = 16 << 20  # bytes: a longer one is no event
MAX_SKIPPED_KEPT = 200
SAMPLE_BYTES = 1024
MIN_TO_WRITE = 20  # tiles: a shorter log is read as quickly as its index
E_ = TypeVar("E_", bound=Event)
CHECK_EVERY = 4  # tiles between two looks at the time


class TileColumns:
    """Rows of numbers, each of a tile, in the order of tiles. Integers are `q`, times are `d`."""

    def __init__(self, **types: str) -> None:
        self.tile = array("q")
        self._columns = {name: array(kind) for name, kind in types.items()}

    def __len__(self) -> int:
        return len(self.tile)

    def append(self, tile: int, *values: float) -> None:
        self.tile.append(tile)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)  # type: ignore[arg-type]  # integers where the column has integers

    def cut(self, tile: int) -> None:
        """Without the rows of this tile and later ones."""
        num = bisect_left(self.tile, tile)
        for column in (self.tile, *self._columns.values()):
            del column[num:]

    def of(self, name: str, begin: int = 0, end: int | None = None) -> NDArray[Any]:
        """A copy of a column, or of its rows from `begin` to `end`."""
        column = self.tile if name == "tile" else self._columns[name]
        return np.array(column[begin:end], dtype=np.float64 if column.typecode == "d" else np.int64)

    def last(self, name: str) -> float:
        return float(self._columns[name][-1])

    def sorted_by(self, name: str) -> array[Any]:
        """To search in: the column itself."""
        return self._columns[name]


WORK = {"begin": "d", "end": "d", "busy": "d", "num": "q", "num_tokens": "q"}
WAITS = {"readings": "q", "num": "q", "longest_s": "d"}


class RunTiles:
    """Hold `lock` to refresh or read. `num_bytes` of the `size` of the log are covered. `num_rest` bytes at its end
    are not a whole line. Another log at the same place replaces `sources`."""

    def __init__(self, events: Path) -> None:
        self.path = events
        self.lock = threading.RLock()
        self._use_index = True
        self._identity: tuple[int, int] | None = None
        self._sample = b""
        self._reset()

    def _reset(self) -> None:
        self.tiles = TileColumns(
            **dict.fromkeys(("offset", "end", "line", "first_seq", "last_seq", "num_readings"), "q"),
            **dict.fromkeys(("low_group", "high_group"), "q"),  # that were admitted; -1: none
            **dict.fromkeys((*COUNTED, *DEPTHS), "q"),
            **dict.fromkeys(("begin", "until", "reach"), "d"),  # reach: the earliest time that its events describe
        )
        self.work: dict[tuple[str, str], TileColumns] = {}
        self.waits: dict[tuple[str, str], TileColumns] = {}
        self.steps = TileColumns(version="q", at="d", num_rollouts="q", num_tokens="q")
        self.marks: list[tuple[int, TileMark]] = []
        self._marked: dict[int, AnyEvent | None] = {}  # events of marks that were read, by their place
        self.statuses: list[tuple[int, TileMark]] = []
        self.sources: dict[int, str] = {}  # by group
        self.skipped: list[tuple[int, TileSkip]] = []
        self.num_skipped = 0
        self.void: dict[int, int] = {}  # by the number of a `Resumed`: the last number before it that counts
        self.num_bytes = 0
        self.size = 0
        self.num_rest = 0
        self._line = 1
        self._size_seen = -1
        self._index_at = 0  # the next byte of the index
        self._tail: tuple[int, int, int, int] | None = (
            None  # a tile that may grow: its number, byte, line, lines skipped
        )
        self._made: list[bytes] = []  # tiles that the index lacks

    @property
    def next_line(self) -> int:
        return self._line

    # ---- reading -------------------------------------------------------------------------------------------------------

    def refresh(self, max_s: float = float("inf"), may_write: Callable[[], bool] = lambda: False) -> bool:
        """Reads what has been written since, for about `max_s`. Returns whether that is all. `may_write`: whether an index that
        was made may be written to the folder of the log. Raises `OSError`."""
        with self.lock, self.path.open("rb") as log:
            found = os.fstat(log.fileno())
            identity = (found.st_dev, found.st_ino)
            is_same = found.st_size >= self.num_bytes and sample_of(log, self.num_bytes) == self._sample
            if (
                identity != self._identity or not is_same
            ):  # a folder that is made again may get the numbers of the old one
                self._reset()
                self._identity = identity
            if found.st_size == self._size_seen:
                return True
            self.size = found.st_size
            self._drop_tail()
            if self._use_index and not self._read_index(log):  # it is the index of another log
                self._reset()
                self.size = found.st_size
                self._use_index = False
            is_all = self._read_log(log, time.monotonic() + max_s, may_write)
            self._size_seen = found.st_size if is_all else -1
            self.num_rest = found.st_size - self.num_bytes if is_all else 0
            self._sample = sample_of(log, self.num_bytes)
            return is_all

    def _drop_tail(self) -> None:
        if self._tail is not None:
            number, self.num_bytes, self._line, self.num_skipped = self._tail
            self._tail = None
            self._cut(number)

    def _read_index(self, log: BinaryIO) -> bool:
        """Returns whether it belongs to the log."""
        first = last = None
        with suppress(OSError):
            for tile, behind in read_tiles(index_of(self.path), self._index_at):
                if tile.offset > self.num_bytes or tile.end > self.size or tile.num_lines != TILE:
                    break
                self._index_at = behind
                if tile.offset == self.num_bytes:
                    first = first or tile
                    last = tile
                    self._add(tile)
        return all(one is None or is_in_place(one, log) for one in (first, last))

    def _read_log(self, log: BinaryIO, until: float, may_write: Callable[[], bool]) -> bool:
        """Returns whether that is all."""
        tiler, num_tiles = Tiler(self.num_bytes, self._line), 0
        log.seek(self.num_bytes)
        for line in _lines(log):
            if isinstance(line, int):
                tiler.skip(f"a line of more than {MAX_LINE} bytes", line)
            else:
                add_line(tiler, line)
            if tiler.num_lines == TILE:
                tile = tiler.take()
                self._add(tile)
                self._made.append(encode_tile(tile))
                num_tiles += 1
                if num_tiles % CHECK_EVERY == 0 and time.monotonic() > until:
                    return False
        if tiler.num_lines:
            before = (self.num_bytes, self._line, self.num_skipped)
            self._add(tiler.take())
            self._tail = (len(self.tiles) - 1, *before)
        self.size = self.num_bytes  # what is left is not a whole line yet
        if len(self._made) >= MIN_TO_WRITE and may_write():
            self._write_index()
        return True

    # ---- adding --------------------------------------------------------------------------------------------------------

    def _add(self, tile: EventTile) -> None:
        self.num_bytes = tile.end
        self._line = tile.line + tile.num_lines
        self.num_skipped += tile.num_skipped
        if tile.resumes:
            self.void |= dict(tile.resumes)
            self._undo(min(from_seq for _, from_seq in tile.resumes))
            tile = self._count_again(tile.offset, tile.end, tile.line)
        self._append(tile)

    def _undo(self, from_seq: int) -> None:
        """Take back what came after this number."""
        number = bisect_right(self.tiles.sorted_by("last_seq"), from_seq)
        if number == len(self.tiles):
            return
        offset, end, line, first = (
            int(self.tiles.sorted_by(n)[number]) for n in ("offset", "end", "line", "first_seq")
        )
        self._cut(number)
        if first <= from_seq:
            self._append(self._count_again(offset, end, line))

    def _count_again(self, offset: int, end: int, line: int) -> EventTile:
        """The tile of these bytes, without what is void."""
        tiler = Tiler(offset, line)
        with self.path.open("rb") as log:
            log.seek(offset)
            for one in io.BytesIO(log.read(end - offset)):
                add_line(tiler, one, self._counts)
        return tiler.take()

    def _counts(self, seq: int) -> bool:
        return not any(from_seq < seq < resumed for resumed, from_seq in self.void.items())

    def _append(self, tile: EventTile) -> None:
        number = len(self.tiles)
        reach = min((one.begin for one in tile.work), default=tile.begin)
        last_seq = max(tile.last_seq, int(self.tiles.last("last_seq")) if number else -1)
        self.tiles.append(
            number,
            *(tile.offset, tile.end, tile.line, tile.first_seq, last_seq, tile.num_readings),
            *(tile.groups or (-1, -1)),
            *tile.counts,
            *tile.depths,
            *(tile.begin, tile.until, min(reach, tile.begin)),
        )
        for one in tile.work:
            columns = self.work.get((one.worker, one.what))
            if columns is None:
                columns = self.work[one.worker, one.what] = TileColumns(**WORK)
            columns.append(number, one.begin, one.end, one.busy, one.num, one.num_tokens)
        for wait in tile.waits:
            columns = self.waits.get((wait.owner, wait.what))
            if columns is None:
                columns = self.waits[wait.owner, wait.what] = TileColumns(**WAITS)
            columns.append(number, wait.num_readings, wait.num, wait.longest_s)
        for step in tile.steps:
            self.steps.append(number, step.version, step.at, step.num_rollouts, step.num_tokens)
        self.marks += ((number, mark) for mark in tile.marks)
        self.statuses += [] if tile.status is None else [(number, tile.status)]
        for source, groups in tile.sources.items():
            self.sources |= dict.fromkeys(groups, source)
        if len(self.skipped) < MAX_SKIPPED_KEPT:
            self.skipped += ((number, one) for one in tile.skipped)

    def _cut(self, number: int) -> None:
        """Without this tile and later ones."""
        for columns in (self.tiles, self.steps, *self.work.values(), *self.waits.values()):
            columns.cut(number)
        for rows in (self.marks, self.statuses, self.skipped):
            while rows and rows[-1][0] >= number:
                rows.pop()

    # ---- an index that was made ----------------------------------------------------------------------------------------

    def _write_index(self) -> None:
        """In the folder of the log, in place of the shorter one that is there."""
        made = self._made
        self._made = []
        path = index_of(self.path)
        new = path.with_name(f".{path.name}.{os.getpid()}.new")
        with suppress(OSError):
            there = path.read_bytes()[: self._index_at] if self._use_index and self._index_at else b""
            new.write_bytes(there + b"".join(made))
            new.replace(path)
            self._index_at = len(there) + sum(map(len, made))
            self._use_index = True
        with suppress(OSError):
            new.unlink(missing_ok=True)

    # ---- what is asked -------------------------------------------------------------------------------------------------

    @property
    def first(self) -> float:
        return float(self.tiles.of("begin").min()) if len(self.tiles) else 0.0

    @property
    def last(self) -> float:
        return float(self.tiles.of("until").max()) if len(self.tiles) else 0.0

    def tiles_between(self, begin: float, end: float) -> NDArray[np.int64]:
        """Whose events describe that time."""
        found: NDArray[np.int64] = np.flatnonzero((self.tiles.of("reach") <= end) & (self.tiles.of("until") >= begin))
        return found

    def events(self, tiles: Iterable[int], *kinds: type[Event], containing: bytes = b"") -> Iterator[AnyEvent]:
        """Of these tiles, in their order: all, or of these kinds, or with this in their lines. What cannot be read is left
        out."""
        tags = {str(kind.__struct_config__.tag).encode() for kind in kinds}
        offsets, ends = self.tiles.sorted_by("offset"), self.tiles.sorted_by("end")
        if not offsets:
            return
        with self.path.open("rb") as log:
            for number in tiles:
                log.seek(offsets[number])
                for line in io.BytesIO(log.read(ends[number] - offsets[number])):
                    if (tags and _tag_of(line) not in tags) or containing not in line:
                        continue
                    with suppress(ValueError, KeyError, TypeError, RecursionError):
                        if not self.void or self._counts(seq_of(line)):
                            yield decode_event(line)

    def marked(self, *kinds: type[E_]) -> Iterator[E_]:
        """The events of these kinds, which must be rare ones (`EventTile.marks`), in their order."""
        tags = {str(kind.__struct_config__.tag) for kind in kinds}
        wanted = [mark for _, mark in self.marks if mark.kind in tags]
        if not wanted:
            return
        with self.path.open("rb") as log:
            for mark in wanted:
                if mark.offset not in self._marked:
                    self._marked[mark.offset] = _event_at(log, mark)
                event = self._marked[mark.offset]
                if isinstance(event, kinds):
                    yield event

    def last_status(self) -> Status | None:
        if not self.statuses:
            return None
        with self.path.open("rb") as log:
            event = _event_at(log, self.statuses[-1][1])
        return event if isinstance(event, Status) else None


def sample_of(file: BinaryIO, end: int) -> bytes:
    """Of the bytes before `end`: a file that was appended to has them still."""
    file.seek(0)
    head = file.read(min(end, SAMPLE_BYTES))
    file.seek(max(0, end - SAMPLE_BYTES))
    return head + file.read(min(end, SAMPLE_BYTES))


def _tag_of(line: bytes) -> bytes:
    begin = line.find(b'"kind":"') + 8
    return line[begin : line.find(b'"', begin)]


def _event_at(log: BinaryIO, mark: TileMark) -> AnyEvent | None:
    log.seek(mark.offset)
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return decode_event(log.read(mark.size))
    return None


def _lines(log: BinaryIO) -> Iterator[bytes | int]:
    """The whole lines from here on. One that is too long is its number of bytes."""
    while (line := log.readline(MAX_LINE)).endswith(b"\n") or len(line) == MAX_LINE:
        if line.endswith(b"\n"):
            yield line
            continue
        size = len(line)
        while (more := log.readline(MAX_LINE)) and not more.endswith(b"\n"):
            size += len(more)
        if not more:
            return
        yield size + len(more)
