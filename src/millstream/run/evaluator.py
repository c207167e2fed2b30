"""A run's evaluations, one at a time; and the evaluation of a model alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from msgspec import structs

from millstream.clock import RealClock
from millstream.cluster.resources import ResourcesConfig
from millstream.engine import EngineConfig
from millstream.env.rewards import Reward
from millstream.errors import ConfigError, MillstreamError
from millstream.events import (
    Evaluated,
    EventSink,
    Sample,
)
from millstream.events.sinks import Tee
from millstream.pipeline.waits import Waits
from millstream.run import build
from millstream.run.config import RunConfig
from millstream.run.evaluate import Measured, evaluate
from millstream.run.prepare import Prepared, prepare
from millstream.serving.router import Router
from millstream.types import Sampling, Task

logger = logging.getLogger(__name__)


def evaluate_model(config: RunConfig, *, reward: Reward | None = None) -> Measured:
    """The config's model on its held-out tasks: sampled, and greedy, on this machine and on our own engine, wherever and
    whatever the run's were. Leaves no run folder. Draws the random numbers of a run's last evaluation, so that a finished
    run's model gets its figure again."""
    learner = structs.replace(config.learner, lora=None)  # new adapters would change nothing
    here = structs.replace(config, runtime="local", resources=ResourcesConfig(), learner=learner)
    prepared = prepare(here, reward)
    if not prepared.held_out:
        raise ConfigError("data.holdout = 0: there is nothing to evaluate on")
    if prepared.warning:
        logger.warning("%s", prepared.warning)

    async def measure() -> Measured:
        clock, sink = RealClock(), Tee([])
        own, stops = _own_engine(config.engine), prepared.tokenizer_for_stops
        engine = build.build_engine(own, prepared.model, clock=clock, sink=sink, tokenizer=stops)
        evaluator = Evaluator(prepared, Router([engine]), clock, sink, waits_of(config, clock, sink))
        try:
            found = await evaluator.sampled_and_greedy("after")
        finally:
            await prepared.environment.close()
            await engine.close()
        assert found is not None
        return found

    return asyncio.run(measure())


def _own_engine(config: EngineConfig) -> EngineConfig:
    """Ours, on a thread, in place of what a run had."""
    if config.kind == "torch":
        return structs.replace(config, process=False)
    return EngineConfig(slots=config.slots, prefill_tokens=config.prefill_tokens, process=False)


class Evaluator:
    """Evaluations of one run, one at a time."""

    def __init__(self, prepared: Prepared, router: Router, clock: RealClock, sink: EventSink, waits: Waits) -> None:
        self._prepared = prepared
        self._router = router
        self._clock = clock
        self._sink = sink
        self._waits = waits
        self._is_running = False

    async def once(self, name: str, tasks: Sequence[Task], sampling: Sampling) -> tuple[Evaluated, tuple[Sample, ...]]:
        config = self._prepared.config
        evaluation = evaluate(
            name,
            self._router,
            self._prepared.environment,
            tasks,
            sampling,
            clock=self._clock,
            sink=self._sink,
            waits=self._waits,
            seed=config.seed,
            timeout_s=config.rollout.timeout_s,
            decode=self._prepared.text.decode,
            max_parts=config.rollout.max_parts,
        )
        # its rollouts have their timeouts
        return await self._waits.on(f"evaluation {name}", "its rollouts", evaluation, deadline=False)

    async def sampled_and_greedy(self, when: str) -> Measured | None:
        """Sampled as in training, and greedy; None without held-out tasks."""
        tasks, sampling = self._prepared.held_out, self._prepared.sampling
        if not tasks:
            return None
        sampled, samples = await self.once(f"sampled {when}", tasks, sampling)
        if sampled.num_failed == sampled.num_tasks:
            raise MillstreamError(f"every rollout of an evaluation failed, the last with {sampled.failure}")
        greedy, _ = await self.once(f"greedy {when}", tasks, structs.replace(sampling, temperature=0.0))
        return Measured(accuracy=sampled.accuracy, greedy=greedy.accuracy, samples=samples)

    async def beside(self, version: int) -> None:
        """While training runs, every so many steps; left out while another is running."""
        config = self._prepared.config
        every = config.evaluation.every_steps
        is_due = every is not None and version % every == 0 and version < config.pipeline.steps
        if not is_due or self._is_running or not self._prepared.held_out:
            return
        self._is_running = True
        try:
            await self.once(f"step {version}", self._prepared.held_out, self._prepared.sampling)
        finally:
            self._is_running = False


def waits_of(config: RunConfig, clock: RealClock, sink: EventSink) -> Waits:
    return Waits(clock=clock, sink=sink, stall_s=config.pipeline.stall_s, deadline_s=config.pipeline.deadline_s)
