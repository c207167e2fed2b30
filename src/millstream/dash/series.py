"""Curves of a run, from `metrics.jsonl`: one row a step and one an evaluation."""

from __future__ import annotations

import math
import os
import re
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from millstream.dash.api import SeriesAnswer, SeriesCurve, SeriesInfo, SkippedRow
from millstream.dash.flow import Floats64
from millstream.dash.tiles import RunTiles, sample_of
from millstream.decoding import json_decoder
from millstream.events import Evaluated

XAxis = Literal["step", "seconds", "samples"]
MAX_SKIPPED_ROWS = 20
# name: title, unit, group, whether it is shown without being asked. The order is that of the page.
KNOWN: dict[str, tuple[str, str, str, bool]] = {
    "reward": ("reward", "", "learning", True),
    "reward_std": ("standard deviation of rewards", "", "learning", False),
    "loss": ("loss", "", "learning", False),
    "entropy": ("entropy", "nats", "learning", True),
    "grad_norm": ("gradient norm", "", "learning", False),
    "learning_rate": ("learning rate", "", "learning", False),
    "length": ("length of rollouts", "tokens", "lengths", True),
    "tokens_per_s": ("tokens a second", "tokens/s", "speed", True),
    "rollouts_per_s": ("rollouts a second", "1/s", "speed", False),
    "step_s": ("time of a step", "s", "speed", True),
    "waiting_s": ("waiting for rollouts", "s", "speed", False),
    "training_s": ("training", "s", "speed", False),
    "sync_s": ("publishing weights", "s", "speed", False),
    "other_s": ("other", "s", "speed", False),
    "lag_mean": ("lag, mean", "versions", "lag", True),
    "lag_max": ("lag, highest", "versions", "lag", False),
    "lag_flight": ("lag from generation", "versions", "lag", False),
    "lag_waiting": ("lag from waiting", "versions", "lag", False),
    "effective_sample_size": ("effective sample size", "", "off-policy", True),
    "behaviour_kl": ("KL, engine to learner", "nats", "off-policy", True),
    "clipped_share": ("clip fraction", "", "off-policy", True),
    "reference_kl": ("KL, reference", "nats", "off-policy", True),
    "max_ratio": ("largest ratio", "", "off-policy", False),
    "ratio": ("mean ratio", "", "off-policy", False),
    "groups": ("groups of a step", "", "groups", False),
    "groups_filtered": ("groups filtered", "", "groups", False),
    "rollouts_failed": ("rollouts failed", "", "groups", False),
    "rollouts_retried": ("rollouts tried again", "", "groups", False),
}
_PASS = re.compile(r"eval/[^/]+/pass@1")


class MetricColumns:
    """The numbers of one file as columns, read again as far as it has grown."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._sample = b""
        self._reset()

    def _reset(self) -> None:
        self._end = 0
        self.num_lines = 0
        self.num_rest = 0  # bytes at the end that are not a whole line
        self._steps = array("q")  # of each row, and its time
        self._at = array("d")
        self._columns: dict[str, tuple[array[int], array[float]]] = {}  # the rows that have a value, and the values
        self.skipped: list[SkippedRow] = []
        self.num_skipped = 0

    def refresh(self) -> None:
        """A file that is not there has no rows. Raises `OSError` for one that cannot be read."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._reset()
            return
        with file:
            found = os.fstat(file.fileno())
            identity = (found.st_dev, found.st_ino)
            is_same = found.st_size >= self._end and sample_of(file, self._end) == self._sample
            if identity != self._identity or not is_same:
                self._reset()  # a resume or a repeated evaluation has replaced it
                self._identity = identity
            file.seek(self._end)
            self.num_rest = 0
            for line in file:
                if line.endswith(b"\n"):
                    self._end += len(line)
                    self.num_lines += 1
                    self._add(line)
                else:
                    self.num_rest = len(line)
            self._sample = sample_of(file, self._end)

    def _add(self, line: bytes) -> None:
        try:
            row = _decode_row(line)
            if type(row.get("step")) is not int:
                raise ValueError("it has no step")
            at = float(row["at"]) if _is_number(row.get("at")) else 0.0
            values = {name: float(value) for name, value in row.items() if _is_number(value)}
            self._steps.append(row["step"])
        except (ValueError, OverflowError, RecursionError) as error:
            self.num_skipped += 1
            if len(self.skipped) < MAX_SKIPPED_ROWS:
                self.skipped.append(SkippedRow(file=self._path.name, line=self.num_lines, why=str(error)))
            return
        number = len(self._at)
        self._at.append(at)
        for name, value in values.items():
            if name not in ("step", "at"):
                if (column := self._columns.get(name)) is None:
                    column = self._columns[name] = array("q"), array("d")
                column[0].append(number)
                column[1].append(value)

    def names(self) -> list[str]:
        """Of the series, in the order of the page."""
        known = [name for name in KNOWN if name in self._columns]
        own = [name for name in self._columns if name not in KNOWN]
        return [*known, *sorted(own, key=lambda name: (_info(name)[2], name))]

    def latest(self) -> dict[str, float | None]:
        return {name: self._columns[name][1][-1] for name in self.names()}

    def of(self, name: str) -> tuple[NDArray[np.int64], Floats64, Floats64] | None:
        """The step, the time and the value of each row that has one. None: none has."""
        if name not in self._columns:
            return None
        rows, values = (np.array(column) for column in self._columns[name])
        return np.array(self._steps)[rows], np.array(self._at)[rows], values


