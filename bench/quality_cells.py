"""One cell of `bench/quality.py`: a loss, a max_lag and a seed, trained from the seed's warm-up, measured afterwards.

The lag is forced: the budget is full and nothing is filtered, so that every batch after the first max_lag ones is made of
groups that were admitted max_lag versions before it. Nothing is evaluated while training runs: an evaluation shares the engine
and delays rollouts, and what starts late is fresher than it should be. Instead the run keeps a checkpoint at every point of the
curve, and these are evaluated when it is over, all with the same random numbers. So a curve's seconds are those of training.
"""

from __future__ import annotations

import shutil
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct, structs

import run_parts
from curves import Point
from internals import audit, read_events
from millstream import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    LearnerConfig,
    ModelConfig,
    PipelineConfig,
    RolloutConfig,
    RunConfig,
    TinyConfig,
    WarmupConfig,
    evaluate,
    export,
    train,
)
from millstream.errors import ConfigError
from millstream.events import Event, GroupAdmitted, GroupTaken, RolloutEnded, Stepped, WarmedUp

UNCORRECTED = "GRPO, uncorrected"
LOSSES: dict[str, dict[str, Any]] = {
    UNCORRECTED: {"loss": f"{run_parts.HERE}:uncorrected", "advantage": "grpo"},
    "Decoupled PPO": {"name": "decoupled_ppo"},
    "TIS": {"name": "truncated_is"},
    "CISPO": {"name": "cispo"},
    "TOPR": {"name": "topr"},
    "Weighted TOPR": {"name": "weighted_topr"},
    "GSPO": {"name": "gspo"},
    "GSPO, clip 0.2": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
}
"""Keys of [algorithm]: presets, with nothing changed but one clip."""
LAGS = (0, 2, 8)
NEVER_S = 1e9
WARM_UP = "warm-up.json"
RESULTS = "results.jsonl"


class Settings(Struct, frozen=True, kw_only=True):
    """What all cells share."""

    toy: str = "add_numbers"
    num_tasks: int = 10_000
    held_out: int = 1024
    hidden: int = 64
    warm_up_to: float = 0.25
    groups_per_step: int = 32
    group_size: int = 8
    max_tokens: int = 4
    steps: int = 200
    every_steps: int = 25
    """Between two points of the curve."""
    learning_rate: float = 3e-4
    schedule: Literal["constant", "linear"] = "linear"

    @property
    def points(self) -> range:
        return range(self.every_steps, self.steps + 1, self.every_steps)


class Cell(NamedTuple):
    loss: str
    max_lag: int
    seed: int

    def __str__(self) -> str:
        return f"{self.loss}, max_lag {self.max_lag}, seed {self.seed}"


class Result(Struct, frozen=True, kw_only=True):
    loss: str
    max_lag: int
    seed: int
    curve: list[Point]
    """The first point is the warm-up's."""
    lags: dict[str, int]
    """Groups by lag, of the batches after the first max_lag ones. A group's lag is that of its oldest token."""
    oldest_token: float
    newest_token: float
    """Mean lags over the rollouts of the same batches, of the first token and of the last, which an update in flight makes
    fresher."""
    metrics: dict[str, float]
    """Means over the steps."""
    seconds: float
    """Of the whole cell, evaluations and imports included."""

    @property
    def cell(self) -> Cell:
        return Cell(self.loss, self.max_lag, self.seed)

    @property
    def forced_share(self) -> float:
        """Of the groups after the first batches, those whose lag is max_lag."""
        return self.lags.get(str(self.max_lag), 0) / max(1, sum(self.lags.values()))


class WarmUp(Struct, frozen=True, kw_only=True):
    """Where all cells of a seed begin."""

    seed: int
    steps: int
    accuracy: float
    greedy: float
    seconds: float


def cells(seeds: int) -> list[Cell]:
    """Seed by seed, so that what is there after any while is balanced."""
    return [Cell(loss, lag, seed) for seed in range(seeds) for loss in LOSSES for lag in LAGS]


