"""`millstream calibrate`: the costs of a real run, fitted from its events, and how far a simulation with them is from the run.

Decoding: every span of an engine took floor_s * steps + request_s * tokens + context_token_s * context + prompt / prefill rate,
times decode_slowdown for the share of it in which the learner worked. Training: every pass took tokens / rate, and longer by
learner_keep for the share in which an engine decoded. Least squares, no parameter below 0; the standard errors are those of the
linearized model. A parameter is *uncertain* if its standard error is above `UNCERTAIN` of its value, if the run has too few
spans, or if it came out as 0.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from msgspec import UNSET, Struct, structs
from numpy.typing import NDArray

from millstream.config import load
from millstream.errors import ConfigError
from millstream.events import (
    Event,
    GroupLeft,
    Resumed,
    RolloutAborted,
    RolloutEnded,
    RolloutFailed,
    RolloutStarted,
    SizesChosen,
    Span,
    Status,
    Stepped,
    WeightsLoaded,
    WeightsPublished,
)
from millstream.events.sinks import read_history
from millstream.events.summary import Interval, Summary, merge_intervals, summarise
from millstream.paths import program
from millstream.run.config import RunConfig
from millstream.run.folder import RunFolder
from millstream.run.simulate import simulate
from millstream.sim.config import DrawConfig, SimConfig, SimEnvironmentConfig
from millstream.types import Fate, Finish

UNCERTAIN = 0.3
MIN_SPANS = 8
LEARNING = ("accumulate", "step")
SHARED_PROMPTS = 0.6  # of the tokens of prompts: if fewer were computed, the engine has a prefix cache
NOT_AS_FOUND = ("prompt_tokens", "lengths")  # keys of `SimConfig` that are not the number that was found
MAX_RATIO = 16.0  # of a slowdown; the search for it ends there
Numbers = NDArray[np.float64]


class Fitted(Struct, frozen=True, kw_only=True):
    """A parameter. `error`: its standard error; None: it has none, because it is a mean of very few, or was not found."""

    name: str
    value: float
    error: float | None
    why: str = ""
    """Why it is uncertain. Empty: it is not."""


class ComparedFigure(Struct, frozen=True, kw_only=True):
    name: str
    real: float
    simulated: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.real if self.real else math.nan


class Calibration(Struct, frozen=True, kw_only=True):
    sim: SimConfig
    parameters: list[Fitted]
    compared: list[ComparedFigure]
    changes: list[str] = []
    """Of the run's config, that a simulation with these costs needs."""


class FittedRun(Struct, frozen=True, kw_only=True):
    """A run's costs, and the config that simulates it with them."""

    events: Sequence[Event]
    config: RunConfig
    sim: SimConfig
    parameters: list[Fitted]
    changes: list[str] = []
    """As in `Calibration`."""


def calibrate(run_dir: Path) -> Calibration:
    """Raises `ConfigError` if the run has too little to fit, or cannot be simulated."""
    found = fit_run(run_dir)
    compared = _compare(summarise(found.events), simulate(found.config, found.sim).result.summary)
    return Calibration(sim=found.sim, parameters=found.parameters, compared=compared, changes=found.changes)


