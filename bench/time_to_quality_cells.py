"""One cell of `bench/time_to_quality.py`: a mode and a seed, trained for a number of seconds, measured afterwards.

The clock of training starts when the first group is admitted: imports, loading and the checks of the start come before it. The
run keeps a reference to the weights that it publishes to its engines, every few seconds, and these are measured when it is
over, all with the same random numbers.
"""

from __future__ import annotations

import asyncio
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import msgspec
from msgspec import Struct, structs

from curves import Point
from held_out import HeldOut, measure_versions
from internals import WeightSync, audit, must_be_clean
from internals_torch import Checkpoints, RemoteWeights, device_name
from millstream import EvaluationConfig, RunConfig, train
from millstream.errors import Stopped
from millstream.events import Event, GroupAdmitted, GroupTaken, RolloutEnded, Stepped
from millstream.types import Weights
from modes import in_mode
from time_to_quality_data import split_by_prompt

MANY_STEPS = 1_000_000
LAST_POINTS = 3


class TimedSettings(Struct, frozen=True, kw_only=True):
    """What the cells of one file share."""

    recipe: str
    changes: tuple[str, ...]
    seconds: float
    points: int
    trl_seconds: float | None = None
    """What TRL trains for. None: as long as the other modes."""
    is_split_by_prompt: bool = False
    """Whether no held-out prompt was trained: files from before 19 November 2026 have a split of tasks, which may repeat."""

    def is_comparable(self, other: TimedSettings) -> bool:
        """A model in a folder is known by the folder's name, wherever it is."""
        return structs.replace(self, changes=_without_folder(self.changes)) == structs.replace(
            other, changes=_without_folder(other.changes)
        )


def _without_folder(changes: Sequence[str]) -> tuple[str, ...]:
    model = "model.path="
    paths = (Path(one.removeprefix(model)) if one.startswith(model) else None for one in changes)
    return tuple(
        one if path is None or not path.is_dir() else model + path.name
        for one, path in zip(changes, paths, strict=True)
    )


class TimedCell(NamedTuple):
    mode: str
    seed: int

    def __str__(self) -> str:
        return f"{self.mode if self.mode.isalpha() else f'max_lag {self.mode}'}, seed {self.seed}"


class TimedResult(Struct, frozen=True, kw_only=True):
    """Rates are over the seconds of training; the first point of the curve is the model before it."""

    settings: TimedSettings
    mode: str
    seed: int
    curve: list[Point]
    steps: int
    rollouts_per_s: float
    generated_per_s: float
    tokens_per_s: float
    """Sampled tokens."""
    mean_tokens: float
    """Of a rollout."""
    mean_lag: float
    held_out: int
    start_s: float
    """Before training."""
    evaluation_s: float
    """After it."""
    device: str
    at: str

    @property
    def cell(self) -> TimedCell:
        return TimedCell(self.mode, self.seed)

    @property
    def final(self) -> float:
        """Accuracy at the end: the mean of the last points."""
        return statistics.mean(point.accuracy for point in self.curve[-LAST_POINTS:])

    def __str__(self) -> str:
        return (
            f"{self.curve[0].accuracy:.3f} -> {self.final:.3f} in {self.curve[-1].seconds:.0f} s, {self.steps} steps, "
            f"{self.rollouts_per_s:.1f} rollouts/s, {self.tokens_per_s:,.0f} tokens/s"
        )

    def seconds_to(self, accuracy: float) -> float:
        """Between two points the curve is a line. Infinite if it is not reached."""
        before = self.curve[0]
        if before.accuracy >= accuracy:
            return 0.0
        for point in self.curve[1:]:
            if point.accuracy >= accuracy:
                share = (accuracy - before.accuracy) / (point.accuracy - before.accuracy)
                return before.seconds + share * (point.seconds - before.seconds)
            before = point
        return math.inf


# ---- a run with a time limit -----------------------------------------------------------------------------------------------


