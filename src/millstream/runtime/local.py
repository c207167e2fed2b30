"""The local runtime: one machine, an engine, a learner thread, and the event loop between them.

Steps of a run: data and model, the run folder, warm-up (if asked for), evaluation, reinforcement learning, the saved model,
evaluation, summary. Whatever ends it, the folder says so: the last event is `RunEnded`, with the name of the error.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, structs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.algo import recipe
from millstream.clock import RealClock
from millstream.config import to_toml
from millstream.engine.torch import TorchEngine
from millstream.env.data import DataSet, in_order, read
from millstream.env.single_turn import SingleTurn
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
WARMUP_PROBE = 128
"""Training tasks that the warm-up is measured on."""


class RunResult(Struct, frozen=True, kw_only=True):
    """What a run has to show. Accuracies are mean rewards on the held-out tasks; None if there are none."""

    run_dir: str
    accuracy_before: float | None
    accuracy_after: float | None
    greedy_before: float | None
    greedy_after: float | None
    summary: Summary


class Prepared(Struct, frozen=True, kw_only=True, eq=False):
    """Everything that can be wrong with a config, a data set, a reward or a model is found while this is made."""

    config: RunConfig
    data: DataSet
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    text: build.Text
    environment: SingleTurn
    sampling: Sampling

    @property
    def held_out(self) -> tuple[Task, ...]:
        return self.data.held_out[: self.config.evaluation.tasks]


def prepare(config: RunConfig) -> Prepared:
    check_run(config)
    set_up_cpu()
    data = read(config.data, seed=config.seed)
    model, tokenizer = build.build_model(config.model, seed=config.seed)
    text = build.Text(tokenizer=tokenizer)
    build.check_lengths(config, model, text, (*data.held_out, *data.train))
    return Prepared(
        config=config,
        data=data,
        model=model,
        tokenizer=tokenizer,
        text=text,
        environment=build.build_environment(config, text),
        sampling=build.build_sampling(config, model, tokenizer),
    )


def train(config: RunConfig, *, sinks: Sequence[EventSink] = (), name: str = "run") -> RunResult:
    """Run a config from beginning to end on this machine."""
    prepared = prepare(config)
    run_dir = make_run_dir(config, name)
    file, metrics = JsonlSink(run_dir / EVENTS), MetricsSink(run_dir / "metrics.jsonl")
    run = _Run(prepared, run_dir, Tee([file, metrics, *sinks]))
    outcome = "finished"
    try:
        asyncio.run(run.run())
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        run.say_ended(outcome)
        metrics.close()
        file.close()
    return run.result()


def evaluate_model(config: RunConfig) -> tuple[float, float]:
    """Accuracy of the config's model on its held-out tasks: sampled, and greedy. Leaves no run folder."""
    prepared = prepare(config)
    if not prepared.held_out:
        raise ConfigError("data.holdout = 0: there is nothing to evaluate on")

    async def measure() -> tuple[float, float]:
        clock, sink = RealClock(), Tee([])
        on_thread = structs.replace(config.engine, process=False)
        engine = build.build_engine(on_thread, prepared.model, clock=clock, sink=sink)
        evaluator = _Evaluator(prepared, Router([engine]), clock, sink)
        found = await evaluator.sampled_and_greedy("")
        await engine.close()
        assert found is not None
        return found

    return asyncio.run(measure())


def make_run_dir(config: RunConfig, name: str) -> Path:
    """The folder of the run, with the resolved config in it."""
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
        (path / "config.toml").write_text(to_toml(config))
    except OSError as error:
        raise ConfigError(f"cannot write the run folder {path}: {error.strerror}") from error
    return path


class _Evaluator:
    """Evaluations of one run, one at a time."""

    def __init__(self, prepared: Prepared, router: Router, clock: RealClock, sink: EventSink) -> None:
        self._prepared, self._router, self._clock, self._sink = prepared, router, clock, sink
        self._is_running = False

    async def once(self, name: str, tasks: Sequence[Task], sampling: Sampling) -> Evaluated:
        config = self._prepared.config
        return await evaluate(
            name,
            self._router,
            self._prepared.environment,
            tasks,
            sampling,
            clock=self._clock,
            sink=self._sink,
            seed=config.seed,
            timeout_s=config.rollout.timeout_s,
        )

    async def sampled_and_greedy(self, when: str) -> tuple[float, float] | None:
        """Sampled as in training, and greedy; None without held-out tasks."""
        tasks, sampling = self._prepared.held_out, self._prepared.sampling
        if not tasks:
            return None
        sampled = await self.once(f"sampled {when}".strip(), tasks, sampling)
        greedy = await self.once(f"greedy {when}".strip(), tasks, structs.replace(sampling, temperature=0.0))
        return sampled.accuracy, greedy.accuracy

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