def fit_run(run_dir: Path) -> FittedRun:
    """Raises `ConfigError` if the run has too little to fit."""
    folder = RunFolder.of_run(run_dir)
    if not folder.events.exists():
        raise ConfigError(f"{run_dir} has no events.jsonl: calibrate a run that has trained for some steps")
    events = list(read_history(folder.events))
    num_steps = sum(isinstance(event, Stepped) for event in events)
    if num_steps < 2:
        raise ConfigError(
            f"the run in {run_dir} has {num_steps} steps: at least 2 are needed, 20 and more are better. To train it further:\n"
            f"  {program()} train --resume {run_dir}"
        )
    config = _as_it_ran(load(folder.config, RunConfig), events, num_steps)
    decoding, training = _decoding(events, run_dir), _training(events, config.learner.ranks)
    ended = [event for event in events if isinstance(event, RolloutEnded) and event.finish is not Finish.ABORT]
    lengths = [event.num_sampled for event in ended]
    parameters = [*decoding, *training, _lengths(lengths, config), *_others(events, config)]
    value = {one.name: one.value for one in parameters}
    sim = structs.replace(
        SimConfig(),
        **{name: value[name] for name in SimConfig.__struct_fields__ if name in value and name not in NOT_AS_FOUND},
        prompt_tokens=max(1, round(value["prompt_tokens"])),
        has_prefix_cache=_has_prefix_cache(events),
        lengths=DrawConfig(kind="run", path=str(run_dir.resolve())),
        environment=SimEnvironmentConfig(
            latency_s=DrawConfig(kind="geometric", mean=value["latency_s"])
            if value["latency_s"]
            else DrawConfig(mean=0.0),
            failure=value["failure"],
            success=value["success"],
            no_signal=value["no_signal"],
        ),
    )
    changes = list[str]()
    if (longest := max(lengths, default=0)) > config.rollout.max_tokens:
        changes.append(f"rollout.max_tokens={longest}")
        config = structs.replace(config, rollout=structs.replace(config.rollout, max_tokens=longest))
    return FittedRun(events=events, config=config, sim=sim, parameters=parameters, changes=changes)


def _as_it_ran(config: RunConfig, events: Sequence[Event], num_steps: int) -> RunConfig:
    """With the sizes that it chose, and the steps that it made."""
    sizes = next((event.sizes for event in events if isinstance(event, SizesChosen)), None)
    if sizes is not None:
        learner = structs.replace(config.learner, micro_batch_tokens=sizes.micro_batch_tokens)
        config = structs.replace(config, engine=structs.replace(config.engine, slots=sizes.slots), learner=learner)
    return structs.replace(config, pipeline=structs.replace(config.pipeline, steps=num_steps))


def _compare(real: Summary, simulated: Summary) -> list[ComparedFigure]:
    def of(name: str, number: Callable[[Summary], float]) -> ComparedFigure:
        return ComparedFigure(name=name, real=number(real), simulated=number(simulated))

    return [
        of("seconds a step", lambda one: one.seconds / max(1, one.steps)),
        of("rollouts/s trained", lambda one: one.rollouts_per_s),
        of("tokens/s generated", lambda one: one.tokens_per_s),
        of("mean lag", lambda one: one.lag_mean),
        of("engines idle, share", lambda one: 1 - one.engine_share),
        of("learner idle, share", lambda one: 1 - one.learner_share),
    ]


# ---- decoding and training ---------------------------------------------------------------------------------------------


def _decoding(events: Sequence[Event], run_dir: Path) -> list[Fitted]:
    spans = [
        event
        for event in events
        if isinstance(event, Span) and event.what == "generate" and event.num_tokens > 0 < event.seconds
    ]
    spans = _while_training(spans, events)
    counted = [span for span in spans if span.num_steps is not UNSET and span.num_steps]
    if len(counted) < MIN_SPANS:
        raise ConfigError(
            f"the run in {run_dir} has {len(counted)} spans of decoding with counts of steps, and {MIN_SPANS} are needed: "
            'they are written by the native engine (engine.kind = "torch"), from this version on'
        )
    columns = [[_count(s.num_steps), s.num_tokens, _count(s.num_context), _count(s.num_prompt)] for s in counted]
    seconds = np.array([span.seconds for span in counted])
    busy = _busy(events, lambda span: span.worker == "learner" and span.what in LEARNING)
    shares = np.array([_share(busy, span.at - span.seconds, span.at) for span in counted])
    fit = _fit(np.array(columns, dtype=np.float64), seconds, shares)
    names = ("floor_s", "request_s", "context_token_s", "prefill_token_s")
    floor, request, context, prefill = (
        _fitted(name, value, error) for name, value, error in zip(names, fit.values, fit.errors, strict=True)
    )
    slow = _ratio("decode_slowdown", fit.ratio, fit.ratio_error, shares, "the learner worked")
    rate = 1 / max(prefill.value, 1e-9)
    error = None if prefill.error is None or not prefill.value else rate * prefill.error / prefill.value
    at_least = max(floor.value, 1e-7)
    return [
        structs.replace(floor, value=at_least),
        request,
        context,
        Fitted(name="prefill_tokens_per_s", value=rate, error=error, why=prefill.why),
        slow,
    ]