class Watch:
    """A sink that counts, up to the last step, and stops the run after the first step past its time."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ended: list[int] = []
        self.is_over = False
        self.began = math.inf
        self.steps: dict[int, Stepped] = {}
        self.lags: list[int] = []
        self.num_generated = 0
        self.num_tokens = 0

    @property
    def seconds(self) -> float:
        return self.steps[max(self.steps)].at - self.began

    def emit(self, event: Event) -> None:
        match event:
            case GroupAdmitted():
                self.began = min(self.began, event.at)
            case RolloutEnded():
                self._ended.append(event.num_sampled)
            case GroupTaken():
                self.lags.append(event.lag)
            case Stepped():
                self.steps[event.version] = event
                self.num_generated += len(self._ended)
                self.num_tokens += sum(self._ended)
                self._ended.clear()
                if event.at - self.began >= self._limit_s and not self.is_over:
                    self.is_over = True
                    signal.raise_signal(signal.SIGTERM)


@contextmanager
def keeping_weights(every_s: float, is_over: Callable[[], bool]) -> Iterator[dict[int, Weights]]:
    """Runs within this keep, by version, the first weights that they publish after every `every_s` seconds, and the last ones.
    They write no checkpoint: the first would be written beside the first steps."""
    kept: dict[int, Weights] = {}
    publish = WeightSync.publish
    due: list[float] = []

    async def publish_and_keep(self: WeightSync, version: int, weights: Weights, began: float) -> None:
        now = time.monotonic()
        if not due:
            due.append(now + every_s)  # the first step ends one after the start
        if now >= due[0] or is_over():
            kept[version] = await asyncio.to_thread(own_copy, weights)
            due[0] += every_s * max(0, math.ceil((now - due[0]) / every_s + 1e-9))
        await publish(self, version, weights, began)

    no_checkpoint = patch.object(Checkpoints, "is_due", lambda *_, **__: False)
    with patch.object(WeightSync, "publish", publish_and_keep), no_checkpoint:
        yield kept


def own_copy(weights: Weights) -> Weights:
    """Of what a process of the run has staged, which ends with it; a thread of the run gives copies."""
    if not isinstance(weights, RemoteWeights):
        return weights
    copied = {name: weights[name].clone() for name in weights}
    weights.release()
    return copied


def run_cell(settings: TimedSettings, config: RunConfig, cell: TimedCell, folder: Path) -> TimedResult:
    """Raises `SystemExit` if the audit of the run is not clean."""
    began, run_dir = time.monotonic(), folder / "run"
    config, held_out = split_by_prompt(base_config(config), folder)
    config = in_mode(config, cell.mode)
    watch = Watch(settings.seconds)
    with keeping_weights(settings.seconds / settings.points, lambda: watch.is_over) as kept, suppress(Stopped):
        train(structs.replace(config, run_dir=str(run_dir)), sinks=[watch])
    trained_s = time.monotonic()
    must_be_clean(audit(run_dir))
    found = measure_versions(config, held_out, kept)
    seconds = watch.seconds
    return TimedResult(
        settings=settings,
        mode=cell.mode,
        seed=cell.seed,
        curve=curve_of(found, watch),
        steps=max(watch.steps),
        rollouts_per_s=sum(step.num_rollouts for step in watch.steps.values()) / seconds,
        generated_per_s=watch.num_generated / seconds,
        tokens_per_s=watch.num_tokens / seconds,
        mean_tokens=watch.num_tokens / max(1, watch.num_generated),
        mean_lag=statistics.mean(watch.lags),
        held_out=len(found[0].sampled),
        start_s=trained_s - began - seconds,
        evaluation_s=time.monotonic() - trained_s,
        device=device_name(),
        at=datetime.now(UTC).isoformat(timespec="minutes"),
    )


def base_config(config: RunConfig) -> RunConfig:
    """Of all modes: without an end, without evaluations, and without replacement of groups."""
    if config.warmup is not None:
        raise SystemExit(
            "a recipe with a [warmup] table is not measured here: the first point is the model as it is loaded"
        )
    return structs.replace(
        config,
        pipeline=structs.replace(config.pipeline, steps=MANY_STEPS, filter_zero_signal=False),
        learner=structs.replace(config.learner, schedule="constant"),
        evaluation=EvaluationConfig(),
    )


def curve_of(found: Mapping[int, HeldOut], watch: Watch) -> list[Point]:
    samples, so_far = {0: 0}, 0
    for version, step in sorted(watch.steps.items()):
        so_far += step.num_rollouts
        samples[version] = so_far
    return [
        Point(
            step=version,
            samples=samples[version],
            seconds=watch.steps[version].at - watch.began if version else 0.0,
            accuracy=measured.accuracy,
            greedy=measured.greedy_accuracy,
        )
        for version, measured in sorted(found.items())
    ]


# ---- the file of results -------------------------------------------------------------------------------------------------


def add_result(file: Path, result: TimedResult) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(result) + b"\n")


def read_results(file: Path, settings: TimedSettings | None = None) -> dict[TimedCell, TimedResult]:
    """By cell. Raises `SystemExit` for results that were made with different settings: they cannot be compared."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    results = [msgspec.json.decode(line, type=TimedResult) for line in lines]
    for result in results:
        settings = settings or result.settings
        if not result.settings.is_comparable(settings):
            raise SystemExit(
                f"{file}: {result.cell} was made with {result.settings}, and others with {settings}: results of the two "
                "cannot be compared. Choose another file"
            )
    return {result.cell: result for result in results}
