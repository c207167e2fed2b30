"""`millstream advise`: what holds a run up, what changes would give, and what came of the last advice.

The bottleneck is read from the events (`events.bottleneck`). A gain is simulated: the costs of the run are fitted
(`run.calibrate`), the run is simulated as it is and with each change (`run.simulate`), and the gain is the ratio of their step
times, so that what the model has wrong in both cancels. A change that is worth naming is simulated again with other seeds and
with costs drawn from their errors, which gives the range. Advice is kept in the run folder (`advice.jsonl`), and held against
the step times after a change that it named.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote

import msgspec
import numpy as np
from msgspec import Struct, structs

from millstream.config import load
from millstream.decoding import decode_json
from millstream.errors import ConfigError, MillstreamError
from millstream.events import (
    Event,
    GroupLeft,
    ReplicaJoined,
    ReplicaLeft,
    RolloutEnded,
    RunEnded,
    RunStarted,
    SettingChanged,
    Span,
    Stepped,
)
from millstream.events.bottleneck import MIN_STEPS, Bottleneck, bottleneck_of
from millstream.events.sinks import read_history
from millstream.events.summary import summarise
from millstream.paths import program
from millstream.run.calibrate import FittedRun, fit_run
from millstream.run.candidates import Seen, TriedChange, candidates
from millstream.run.changes import WHILE_TRAINING
from millstream.run.config import RunConfig
from millstream.run.folder import RunFolder, holder_of, resume_command
from millstream.run.simulate import simulate
from millstream.sim.config import DrawConfig, SimConfig, SimFailuresConfig
from millstream.types import Fate

ADVICE = "advice.jsonl"
WORTH = 1.03  # gains below it are not named
MAX_NAMED = 4
NUM_DRAWS = 2  # simulations of a named change with other seeds and costs
NUM_ROLLOUTS = 1_500  # of a simulation, about
MIN_SIMULATED = 8  # steps
MAX_SIMULATED = 40
MAX_LENGTHS = 5_000
MAX_ERROR = 0.5  # of a cost, relative
MIN_SPREAD = 0.05  # of a gain, to both sides: what promises were wrong by in `bench/advice.py`
SLOWDOWN = 2.0
"""Of engine and learner by each other, at most, where they share a machine and the run does not show it. On one H200 it is 2
for decoding and 1.7 for training. The square root of it is what is assumed."""
OVERLAP = 0.5  # of the learner's time, with engines: below it a run need not show their slowdown
STEPS_AFTER = 4  # a change, at least, before its gain is known


class PromisedGain(Struct, frozen=True, kw_only=True):
    """A change, and how many times as fast the run would be, with a range. `settings` is empty where there is no key."""

    words: str
    gain: float
    low: float
    high: float
    settings: tuple[str, ...] = ()
    command: str = ""
    note: str = ""


class AdviceOutcome(Struct, frozen=True, kw_only=True):
    """What came of an earlier advice. `gain` None: too few steps since then. `promised` None: it did not name this change."""

    settings: tuple[str, ...]
    promised: float | None
    gain: float | None
    steps: int  # since the change


class Advice(Struct, frozen=True, kw_only=True):
    """`why_none`: why no gain could be simulated. Empty: they were."""

    at: float
    version: int
    bottleneck: Bottleneck
    promises: tuple[PromisedGain, ...] = ()
    simulated_step_s: float | None = None
    uncertain: tuple[str, ...] = ()
    why_none: str = ""
    last: AdviceOutcome | None = None


def advise(run_dir: Path) -> Advice:
    """Raises `ConfigError` if the run has too few steps."""
    folder = RunFolder.of_run(run_dir)
    if not folder.events.exists():
        raise ConfigError(f"{run_dir} has no events.jsonl: name a run that has trained for some steps")
    events = list(read_history(folder.events))
    if (found := bottleneck_of(events)) is None:
        raise ConfigError(_too_few(folder, events))
    advice = Advice(
        at=events[-1].at,
        version=max(event.version for event in events if isinstance(event, Stepped)),
        bottleneck=found,
        last=outcome_of(read_advice(folder), events),
    )
    try:
        fitted = fit_run(run_dir)
        return _Trials(folder, fitted, found).complete(advice)
    except MillstreamError as error:  # of an engine that counts no steps, or with a model that is not simulated
        return structs.replace(advice, why_none=str(error))


def _too_few(folder: RunFolder, events: Sequence[Event]) -> str:
    num = sum(isinstance(event, Stepped) for event in events)
    changed = any(isinstance(event, SettingChanged) for event in events)
    since = " since its settings were changed" if changed and num >= MIN_STEPS else ""
    found = (
        f"the run in {folder.path} has too few steps for advice{since}: at least {MIN_STEPS} are needed, 20 are better"
    )
    if holder_of(folder.path) is not None:
        return f"{found}. It is active: try again later"
    return f"{found}. To train it further:\n  {resume_command(folder.path, 'pipeline.steps=N')}"


# ---- simulations -------------------------------------------------------------------------------------------------------


class _Trials:
    """Simulations of one run."""

    def __init__(self, folder: RunFolder, fitted: FittedRun, found: Bottleneck) -> None:
        self._folder = folder
        self._fitted = fitted
        self._bottleneck = found
        events = fitted.events
        started = next((event for event in events if isinstance(event, RunStarted)), None)
        self._is_simulated = started is not None and started.is_simulated
        summary = summarise(events)
        self._sizes = summary.sizes
        sim = _with_seen(fitted.sim, events, found)
        self._has_overlap = self._is_spread or summary.overlap_share > OVERLAP
        self._sim = sim if self._has_overlap else structs.replace(sim, **_slowed(fitted, math.sqrt(SLOWDOWN)))

    def complete(self, advice: Advice) -> Advice:
        config = self._fitted.config
        with tempfile.TemporaryDirectory() as place:
            sim = structs.replace(self._sim, lengths=_lengths(self._fitted.events, Path(place) / "lengths.txt"))
            base = self._step_s(config, sim)
            tried = [(one, self._gain(one, sim, base)) for one in candidates(config, sim, self._seen())]
            named = _worth_naming([(one, gain) for one, gain in tried if gain is not None])
            gains = {one.words: [gain] for one, gain in named}
            for number in range(1, NUM_DRAWS + 1):
                rng = random.Random(number)
                drawn = _drawn(sim, self._fitted, rng, has_overlap=self._has_overlap)
                again = self._step_s(config, drawn, seed=number)
                for one, _ in named:
                    gain = self._gain(one, drawn, again, seed=number)
                    gains[one.words] += [] if gain is None else [gain]
        missed = abs(math.log(base / advice.bottleneck.step_s))
        promises = [self._promise(one, gains[one.words], missed) for one, _ in named]
        promises = [promise for promise in promises if promise.gain >= WORTH]
        return structs.replace(
            advice,
            promises=tuple(sorted(promises, key=lambda promise: -promise.gain)),
            simulated_step_s=base,
            uncertain=tuple(f"{one.name}: {one.why}" for one in self._fitted.parameters if one.why),
        )

    @property
    def _is_spread(self) -> bool:
        """Whether more engines and ranks have machines of their own."""
        return self._is_simulated or self._fitted.config.runtime == "ray"

    def _seen(self) -> Seen:
        steps = [event for event in self._fitted.events if isinstance(event, Stepped)]
        left = [event.fate for event in self._fitted.events if isinstance(event, GroupLeft)]
        return Seen(
            bottleneck=self._bottleneck,
            step_tokens=statistics.mean(step.num_tokens for step in steps),
            filtered=left.count(Fate.FILTERED) / max(1, len(left)),
            is_spread=self._is_spread,
            cache_gb=None if self._sizes is None else self._sizes.cache_gb,
        )

    def _gain(self, one: TriedChange, sim: SimConfig, base: float, seed: int = 0) -> float | None:
        """None: the config cannot be changed so, or the changed run fails."""
        try:
            return base / self._step_s(self._changed(one.settings), one.costs(sim), seed=seed)
        except MillstreamError:
            return None

    def _changed(self, settings: Sequence[str]) -> RunConfig:
        config, sizes = self._fitted.config, self._sizes
        as_run = (
            []
            if sizes is None
            else [f"engine.slots={sizes.slots}", f"learner.micro_batch_tokens={sizes.micro_batch_tokens}"]
        )
        changes = [*as_run, f"rollout.max_tokens={config.rollout.max_tokens}", *settings]
        return load(self._folder.config, RunConfig, changes)

    def _step_s(self, config: RunConfig, sim: SimConfig, seed: int = 0) -> float:
        """Seconds a step, without those in which the pipeline fills and empties."""
        pipeline = config.pipeline
        rollouts = pipeline.groups_per_step * config.rollout.num_members
        num = min(MAX_SIMULATED, max(MIN_SIMULATED, NUM_ROLLOUTS // rollouts))
        around = math.ceil(pipeline.max_lag) + 1
        config = structs.replace(
            config, pipeline=structs.replace(pipeline, steps=num + 2 * around), seed=config.seed + seed
        )
        ends = [event.at for event in simulate(config, sim).events if isinstance(event, Stepped)]
        return (ends[around + num - 1] - ends[around - 1]) / num

    def _promise(self, one: TriedChange, gains: Sequence[float], missed: float) -> PromisedGain:
        """The mean of the simulations. What the model misses of the run's own step time widens the range."""
        gain = math.exp(statistics.mean(map(math.log, gains)))
        factor = math.exp(MIN_SPREAD + min(1.0, missed))
        low, high = min(*gains, gain / factor), max(*gains, gain * factor)
        command = self._command(one.settings)
        return PromisedGain(
            words=one.words, settings=one.settings, gain=gain, low=low, high=high, command=command, note=one.note
        )

    def _command(self, settings: Sequence[str]) -> str:
        if not settings:
            return ""
        folder = self._folder
        keys = {setting.partition("=")[0] for setting in settings}
        is_active = holder_of(folder.path) is not None
        if self._is_simulated:
            return " ".join([program(), "sim", quote(str(folder.config)), *(f"--set {quote(one)}" for one in settings)])
        if is_active and keys <= set(WHILE_TRAINING) and not self._fitted.config.pipeline.is_in_lockstep:
            return " ".join([program(), "set", quote(str(folder.path)), *map(quote, settings)])
        if is_active and keys == {"engine.replicas"} and not self._fitted.config.pipeline.is_in_lockstep:
            return f"{program()} scale {quote(str(folder.path))} engines={settings[0].partition('=')[2]}"
        ended = next((one for one in reversed(self._fitted.events) if isinstance(one, RunEnded)), None)
        more = ["pipeline.steps=N"] if not is_active and ended is not None and ended.outcome == "finished" else []
        return resume_command(folder.path, *settings, *more)