def _training(events: Sequence[Event], ranks: int) -> list[Fitted]:
    spans = [event for event in events if isinstance(event, Span) and event.worker == "learner"]
    passes = [span for span in spans if span.what == "accumulate" and span.num_tokens > 0 < span.seconds]
    steps = [span for span in spans if span.what == "step"]
    busy = _busy(events, lambda span: span.what == "generate")
    shares = np.array([_share(busy, span.at - span.seconds, span.at) for span in passes])
    of_steps = [np.array(_share(busy, span.at - span.seconds, span.at)) for span in steps]
    columns = np.array([[float(span.num_tokens)] for span in passes])
    fit = _fit(columns, np.array([span.seconds for span in passes]), shares)
    token_s, error = max(fit.values[0], 1e-12), fit.errors[0]
    keep = _ratio("learner_keep", fit.ratio, fit.ratio_error, shares, "an engine decoded")
    rate = 1 / (token_s * ranks)
    return [
        _fitted("train_tokens_per_s", rate, rate * error / token_s),
        structs.replace(keep, value=1 / keep.value, error=None if keep.error is None else keep.error / keep.value**2),
        _mean(
            "train_step_s",
            [span.seconds / float(_slower(fit.ratio, share)) for span, share in zip(steps, of_steps, strict=True)],
        ),
    ]


class _Fit(Struct, frozen=True):
    values: list[float]
    errors: list[float]
    ratio: float
    ratio_error: float


def _fit(columns_NP: Numbers, seconds_N: Numbers, shares_N: Numbers) -> _Fit:
    """seconds = columns @ values / (1 - shares * (1 - 1 / ratio)), with values >= 0 and ratio >= 1: in its share of the time,
    work is `ratio` times as slow. Each residual is divided by the root of its seconds: a span is a sum of steps, whose errors
    add up in squares."""

    def solved(ratio: float) -> tuple[Numbers, float]:
        factor_N = _slower(ratio, shares_N)
        weight_N = 1 / np.sqrt(seconds_N)
        values_P = _not_negative(columns_NP * (factor_N * weight_N)[:, None], seconds_N * weight_N)
        residual_N = (columns_NP @ values_P * factor_N - seconds_N) * weight_N
        return values_P, float(residual_N @ residual_N)

    low, high = 1.0, MAX_RATIO
    while high - low > 1e-3:  # the error has one minimum: golden section would save little
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if solved(left)[1] <= solved(right)[1] else (left, high)
    ratio = (low + high) / 2
    if solved(1.0)[1] <= solved(ratio)[1]:
        ratio = 1.0
    values_P, error = solved(ratio)
    factor_N, weight_N = _slower(ratio, shares_N), 1 / np.sqrt(seconds_N)
    by_ratio_N = (columns_NP @ values_P) * factor_N**2 * shares_N / ratio**2
    jacobian = np.column_stack([columns_NP * factor_N[:, None], by_ratio_N]) * weight_N[:, None]
    used = [i for i in range(jacobian.shape[1]) if np.any(jacobian[:, i]) and (i == len(values_P) or values_P[i] > 0)]
    errors = np.full(len(values_P) + 1, math.inf)
    scale = np.linalg.norm(jacobian[:, used], axis=0)
    spread = error / max(1, len(seconds_N) - len(used))
    covariance = np.linalg.pinv((jacobian[:, used] / scale).T @ (jacobian[:, used] / scale)) * spread
    errors[used] = np.sqrt(np.maximum(np.diag(covariance), 0)) / scale
    return _Fit(values_P.tolist(), errors[:-1].tolist(), ratio, float(errors[-1]))


