"""The runs that a dashboard shows: those that were named, and those in folders that were named, as they come and go.

Only regular files inside a run folder are read. A run folder that cannot be read is listed with the reason.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from millstream.dash.api import (
    BottleneckRow,
    FlowAnswer,
    GroupAnswer,
    LanesAnswer,
    OverviewAnswer,
    RolloutsAnswer,
    RunRow,
    RunStateName,
    SeriesAnswer,
)
from millstream.dash.flow import flow_answer
from millstream.dash.overview import SUMMARY, bottleneck_row, overview_answer
from millstream.dash.rollouts import RolloutFilter, RolloutList
from millstream.dash.series import MetricColumns, XAxis, series_answer
from millstream.dash.tiles import RunTiles
from millstream.dash.timeline import lanes_answer
from millstream.decoding import decode_json
from millstream.errors import ConfigError, LogError
from millstream.events import RunEnded, RunStarted
from millstream.events.encoding import AnyEvent, decode_event
from millstream.events.metrics import is_step
from millstream.events.rollouts.writer import ROLLOUTS_FOLDER
from millstream.paths import did_you_mean, kind_of
from millstream.run.advise import ADVICE
from millstream.run.folder import FINISHED, LOCK, NOTES, RunFolder, holder_of

HEAD_BYTES = 1 << 20  # of a log, in which it says what the run is
TAIL_BYTES = 1 << 18  # in which the last event is
MAX_TAILS = 1000  # that are searched for it: a machine that lost power may leave zeros at the end
ANSWER_S = 1.0  # that a request reads a log or rollouts before it answers with what there is
BUILD_S = 0.05  # that is read at a time, in the background
PAUSE_S = 0.02  # in which requests are answered
HELD_UP_S = 15.0
MAX_ID = 100  # characters
STOPPED = ("Stopped", "KeyboardInterrupt")
FILES = ("events.jsonl", "events.index", "metrics.jsonl", "config.toml", SUMMARY, ADVICE, NOTES, ROLLOUTS_FOLDER)


class _Peek(NamedTuple):
    """What the ends of the files say, without the rest."""

    state: RunStateName
    step: int
    seconds: float


class WatchedRun:
    """One run folder. Answers are of the moment; they may be asked for by several threads."""

    def __init__(self, run_id: str, path: Path) -> None:
        self.id = run_id
        self.folder = RunFolder(path)
        self._tiles = RunTiles(self.folder.events)
        self._metrics = MetricColumns(self.folder.metrics)
        self._table = RolloutList(path)
        self._reads_log = _Reading(lambda seconds: self._tiles.refresh(seconds, self._may_write))
        self._reads_rollouts = _Reading(lambda seconds: self._table.refresh(seconds, self._tiles.sources))
        self._lock = threading.Lock()
        self._peeked: tuple[object, _Peek] | None = None
        self._free_lock: int | None = None  # when the lock file was written that no process holds
        self._config: tuple[object, dict[str, Any]] | None = None
        self._is_simulated: bool | None = None
        self._held_up: tuple[object, float, BottleneckRow | None] | None = (
            None  # what it was computed from, when, the result
        )

    # ---- the row -------------------------------------------------------------------------------------------------------

    def row(self) -> RunRow:
        path = self.folder.path
        try:
            self.check()
            peek, config, problem = self._peek(), self._read_config(), None
        except (OSError, ConfigError, LogError) as error:
            peek, config, problem = _Peek("unreadable", 0, 0.0), {}, _reason(error)
        model, pipeline = config.get("model", {}), config.get("pipeline", {})
        steps = pipeline.get("steps", 0) if isinstance(pipeline, dict) else 0
        name = model.get("path") if isinstance(model, dict) else None
        tiles = self._tiles
        return RunRow(
            id=self.id,
            name=path.name,
            path=str(path),
            state=peek.state,
            is_simulated=bool(self._is_simulated),
            model=str(name or "tiny"),
            step=peek.step,
            steps=steps if isinstance(steps, int) else 0,
            seconds=peek.seconds,
            started=_written(self.folder.config),
            stamp=self._stamp(peek.state),
            indexed=1.0 if not tiles.size else min(1.0, tiles.num_bytes / tiles.size),
            problem=problem,
        )

    def check(self) -> None:
        """Raises `ConfigError` for a folder that is not that of a run, or whose files are elsewhere, and `OSError`."""
        path = self.folder.path
        with os.scandir(path) as entries:
            found = {entry.name: entry for entry in entries if entry.name in (*FILES, LOCK)}
        if not {"events.jsonl", "config.toml"} & found.keys():
            raise ConfigError(f"{path} is not a run folder: it has no events.jsonl and no config.toml")
        inside = path.resolve()
        for name, entry in found.items():
            if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(inside):
                raise ConfigError(f"{path / name} is a link to a place outside the run folder: it is not followed")
            if name == ROLLOUTS_FOLDER:
                _check_inside(entry)
            elif not entry.is_file():
                raise ConfigError(f"{path / name} is not a file")

    def _stamp(self, state: RunStateName) -> str:
        path = self.folder.path
        files = (_sizes(path / name) for name in FILES if name != "events.index")
        covered = self._tiles.num_bytes if self._tiles.num_bytes < self._tiles.size else 0
        return "-".join((*files, state, f"{covered:x}", f"{self._table.progress:x}"))

    def _peek(self) -> _Peek:
        path = self.folder.path
        is_held = self._is_held()
        key = (_sizes(self.folder.events), _sizes(self.folder.metrics), is_held)
        if self._peeked is not None and self._peeked[0] == key:
            return self._peeked[1]
        last, seconds = _last_event(self.folder.events)
        state: RunStateName = "dead"
        if is_held:
            state = "running"
        elif isinstance(last, RunEnded):
            is_stopped = last.outcome in STOPPED
            state = "ended" if last.outcome == FINISHED else "stopped" if is_stopped else "failed"
        elif (path / SUMMARY).exists():
            state = "ended"
        step = last.version if isinstance(last, RunEnded) else _last_step(self.folder.metrics)
        if self._is_simulated is None:
            self._is_simulated = _says_simulated(self.folder.events)
        found = _Peek(state, step, seconds)
        self._peeked = (key, found)
        return found

    def _is_held(self) -> bool:
        """Whether a process has the lock. To ask takes the lock for a moment: done once for each time that it was written."""
        written = _written_ns(self.folder.path / LOCK)
        if written is not None and written == self._free_lock:
            return False
        is_held = holder_of(self.folder.path) is not None
        self._free_lock = None if is_held else written
        return is_held

    def _read_config(self) -> dict[str, Any]:
        key = _sizes(self.folder.config)
        if self._config is None or self._config[0] != key:
            config: dict[str, Any] = {}
            with suppress(FileNotFoundError):
                try:
                    config = tomllib.loads(self.folder.config.read_bytes().decode("utf-8", "replace"))
                except (tomllib.TOMLDecodeError, RecursionError) as error:
                    raise ConfigError(f"{self.folder.config} cannot be read: {error}") from error
            self._config = (key, config)
        return self._config[1]

    def config(self) -> dict[str, Any]:
        self.check()
        return self._read_config()

    # ---- answers -------------------------------------------------------------------------------------------------------

    def overview(self) -> OverviewAnswer:
        tiles = self._fresh_tiles()
        with self._lock:
            self._metrics.refresh()
        row = self.row()
        damaged = self._table.damaged
        if tiles is None:
            return overview_answer(row, self.folder, None, self._metrics, None, damaged)
        with tiles.lock:
            return overview_answer(row, self.folder, tiles, self._metrics, self._bottleneck(tiles, row), damaged)

    def _bottleneck(self, tiles: RunTiles, row: RunRow) -> BottleneckRow | None:
        """Of an active run it is computed again after `HELD_UP_S`: that reads the last steps."""
        key, now = (tiles.num_bytes, row.state), time.monotonic()
        if self._held_up is None or (key != self._held_up[0] and now > self._held_up[1] + HELD_UP_S):
            self._held_up = (key, now, bottleneck_row(self.folder, tiles, row))
        return self._held_up[2]

    def series(self, names: list[str], x: XAxis, num_points: int) -> SeriesAnswer:
        tiles = self._fresh_tiles()
        with self._lock:
            self._metrics.refresh()
            return series_answer(self._metrics, tiles, names or self._metrics.names(), x, num_points)

    def lanes(self, begin: float | None, end: float | None, num_points: int) -> LanesAnswer:
        tiles = self._fresh_tiles() or self._tiles
        with tiles.lock:
            return lanes_answer(tiles, begin, end, num_points)

    def flow(self, begin: float | None, end: float | None, num_points: int) -> FlowAnswer:
        tiles = self._fresh_tiles() or self._tiles
        with tiles.lock:
            return flow_answer(tiles, begin, end, num_points)

    def rollouts(self, asked: RolloutFilter) -> RolloutsAnswer:
        tiles = self._fresh_tiles()
        self._reads_rollouts.refresh()
        return self._table.answer(asked, tiles, self._table.search(asked.query, ANSWER_S))

    def group(self, group_id: int) -> GroupAnswer | None:
        tiles = self._fresh_tiles()
        self._reads_rollouts.refresh()
        return self._table.group(group_id, tiles)

    # ---- reading files -------------------------------------------------------------------------------------------------

    def _fresh_tiles(self) -> RunTiles | None:
        """With what has been written. None: there is no log."""
        self.check()
        if kind_of(self.folder.events) != "file":
            return None
        self._reads_log.refresh()
        return self._tiles

    def read_all(self) -> None:
        """However long it takes: answers are then of everything."""
        if self._fresh_tiles() is not None:
            self._tiles.refresh()
        while not self._table.refresh(ANSWER_S, self._tiles.sources):
            pass

    def _may_write(self) -> bool:
        """An index into the folder: only where no process of the run writes one."""
        return os.access(self.folder.path, os.W_OK) and not self._is_held()


class _Reading:
    """Something that takes long to read the first time: `ANSWER_S` of it in a request, the rest on a thread. `read` reads for
    this many seconds and returns whether that is all."""

    def __init__(self, read: Callable[[float], bool]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def refresh(self) -> None:
        if self._is_running():
            return
        with self._lock:
            if not self._is_running() and not self._read(ANSWER_S):
                self._thread = threading.Thread(target=self._read_rest, name="dash", daemon=True)
                self._thread.start()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _read_rest(self) -> None:
        with suppress(OSError):  # the next request says it
            while not self._read(BUILD_S):
                time.sleep(PAUSE_S)


class RunCatalog:
    """The runs of these folders: a run folder, or one with run folders in it. `ids` are names that are never used for another
    folder."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [path.absolute() for path in paths]
        self._runs: dict[Path, WatchedRun] = {}
        self._ids: dict[str, Path] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[WatchedRun]:
        with self._lock:
            found = list(dict.fromkeys(path for root in self._paths for path in _runs_in(root)))
            for path in found:
                if path not in self._runs:
                    self._runs[path] = WatchedRun(self._new_id(path), path)
            self._runs = {path: self._runs[path] for path in found}
            return list(self._runs.values())

    def run(self, run_id: str) -> WatchedRun | None:
        return next((run for run in self.runs() if run.id == run_id), None)

    def _new_id(self, path: Path) -> str:
        name = re.sub(r"[^\w.-]+", "_", path.name, flags=re.ASCII).lstrip(".")[:MAX_ID] or "run"
        names = (name if number == 1 else f"{name}~{number}" for number in itertools.count(1))
        found = next(one for one in names if self._ids.get(one, path) == path)
        self._ids[found] = path
        return found


