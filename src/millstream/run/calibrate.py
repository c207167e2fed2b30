"""`millstream calibrate`: the costs of a real run, fitted from its events, and how far a simulation with them is from the run.

Decoding: every span of an engine took floor_s * steps + request_s * tokens + context_token_s * context + prompt / prefill rate,
times decode_slowdown for the share of it in which the learner worked. Training: every pass took tokens / rate, and longer by
learner_keep for the share in which an engine decoded. Least squares, no parameter below 0; the standard errors are those of the
linearized model. A parameter is *uncertain* if its standard error is above `UNCERTAIN` of its value, if the run has too few
spans, or if it came out as 0.

On a CPU engines, learner and driver compete for its cores, and the events do not say which of them had one. There the costs
are those of the spans that nothing disturbed (`fit_alone`), and `cores` is the number with which the simulated run is as fast
as the real one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from msgspec import UNSET, Struct, structs

from millstream.config import load
from millstream.errors import ConfigError
from millstream.events import (
    Event,
    GroupAdmitted,
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
from millstream.events.summary import Interval, Summary, merge_intervals, share_within, summarise
from millstream.paths import program
from millstream.run.config import RunConfig
from millstream.run.device_queue import spans_on_device
from millstream.run.fit_costs import UNDISTURBED, Numbers, fit_alone, fit_costs, fit_with, slower
from millstream.run.folder import RunFolder, resume_command
from millstream.run.roofline import gpu_table
from millstream.run.simulate import simulate
from millstream.sim.config import DrawConfig, SimConfig, SimEnvironmentConfig
from millstream.types import Fate, Finish

UNCERTAIN = 0.3
MIN_SPANS = 8
FIRST_STEPS = 2  # that are left out, and as many more as max_lag
LEARNING = ("accumulate", "step")
SHARED = 1.1  # a slowdown above it: engine and learner share a GPU
SHARED_PROMPTS = 0.6  # of the tokens of prompts: if fewer were computed, the engine has a prefix cache
MIN_LATENCY = 0.05  # of the time of a rollout: less cannot be distinguished from what the simulation leaves out
MIN_VARIATION = 0.3
MAX_SIGMA = 2.0
SIMULATED_STEPS = 100  # at most, to compare
MATCHED_STEPS = 24  # of these, to find `cores`
HALVINGS = 6  # of the range in which it is looked for
NOT_AS_FOUND = ("prompt_tokens", "lengths")  # keys of `SimConfig` that are not the number that was found


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
    real, simulated = (
        summarise(_settled(events, found.config)) for events in (found.events, simulate(found.config, found.sim).events)
    )
    compared = _compare(real, simulated)
    return Calibration(sim=found.sim, parameters=found.parameters, compared=compared, changes=found.changes)


def fit_run(run_dir: Path) -> FittedRun:
    """Raises `ConfigError` if the run has too little to fit, or cannot be simulated."""
    folder = RunFolder.of_run(run_dir)
    if not folder.events.exists():
        raise ConfigError(f"{run_dir} has no events.jsonl: calibrate a run that has trained for some steps")
    events = spans_on_device(list(read_history(folder.events)))
    num_steps = sum(isinstance(event, Stepped) for event in events)
    if num_steps < 2:
        raise ConfigError(
            f"the run in {run_dir} has {num_steps} steps: at least 2 are needed, 20 and more are better. To train it further:\n"
            f"  {resume_command(run_dir, 'pipeline.steps=20')}"
        )
    config = as_it_ran(load(folder.config, RunConfig), events, min(num_steps, SIMULATED_STEPS))
    settled = _settled(events, config)
    is_on_cpu = _is_on_cpu(events)
    decoding = _decoding(settled, run_dir, is_on_cpu=is_on_cpu)
    training = _training(settled, config.learner.ranks, run_dir, is_on_cpu=is_on_cpu, slowdown=decoding[-1])
    ended = [event for event in events if isinstance(event, RolloutEnded) and event.finish is not Finish.ABORT]
    lengths, changes = [event.num_sampled for event in ended], list[str]()
    if (longest := max(lengths, default=0)) > config.rollout.max_tokens:
        changes.append(f"rollout.max_tokens={longest}")
    parameters = [*decoding, *training, _lengths(lengths, config), *_others(settled, config, is_on_cpu=is_on_cpu)]
    if changes:
        config = structs.replace(config, rollout=structs.replace(config.rollout, max_tokens=longest))
    sim = _sim_config({one.name: one.value for one in parameters}, events, run_dir)
    if is_on_cpu:
        sim = structs.replace(sim, cores=_cores(settled, config, sim))
        parameters.append(Fitted(name="cores", value=sim.cores or 0.0, error=None))
    latency = _latency(events, simulate(config, sim).events, config)
    if latency.value:
        spread = _latency_spread(ended, latency.value)
        sim = structs.replace(sim, environment=structs.replace(sim.environment, latency_s=spread))
    return FittedRun(events=events, config=config, sim=sim, parameters=[*parameters, latency], changes=changes)


def _sim_config(value: Mapping[str, float], events: Sequence[Event], run_dir: Path) -> SimConfig:
    """Without the time that rollouts spend in their environment."""
    return structs.replace(
        SimConfig(),
        **{name: value[name] for name in SimConfig.__struct_fields__ if name in value and name not in NOT_AS_FOUND},
        prompt_tokens=max(1, round(value["prompt_tokens"])),
        has_prefix_cache=_has_prefix_cache(events),
        lengths=DrawConfig(kind="run", path=str(run_dir.resolve())),
        environment=SimEnvironmentConfig(
            failure=value["failure"],
            success=value["success"],
            graded=_are_graded(events),
            no_signal=value["no_signal"],
        ),
    )


def _cores(settled: Sequence[Event], config: RunConfig, sim: SimConfig) -> float | None:
    """With which the simulated run is as fast as the real one. None: it is slower even if each has a core."""
    config = structs.replace(
        config, pipeline=structs.replace(config.pipeline, steps=min(config.pipeline.steps, MATCHED_STEPS))
    )
    real, most = summarise(settled).rollouts_per_s, 2.0 + config.engine.num_engines

    def is_slow(cores: float) -> bool:
        simulated = simulate(config, structs.replace(sim, cores=cores)).events
        return summarise(_settled(simulated, config)).rollouts_per_s < real

    if is_slow(most):
        return None
    low, high = 1.0, most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_slow(middle) else (low, middle)
    return high


def as_it_ran(config: RunConfig, events: Sequence[Event], num_steps: int) -> RunConfig:
    """With the sizes that it chose, and the steps that it made."""
    sizes = next((event.sizes for event in events if isinstance(event, SizesChosen)), None)
    if sizes is not None:
        learner = structs.replace(config.learner, micro_batch_tokens=sizes.micro_batch_tokens)
        replicas = sizes.replicas or config.engine.replicas
        engine = structs.replace(config.engine, slots=sizes.slots, replicas=replicas)
        config = structs.replace(config, engine=engine, learner=learner)
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


def _decoding(events: Sequence[Event], run_dir: Path, *, is_on_cpu: bool) -> list[Fitted]:
    spans = [
        event
        for event in events
        if isinstance(event, Span) and event.what == "generate" and event.num_tokens > 0 < event.seconds
    ]
    counted = [span for span in spans if span.num_steps is not UNSET and span.num_steps]
    if len(counted) < MIN_SPANS:
        why = (
            "train it for more steps"
            if len(counted) == len(spans) > 0
            else 'they are written by the native engine (engine.kind = "torch"), from this version on'
        )
        raise ConfigError(
            f"the run in {run_dir} has {len(counted)} spans of decoding with counts of steps, and {MIN_SPANS} are needed: {why}"
        )
    columns = np.array(
        [[_count(s.num_steps), s.num_tokens, _count(s.num_context), _count(s.num_prompt)] for s in counted],
        dtype=np.float64,
    )
    seconds = np.array([span.seconds for span in counted])
    busy = _busy(events, lambda span: span.worker == "learner" and span.what in LEARNING)
    shares = np.array([share_within(busy, span.at - span.seconds, span.at) for span in counted])
    fit = fit_alone(columns, seconds) if is_on_cpu else fit_costs(columns, seconds, shares)
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


def _training(events: Sequence[Event], ranks: int, run_dir: Path, *, is_on_cpu: bool, slowdown: Fitted) -> list[Fitted]:
    spans = [event for event in events if isinstance(event, Span) and event.worker == "learner"]
    passes = [span for span in spans if span.what == "accumulate" and span.num_tokens > 0 < span.seconds]
    if not passes:
        raise ConfigError(
            f"the run in {run_dir} has trained nothing after its first steps: its groups were filtered, or it is too short. "
            f"To see what became of them: {program()} report {run_dir}"
        )
    busy = _busy(events, lambda span: span.what == "generate")
    shares = np.array([share_within(busy, span.at - span.seconds, span.at) for span in passes])
    columns, seconds = np.array([[float(span.num_tokens)] for span in passes]), np.array([s.seconds for s in passes])
    fit = fit_alone(columns, seconds) if is_on_cpu else fit_costs(columns, seconds, shares)
    keep = _ratio("learner_keep", fit.ratio, fit.ratio_error, shares, "an engine decoded")
    if keep.why and slowdown.value > SHARED and not slowdown.why:  # they share a GPU, and the learner was never alone
        fit = fit_with(columns, seconds, shares, 1 / (known := gpu_table().efficiency.learner_keep))
        keep = Fitted(
            name="learner_keep", value=fit.ratio, error=None, why=f"{keep.why}; {known:g} was measured elsewhere"
        )
    token_s, error = max(fit.values[0], 1e-12), fit.errors[0]
    rate = 1 / (token_s * ranks)

    mean = _undisturbed if is_on_cpu else _mean
    begin_s = mean("", [span.seconds for span in spans if span.what == "begin_batch"]).value
    steps = [span for span in spans if span.what == "step"]
    of_steps = [np.array(share_within(busy, span.at - span.seconds, span.at)) for span in steps]
    step_s = [s.seconds / float(slower(fit.ratio, share)) + begin_s for s, share in zip(steps, of_steps, strict=True)]
    return [
        _fitted("train_tokens_per_s", rate, rate * error / token_s),
        structs.replace(keep, value=1 / keep.value, error=None if keep.error is None else keep.error / keep.value**2),
        mean("train_step_s", step_s),
    ]


# ---- the rest ----------------------------------------------------------------------------------------------------------


def _others(events: Sequence[Event], config: RunConfig, *, is_on_cpu: bool) -> list[Fitted]:
    ended = [event for event in events if isinstance(event, RolloutEnded)]
    num_failed, mean = sum(isinstance(event, RolloutFailed) for event in events), _undisturbed if is_on_cpu else _mean
    left = [event for event in events if isinstance(event, GroupLeft) and event.fate in (Fate.TRAINED, Fate.FILTERED)]
    filtered = [event for event in left if event.fate is Fate.FILTERED]
    trained = [event.mean_reward for event in left if event.fate is Fate.TRAINED]
    success = min(1.0, max(0.0, statistics.mean(trained or [0.5])))
    by_chance = success**config.rollout.group_size + (1 - success) ** config.rollout.group_size
    by_chance = 0.0 if _are_graded(events) else by_chance
    share = len(filtered) / max(1, len(left))
    rewards = [event.reward for event in ended]
    why = (
        f"{len(filtered)} of {len(left)} groups were filtered: it is the mean reward of the others" if filtered else ""
    )
    if rewards and (min(rewards) < 0 or max(rewards) > 1):
        why = f"the run's rewards are {min(rewards):g} to {max(rewards):g}: simulated ones are 0 or 1"
    return [
        mean("publish_s", [event.seconds for event in events if isinstance(event, WeightsPublished)]),
        mean("load_s", [event.seconds for event in events if isinstance(event, WeightsLoaded)]),
        _mean("prompt_tokens", [float(event.num_tokens - event.num_sampled) for event in ended]),
        _driver(events),
        *_scoring(events),
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


def _latency(events: Sequence[Event], simulated: Sequence[Event], config: RunConfig) -> Fitted:
    """Of a rollout in its environment: the time in which no engine decodes it, less that of a simulation without environments,
    in which it waits for the driver and for its prompt."""
    real, without = _outside_s(events, config), statistics.mean(_outside_s(simulated, config))
    mean, error = statistics.mean(real) - without, statistics.stdev(real) / math.sqrt(len(real))
    in_all = statistics.mean(event.seconds for event in events if isinstance(event, RolloutEnded))
    if mean < MIN_LATENCY * in_all:
        return Fitted(name="latency_s", value=0.0, error=None)
    return _fitted("latency_s", mean, error)


def _outside_s(events: Sequence[Event], config: RunConfig) -> list[float]:
    """Seconds of a rollout in which no engine decodes it, in each of `MIN_SPANS` parts of the run. By Little's law: the mean
    number of such rollouts, divided by the rate of rollouts."""
    settled = _settled(events, config)
    bounds = np.linspace(settled[0].at, settled[-1].at, MIN_SPANS + 1)
    starts, stops = _in_flight(events)
    waiting = [event.requests_waiting + _num_queued(event) for event in settled if isinstance(event, Status)]
    spans = [event for event in events if isinstance(event, Span) and event.what == "generate" and event.seconds]
    found = list[float]()
    for begin, end in pairwise(map(float, bounds)):
        # the time of rollouts in this part: each has begun and not ended
        in_flight = np.clip(end - starts, 0, end - begin).sum() - np.clip(end - stops, 0, end - begin).sum()
        decoded = sum(_inside(s, begin, end) * s.num_tokens / max(1.0, _count(s.num_steps)) for s in spans)
        queued = statistics.mean(waiting or [0]) * (end - begin)
        num_ended = int(((stops > begin) & (stops <= end)).sum())
        found.append(max(0.0, float(in_flight) - decoded - queued) / max(1, num_ended))
    return found


def _in_flight(events: Sequence[Event]) -> tuple[Numbers, Numbers]:
    """When rollouts began, and when they ended. A resume ends those that the process before it had in flight."""
    starts, stops = list[float](), list[float]()
    for event in events:
        match event:
            case RolloutStarted():
                starts.append(event.at)
            case RolloutEnded() | RolloutFailed() | RolloutAborted():
                stops.append(event.at)
            case Resumed():
                stops += [event.at] * (len(starts) - len(stops))
    return np.array(starts), np.array(stops)


def _num_queued(status: Status) -> int:
    """Rollouts that wait for a place in their environment."""
    return sum(wait.count for wait in status.waits if wait.what.startswith("a place in "))


def _inside(span: Span, begin: float, end: float) -> float:
    """Seconds of the span in this time."""
    return max(0.0, min(end, span.at) - max(begin, span.at - span.seconds))


def _latency_spread(ended: Sequence[RolloutEnded], mean: float) -> DrawConfig:
    """Its distribution, by how much members of a group differ that have as many tokens as one another."""
    by_group = dict[int, list[tuple[float, float]]]()
    for event in ended:
        by_group.setdefault(event.group_id, []).append((event.seconds, float(event.num_sampled)))
    groups = [np.array(members) - np.mean(members, axis=0) for members in by_group.values() if len(members) > 1]
    if not groups:
        return DrawConfig(mean=mean)
    seconds_R, tokens_R = np.concatenate(groups).T
    token_s = float(seconds_R @ tokens_R) / max(1e-9, float(tokens_R @ tokens_R))
    left_R = seconds_R - token_s * tokens_R
    variation = math.sqrt(float(left_R @ left_R) / max(1, len(left_R) - len(groups))) / mean
    if variation < MIN_VARIATION:
        return DrawConfig(mean=mean)
    return DrawConfig(kind="lognormal", mean=mean, sigma=min(MAX_SIGMA, math.sqrt(math.log1p(variation**2))))


def _scoring(events: Sequence[Event]) -> list[Fitted]:
    """Of the reference, the critic and the proximal policy, where the run has one."""
    spans = [event for event in events if isinstance(event, Span) and event.what == "score" and event.num_tokens]
    seconds, num_tokens = sum(span.seconds for span in spans), sum(span.num_tokens for span in spans)
    return [Fitted(name="score_tokens_per_s", value=num_tokens / seconds, error=None)] if seconds else []


def _driver(events: Sequence[Event]) -> Fitted:
    """Processor time of the event loop, for each rollout that ended."""
    seconds, rollouts, before, num_before, num_ended = 0.0, 0, None, 0, 0
    for event in events:
        if isinstance(event, RolloutEnded | RolloutFailed):
            num_ended += 1
        elif isinstance(event, Status) and isinstance(event.loop_s, float):
            if before is not None and event.loop_s >= before:  # otherwise another process continues the run
                seconds += event.loop_s - before
                rollouts += num_ended - num_before
            before, num_before = event.loop_s, num_ended
    why = "" if before is not None else "the run's log does not have it: it was written by an earlier version"
    return Fitted(name="driver_s", value=seconds / max(1, rollouts), error=None, why=why)


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


def _undisturbed(name: str, numbers: Sequence[float]) -> Fitted:
    """What it took if nothing disturbed it."""
    if not numbers:
        return _mean(name, numbers)
    return Fitted(name=name, value=float(np.quantile(numbers, UNDISTURBED)), error=None)


def _ratio(name: str, ratio: float, error: float, shares_N: Numbers, when: str) -> Fitted:
    """A ratio is known only if there were spans with interference and spans without. Without an error it was not looked for."""
    if math.isnan(error):
        return Fitted(name=name, value=ratio, error=None)
    spread = float(np.ptp(shares_N)) if len(shares_N) else 0.0
    why = "" if spread > UNCERTAIN else f"{when} in about the same share of every span"
    if not why and error > UNCERTAIN * ratio:
        why = f"its standard error is {error / ratio:.0%} of it"
    return Fitted(name=name, value=ratio, error=error if math.isfinite(error) else None, why=why)


def _count(number: object) -> float:
    return float(number) if isinstance(number, int) else 0.0


def _is_on_cpu(events: Sequence[Event]) -> bool:
    return any(isinstance(event, SizesChosen) and event.device == "cpu" for event in events)


def _are_graded(events: Sequence[Event]) -> bool:
    """Whether rewards differ by more than success and failure."""
    return len({event.reward for event in events if isinstance(event, RolloutEnded)}) > 2


def _has_prefix_cache(events: Sequence[Event]) -> bool:
    needed = sum(event.num_tokens - event.num_sampled for event in events if isinstance(event, RolloutEnded))
    computed = sum(_count(event.num_prompt) for event in events if isinstance(event, Span))
    return computed < SHARED_PROMPTS * needed


def _settled(events: Sequence[Event], config: RunConfig) -> list[Event]:
    """From the first steps to the last: before, all groups have started at once, and something may be compiled. Of a run with
    few steps, from the first group on."""
    ends = [event.at for event in events if isinstance(event, Stepped)]
    first = FIRST_STEPS + math.ceil(config.pipeline.max_lag)
    began = next(event.at for event in events if isinstance(event, GroupAdmitted))
    begin = math.nextafter(ends[first - 1], math.inf) if len(ends) >= 2 * first else began

    def began_at(event: Event) -> float:
        return event.at - (event.seconds if isinstance(event, Span) else 0.0)

    return [event for event in events if begin <= began_at(event) and event.at <= ends[-1]]


def _busy(events: Sequence[Event], is_counted: Callable[[Span], bool]) -> list[Interval]:
    spans = [event for event in events if isinstance(event, Span) and is_counted(event)]
    return merge_intervals((span.at - span.seconds, span.at) for span in spans)