def _slower(ratio: float, shares_N: Numbers) -> Numbers:
    """How many times as long a span takes, of which this share is `ratio` times as slow."""
    slower_N: Numbers = 1 / (1 - shares_N * (1 - 1 / ratio))
    return slower_N


def _not_negative(columns_NP: Numbers, target_N: Numbers) -> Numbers:
    """Least squares without negative values: columns whose value would be below 0 are left out, the lowest first. Greedy: a
    column that was left out does not come back, so that the result need not be the least of all."""
    kept = list(range(columns_NP.shape[1]))
    values_P = np.zeros(columns_NP.shape[1])
    while kept:
        scale = np.maximum(np.linalg.norm(columns_NP[:, kept], axis=0), 1e-300)
        found = np.linalg.lstsq(columns_NP[:, kept] / scale, target_N, rcond=None)[0]
        if found.min() >= 0:
            values_P[kept] = found / scale
            break
        del kept[int(found.argmin())]
    return values_P


# ---- the rest ----------------------------------------------------------------------------------------------------------


def _others(events: Sequence[Event], config: RunConfig) -> list[Fitted]:
    ended = [event for event in events if isinstance(event, RolloutEnded)]
    num_failed = sum(isinstance(event, RolloutFailed) for event in events)
    left = [event for event in events if isinstance(event, GroupLeft) and event.fate in (Fate.TRAINED, Fate.FILTERED)]
    filtered = [event for event in left if event.fate is Fate.FILTERED]
    trained = [event.mean_reward for event in left if event.fate is Fate.TRAINED]
    success = min(1.0, max(0.0, statistics.mean(trained or [0.5])))
    by_chance = success**config.rollout.group_size + (1 - success) ** config.rollout.group_size
    share = len(filtered) / max(1, len(left))
    rewards = [event.reward for event in ended]
    why = (
        f"{len(filtered)} of {len(left)} groups were filtered: it is the mean reward of the others" if filtered else ""
    )
    if rewards and (min(rewards) < 0 or max(rewards) > 1):
        why = f"the run's rewards are {min(rewards):g} to {max(rewards):g}: simulated ones are 0 or 1"
    return [
        _mean("publish_s", [event.seconds for event in events if isinstance(event, WeightsPublished)]),
        _mean("load_s", [event.seconds for event in events if isinstance(event, WeightsLoaded)]),
        _mean("prompt_tokens", [float(event.num_tokens - event.num_sampled) for event in ended]),
        _latency(events, len(ended) + num_failed),
        Fitted(name="failure", value=num_failed / max(1, num_failed + len(ended)), error=None),
        Fitted(name="success", value=success, error=None, why=why),
        Fitted(name="no_signal", value=max(0.0, (share - by_chance) / max(1e-9, 1 - by_chance)), error=None),
    ]


def _lengths(sampled: Sequence[int], config: RunConfig) -> Fitted:
    """Of a rollout, which is simulated as one turn. One beyond the limit of a turn has several."""
    limit, several = config.rollout.max_tokens, [number for number in sampled if number > config.rollout.max_tokens]
    why = (
        f"{len(several)} of {len(sampled)} rollouts have several turns (above rollout.max_tokens = {limit})"
        if several
        else ""
    )
    return structs.replace(_mean("lengths", list(map(float, sampled))), **({"why": why} if why else {}))