def check_paths(paths: Sequence[Path]) -> None:
    """Raises `ConfigError` for a path that is neither a run folder nor a folder that may have some."""
    for path in paths:
        kind = kind_of(path)
        if kind is None:
            raise ConfigError(f"{path} is not there: expected a run folder, or a folder of runs.{did_you_mean(path)}")
        if kind != "folder":
            raise ConfigError(f"{path} is a file: expected a run folder, or a folder of runs")


def _runs_in(root: Path) -> Iterator[Path]:
    """The folder itself, if it is a run's or cannot be read; otherwise the run folders in it, the newest first."""
    try:
        if _is_run(root):
            yield root
            return
        with os.scandir(root) as entries:
            inside = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:  # not yet, or no more
        return
    except OSError:
        yield root
        return
    found = [path for path in inside if _may_be_run(path)]
    yield from sorted(found, key=lambda path: (-(_written(path / "config.toml") or 0.0), path.name))


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in ("events.jsonl", "config.toml"))


def _may_be_run(path: Path) -> bool:
    """Also one that cannot be looked at: it is listed with the reason."""
    try:
        return _is_run(path)
    except OSError:
        return True


def _check_inside(entry: os.DirEntry[str]) -> None:
    """Raises `ConfigError` for what is neither a file nor a folder, here or below."""
    if entry.is_dir(follow_symlinks=False):
        with os.scandir(entry.path) as entries:
            for one in entries:
                _check_inside(one)
    elif entry.is_symlink():
        raise ConfigError(f"{entry.path} is a link: it is not followed")
    elif not entry.is_file(follow_symlinks=False):
        raise ConfigError(f"{entry.path} is not a file")


