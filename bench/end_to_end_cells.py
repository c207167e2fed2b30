"""One cell of `bench/end_to_end.py`: a load in a mode, run by `millstream.train` and measured from the run's events.

The *barrier* is the naive synchronous loop: all rollouts of a batch are generated, then the batch is trained, then the weights
are published, then the next batch starts. It is `max_lag = 0` with an advantage that needs the whole batch (its standard
deviation), so that no row is trained before the last rollout has ended. Nothing else differs from the other modes: the same
engine, learner, loss and settings, no lockstep, every rollout continues on its own.

A cell is a run without checkpoints that is stopped by SIGTERM after its last measured step. All modes of a load have the same
warm-up steps and measure the same steps after them: from the end of the warm-up to the end of the last one.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from end_to_end_loads import Workload
from internals import EventSink, Interval, load, merge_intervals, total_length, without_checkpoints
from internals_torch import gpu_share
from millstream import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    LearnerConfig,
    ModelConfig,
    PipelineConfig,
    RolloutConfig,
    RunConfig,
    train,
)
from millstream.config import to_toml
from millstream.errors import Stopped
from millstream.events import (
    Event,
    GroupAdmitted,
    GroupTaken,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    Span,
    Status,
    Stepped,
    Warned,
)

SLOTS = 512
MAX_STEPS = 100_000
SHOWN_S = 30.0
"""Of the timeline that is kept."""


class Mode(Struct, frozen=True, kw_only=True):
    max_lag: float = 0.0
    is_barrier: bool = False
    is_auto: bool = False
    """Whether the run chooses its lag itself, up to `max_lag` (`pipeline.auto_lag`)."""
    is_redundant: bool = False
    """First to finish: more groups and members than needed, biased against slow rollouts."""


MODES: dict[str, Mode] = {
    "barrier": Mode(is_barrier=True),
    "0": Mode(),
    "0.5": Mode(max_lag=0.5),
    "1": Mode(max_lag=1),
    "2": Mode(max_lag=2),
    "4": Mode(max_lag=4),
    "auto": Mode(max_lag=4, is_auto=True),
    "redundant": Mode(max_lag=2, is_redundant=True),
}
REDUNDANT_GROUPS = 4
REDUNDANT_MEMBERS = 2


class Sources(Struct, frozen=True, kw_only=True):
    """The files that a cell and its peer share."""

    model: Path
    prompts: Path


class Budget(Struct, frozen=True, kw_only=True):
    """How long a cell is measured."""

    seconds: float
    min_steps: int
    limit_s: float
    """From its first group on, compilation included: what was measured until then counts."""


class Timeline(Struct, frozen=True, kw_only=True):
    """Seconds since the end of the warm-up."""

    rollouts: list[Interval]
    learner: list[Interval]
    steps: list[float]


class Result(Struct, frozen=True, kw_only=True, tag="cell"):
    workload: str
    mode: str
    settings: list[str]
    """`KEY=VALUE` that were set for all cells."""
    device: str
    slots: int
    warm_steps: int
    step_ends: list[float]
    """Of all steps, in seconds since the first group was admitted."""
    rollouts_per_s: float
    tokens_per_s: float
    """Generated."""
    tail_ms_per_token: float | None
    """Of the one percent of the rollouts that took longest, queueing included; None if none ended in the measured time."""
    engine_share: float
    learner_share: float
    """Of the wall time, in which the component had work, as the run's spans say."""
    step_rollouts: list[int]
    """Trained in each of all steps."""
    step_tokens: list[int]
    """Trained in each of all steps."""
    lag_mean: float
    lag_max: int
    memory_gib: float
    """Peak of what is in use on the device, by any process."""
    preempted: int
    failed: int
    """Attempts whose environment failed."""
    aborted: int
    lengths: list[list[int]]
    """Sampled tokens of the members that ended, group by group in the order of admission."""
    prompts: list[int]
    warnings: list[str]
    timeline: Timeline
    seconds: float
    """That the cell took, from its start to the end of its run."""
    gpu_share: float = 1.0
    """Of the multiprocessors, that the learner had."""

    @property
    def steps_s(self) -> list[float]:
        """Durations of the measured steps."""
        return np.diff(self.step_ends[self.warm_steps - 1 :]).tolist()

    @property
    def measured_steps(self) -> range:
        """Their numbers, from 0 on."""
        return range(self.warm_steps, len(self.step_ends))

    @property
    def wall_s(self) -> float:
        return self.wall_s_of(self.measured_steps)

    @property
    def step_s(self) -> float:
        return self.wall_s / max(1, len(self.steps_s))

    @property
    def trained_tokens_per_s(self) -> float:
        return sum(self.step_tokens[self.warm_steps :]) / self.wall_s

    def wall_s_of(self, steps: range) -> float:
        return self.step_ends[steps[-1]] - self.step_ends[steps[0] - 1]

    def rollouts_per_s_of(self, steps: range) -> float:
        return sum(self.step_rollouts[number] for number in steps) / self.wall_s_of(steps)


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """A cell that could not be measured."""

    workload: str
    mode: str
    why: str


