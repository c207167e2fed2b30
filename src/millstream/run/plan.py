"""`millstream plan`: how GPUs are divided between learner and engines, `max_lag`, slots, groups in flight and redundancy.

Closed forms order all settings that fit in memory (`run.workload`), and the simulator judges (`run.simulate`): from the best
guess one setting at a time is varied, and the fastest simulated one is kept, until no variation is faster. The fastest few are
simulated again, for longer and with other random numbers. Lag is not free: of those within `MARGIN` of the fastest, the plan is
the one with the lowest `max_lag`. What a plan expects comes from random numbers that did not choose it. The same input gives
the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec import Struct, structs

from millstream.cluster.resources import ResourcesConfig
from millstream.errors import ConfigError
from millstream.events import Stepped
from millstream.events.lanes import lanes_of
from millstream.events.summary import summarise
from millstream.pipeline.admission import full_budget
from millstream.run.changes import ChangedSetting, changed_settings, tables_of
from millstream.run.config import RunConfig
from millstream.run.plan_input import check_planned
from millstream.run.roofline import Gpus, MemoryFit, Placed, costs_on, fit_memory, gpu_table, with_sharing
from millstream.run.simulate import longest_request, simulate
from millstream.run.sizes import MAX_SLOTS, MIN_SLOTS, USABLE, ModelShape
from millstream.run.workload import guess_step_s, workload_of
from millstream.sim.config import SimConfig

MARGIN = 0.02
LAGS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
SLOT_SHARES = (1.0, 0.5, 0.25)  # of the slots that hold all rollouts in flight, or that fit
EXTRA_SHARES = (1.0, 0.5)  # of the groups that max_lag allows beyond one batch
SURPLUS_SHARES = (0.0, 0.25, 0.5, 1.0)  # of a batch, where surplus = "abort" allows any number
MEMBER_SHARES = (0.0, 0.25)  # of a group, likewise
MAX_PLACES = 16  # ways to divide GPUs that are tried; of more GPUs, at equal distances
MIN_STEPS, MAX_STEPS = 4, 24  # of a simulation, and two more for every version of lag
USUAL_ROLLOUTS = 1000  # of a simulation: fewer a step give more steps
MAX_ROLLOUTS = 25_000  # of all simulations of a search; a rollout takes about a millisecond
NUM_FINALISTS = 4  # simulated again, for longer: the fastest of many short simulations is fast partly by chance
MAX_GUESS = 1.5  # times the guess of the best: beyond it a variation is not simulated
MAX_GPUS = 4096
MAX_MORE = 64  # GPUs that are tried beyond those of the plan, where these are too few
NEVER_S = 1e9


class Settings(Struct, frozen=True, kw_only=True):
    """What a plan chooses."""

    placed: Placed
    max_lag: float
    slots: int
    """Of one engine."""
    extra_groups: int
    extra_members: int


class Expected(Struct, frozen=True, kw_only=True):
    """Of a simulation, after its first quarter. Idle shares are of the time of all engines, and of the learner."""

    step_s: float
    rollouts_per_s: float
    tokens_per_s: float
    engines_idle: float
    learner_idle: float
    mean_lag: float


class Tried(Struct, frozen=True, kw_only=True):
    settings: Settings
    guess_s: float
    expected: Expected


class Curve(Struct, frozen=True, kw_only=True):
    """Of one max_lag: the best guess for each way to divide the GPUs."""

    max_lag: float
    step_s: list[float]


class Plan(Struct, frozen=True, kw_only=True):
    chosen: Tried
    synchronous: Tried
    """The fastest with max_lag = 0 on the same GPUs."""
    fit: MemoryFit
    config: RunConfig
    tried: list[Tried]
    """All that were simulated, with the random numbers of the search."""
    places: list[Placed]
    curves: list[Curve]
    changed: list[str]
    """Keys of the config that the plan changes, as KEY=VALUE."""
    notes: list[str]

    @property
    def gain(self) -> float:
        """Times the throughput of the synchronous plan."""
        return self.chosen.expected.rollouts_per_s / self.synchronous.expected.rollouts_per_s


class GridPoint(NamedTuple):
    """Settings by their place in the lists that are searched."""

    place: int
    lag: int
    slots: int
    extra: int
    members: int


class Planner:
    """All settings of a config on these GPUs, and what each is guessed and simulated to take. `is_calibrated`: `sim` has the
    costs of a real run; otherwise they are those of the roofline. `report` gets the number of simulated settings."""

    def __init__(
        self,
        config: RunConfig,
        sim: SimConfig,
        shape: ModelShape,
        gpus: Gpus,
        *,
        max_lag: float = 2.0,
        is_calibrated: bool = False,
        report: Callable[[int], None] = lambda num_simulated: None,
    ) -> None:
        check_planned(config)
        if not 1 <= gpus.number <= MAX_GPUS:
            raise ConfigError(f"--gpus {gpus.number}x{gpus.name}: expected 1 to {MAX_GPUS:,} GPUs")
        self.config = structs.replace(config, run_dir=None)
        self.shape = shape
        self.gpus = gpus
        self.lags = tuple(sorted({lag for lag in (*LAGS, max_lag) if lag <= max_lag}))
        self.report = report
        self.simulated: dict[Settings, Expected] = {}
        self._sim = sim
        self._is_calibrated = is_calibrated
        draws = sim.read_draws()
        self._draws = draws
        self._load = workload_of(config, sim, draws)
        self._fits = dict(self._fits_of(self.config, gpus))
        self.places = [placed for placed, fit in self._fits.items() if fit.lack_gb <= 0]
        if not self.places:
            raise ConfigError(self._does_not_fit())
        is_greedy = config.pipeline.is_first_to_finish
        self._extra = SURPLUS_SHARES if is_greedy else EXTRA_SHARES
        self._members = MEMBER_SHARES if is_greedy else (0.0,)
        wanted = USUAL_ROLLOUTS // self._load.num_rollouts
        self.steps = 2 * math.ceil(max_lag) + max(MIN_STEPS, min(MAX_STEPS, wanted))
        self._num_rollouts = 0  # that a search has simulated
        self._guesses: dict[Settings, float] = {}

    def _fits_of(self, config: RunConfig, gpus: Gpus) -> Iterator[tuple[Placed, MemoryFit]]:
        """For each way to divide these GPUs."""
        num_rollouts = config.pipeline.groups_per_step * config.rollout.group_size
        longest, tokens = longest_request(config, self._sim, self._draws), num_rollouts * self._load.trained
        for placed in _places(gpus.number, num_rollouts):
            yield (
                placed,
                fit_memory(config, self.shape, gpus, placed, longest_request=longest, batch_tokens=tokens),
            )

    def _does_not_fit(self) -> str:
        """With what fits."""
        gpus, shape = self.gpus, self.shape
        least = min(self._fits.values(), key=lambda fit: fit.lack_gb)
        engine_gb, longest = 2 * shape.trained / 1e9, longest_request(self.config, self._sim, self._draws)
        is_too_large = engine_gb > USABLE * gpus.kind.memory_gb
        alone = f"An engine has one GPU, which cannot hold its weights of {engine_gb:.1f} GB. " if is_too_large else ""
        found = [
            next((words for words, one, config in way if self._is_fitting(config, one)), None) for way in self._others()
        ]
        typed = " or ".join(words for words in found if words is not None)
        advice = f"Type {typed}, or train a smaller model" if typed else "Train a smaller model"
        return (
            f"a model of {shape.parameters / 1e9:.1f}B parameters does not fit on {gpus.number}x{gpus.name}, however they are "
            f"divided: {least.where} needs {least.lack_gb:.1f} GB more than {gpus.kind.memory_gb:g} GB for weights, "
            f"optimizer, a pass of the learner, and a rollout of {longest} tokens. {alone}{advice}"
        )

    def _is_fitting(self, config: RunConfig, gpus: Gpus) -> bool:
        return any(fit.lack_gb <= 0 for _, fit in self._fits_of(config, gpus))

    def _others(self) -> Iterator[list[tuple[str, Gpus, RunConfig]]]:
        """By what is changed: what to type, and the GPUs and the config with it; the smallest change first. There are no more
        ranks than rollouts a step, so that more GPUs may need more groups."""
        config, gpus, pipeline, rollout = self.config, self.gpus, self.config.pipeline, self.config.rollout
        if config.learner.micro_batch_tokens != "auto":
            learner = structs.replace(config.learner, micro_batch_tokens="auto")
            words = "--set learner.micro_batch_tokens=auto"
            yield [(words, gpus, structs.replace(config, learner=learner))]
        numbers = range(gpus.number, min(MAX_GPUS, gpus.number + MAX_MORE) + 1)
        more = [(f"--gpus {number}x{gpus.name}", structs.replace(gpus, number=number)) for number in numbers]
        with_groups = list[tuple[str, Gpus, RunConfig]]()
        for words, one in more:
            if (groups := -(-one.number // rollout.group_size)) > pipeline.groups_per_step:
                larger = structs.replace(config, pipeline=structs.replace(pipeline, groups_per_step=groups))
                words = f"{f'{words} ' if one != gpus else ''}--set pipeline.groups_per_step={groups}"
                with_groups.append((words, one, larger))
        yield [*((words, one, config) for words, one in more[1:]), *with_groups]
        kinds = [(name, kind) for name, kind in gpu_table().gpu.items() if kind.memory_gb > gpus.kind.memory_gb]
        yield [
            (f"--gpus {number}x{name}", Gpus(name=name, kind=kind, number=number), config)
            for number in numbers
            for name, kind in kinds
        ]
        limits = [1 << power for power in range(rollout.max_tokens.bit_length() - 1, 3, -1)]
        yield [
            (
                f"--set rollout.max_tokens={limit}",
                gpus,
                structs.replace(config, rollout=structs.replace(rollout, max_tokens=limit)),
            )
            for limit in limits
            if limit < rollout.max_tokens
        ]

    # ---- settings ------------------------------------------------------------------------------------------------------

    def points(self, lags: Sequence[float]) -> Iterator[GridPoint]:
        """All of them; some may stand for the same settings."""
        some = [number for number, lag in enumerate(self.lags) if lag in lags]
        sizes = (len(SLOT_SHARES), len(self._extra), len(self._members))
        for point in itertools.product(range(len(self.places)), some, *map(range, sizes)):
            yield GridPoint(*point)

    def settings_of(self, point: GridPoint) -> Settings:
        pipeline, size = self.config.pipeline, self.config.rollout.group_size
        lag, placed, groups = self.lags[point.lag], self.places[point.place], pipeline.groups_per_step
        allowed = groups if pipeline.is_first_to_finish else full_budget(groups, lag) - groups
        extra = math.ceil(self._extra[point.extra] * allowed)
        members = math.ceil(self._members[point.members] * size) if self._members[point.members] else 0
        in_flight = -(-(groups + extra) * (size + members) // placed.engines)
        fitting = int(self._fits[placed].cache_tokens / (self._load.context + 1))
        slots = max(MIN_SLOTS, round(SLOT_SHARES[point.slots] * min(MAX_SLOTS, in_flight, fitting)))
        return Settings(placed=placed, max_lag=lag, slots=slots, extra_groups=extra, extra_members=members)

    def config_of(self, settings: Settings) -> RunConfig:
        """The config that trains so, with the costs of this placement."""
        config, placed, fitted = self.config, settings.placed, self._fits[settings.placed]
        pipeline = structs.replace(
            config.pipeline,
            max_lag=settings.max_lag,
            extra_groups=settings.extra_groups,
            auto_lag=False,
            lockstep=False,
            overdue=config.pipeline.overdue if settings.max_lag else "wait",
        )
        costs = self._sim if self._is_calibrated else costs_on(self._sim, self.shape, self.gpus, placed, fitted)
        learner = structs.replace(
            config.learner,
            ranks=placed.ranks,
            micro_batch_tokens=fitted.micro_batch_tokens,
            recompute=fitted.is_recomputed,
            compile=fitted.is_compiled,
        )
        process = config.engine.process if self.gpus.number == 1 else None
        engine = structs.replace(
            config.engine, replicas=placed.engines, slots=settings.slots, cache_gb=fitted.cache_gb, process=process
        )
        return structs.replace(
            config,
            pipeline=pipeline,
            rollout=structs.replace(config.rollout, extra_members=settings.extra_members),
            learner=learner,
            engine=engine,
            sim=structs.replace(with_sharing(costs, placed), cache_tokens=fitted.cache_tokens),
            **_resources(config, placed, is_one_gpu=self.gpus.number == 1),
        )

    # ---- guess, simulation, search -------------------------------------------------------------------------------------

    def guess(self, settings: Settings) -> float:
        """Seconds a step."""
        if settings not in self._guesses:
            config = self.config_of(settings)
            assert config.sim is not None
            guess = guess_step_s(self._load, config.sim, config, is_shared=settings.placed.is_shared)
            self._guesses[settings] = guess
        return self._guesses[settings]

    def simulate(self, settings: Settings, *, steps: int | None = None, seed: int | None = None) -> Expected:
        config, steps = self.config_of(settings), self.steps if steps is None else steps
        sim = config.sim
        assert sim is not None
        pipeline = structs.replace(config.pipeline, steps=steps, stall_s=NEVER_S, deadline_s=NEVER_S)
        config = structs.replace(config, pipeline=pipeline, seed=config.seed if seed is None else seed)
        self._num_rollouts += steps * self._load.num_rollouts
        events = simulate(config, sim).events
        steps_made = [event for event in events if isinstance(event, Stepped)]
        first, lanes, summary = len(steps_made) // 4, lanes_of(events), summarise(events)
        begin, end = steps_made[first].at, steps_made[-1].at
        busy = lanes.busy_share(lanes.engines, begin, end) * len(lanes.engines) / settings.placed.engines
        return Expected(
            step_s=(end - begin) / (len(steps_made) - 1 - first),
            rollouts_per_s=sum(step.num_rollouts for step in steps_made[first + 1 :]) / (end - begin),
            tokens_per_s=summary.tokens_per_s,
            engines_idle=1 - busy,
            learner_idle=1 - lanes.busy_share([lanes.learner], begin, end),
            mean_lag=summary.lag_mean,
        )

    def rate(self, settings: Settings) -> float:
        """Rollouts trained a second, simulated once."""
        if settings not in self.simulated:
            self.simulated[settings] = self.simulate(settings)
            self.report(len(self.simulated))
        return self.simulated[settings].rollouts_per_s

    def search(self, lags: Sequence[float]) -> Settings:
        """The fastest that was found with one of these lags."""
        best = min(self.points(lags), key=lambda point: self.guess(self.settings_of(point)))
        self._num_rollouts = 0
        is_better = True
        while is_better:
            before = best
            for name in ("place", "lag", "extra", "slots", "members"):
                best = self._varied(best, name, lags)
            is_better = best != before and self._num_rollouts < MAX_ROLLOUTS
        return self.settings_of(best)

    def _varied(self, best: GridPoint, name: str, lags: Sequence[float]) -> GridPoint:
        """The fastest of a point and those that differ from it in this one. Ways to divide GPUs are tried in one direction as
        long as it pays."""
        rate, limit = self.rate(self.settings_of(best)), MAX_GUESS * self.guess(self.settings_of(best))
        sizes = GridPoint(len(self.places), len(self.lags), len(SLOT_SHARES), len(self._extra), len(self._members))
        here, values = getattr(best, name), range(getattr(sizes, name))
        if name == "lag":
            ways = [[value for value in values if self.lags[value] in lags]]
        elif name == "place":
            ways = [list(range(here + 1, len(values))), list(range(here - 1, -1, -1)), [0]]
        else:
            ways = [list(values)]
        found = best
        for way in ways:
            for value in way:
                settings = self.settings_of(point := best._replace(**{name: value}))
                is_tried = self._num_rollouts <= MAX_ROLLOUTS and self.guess(settings) <= limit
                other = self.rate(settings) if is_tried else 0.0
                if other > rate:
                    found, rate = point, other
                elif name == "place":
                    break
        return found

    def tried(self) -> list[Tried]:
        """The fastest first."""
        found = sorted(self.simulated.items(), key=lambda item: -item[1].rollouts_per_s)
        return [Tried(settings=one, guess_s=self.guess(one), expected=expected) for one, expected in found]

    def again(self, settings: Settings, seed: int) -> Tried:
        """With other random numbers, and for longer where that takes seconds."""
        steps = max(self.steps, min(2 * MAX_STEPS, 4 * USUAL_ROLLOUTS // self._load.num_rollouts))
        expected = self.simulate(settings, steps=steps, seed=self.config.seed + seed)
        return Tried(settings=settings, guess_s=self.guess(settings), expected=expected)

    def curve(self, max_lag: float) -> Curve:
        found = [math.inf] * len(self.places)
        for point in self.points([max_lag]):
            found[point.place] = min(found[point.place], self.guess(self.settings_of(point)))
        return Curve(max_lag=max_lag, step_s=found)

    def fit_of(self, settings: Settings) -> MemoryFit:
        return self._fits[settings.placed]


def choose(tried: Sequence[Tried]) -> Settings:
    """The lowest max_lag within `MARGIN` of the fastest, and the fastest of these."""
    least = (1 - MARGIN) * max(one.expected.rollouts_per_s for one in tried)
    near = [one for one in tried if one.expected.rollouts_per_s >= least]
    return min(near, key=lambda one: (one.settings.max_lag, -one.expected.rollouts_per_s)).settings


def plan_run(planner: Planner, notes: Sequence[str] = ()) -> Plan:
    synchronous = planner.search([0.0])
    planner.search(planner.lags)
    tried = planner.tried()
    finalists = dict.fromkeys([*(one.settings for one in tried[:NUM_FINALISTS]), choose(tried)])
    chosen = choose([planner.again(settings, 1) for settings in finalists])
    found, config = planner.again(chosen, 2), planner.config_of(chosen)
    changes = changed_settings(tables_of(planner.config), tables_of(config))
    return Plan(
        chosen=found,
        synchronous=found if chosen == synchronous else planner.again(synchronous, 2),
        fit=planner.fit_of(chosen),
        config=config,
        tried=tried,
        places=planner.places,
        curves=[planner.curve(lag) for lag in planner.lags],
        changed=[_as_typed(change) for change in changes if not change.key.startswith("sim")],
        notes=list(notes),
    )


def _as_typed(change: ChangedSetting) -> str:
    """As `--set` takes it."""
    return str(change._replace(new=str(change.new).lower()) if isinstance(change.new, bool) else change)


def _places(num_gpus: int, num_rollouts: int) -> list[Placed]:
    """Shared GPUs, then those of the learner, from one to all but one; no more ranks than rollouts."""
    stride = max(1, num_gpus // MAX_PLACES)
    ranks = [number for number in range(stride, num_gpus, stride) if number <= num_rollouts]
    return [
        Placed(ranks=num_gpus, engines=num_gpus, is_shared=True),
        *(Placed(ranks=number, engines=num_gpus - number, is_shared=False) for number in ranks),
    ]


def _resources(config: RunConfig, placed: Placed, *, is_one_gpu: bool) -> dict[str, Any]:
    """The keys of a config that place processes: on one GPU threads of one process, otherwise by Ray."""
    if is_one_gpu:
        return {"runtime": "local", "resources": ResourcesConfig()}
    share = 0.5 if placed.is_shared else 1.0
    resources = structs.replace(
        config.resources, gpus=None, engine_gpus=share, learner_gpus=share, colocate=placed.is_shared, weights=None
    )
    model = structs.replace(config.model, device="auto")
    return {"runtime": "ray", "resources": resources, "model": model}