def base_config(settings: Settings, seed: int, model: ModelConfig) -> RunConfig:
    return RunConfig(
        model=model,
        seed=seed,
        data=DataConfig(toy=settings.toy, size=settings.num_tasks, holdout=settings.held_out),
        engine=EngineConfig(
            slots=max(settings.held_out, 2 * settings.groups_per_step * settings.group_size), process=False
        ),
        rollout=RolloutConfig(group_size=settings.group_size, max_tokens=settings.max_tokens),
        evaluation=EvaluationConfig(tasks=1),  # of no interest, and as cheap as can be
    )


def cell_config(settings: Settings, cell: Cell, model: Path, run_dir: Path) -> RunConfig:
    """Everything that the cells do not share is in here: the algorithm and max_lag."""
    return structs.replace(
        base_config(settings, cell.seed, ModelConfig(path=str(model), device="cpu")),
        run_dir=str(run_dir),
        pipeline=PipelineConfig(
            steps=settings.steps,
            groups_per_step=settings.groups_per_step,
            max_lag=cell.max_lag,
            filter_zero_signal=False,  # a replacement starts late; and every cell trains the same number of rollouts
        ),
        algorithm=AlgorithmConfig(**LOSSES[cell.loss]),
        learner=LearnerConfig(learning_rate=settings.learning_rate, schedule=settings.schedule),
        checkpoint=CheckpointConfig(every_s=NEVER_S, every_steps=settings.every_steps, keep=len(settings.points) + 1),
    )


# ---- the warm-up of a seed -----------------------------------------------------------------------------------------------


def warm_up(settings: Settings, seed: int, scratch: Path, target: Path) -> None:
    """A model and its accuracy, as one file that is whole or not there. The run's one step is taken at a rate that changes
    nothing."""
    began = time.monotonic()
    tiny = ModelConfig(tiny=TinyConfig(hidden=settings.hidden), device="cpu")
    config = structs.replace(
        base_config(settings, seed, tiny),
        run_dir=str(scratch),
        pipeline=PipelineConfig(steps=1, groups_per_step=1, max_lag=0, filter_zero_signal=False),
        learner=LearnerConfig(learning_rate=1e-30),
        warmup=WarmupConfig(learning_rate=2e-3, max_steps=3000, stop_at=settings.warm_up_to),
    )
    train(config)
    steps = max(event.step for event in read_events(scratch / "events.jsonl") if isinstance(event, WarmedUp))
    accuracy, greedy = measure(settings, seed, scratch / "model")
    done = WarmUp(seed=seed, steps=steps, accuracy=accuracy, greedy=greedy, seconds=time.monotonic() - began)
    (scratch / "model" / WARM_UP).write_bytes(msgspec.json.encode(done))
    new = target.with_name(f".{target.name}.new")
    with tarfile.open(new, "w") as tar:
        for path in sorted((scratch / "model").iterdir()):
            tar.add(path, path.name)
    new.replace(target)


def measure(settings: Settings, seed: int, model: Path) -> tuple[float, float]:
    """Accuracy on all held-out tasks, sampled and greedy. The random numbers are those of the seed, whichever the model."""
    config = base_config(settings, seed, ModelConfig(path=str(model), device="cpu"))
    found = evaluate(structs.replace(config, evaluation=EvaluationConfig()))
    assert found.greedy is not None
    return found.accuracy, found.greedy


# ---- a cell --------------------------------------------------------------------------------------------------------------


def run_cell(settings: Settings, cell: Cell, model: Path, scratch: Path) -> Result:
    """Trained and measured. Raises `SystemExit` if its audit is not clean or a point of the curve is missing."""
    began, run_dir = time.monotonic(), scratch / "run"
    train(cell_config(settings, cell, model, run_dir))
    if not (report := audit(run_dir)).is_clean:
        raise SystemExit(f"{cell}: the audit is not clean\n" + "\n".join(map(str, report.findings)))
    events = list(read_events(run_dir / "events.jsonl"))
    start = msgspec.json.decode((model / WARM_UP).read_bytes(), type=WarmUp)
    first = Point(step=0, samples=0, seconds=0.0, accuracy=start.accuracy, greedy=start.greedy)
    curve = [first, *_curve(settings, cell, run_dir, events)]
    return Result(
        loss=cell.loss,
        max_lag=cell.max_lag,
        seed=cell.seed,
        curve=curve,
        **lags_of(events, cell.max_lag),
        metrics=_metrics(events),
        seconds=time.monotonic() - began,
    )


