"""Evaluation: a model on tasks that it is not trained on, of a run's model between its steps or of a model alone.

An evaluation is of one version of the weights: it pins engines to that version (`serving.pins`) and samples with them alone. An
evaluation during training takes no budget; a pinned engine gets newer weights when it is over. Imports torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import Struct, structs

from millstream.clock import Clock, RealClock
from millstream.cluster.resources import ResourcesConfig
from millstream.engine import EngineConfig
from millstream.env.data import PassedData
from millstream.env.rewards import PassedRewards
from millstream.errors import ConfigError, MillstreamError, PinLost, StallError
from millstream.events import WARMUP, Evaluated, EvaluationStarted, EventSink, Sample, Warned
from millstream.events.rollouts.text import spoken_text, task_text
from millstream.events.sinks import Tee
from millstream.model.lora import LoraConfig
from millstream.pipeline.episode import EpisodeResult, Player
from millstream.pipeline.limit import Limit
from millstream.pipeline.waits import Waits
from millstream.run import build
from millstream.run.checkpoint import CheckpointConfig
from millstream.run.config import HELD_OUT, EvaluationConfig, RunConfig, scheduled_engine
from millstream.run.estimates import evaluation_scores
from millstream.run.own_thread import outside_loop
from millstream.run.prepare import Prepared, prepare_run
from millstream.run.prepare_evaluation import PreparedEvaluation
from millstream.run.tracking.config import AlertsConfig, MetricsConfig, TracesConfig, TrackersConfig
from millstream.serving.request import Pin
from millstream.serving.router import Router
from millstream.types import Completion, Request, RequestKey, Sampling, Task

logger = logging.getLogger(__name__)


BEFORE, AFTER = "before", "after"


class Evaluation(Struct, frozen=True, kw_only=True):
    """One evaluation: its scores, and every rollout as text: all samples of the first task, then those of the next."""

    result: Evaluated
    samples: tuple[Sample, ...]

    def rewards(self) -> list[list[float]]:
        """Of each task, those of its samples."""
        return _by_task([sample.reward for sample in self.samples], self.result.num_samples)


class Measured(Struct, frozen=True, kw_only=True):
    """A model on every evaluation of a config. `accuracy`, `greedy` and `samples` are of the first table: mean rewards, and the
    rollouts as text in the order of its tasks."""

    accuracy: float
    greedy: float | None
    """None: it was not measured."""
    samples: tuple[Sample, ...]
    evaluations: tuple[Evaluation, ...] = ()


class Measurement(NamedTuple):
    """One measurement to make: a table, sampled or greedy. `label` makes its name, given the version that is measured."""

    table: PreparedEvaluation
    is_greedy: bool
    label: Callable[[int], str]


class Evaluator:
    """Evaluations of one model through one router, each on one version of the weights. During training, one at a time."""

    def __init__(self, prepared: Prepared, router: Router, clock: Clock, sink: EventSink, waits: Waits) -> None:
        self._prepared = prepared
        self._router = router
        self._clock = clock
        self._sink = sink
        self._waits = waits
        self._running = 0  # the version of the evaluation that runs while training does; 0: none does
        self._awaiting: set[str] = set()  # tables that wait for engines to be pinned

    async def before(self) -> list[Evaluation]:
        return await self._at_an_end(BEFORE, [one for one in self._prepared.evaluations if one.config.at_start])

    async def after(self) -> list[Evaluation]:
        return await self._at_an_end(AFTER, [one for one in self._prepared.evaluations if one.config.at_end])

    async def all(self) -> list[Evaluation]:
        """As after training, whatever a table says about when."""
        return await self._at_an_end(AFTER, self._prepared.evaluations)

    async def _at_an_end(self, when: str, tables: Sequence[PreparedEvaluation]) -> list[Evaluation]:
        """Nothing is trained meanwhile. Raises `MillstreamError` if every rollout of one failed."""
        jobs = [
            Measurement(table, is_greedy, partial(_label, table, f"{'greedy' if is_greedy else 'sampled'} {when}"))
            for table in tables
            for is_greedy in (False, True)
            if table.config.decoding in ("both", "greedy" if is_greedy else "sampled")
        ]
        found = await self._measure(jobs, at_least=0, in_training=False)
        for one in found:
            if one.result.num_failed == len(one.samples):
                raise MillstreamError(f"every rollout of an evaluation failed, the last with {one.result.failure}")
        return found

    async def after_step(self, version: int) -> None:
        """While training continues, the tables whose `every_steps` divides the version. Left out, with a warning, while the
        evaluation of an earlier step is running."""
        config = self._prepared.config
        due = [
            table for table in self._prepared.evaluations if version % (table.config.every_steps or version + 1) == 0
        ]
        if not due or not 0 < version < config.pipeline.steps:
            return
        if self._running:
            self._warn(
                f"the evaluation after step {version} is left out: that of step {self._running} is still running. Set "
                "every_steps higher, or tasks or samples lower"
            )
            return
        self._running = version
        try:
            jobs = [Measurement(table, not table.config.is_sampled, partial(_step_label, table)) for table in due]
            await self._measure(jobs, at_least=version, in_training=not config.pipeline.is_in_lockstep)
        finally:
            self._running = 0

    def is_awaited(self, name: str) -> bool:
        """Whether an evaluation of this table waits for engines to be pinned."""
        return name in self._awaiting

    async def measure(
        self, name: str, tasks: Sequence[Task], sampling: Sampling
    ) -> tuple[Evaluated, tuple[Sample, ...]]:
        """One sample of each of these tasks, in the run's environments, under this name."""
        table = PreparedEvaluation(
            config=EvaluationConfig(decoding="sampled"),
            tasks=tuple(tasks),
            environment=self._prepared.environment,
            sampling=sampling,
        )
        (found,) = await self._measure([Measurement(table, False, lambda version: name)], at_least=0, in_training=False)
        return found.result, found.samples

    async def _measure(self, jobs: Sequence[Measurement], *, at_least: int, in_training: bool) -> list[Evaluation]:
        """All of them on one version, unless every engine that keeps it is lost: then the rest on another."""
        found = list[Evaluation]()
        while len(found) < len(jobs):
            self._awaiting = {job.table.config.name for job in jobs}
            try:
                with self._waits.idle("evaluation", f"an engine with version {at_least}"):
                    pin = await self._router.pins.take(at_least, in_training=in_training)
            finally:
                self._awaiting = set()
            try:
                while len(found) < len(jobs):
                    found.append(await self._play_all(jobs[len(found)], pin))
            except PinLost as error:
                self._warn(f"an evaluation starts again: {error}")
            finally:
                self._router.pins.release(pin)
        return found

    async def _play_all(self, job: Measurement, pin: Pin) -> Evaluation:
        """All rollouts of one job. One that fails, for whatever reason, counts 0; of several agents, the first one's counts."""
        table, config, name = job.table, self._prepared.config, job.label(pin.version)
        sampling = structs.replace(table.sampling, temperature=0.0, top_p=1.0) if job.is_greedy else table.sampling
        num_samples = 1 if job.is_greedy else table.config.samples
        self._sink.emit(
            EvaluationStarted(at=self._clock.now(), name=name, version=pin.version, engines=tuple(sorted(pin.engines)))
        )
        player = Player(
            environment=table.environment,
            sampling=sampling,
            run_seed=config.seed,
            role=f"eval/{table.config.name}",  # the same random numbers for every version: differences are of the weights
            max_parts=config.rollout.max_parts,
            waits=self._waits,
        )
        slots = sum(engine.slots for engine in self._router.engines if engine.name in pin.engines)
        places = asyncio.Semaphore(
            max(1, slots)
        )  # time limits begin when a rollout does, not while it waits for a slot
        playing = [
            asyncio.create_task(self._play(player, index, sample, task, f"evaluation {name} task {index}", pin, places))
            for index, task in enumerate(table.tasks)
            for sample in range(num_samples)
        ]
        try:  # its rollouts have their timeouts
            every = asyncio.gather(*playing)
            samples = tuple(await self._waits.on(f"evaluation {name}", "its rollouts", every, deadline=False))
        finally:
            for rollout in playing:
                rollout.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
        result = self._result(job, name, pin.version, num_samples, samples)
        self._sink.emit(result)
        return Evaluation(result=result, samples=samples)

    async def _play(
        self, player: Player, index: int, sample: int, task: Task, owner: str, pin: Pin, places: asyncio.Semaphore
    ) -> Sample:
        key, limit = RequestKey(group_id=-1 - index, member=sample), Limit(self._prepared.config.rollout.timeout_s)
        generate = partial(self._generate, owner=owner, pin=pin)
        async with places:
            try:
                result = await player.play(task, key, generate, owner=owner, limit=limit)
            except StallError as stall:  # it ends a run from a rollout in training, but not from one of an evaluation
                result = EpisodeResult((), stall, [])
        error, decode = result.failure, self._prepared.text.decode
        return Sample(
            prompt=task_text(task),
            completion=spoken_text(result.played, decode),
            reward=result.parts[0].reward if result.parts else 0.0,
            answer=task.answer,
            failure="" if error is None else f"{type(error).__name__}: {error}",
        )

    async def _generate(self, request: Request, *, owner: str, pin: Pin) -> Completion:
        with self._waits.idle(owner, "an engine"):
            return await self._router.generate(request, floor=pin.version, pin=pin)

    def _result(
        self, job: Measurement, name: str, version: int, num_samples: int, samples: Sequence[Sample]
    ) -> Evaluated:
        failures, rewards = [sample.failure for sample in samples if sample.failure], [one.reward for one in samples]
        rewards_TK = _by_task(rewards, num_samples)
        return Evaluated(
            at=self._clock.now(),
            name=name,
            version=version,
            accuracy=sum(rewards) / max(1, len(rewards)),
            num_tasks=len(rewards_TK),
            num_failed=len(failures),
            failure=failures[-1] if failures else "",
            sample=samples[0] if samples else None,
            table="" if name == WARMUP else job.table.config.name,
            is_greedy=job.is_greedy,
            num_samples=num_samples,
            scores=evaluation_scores(rewards_TK, pass_reward=job.table.config.pass_reward),
        )

    def _warn(self, message: str) -> None:
        self._sink.emit(Warned(at=self._clock.now(), message=message))