class _Run:
    def __init__(self, prepared: Prepared, run_dir: Path, sink: EventSink) -> None:
        self._prepared, self._dir, self._sink = prepared, run_dir, sink
        self._clock = RealClock()
        self._before: tuple[float, float] | None = None
        self._after: tuple[float, float] | None = None
        self._version = 0

    async def run(self) -> None:
        prepared, config = self._prepared, self._prepared.config
        engine = build.build_engine(config.engine, prepared.model, clock=self._clock, sink=self._sink)
        evaluator = _Evaluator(prepared, Router([engine]), self._clock, self._sink)
        try:
            if config.warmup is not None:
                await self._warm_up(engine, evaluator, config.warmup)
            self._before = await evaluator.sampled_and_greedy("before")
            learner = build.build_learner(
                config,
                prepared.model,
                prepared.tokenizer,
                learner=config.learner,
                objective=recipe.objective(config.algorithm, max_tokens=config.rollout.max_tokens),
                num_steps=config.pipeline.steps,
            )
            try:
                await self._reinforce(learner, engine, evaluator)
            finally:
                await learner.close()
            learner.save(self._dir / "model")
            self._after = await evaluator.sampled_and_greedy("after")
        finally:
            await engine.close()

    async def _warm_up(self, engine: TorchEngine, evaluator: _Evaluator, config: WarmupConfig) -> None:
        prepared, text = self._prepared, self._prepared.text
        learner = build.build_learner(
            prepared.config,
            prepared.model,
            prepared.tokenizer,
            learner=LearnerConfig(learning_rate=config.learning_rate),
            objective=recipe.supervised(),
            num_steps=None,
        )

        async def accuracy_of(weights: Weights) -> float:
            await engine.load(0, weights)
            return (await evaluator.once("warmup", prepared.data.train[:WARMUP_PROBE], prepared.sampling)).accuracy

        def say(step: int, accuracy: float) -> None:
            now, most = self._clock.now(), config.max_steps
            self._sink.emit(WarmedUp(at=now, step=step, max_steps=most, accuracy=accuracy, stop_at=config.stop_at))

        try:
            await warm_up(
                learner,
                prepared.data.train,
                lambda task: gold_row(text.encode(task), text.encode_answer(task)),
                accuracy_of,
                config,
                seed=prepared.config.seed,
                on_progress=say,
            )
            await engine.load(0, await learner.weights())
        finally:
            await learner.close()

    async def _reinforce(self, learner: TorchLearner, engine: TorchEngine, evaluator: _Evaluator) -> None:
        prepared, config = self._prepared, self._prepared.config
        parts = Parts(
            engines=(engine,),
            environment=prepared.environment,
            learner=learner,
            store=build.build_store(config),
            channel=LocalChannel(),
            clock=self._clock,
            sink=self._sink,
        )
        pipeline = Pipeline(
            parts,
            in_order(prepared.data.train, seed=config.seed, shuffle=config.data.shuffle),
            build.build_algorithm(config, prepared.sampling),
            config=config.pipeline,
            rollout=config.rollout,
            seed=config.seed,
            after_step=evaluator.beside if config.evaluation.every_steps is not None else None,
        )
        self._say_started(pipeline)
        gc.collect()
        gc.freeze()  # what the libraries made at import is here to stay: no need to walk over it again and again
        watch = asyncio.create_task(self._watch(pipeline))
        try:
            await pipeline.run()
        finally:
            watch.cancel()
            self._version = pipeline.admission.version

    async def _watch(self, pipeline: Pipeline) -> None:
        """Says about once a second what the run is doing."""
        while True:
            self._sink.emit(pipeline.status())
            await asyncio.sleep(STATUS_S)

    def _say_started(self, pipeline: Pipeline) -> None:
        config = self._prepared.config
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

    def say_ended(self, outcome: str) -> None:
        self._sink.emit(RunEnded(at=self._clock.now(), outcome=outcome, version=self._version))

    def result(self) -> RunResult:
        """Also written as `summary.json`, flat."""
        before, after = self._before, self._after
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