def _curve(settings: Settings, cell: Cell, run_dir: Path, events: Sequence[Event]) -> Iterator[Point]:
    begin = next(event.at for event in events if isinstance(event, GroupAdmitted))
    steps = {event.version: event for event in events if isinstance(event, Stepped)}
    samples = 0
    for step in range(1, settings.steps + 1):
        samples += steps[step].num_rollouts
        if step not in settings.points:
            continue
        model = _model_of(run_dir, step, cell)
        accuracy, greedy = measure(settings, cell.seed, model)
        shutil.rmtree(model)
        yield Point(step=step, samples=samples, seconds=steps[step].at - begin, accuracy=accuracy, greedy=greedy)


def _model_of(run_dir: Path, step: int, cell: Cell) -> Path:
    """The weights of a checkpoint as a model that can be loaded."""
    model = run_dir / f"model-{step}"
    try:
        export(run_dir, model, step=step)
    except ConfigError as error:
        raise SystemExit(
            f"{cell}: step {step} has no checkpoint, the machine was too busy to write it: run the cell again ({error})"
        ) from error
    return model


def lags_of(events: Sequence[Event], max_lag: int) -> dict[str, Any]:
    """The measured lags of a `Result`: those of the batches after the first max_lag ones, whose groups had no time to age."""
    taken = {event.group_id: event for event in events if isinstance(event, GroupTaken) and event.version >= max_lag}
    ended = [event for event in events if isinstance(event, RolloutEnded) and event.group_id in taken]
    counts = Counter(event.lag for event in taken.values())
    trained_at = [taken[event.group_id].version for event in ended]
    oldest = sum(at - event.start_version for at, event in zip(trained_at, ended, strict=True))
    newest = sum(at - event.end_version for at, event in zip(trained_at, ended, strict=True))
    return {
        "lags": {str(lag): counts[lag] for lag in sorted(counts)},
        "oldest_token": oldest / max(1, len(ended)),
        "newest_token": newest / max(1, len(ended)),
    }


def _metrics(events: Sequence[Event]) -> dict[str, float]:
    names = ("effective_sample_size", "behaviour_kl", "clipped_share", "truncated_share", "entropy", "grad_norm")
    steps = [event.metrics for event in events if isinstance(event, Stepped)]
    return {
        name: round(sum(step[name] for step in steps if name in step) / len(steps), 5)
        for name in names
        if any(name in step for step in steps)
    }


# ---- the results of all cells --------------------------------------------------------------------------------------------


class Results:
    """Every finished cell of a folder. The file is rewritten for each, under another name first: a kill leaves a whole one."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._path = folder / RESULTS
        self._settings = settings
        self.found: dict[Cell, Result] = {}
        if self._path.exists():
            made_with, self.found = read_results(folder)
            if made_with != settings:
                raise SystemExit(
                    f"{self._path} was made with {made_with}, and this run has {settings}: results of the two cannot be "
                    "compared. Choose another folder"
                )

    def add(self, result: Result) -> None:
        self.found[result.cell] = result
        lines = [msgspec.json.encode(record) for record in (self._settings, *self.found.values())]
        new = self._path.with_name(f".{RESULTS}.new")
        new.write_bytes(b"\n".join(lines) + b"\n")
        new.replace(self._path)


def read_results(folder: Path) -> tuple[Settings, dict[Cell, Result]]:
    path = folder / RESULTS
    if not path.exists():
        raise SystemExit(f"{path} is not there. To make it: python bench/quality.py run {folder} --jobs 2 --minutes 60")
    first, *others = path.read_bytes().splitlines()
    results = [msgspec.json.decode(line, type=Result) for line in others]
    return msgspec.json.decode(first, type=Settings), {result.cell: result for result in results}