def _by_task(rewards: Sequence[float], num_samples: int) -> list[list[float]]:
    return [list(rewards[start : start + num_samples]) for start in range(0, len(rewards), num_samples)]


def _label(table: PreparedEvaluation, what: str, version: int) -> str:
    return what if table.config.name == HELD_OUT else f"{table.config.name} {what}"


def _step_label(table: PreparedEvaluation, version: int) -> str:
    return _label(table, f"step {version}", version)


@outside_loop
def evaluate(config: RunConfig, *, reward: PassedRewards | None = None, data: PassedData | None = None) -> Measured:
    """The config's model on every evaluation of the config, and what it wrote.

    Measured on this machine with Millstream's own engine, whatever the config says about where a run has its parts. Creates no
    run folder. Uses the random seeds of a run's last evaluation, so that a finished run's model gets the same figure again."""
    here = structs.replace(
        config,
        runtime="local",
        resources=ResourcesConfig(reward_gpus=config.resources.reward_gpus),
        engine=_own_engine(config.engine),
        learner=structs.replace(config.learner, lora=_first_adapters(config.learner.lora)),
        checkpoint=CheckpointConfig(),
        trackers=TrackersConfig(),
        metrics=MetricsConfig(),
        traces=TracesConfig(),
        alerts=AlertsConfig(),
    )
    prepared = prepare_run(here, reward, data_passed=data, is_alone=True)
    if not prepared.evaluations:
        raise ConfigError("data.holdout = 0: there is nothing to evaluate on")
    if prepared.warning:
        logger.warning("%s", prepared.warning)
    return asyncio.run(_measure_alone(prepared))