def _worth_naming(tried: Sequence[tuple[TriedChange, float]]) -> list[tuple[TriedChange, float]]:
    """The largest gains first; not one that gives less than 5% more than another that sets the same key lower."""
    best: list[tuple[TriedChange, float]] = []
    for one, gain in tried:
        keys = {setting.partition("=")[0] for setting in one.settings}
        known = [other for before, other in best if keys and {s.partition("=")[0] for s in before.settings} == keys]
        if gain >= WORTH and not (known and gain < 1.05 * max(known)):
            best.append((one, gain))
    return sorted(best, key=lambda pair: -pair[1])[:MAX_NAMED]


# ---- costs -------------------------------------------------------------------------------------------------------------


def _with_seen(sim: SimConfig, events: Sequence[Event], found: Bottleneck) -> SimConfig:
    """With what calibration does not fit: the size of a cache that was full, and engines that failed."""
    if found.name == "cache":
        held = [
            span.num_context / span.num_steps
            for span in events
            if isinstance(span, Span)
            and isinstance(span.num_steps, int)
            and isinstance(span.num_context, int)
            and span.num_steps
        ]
        sim = structs.replace(sim, cache_tokens=round(float(np.quantile(held, 0.95))))
    return structs.replace(sim, failures=_failures(events))


def _failures(events: Sequence[Event]) -> SimFailuresConfig:
    """Of engines, each on a node of its own."""
    left = [event for event in events if isinstance(event, ReplicaLeft)]
    joined = [event for event in events if isinstance(event, ReplicaJoined)]
    engines = {span.worker for span in events if isinstance(span, Span) and span.what == "generate"}
    if not left or not joined:
        return SimFailuresConfig()
    gone_s = [
        next((one.at for one in joined if one.engine == lost.engine and one.at > lost.at), events[-1].at) - lost.at
        for lost in left
    ]
    alive_s = max(1.0, len(engines) * events[-1].at - sum(gone_s))
    return SimFailuresConfig(node_mean_s=alive_s / len(left), restart_s=statistics.mean(gone_s))