class NotMeasured(Exception):
    """A cell whose run was over before a step was measured."""


def config_of(
    workload: Workload, mode: Mode, sources: Sources, run_dir: Path, *, settings: Sequence[str] = ()
) -> RunConfig:
    """Everything that the modes do not share is in here: the lag, the advantage of the barrier, the redundancy."""
    has_gpu = torch.cuda.is_available()
    groups = workload.groups_per_step
    extra_groups = math.floor(mode.max_lag * groups) + REDUNDANT_GROUPS if mode.is_redundant else None
    config = RunConfig(
        model=ModelConfig(path=str(sources.model), dtype="bfloat16" if has_gpu else "float32"),
        run_dir=str(run_dir),
        data=DataConfig(path=str(sources.prompts), holdout=0, shuffle=False),
        environment=(EnvironmentConfig(**workload.environment()),),
        rollout=RolloutConfig(
            group_size=workload.group_size,
            max_tokens=workload.max_tokens,
            extra_members=REDUNDANT_MEMBERS if mode.is_redundant else 0,
        ),
        pipeline=PipelineConfig(
            steps=MAX_STEPS,
            groups_per_step=groups,
            max_lag=mode.max_lag,
            auto_lag=mode.is_auto,
            lockstep=False,
            extra_groups=extra_groups,
            surplus="abort" if mode.is_redundant else "carry_over",
        ),
        algorithm=AlgorithmConfig(advantage="lite_ppo" if mode.is_barrier else "grpo"),
        learner=LearnerConfig(learning_rate=1e-7, compile=has_gpu),  # the lengths stay what they are
        engine=EngineConfig(slots=SLOTS if has_gpu else 16, process=None if has_gpu else False),
        checkpoint=CheckpointConfig(grace_s=0.0),
    )
    if not settings:
        return config
    path = run_dir.with_suffix(".toml")
    path.write_text(to_toml(config))
    return load(path, RunConfig, list(settings))


# ---- a run --------------------------------------------------------------------------------------------------------------