async def _measure_alone(prepared: Prepared) -> Measured:
    clock, sink, config = RealClock(), Tee([]), prepared.config
    engine = build.build_engine(
        scheduled_engine(config), prepared.model, clock=clock, sink=sink, tokenizer=prepared.tokenizer_for_stops
    )
    evaluator = Evaluator(prepared, Router([engine]), clock, sink, new_waits(config, clock, sink))
    try:
        found = await evaluator.all()
    finally:
        await prepared.close()
        await engine.close()
    first, name = found[0], found[0].result.table
    greedy = [one.result.accuracy for one in found if one.result.is_greedy and one.result.table == name]
    return Measured(
        accuracy=first.result.accuracy,
        greedy=greedy[0] if greedy else None,
        samples=first.samples,
        evaluations=tuple(found),
    )


def _first_adapters(lora: LoraConfig | None) -> LoraConfig | None:
    """Those that training starts from; new ones would change nothing."""
    return None if lora is None or lora.path is None else lora


def _own_engine(config: EngineConfig) -> EngineConfig:
    """Millstream's own engine on a thread, in place of the run's."""
    if config.kind == "torch":
        return structs.replace(config, process=False, replicas=1)
    return EngineConfig(slots=config.slots, prefill_tokens=config.prefill_tokens, process=False)


def new_waits(config: RunConfig, clock: Clock, sink: EventSink) -> Waits:
    return Waits(clock=clock, sink=sink, stall_s=config.pipeline.stall_s, deadline_s=config.pipeline.deadline_s)