# ---- the ends of files -----------------------------------------------------------------------------------------------------


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot read {error.filename}: {error.strerror}"
    return str(error)


def _sizes(path: Path) -> str:
    """What changes when a file or a folder does."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_size:x}.{found.st_mtime_ns:x}"


def _written(path: Path) -> float | None:
    with suppress(OSError):
        return path.stat().st_mtime
    return None


def _written_ns(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return None


def _last_lines(path: Path) -> list[bytes]:
    """The whole lines in the last `TAIL_BYTES` that have the end of one, the last one first. Raises `OSError`."""
    data = b""
    try:
        with path.open("rb") as file:
            begin = file.seek(0, os.SEEK_END)
            for _ in range(MAX_TAILS):
                end, begin = begin, max(0, begin - TAIL_BYTES)
                file.seek(begin)
                data = file.read(end - begin)
                if b"\n" in data or not begin:
                    break
    except FileNotFoundError:
        return []
    return data[: data.rfind(b"\n") + 1].split(b"\n")[-2::-1]


def _last_event(path: Path) -> tuple[AnyEvent | None, float]:
    """That can be read, and its time."""
    for line in _last_lines(path):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            event = decode_event(line)
            return event, event.at
    return None, 0.0


def _last_step(path: Path) -> int:
    for line in _last_lines(path):
        with suppress(ValueError, RecursionError):
            row = decode_json(line, dict[str, Any])
            if is_step(row) and isinstance(row.get("step"), int):
                return int(row["step"])
    return 0


def _says_simulated(path: Path) -> bool | None:
    """None: the log does not say yet."""
    try:
        with path.open("rb") as file:
            lines = file.read(HEAD_BYTES).split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    for line in lines:
        if b'"kind":"run_started"' in line:
            with suppress(ValueError, RecursionError):
                event = decode_event(line)
                return isinstance(event, RunStarted) and event.is_simulated
    return None