def _lengths(events: Sequence[Event], file: Path) -> DrawConfig:
    """Of the newest rollouts, in a file: a simulation would read the whole log each time."""
    lengths = [event.num_sampled for event in events if isinstance(event, RolloutEnded) and event.num_sampled]
    file.write_text("\n".join(map(str, lengths[-MAX_LENGTHS:])))
    return DrawConfig(kind="file", path=str(file))


def _slowed(fitted: FittedRun, slowdown: float) -> dict[str, float]:
    """How much engine and learner slow each other down, where the run does not show it: they never worked at the same time."""
    unknown = {one.name for one in fitted.parameters if "same share of every span" in one.why}
    found = {"decode_slowdown": slowdown, "learner_keep": 1 / slowdown}
    return {name: value for name, value in found.items() if name in unknown}


def _drawn(sim: SimConfig, fitted: FittedRun, rng: random.Random, *, has_overlap: bool) -> SimConfig:
    """Costs within their errors. `has_overlap`: they contain how much engine and learner slow each other down."""
    changes = dict[str, float]()
    for one in fitted.parameters:
        if one.name not in SimConfig.__struct_fields__ or one.name in ("prompt_tokens", "lengths") or not one.value:
            continue
        error = min(MAX_ERROR, (one.error or 0.0) / one.value)
        changes[one.name] = one.value * math.exp(rng.gauss(0, 1) * error)
    if not has_overlap:
        changes |= _slowed(fitted, rng.uniform(1, SLOWDOWN))
    changes["decode_slowdown"] = max(1.0, changes.get("decode_slowdown", 1.0))
    changes["learner_keep"] = min(1.0, changes.get("learner_keep", 1.0))
    num_groups, share = sum(isinstance(event, GroupLeft) for event in fitted.events), sim.environment.no_signal
    no_signal = share + rng.gauss(0, 1) * math.sqrt(share * (1 - share) / max(1, num_groups))
    environment = structs.replace(sim.environment, no_signal=min(0.95, max(0.0, no_signal)))
    return structs.replace(sim, environment=environment, **changes)