def _latency(events: Sequence[Event], num_rollouts: int) -> Fitted:
    """Rollouts in flight that no engine has are in their environment, or queue for a place in it. By Little's law the mean of
    the number in it, divided by the rate of rollouts, is the time of each. Read once a second (`Status`)."""
    in_flight, outside, times = 0, list[float](), list[float]()
    for event in events:
        match event:
            case RolloutStarted():
                in_flight += 1
            case RolloutEnded() | RolloutFailed() | RolloutAborted():
                in_flight -= 1
            case Resumed():
                in_flight = 0
            case Status() if event.budget:
                queued = sum(wait.count for wait in event.waits if wait.what.startswith("a place in "))
                outside.append(max(0.0, in_flight - event.requests_running - event.requests_waiting - queued))
                times.append(event.at)
    if len(outside) < MIN_SPANS:
        return Fitted(name="latency_s", value=0.0, error=None, why=f"the run has {len(outside)} readings of its state")
    per_rollout = (times[-1] - times[0]) / max(1, num_rollouts)
    mean, error = statistics.mean(outside), statistics.stdev(outside) / math.sqrt(len(outside))
    return _fitted("latency_s", mean * per_rollout, error * per_rollout, may_be_0=True)


def _fitted(name: str, value: float, error: float, *, may_be_0: bool = False) -> Fitted:
    if not value:
        why = "" if may_be_0 else "the run does not show it: 0 fits best"
        return Fitted(name=name, value=0.0, error=None, why=why)
    why = f"its standard error is {error / value:.0%} of it" if error > UNCERTAIN * abs(value) else ""
    return Fitted(name=name, value=value, error=error if math.isfinite(error) else None, why=why)


def _mean(name: str, numbers: Sequence[float]) -> Fitted:
    if len(numbers) < 2:
        return Fitted(name=name, value=sum(numbers), error=None, why=f"the run has {len(numbers)} of them")
    return _fitted(name, statistics.mean(numbers), statistics.stdev(numbers) / math.sqrt(len(numbers)), may_be_0=True)


def _ratio(name: str, ratio: float, error: float, shares_N: Numbers, when: str) -> Fitted:
    """A ratio is known only if there were spans with interference and spans without."""
    spread = float(np.ptp(shares_N)) if len(shares_N) else 0.0
    why = "" if spread > UNCERTAIN else f"{when} in about the same share of every span"
    if not why and error > UNCERTAIN * ratio:
        why = f"its standard error is {error / ratio:.0%} of it"
    return Fitted(name=name, value=ratio, error=error if math.isfinite(error) else None, why=why)


def _count(number: object) -> float:
    return float(number) if isinstance(number, int) else 0.0


def _has_prefix_cache(events: Sequence[Event]) -> bool:
    needed = sum(event.num_tokens - event.num_sampled for event in events if isinstance(event, RolloutEnded))
    computed = sum(_count(event.num_prompt) for event in events if isinstance(event, Span))
    return computed < SHARED_PROMPTS * needed


def _while_training(spans: Sequence[Span], events: Sequence[Event]) -> list[Span]:
    """Without the warm-up and what comes after the last step."""
    started = [event.at for event in events if isinstance(event, RolloutStarted)]
    stepped = [event.at for event in events if isinstance(event, Stepped)]
    return [span for span in spans if started and started[0] <= span.at - span.seconds and span.at <= stepped[-1]]


def _busy(events: Sequence[Event], is_counted: Callable[[Span], bool]) -> list[Interval]:
    spans = [event for event in events if isinstance(event, Span) and is_counted(event)]
    return merge_intervals((span.at - span.seconds, span.at) for span in spans)


def _share(busy: Sequence[Interval], begin: float, end: float) -> float:
    """Of this stretch of time, the part in which something was busy."""
    covered = 0.0
    for number in range(max(0, bisect_left(busy, (begin, begin)) - 1), len(busy)):
        if busy[number][0] >= end:
            break
        covered += max(0.0, min(end, busy[number][1]) - max(begin, busy[number][0]))
    return min(1.0, covered / max(1e-12, end - begin))