class Watch:
    """A sink that keeps the events and stops the run when it was measured for long enough."""

    def __init__(self, warm_steps: int, budget: Budget) -> None:
        self.events: list[Event] = []
        self.memory_bytes = 0
        self._warm_steps = warm_steps
        self._budget = budget
        self._began = math.inf
        self._warm_at = math.inf
        self._num_steps = 0
        self._is_stopped = False

    def emit(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case GroupAdmitted():
                self._began = min(self._began, event.at)
            case Stepped():
                self._num_steps += 1
                if self._num_steps == self._warm_steps:
                    self._warm_at = event.at
            case Status():
                self.memory_bytes = max(self.memory_bytes, device_bytes())
            case _:
                return
        if not self._is_stopped and self._is_done(event.at):
            self._is_stopped = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _is_done(self, now: float) -> bool:
        budget = self._budget
        has_steps = self._num_steps >= self._warm_steps + budget.min_steps
        return now - self._began > budget.limit_s or (has_steps and now - self._warm_at >= budget.seconds)


def device_bytes() -> int:
    """In use on the GPU, by any process; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def run_cell(
    name: str,
    workload: Workload,
    mode_name: str,
    sources: Sources,
    folder: Path,
    budget: Budget,
    settings: Sequence[str],
    sinks: Sequence[EventSink] = (),
) -> Result:
    """Raises `NotMeasured`, and what the run raises. What comes after `budget.min_steps` measured steps is left out."""
    began, mode, warm_steps = time.perf_counter(), MODES[mode_name], workload.warm_steps
    watch = Watch(warm_steps, budget)
    config = config_of(workload, mode, sources, folder / "run", settings=settings)
    with without_checkpoints() as preempted, suppress(Stopped):
        train(config, sinks=[watch, *sinks])
    figures = measured(watch.events, warm_steps, budget.min_steps)
    return Result(
        workload=name,
        mode=mode_name,
        settings=list(settings),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        slots=config.engine.num_slots,
        warm_steps=warm_steps,
        memory_gib=watch.memory_bytes / 2**30,
        preempted=max(preempted, default=0),
        seconds=time.perf_counter() - began,
        gpu_share=gpu_share(config, config.learner),
        **figures,
    )


# ---- figures ------------------------------------------------------------------------------------------------------------


def measured(events: Sequence[Event], warm_steps: int, num_steps: int | None = None) -> dict[str, Any]:
    """The figures of a `Result` from a run's events, of the first `num_steps` after the warm-up. None: of all."""
    steps = [event for event in events if isinstance(event, Stepped)]
    steps = steps if num_steps is None else steps[: warm_steps + num_steps]
    if len(steps) <= warm_steps:
        raise NotMeasured(f"{len(steps)} steps in the time there was, and {warm_steps} of them are the warm-up")
    first = next(event.at for event in events if isinstance(event, GroupAdmitted))
    begin, end = steps[warm_steps - 1].at, steps[-1].at
    wall_s, late = end - begin, steps[warm_steps:]
    spans = [event for event in events if isinstance(event, Span)]
    generating = within(spans, "generate", begin, end)
    training = merge_intervals(_cut((s for s in spans if s.worker == "learner"), begin, end))
    ended = [event for event in events if isinstance(event, RolloutEnded)]
    in_time = [event for event in ended if begin < event.at <= end]
    lags = [event.lag for event in events if isinstance(event, GroupTaken) and begin < event.at <= end]
    return {
        "step_ends": [step.at - first for step in steps],
        "rollouts_per_s": sum(step.num_rollouts for step in late) / wall_s,
        "tokens_per_s": _tokens(spans, begin, end) / wall_s,
        "tail_ms_per_token": tail_ms_per_token(in_time),
        "engine_share": total_length(generating) / wall_s,
        "learner_share": total_length(training) / wall_s,
        "step_rollouts": [step.num_rollouts for step in steps],
        "step_tokens": [step.num_tokens for step in steps],
        "lag_mean": float(np.mean(lags)) if lags else 0.0,
        "lag_max": max(lags, default=0),
        "failed": sum(isinstance(event, RolloutFailed) for event in events),
        "aborted": sum(isinstance(event, RolloutAborted) for event in events),
        "warnings": [event.message for event in events if isinstance(event, Warned)],
        "timeline": timeline_of(events, training, begin, end),
        **lengths_of(events, ended),
    }


def _cut(spans: Iterator[Span], begin: float, end: float) -> Iterator[Interval]:
    """The parts of spans within this time."""
    for span in spans:
        left, right = max(begin, span.at - span.seconds), min(end, span.at)
        if left < right:
            yield left, right


def within(spans: Sequence[Span], what: str, begin: float, end: float) -> list[Interval]:
    return merge_intervals(_cut((span for span in spans if span.what == what), begin, end))


def _tokens(spans: Sequence[Span], begin: float, end: float) -> float:
    """Generated within this time: of a span at its border, the share that is inside."""
    total = 0.0
    for span in spans:
        if span.what == "generate" and span.seconds > 0:
            total += span.num_tokens * max(0.0, min(end, span.at) - max(begin, span.at - span.seconds)) / span.seconds
    return total


def tail_ms_per_token(ended: Sequence[RolloutEnded]) -> float | None:
    longest = sorted(ended, key=lambda event: event.seconds)[-max(1, len(ended) // 100) :]
    num_tokens = sum(event.num_sampled for event in longest)
    return 1000 * sum(event.seconds for event in longest) / num_tokens if num_tokens else None


def lengths_of(events: Sequence[Event], ended: Sequence[RolloutEnded]) -> dict[str, Any]:
    groups: dict[int, list[int]] = {event.group_id: [] for event in events if isinstance(event, GroupAdmitted)}
    prompts: dict[int, int] = {}
    for event in ended:
        groups[event.group_id].append(event.num_sampled)
        prompts[event.group_id] = event.num_tokens - event.num_sampled
    usual = round(np.mean(list(prompts.values())))
    return {
        "lengths": [groups[group_id] for group_id in sorted(groups)],
        "prompts": [prompts.get(group_id, usual) for group_id in sorted(groups)],
    }


def timeline_of(events: Sequence[Event], training: Sequence[Interval], begin: float, end: float) -> Timeline:
    stop = min(end, begin + SHOWN_S)
    rollouts = [
        (max(begin, event.at - event.seconds), min(stop, event.at))
        for event in events
        if isinstance(event, RolloutEnded | RolloutAborted) and event.at > begin and event.at - event.seconds < stop
    ]
    learner = [(left, min(stop, right)) for left, right in training if left < stop]
    steps = [event.at - begin for event in events if isinstance(event, Stepped) and begin <= event.at <= stop]
    return Timeline(
        rollouts=_since(begin, rollouts), learner=_since(begin, learner), steps=[round(at, 3) for at in steps]
    )


def _since(begin: float, intervals: Sequence[Interval]) -> list[Interval]:
    return [(round(left - begin, 3), round(right - begin, 3)) for left, right in intervals]