# ---- the last advice -----------------------------------------------------------------------------------------------------


def read_advice(folder: RunFolder) -> list[Advice]:
    """That was given before. A line that cannot be read is left out."""
    found = list[Advice]()
    with suppress(OSError):
        for line in (folder.path / ADVICE).read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                found.append(decode_json(line, Advice))
    return found


def keep_advice(run_dir: Path, advice: Advice) -> None:
    """Raises `OSError`."""
    with (run_dir / ADVICE).open("ab") as file:
        file.write(msgspec.json.encode(advice) + b"\n")


def outcome_of(given: Sequence[Advice], events: Sequence[Event]) -> AdviceOutcome | None:
    """What came of the last advice after which settings were changed. None: none were."""
    changed = [event for event in events if isinstance(event, SettingChanged)]
    before = next((one for one in reversed(given) if changed and one.at < changed[-1].at), None)
    if before is None:
        return None
    since = [event for event in changed if event.at > before.at and event.key != "pipeline.steps"]
    new = {event.key: event.new for event in since}
    if not new:
        return None
    settings = tuple(f"{key}={value}" for key, value in new.items())
    promise = next((one for one in before.promises if one.settings and _is_same(one.settings, new)), None)
    ends = [event.at for event in events if isinstance(event, Stepped) and event.at > since[-1].at]
    lag = next((math.ceil(float(value)) for key, value in new.items() if key == "pipeline.max_lag"), 1)
    ends = ends[lag:]  # from then on all groups began under it
    num = len(ends) - 1
    gain = before.bottleneck.step_s / ((ends[-1] - ends[0]) / num) if num >= STEPS_AFTER else None
    return AdviceOutcome(
        settings=settings, promised=None if promise is None else promise.gain, gain=gain, steps=max(0, num)
    )


def _is_same(settings: Sequence[str], new: dict[str, object]) -> bool:
    wanted = {key: value for key, _, value in (setting.partition("=") for setting in settings)}
    if wanted.keys() != new.keys():
        return False
    return all(str(new[key]) == value or _number(new[key]) == _number(value) for key, value in wanted.items())


def _number(value: object) -> object:
    try:
        return float(str(value))
    except ValueError:
        return value
