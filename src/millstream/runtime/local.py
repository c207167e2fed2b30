"""The local runtime: one process, everything in it. An engine thread, a learner thread, and the event loop between them.

Steps of a run: model, data, warm-up (if asked for), evaluation, reinforcement learning, evaluation, the saved model.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from millstream.algo import recipe
from millstream.clock import RealClock
from millstream.config import to_toml
from millstream.engine.torch import TorchEngine
from millstream.env.data import DataSet, in_order, read
from millstream.errors import ConfigError
from millstream.events import Evaluated, EventSink, RunEnded, RunStarted, WarmedUp
from millstream.events.sinks import JsonlSink, MetricsSink, Tee, read_events
from millstream.events.summary import Summary, summarise
from millstream.learner import LearnerConfig
from millstream.learner.torch import TorchLearner
from millstream.model.load import set_up_cpu
from millstream.runtime import build
from millstream.runtime.config import RunConfig, WarmupConfig, check_run
from millstream.runtime.evaluate import evaluate
from millstream.runtime.pipeline import Parts, Pipeline
from millstream.runtime.router import Router
from millstream.runtime.warmup import gold_row, warm_up
from millstream.types import Sampling, Task, Weights
from millstream.weights.local import LocalChannel

EVENTS = "events.jsonl"
STATUS_S = 1.0


class RunResult(Struct, frozen=True, kw_only=True):
    """What a run has to show. Accuracies are mean rewards on the held-out tasks; None if there are none."""

    run_dir: str
    accuracy_before: float | None
    accuracy_after: float | None
    greedy_before: float | None
    greedy_after: float | None
    summary: Summary


def train(config: RunConfig, *, sinks: Sequence[EventSink] = (), name: str = "run") -> RunResult:
    """Run a config from beginning to end in this process."""
    check_run(config)
    set_up_cpu()
    run_dir = make_run_dir(config, name)
    (run_dir / "config.toml").write_text(to_toml(config))
    return asyncio.run(_Run(config, run_dir, sinks).run())


def evaluate_model(config: RunConfig) -> tuple[float, float]:
    """Accuracy of the config's model on its held-out tasks: sampled, and greedy. Leaves no run folder."""
    set_up_cpu()
    data = read(config.data, seed=config.seed)
    if not data.held_out:
        raise ConfigError("data.holdout = 0: there is nothing to evaluate on")
    model, tokenizer = build.build_model(config.model, seed=config.seed)
    clock, sink = RealClock(), Tee([])
    environment = build.build_environment(config, build.Text(tokenizer=tokenizer))
    sampling = build.build_sampling(config, tokenizer)

    async def measure() -> tuple[float, float]:
        engine = build.build_engine(structs.replace(config.engine, process=False), model, clock=clock, sink=sink)
        results = [
            await evaluate(
                name, Router([engine]), environment, data.held_out, how, clock=clock, sink=sink, seed=config.seed
            )
            for name, how in (("sampled", sampling), ("greedy", structs.replace(sampling, temperature=0.0)))
        ]
        await engine.close()
        return results[0].accuracy, results[1].accuracy

    return asyncio.run(measure())


def make_run_dir(config: RunConfig, name: str) -> Path:
    if config.run_dir is not None:
        path = Path(config.run_dir)
        if (path / EVENTS).exists():
            raise ConfigError(f"{path} holds a run already: choose another run_dir, or remove it")
    else:
        number = 1
        while (path := Path("runs") / f"{name}-{number}").exists():
            number += 1
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {path}: {error.strerror}") from error
    return path


