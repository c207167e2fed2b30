"""Evaluation: the mean reward of a model on held-out tasks, of a run's model between its steps or of a model alone.

An evaluation during training takes no budget, pauses nothing, and reports which weights version it measured. Imports torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from msgspec import Struct, structs

from millstream.clock import Clock, RealClock
from millstream.cluster.resources import ResourcesConfig
from millstream.engine import EngineConfig
from millstream.env.data import PassedData
from millstream.env.rewards import PassedRewards
from millstream.errors import ConfigError, MillstreamError, StallError
from millstream.events import Evaluated, EventSink, Sample
from millstream.events.sinks import Tee
from millstream.model.lora import LoraConfig
from millstream.pipeline.episode import EpisodeResult, Player
from millstream.pipeline.limit import Limit
from millstream.pipeline.waits import Waits
from millstream.run import build
from millstream.run.config import RunConfig, scheduled_engine
from millstream.run.prepare import Prepared, prepare_run
from millstream.serving.router import Router
from millstream.types import Completion, Request, RequestKey, Sampling, Task

logger = logging.getLogger(__name__)


class Measured(Struct, frozen=True, kw_only=True):
    """A model on the held-out tasks: mean rewards, and every sampled rollout as text, in the order of the tasks."""

    accuracy: float
    greedy: float
    samples: tuple[Sample, ...]


class Evaluator:
    """Evaluations of one model through one router. During training, one at a time."""

    def __init__(self, prepared: Prepared, router: Router, clock: Clock, sink: EventSink, waits: Waits) -> None:
        self._prepared = prepared
        self._router = router
        self._clock = clock
        self._sink = sink
        self._waits = waits
        self._is_running = False

    async def sampled_and_greedy(self, when: str) -> Measured | None:
        """Sampled as in training, and greedy; None without held-out tasks."""
        tasks, sampling = self._prepared.held_out, self._prepared.sampling
        if not tasks:
            return None
        sampled, samples = await self.measure(f"sampled {when}", tasks, sampling)
        if sampled.num_failed == sampled.num_tasks:
            raise MillstreamError(f"every rollout of an evaluation failed, the last with {sampled.failure}")
        greedy, _ = await self.measure(f"greedy {when}", tasks, structs.replace(sampling, temperature=0.0))
        return Measured(accuracy=sampled.accuracy, greedy=greedy.accuracy, samples=samples)

    async def after_step(self, version: int) -> None:
        """While training continues, every `evaluation.every_steps` steps; skipped while another one is running."""
        config = self._prepared.config
        every = config.evaluation.every_steps
        is_due = every is not None and version % every == 0 and 0 < version < config.pipeline.steps
        if not is_due or self._is_running or not self._prepared.held_out:
            return
        self._is_running = True
        try:
            await self.measure(f"step {version}", self._prepared.held_out, self._prepared.sampling)
        finally:
            self._is_running = False

    async def measure(
        self, name: str, tasks: Sequence[Task], sampling: Sampling
    ) -> tuple[Evaluated, tuple[Sample, ...]]:
        """The mean reward of one rollout a task (of several agents, that of the first), and the rollouts. A rollout that
        fails, for whatever reason, counts 0."""
        config, versions = self._prepared.config, set[int]()
        player = Player(
            environment=self._prepared.environment,
            sampling=sampling,
            run_seed=config.seed,
            role=f"eval/{name}",
            max_parts=config.rollout.max_parts,
            waits=self._waits,
        )
        playing = asyncio.gather(
            *(
                self._play(player, index, task, f"evaluation {name} task {index}", versions)
                for index, task in enumerate(tasks)
            )
        )
        # its rollouts have their timeouts
        samples = await self._waits.on(f"evaluation {name}", "its rollouts", playing, deadline=False)
        result = _result(name, self._clock.now(), versions, samples)
        self._sink.emit(result)
        return result, tuple(samples)

    async def _play(self, player: Player, index: int, task: Task, owner: str, versions: set[int]) -> Sample:
        key, limit = RequestKey(group_id=-1 - index, member=0), Limit(self._prepared.config.rollout.timeout_s)
        generate = partial(self._generate, owner=owner, versions=versions)
        try:
            result = await player.play(task, key, generate, owner=owner, limit=limit)
        except StallError as stall:  # it ends a run from a rollout in training, but not from one of an evaluation
            result = EpisodeResult((), stall, [])
        error, decode = result.failure, self._prepared.text.decode
        return Sample(
            prompt=_as_text(task),
            completion="\n".join(decode(turn.tokens) for turn in result.turns),
            reward=result.parts[0].reward if result.parts else 0.0,
            answer=task.answer,
            failure="" if error is None else f"{type(error).__name__}: {error}",
        )

    async def _generate(self, request: Request, *, owner: str, versions: set[int]) -> Completion:
        with self._waits.idle(owner, "an engine"):
            completion = await self._router.generate(request, floor=0)
        versions.update(completion.versions)
        return completion


def _result(name: str, at: float, versions: set[int], samples: Sequence[Sample]) -> Evaluated:
    failures = [sample.failure for sample in samples if sample.failure]
    return Evaluated(
        at=at,
        name=name,
        version=min(versions) if len(versions) == 1 else None,
        accuracy=sum(sample.reward for sample in samples) / max(1, len(samples)),
        num_tasks=len(samples),
        num_failed=len(failures),
        failure=failures[-1] if failures else "",
        sample=samples[0] if samples else None,
    )


def _as_text(task: Task) -> str:
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(f"{message.role}: {message.content}" for message in task.prompt)


def evaluate(config: RunConfig, *, reward: PassedRewards | None = None, data: PassedData | None = None) -> Measured:
    """The mean reward of the config's model on its held-out tasks, sampled as in training and greedy, and what it wrote.

    Measured on this machine with Millstream's own engine, whatever the config says about where a run has its parts. Creates no
    run folder. Uses the random seeds of a run's last evaluation, so that a finished run's model gets the same figure again."""
    here = structs.replace(
        config,
        runtime="local",
        resources=ResourcesConfig(),
        engine=_own_engine(config.engine),
        learner=structs.replace(config.learner, lora=_first_adapters(config.learner.lora)),
    )
    prepared = prepare_run(here, reward, data_passed=data)
    if not prepared.held_out:
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
        found = await evaluator.sampled_and_greedy("after")
    finally:
        await prepared.environment.close()
        await engine.close()
    assert found is not None
    return found


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