_decode_row = json_decoder(dict[str, Any]).decode


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _info(name: str) -> tuple[str, str, str, bool]:
    if name in KNOWN:
        return KNOWN[name]
    if name.startswith("eval/"):
        return name.removeprefix("eval/").replace("/", ", "), "", "evaluation", _PASS.fullmatch(name) is not None
    if name.startswith("reward/"):
        return name.removeprefix("reward/"), "", "rewards", False
    return name.replace("_", " "), "s" if name.endswith("_s") else "", "other", False


def series_infos(names: Iterable[str]) -> list[SeriesInfo]:
    infos = ((name, _info(name)) for name in names)
    return [
        SeriesInfo(name=name, title=title, unit=unit, group=group, is_main=is_main)
        for name, (title, unit, group, is_main) in infos
    ]


def series_answer(
    metrics: MetricColumns, tiles: RunTiles | None, names: list[str], x: XAxis, num_points: int
) -> SeriesAnswer:
    """`tiles`: None where the run has no log; then there is no number of samples."""
    samples = _samples(tiles) if x == "samples" and tiles is not None else {}
    intervals = _intervals(tiles) if tiles is not None and any(name.startswith("eval/") for name in names) else {}
    curves = {}
    for name in names:
        if (found := metrics.of(name)) is not None:
            steps, at, values = found
            if x == "samples":
                at = np.array([float(samples.get(step, 0)) for step in steps.tolist()])
            elif x == "step":
                at = steps.astype(np.float64)
            pairs = [intervals.get((name, step)) for step in steps.tolist()] if name.startswith("eval/") else []
            curves[name] = _interval_curve(at, values, pairs) if any(pairs) else _curve(at, values, num_points)
    return SeriesAnswer(x=x, curves=curves)


def _samples(tiles: RunTiles) -> dict[int, int]:
    """By version: the rollouts that were trained up to it."""
    with tiles.lock:
        versions, nums = tiles.steps.of("version"), tiles.steps.of("num_rollouts")
    return dict(zip(versions.tolist(), nums.cumsum().tolist(), strict=True))


def _intervals(tiles: RunTiles) -> dict[tuple[str, int], tuple[float, float]]:
    """Of scores, by series and version."""
    found = {}
    with tiles.lock:
        for event in tiles.marked(Evaluated):
            of_table = f"eval/{event.table}{'/greedy' if event.is_greedy else ''}"
            for name, one in event.scores.items() if event.version is not None else ():
                found[f"{of_table}/{name}", event.version or 0] = (one.low, one.high)
    return found


def _interval_curve(at: Floats64, values: Floats64, pairs: list[tuple[float, float] | None]) -> SeriesCurve:
    known = [pair or (value, value) for pair, value in zip(pairs, values.tolist(), strict=True)]
    low, high = [pair[0] for pair in known], [pair[1] for pair in known]
    return SeriesCurve(x=at.tolist(), values=values.tolist(), low=low, high=high)


def _curve(at: Floats64, values: Floats64, num_points: int) -> SeriesCurve:
    if len(values) <= num_points:
        return SeriesCurve(x=at.tolist(), values=values.tolist(), low=None, high=None)
    begins = np.unique(np.linspace(0, len(values), num_points + 1).astype(int))[:-1]
    nums = np.diff(begins, append=len(values))
    return SeriesCurve(
        x=(np.add.reduceat(at, begins) / nums).tolist(),
        values=(np.add.reduceat(values, begins) / nums).tolist(),
        low=np.minimum.reduceat(values, begins).tolist(),
        high=np.maximum.reduceat(values, begins).tolist(),
    )