class _Run:
    def __init__(self, config: RunConfig, run_dir: Path, sinks: Sequence[EventSink]) -> None:
        self._config, self._dir = config, run_dir
        self._clock = RealClock()
        self._file = JsonlSink(run_dir / EVENTS)
        self._metrics = MetricsSink(run_dir / "metrics.jsonl")
        self._sink = Tee([self._file, self._metrics, *sinks])

    async def run(self) -> RunResult:
        config, seed = self._config, self._config.seed
        data = read(config.data, seed=seed)
        self._held_out = data.held_out[: config.evaluation.tasks]
        self._evaluating = asyncio.Lock()
        model, tokenizer = build.build_model(config.model, seed=seed)
        self._text = build.Text(tokenizer=tokenizer)
        self._environment = build.build_environment(config, self._text)
        self._sampling = build.build_sampling(config, tokenizer)
        engine = build.build_engine(config.engine, model, clock=self._clock, sink=self._sink)
        self._router = Router([engine])
        try:
            if config.warmup is not None:
                learner = build.build_learner(
                    config,
                    model,
                    tokenizer,
                    learner=LearnerConfig(learning_rate=config.warmup.learning_rate),
                    objective=recipe.supervised(),
                    num_steps=None,
                )
                await self._warm_up(learner, engine, data, config.warmup)
            before = await self._evaluate("before")
            learner = build.build_learner(
                config,
                model,
                tokenizer,
                learner=config.learner,
                objective=recipe.objective(config.algorithm, max_tokens=config.rollout.max_tokens),
                num_steps=config.pipeline.steps,
            )
            await self._reinforce(learner, engine, data)
            after = await self._evaluate("after")
        finally:
            await engine.close()
        learner.save(self._dir / "model")
        return self._finish(before, after)

    async def _warm_up(self, learner: TorchLearner, engine: TorchEngine, data: DataSet, config: WarmupConfig) -> None:
        probe = data.train[:128]

        async def accuracy_of(weights: Weights) -> float:
            await engine.load(0, weights)
            return (await self._evaluate_once("warmup", probe, self._sampling)).accuracy

        await warm_up(
            learner,
            data.train,
            lambda task: gold_row(self._text.encode(task), self._text.encode_answer(task)),
            accuracy_of,
            config,
            seed=self._config.seed,
            on_progress=lambda step, accuracy: self._sink.emit(
                WarmedUp(
                    at=self._clock.now(),
                    step=step,
                    max_steps=config.max_steps,
                    accuracy=accuracy,
                    stop_at=config.stop_at,
                )
            ),
        )
        await engine.load(0, await learner.weights())
        learner.close()

    async def _evaluate(self, when: str) -> tuple[float, float] | None:
        """Sampled as in training, and greedy."""
        tasks, greedily = self._held_out, structs.replace(self._sampling, temperature=0.0)
        if not tasks:
            return None
        sampled = await self._evaluate_once(f"sampled {when}", tasks, self._sampling)
        greedy = await self._evaluate_once(f"greedy {when}", tasks, greedily)
        return sampled.accuracy, greedy.accuracy

    async def _evaluate_beside(self, version: int) -> None:
        """While training runs: one evaluation at a time."""
        every = self._config.evaluation.every_steps
        if every is not None and version % every == 0 and version < self._config.pipeline.steps and self._held_out:
            async with self._evaluating:
                await self._evaluate_once(f"step {version}", self._held_out, self._sampling)

    async def _evaluate_once(self, name: str, tasks: Sequence[Task], sampling: Sampling) -> Evaluated:
        return await evaluate(
            name,
            self._router,
            self._environment,
            tasks,
            sampling,
            clock=self._clock,
            sink=self._sink,
            seed=self._config.seed,
        )

    async def _reinforce(self, learner: TorchLearner, engine: TorchEngine, data: DataSet) -> None:
        config = self._config
        parts = Parts(
            engines=(engine,),
            environment=self._environment,
            learner=learner,
            store=build.build_store(config),
            channel=LocalChannel(),
            clock=self._clock,
            sink=self._sink,
        )
        pipeline = Pipeline(
            parts,
            in_order(data.train, seed=config.seed, shuffle=config.data.shuffle),
            build.build_algorithm(config, self._sampling),
            config=config.pipeline,
            rollout=config.rollout,
            seed=config.seed,
            after_step=self._evaluate_beside if config.evaluation.every_steps is not None else None,
        )
        self._sink.emit(
            RunStarted(
                at=self._clock.now(),
                seed=config.seed,
                groups_per_step=config.pipeline.groups_per_step,
                group_size=config.rollout.group_size,
                max_lag=config.pipeline.max_lag,
                lag_bound=pipeline.admission.bound,
                budget=pipeline.admission.budget,
            )
        )
        gc.collect()
        gc.freeze()  # what the libraries made at import is here to stay: no need to walk over it again and again
        watch = asyncio.create_task(self._watch(pipeline))
        try:
            await pipeline.run()
        finally:
            watch.cancel()
        self._sink.emit(RunEnded(at=self._clock.now(), outcome="finished", version=pipeline.admission.version))

    async def _watch(self, pipeline: Pipeline) -> None:
        """Says about once a second what the run is doing."""
        while True:
            self._sink.emit(pipeline.status())
            await asyncio.sleep(STATUS_S)

    def _finish(self, before: tuple[float, float] | None, after: tuple[float, float] | None) -> RunResult:
        self._file.close()
        self._metrics.close()
        result = RunResult(
            run_dir=str(self._dir),
            accuracy_before=before and before[0],
            accuracy_after=after and after[0],
            greedy_before=before and before[1],
            greedy_after=after and after[1],
            summary=summarise(read_events(self._dir / EVENTS)),
        )
        flat = {**structs.asdict(result), **structs.asdict(result.summary)}
        del flat["summary"]
        (self._dir / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(flat), indent=2) + b"\n")
        return result
