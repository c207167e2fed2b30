"""A simulated run: the production pipeline, router, fleet, admission rule and store on the virtual clock, with simulated
engines, environment and learner (`millstream.sim`). The same config and seed give the same events,
byte for byte. Imports no torch.

What is left out: the model and the data (tasks are numbered), evaluations, the warm-up, checkpoints, trackers. What a real run
does at its start takes no time.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, structs

from millstream.algo import advantage_of, credit_for, signal_for
from millstream.clock import VirtualClock, run_virtual
from millstream.config import load, to_toml
from millstream.engine.base import SPAN_S
from millstream.env.data import in_order
from millstream.errors import ConfigError, OutputError
from millstream.events import ConfigWritten, Event, EventSink, RunEnded, RunStarted
from millstream.events.sinks import JsonlSink, MemorySink, MetricsSink
from millstream.learner.config import call_tokens
from millstream.pipeline.pipeline import Algorithm, Parts, Pipeline
from millstream.pipeline.schema import Stage, store_tasks
from millstream.pipeline.waits import Waits
from millstream.run.build_stages import build_stages
from millstream.run.check import check_combinations
from millstream.run.config import RunConfig, critic_of, reference_of, with_absolute_paths
from millstream.run.folder import FINISHED, RunFolder, RunResult, check_free, result_of
from millstream.run.garbage import seldom_collected
from millstream.run.log import run_started
from millstream.run.places import place
from millstream.seeds import derive_seed
from millstream.serving.fleet import Fleet
from millstream.sim.config import CostsFile, SimConfig, SimDraws, SimFailuresConfig
from millstream.sim.draws import constant
from millstream.sim.engine import SimEngine
from millstream.sim.environment import SimDriver, SimEnvironment, by_prompt
from millstream.sim.learner import SimCritic, SimFollower, SimLearner, SimScorer
from millstream.sim.meter import DecodeMeter
from millstream.sim.sharing import Sharing
from millstream.store.memory import MemoryStore
from millstream.types import Sampling, Task
from millstream.weights.local import LocalChannel

STATUS_S = 1.0  # of up to `MAX_SHORT_STATUS` engines; of more, longer
MAX_SHORT_STATUS = 64
NEWS_S = 1.0  # how often engines report tokens, where engines fail
MAX_SHORT_SPANS = 8  # engines; spans of more are longer, so that there are as many events


class Simulated(Struct, frozen=True, kw_only=True):
    result: RunResult
    events: list[Event]


def costs_of(config: RunConfig, costs: Path | None = None) -> SimConfig:
    """The `[sim]` table of a config, or of the file of costs. Raises `ConfigError` unless one of them has it."""
    if costs is not None:
        return load(costs, CostsFile).sim
    if config.sim is None:
        raise ConfigError(
            "the config has no [sim] table, which says what things cost: add one (an empty one has the costs of a small model "
            "on an H200), or type --costs FILE with one. docs/simulation.md lists its keys"
        )
    return config.sim


def simulate(config: RunConfig, sim: SimConfig, *, out: Path | None = None) -> Simulated:
    """Run the config with these costs. `out`: a new run folder, with config, events, metrics, summary and trace. Raises
    `ConfigError` for a config that cannot be simulated, and what ends a real run."""
    config = place(structs.replace(config, sim=sim, run_dir=None), None)[0]
    draws = sim.read_draws()
    _check(config, sim, draws)
    memory = MemorySink()
    if out is None:
        _run(config, sim, draws, memory)
        return Simulated(result=result_of(memory.events, ""), events=memory.events)
    check_free(str(out))
    folder = RunFolder.create(structs.replace(config, run_dir=str(out)), "sim")
    try:
        folder.keep(config)  # without the folder's own name: the same run has the same files, wherever they are
        files: list[JsonlSink | MetricsSink] = [JsonlSink(folder.events), MetricsSink(folder.metrics)]
        try:
            _run(config, sim, draws, _All([memory, *files]))
        finally:
            for file in files:
                file.close()
        folder.conclude()
    except BaseException as error:
        if not any(isinstance(event, RunStarted) for event in memory.events):
            folder.discard()
        if isinstance(error, OSError):
            raise OutputError(f"cannot write {out}: {error.strerror}") from error
        raise
    finally:
        folder.unlock()
    return Simulated(result=result_of(memory.events, str(out)), events=memory.events)


class _All:
    """Every event goes to all of the sinks."""

    def __init__(self, sinks: list[EventSink]) -> None:
        self._sinks = sinks

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)


def _check(config: RunConfig, sim: SimConfig, draws: SimDraws) -> None:
    check_combinations(config)
    if not config.pipeline.steps or config.pipeline.rollouts_only or config.data.rollouts is not None:
        raise ConfigError(
            "nothing to simulate: the config trains no step of reinforcement learning with new rollouts. Set pipeline.steps "
            "above 0, and leave pipeline.rollouts_only and data.rollouts out"
        )
    _check_cache(config, sim, draws)
    _check_lengths(config, sim, draws.lengths.most)
    engines, per_node = config.engine.num_engines, sim.failures.engines_per_node
    num_nodes = _num_nodes(config, sim)
    for failure in sim.failures.planned:
        if failure.node >= num_nodes:
            raise ConfigError(
                f"sim.failures.planned: node {failure.node}, and {engines} engines with engines_per_node = {per_node} have "
                f"nodes 0 to {num_nodes - 1}"
            )


def _check_cache(config: RunConfig, sim: SimConfig, draws: SimDraws) -> None:
    turns, most = _most_turns(draws), longest_request(config, sim, draws)
    if sim.cache_tokens is not None and sim.cache_tokens < most:
        of = f"with {turns} turns, each of" if turns > 1 else "with"
        raise ConfigError(
            f"sim.cache_tokens = {sim.cache_tokens}, and a request may need {most} ({of} sim.prompt_tokens and at most "
            "rollout.max_tokens): set sim.cache_tokens higher, or rollout.max_tokens lower"
        )


def longest_request(config: RunConfig, sim: SimConfig, draws: SimDraws) -> int:
    """In tokens of the cache. The last request of a rollout has all turns before it in its prompt. Without a highest number of
    turns only the first request is counted; the engine refuses the others."""
    limit, turns = config.rollout.max_tokens, _most_turns(draws)
    sampled = limit if math.isinf(draws.lengths.most) else min(limit, max(1, round(draws.lengths.most)))
    return turns * sim.prompt_tokens + (turns - 1) * sampled + limit


def _most_turns(draws: SimDraws) -> int:
    return max(1, round(draws.turns.most)) if math.isfinite(draws.turns.most) else 1


def _check_lengths(config: RunConfig, sim: SimConfig, longest: float) -> None:
    """A limit below that of the run which the lengths are of cuts rollouts, as it would in a real run. But a rollout beyond the
    limit of its own run has several turns, and a simulated one samples all of it in one."""
    limit, source = config.rollout.max_tokens, Path(sim.lengths.path or "") / "config.toml"
    if sim.lengths.kind != "run" or longest <= limit or not source.exists():
        return
    if longest > (of_turn := load(source, RunConfig).rollout.max_tokens):
        raise ConfigError(
            f"sim.lengths: rollouts of {sim.lengths.path} have several turns and sampled up to {longest:.0f} tokens, at most "
            f"{of_turn} a turn. A simulated rollout samples them in one turn, which rollout.max_tokens = {limit} would cut. "
            f"Type --set rollout.max_tokens={longest:.0f}, or describe a turn: sim.lengths and sim.environment.turns"
        )


def _num_nodes(config: RunConfig, sim: SimConfig) -> int:
    return -(-config.engine.num_engines // sim.failures.engines_per_node)


def _run(config: RunConfig, sim: SimConfig, draws: SimDraws, sink: EventSink) -> None:
    """To its end. The last event says how it ended."""
    text = to_toml(with_absolute_paths(config))
    digest = hashlib.sha256(text.encode()).hexdigest()
    sink.emit(ConfigWritten(at=0.0, digest=digest, text=text))
    run, outcome = _SimRun(config, sim, draws, sink), FINISHED
    try:
        with seldom_collected():
            run_virtual(run.run(run_id=digest[:16]))
    except BaseException as error:  # whatever ended it: the log says so
        outcome = type(error).__name__
        raise
    finally:
        sink.emit(RunEnded(at=run.ended_at, outcome=outcome, version=run.version))


class _Scorers(NamedTuple):
    """Those of `run.build_scorers`, simulated."""

    stages: tuple[Stage, ...]
    critic: SimCritic | None
    proximal: SimFollower | None


class _SimRun:
    """One run on the virtual loop."""

    def __init__(self, config: RunConfig, sim: SimConfig, draws: SimDraws, sink: EventSink) -> None:
        self._config = config
        self._sim = sim
        self._draws = draws
        self._sink = sink
        self._sharing = Sharing(slowdown=sim.decode_slowdown, keep=sim.learner_keep, cores=sim.cores)
        self._driver = SimDriver(None if sim.cores is None else self._sharing)
        self._engines: dict[str, SimEngine] = {}  # the newest of each name
        self.ended_at = 0.0
        self.version = 0

    async def run(self, run_id: str) -> None:
        config, clock, channel = self._config, VirtualClock(), LocalChannel()
        await channel.publish(0, {})
        fleet = self._fleet(clock)
        scorers = self._scorers()
        parts = Parts(
            engines=fleet.router.engines,
            environment=self._environment(),
            learner=self._learner(),
            store=MemoryStore(
                store_tasks(
                    scorers.stages,
                    has_critic=scorers.critic is not None,
                    has_proximal=scorers.proximal is not None,
                    is_in_lockstep=config.pipeline.is_in_lockstep,
                ),
                capacity_rows=config.pipeline.most_groups * config.rollout.most_rows,
            ),
            channel=channel,
            clock=clock,
            sink=self._sink,
            waits=Waits(
                clock=clock,
                sink=self._sink,
                stall_s=config.pipeline.stall_s,
                deadline_s=config.pipeline.deadline_s,
            ),
            stages=scorers.stages,
            critic=scorers.critic,
            proximal=scorers.proximal,
        )
        num_tasks = len(self._draws.lengths.prompts)
        self._sink.emit(run_started(config, at=0.0, run_id=run_id, num_tasks=num_tasks, is_simulated=True))
        pipeline = Pipeline(
            parts,
            self._tasks(),
            self._algorithm(),
            config=config.pipeline,
            rollout=config.rollout,
            seed=config.seed,
            router=fleet.router,
        )
        loops = [fleet.replace(pipeline.sync.adopt), self._report_status(pipeline), *self._failures()]
        running = [asyncio.ensure_future(one) for one in loops]
        try:
            await pipeline.run()
        finally:
            self.ended_at = clock.now()
            self.version = pipeline.admission.version
            for task in running:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*running)

    # ---- the parts ---------------------------------------------------------------------------------------------------

    def _fleet(self, clock: VirtualClock) -> Fleet:
        config = self._config

        async def after_restart(make: Any, name: str) -> Any:
            await asyncio.sleep(self._sim.failures.restart_s)
            return make(name)

        return Fleet(
            self._make_engine,
            config.engine.num_engines,
            is_queueing=not config.pipeline.is_in_lockstep,
            patience_s=config.engine.answer_s,
            clock=clock,
            sink=self._sink,
            is_lone_replaced=True,
            in_thread=after_restart,
        )

    def _make_engine(self, name: str) -> SimEngine:
        sim, replicas = self._sim, self._config.engine.num_engines
        span_s = SPAN_S * max(1, replicas / MAX_SHORT_SPANS)
        engine = self._engines[name] = SimEngine(
            name=name,
            slots=self._config.engine.num_slots,
            costs=sim.costs,
            kv_tokens=sim.cache_tokens,
            num_tokens=self._draws.lengths.draw,
            prompts=self._draws.lengths.prompts,
            load_s=constant(sim.load_s),
            seed=self._config.seed,
            news_s=NEWS_S if sim.failures.is_on else None,
            has_prefix_cache=sim.has_prefix_cache,
            sharing=self._sharing,
            meter=DecodeMeter(name, sim.costs.step_s, self._sink, span_s=span_s),
        )
        return engine

    def _learner(self) -> SimLearner:
        return SimLearner(
            token_s=1 / (self._sim.train_tokens_per_s * self._config.learner.ranks),
            step_s=constant(self._sim.train_step_s),
            publish_s=self._sim.publish_s,
            seed=self._config.seed,
            sharing=self._sharing,
        )

    def _scorers(self) -> _Scorers:
        config, token_s = self._config, 1 / self._sim.score_tokens_per_s
        critic = None if critic_of(config) is None else SimCritic(token_s=token_s)
        reference = None if reference_of(config) is None else SimScorer(token_s=token_s)
        proximal = None if config.proximal is None else SimFollower(token_s=token_s, load_s=self._sim.load_s)
        return _Scorers(build_stages(config, reference, critic), critic, proximal)

    def _environment(self) -> SimEnvironment:
        found = self._sim.environment
        limits = [one.max_concurrent for one in self._config.environment]
        return SimEnvironment(
            num_turns=self._draws.turns.draw,
            latency_s=self._draws.latency_s.draw,
            failure=found.failure,
            success=by_prompt(found.chance(), self._config.seed),
            graded=found.graded,
            prompt_tokens=self._sim.prompt_tokens,
            driver=self._driver,
            driver_s=self._sim.driver_s,
            max_concurrent=None if None in limits else sum(limit or 0 for limit in limits),
        )

    def _algorithm(self) -> Algorithm:
        config, learner, critic = self._config, self._config.learner, critic_of(self._config)
        advantage = advantage_of(config.algorithm)
        return Algorithm(
            advantage=advantage.of_group,
            over_batch=advantage.over_batch,
            sampling=Sampling(max_tokens=config.rollout.max_tokens),
            micro_batch_tokens=learner.pass_tokens * learner.ranks,
            mini_batches=learner.mini_batches,
            credit=credit_for(config.algorithm),
            signal=signal_for(config.algorithm),
            critic_batch_tokens=learner.pass_tokens if critic is None else call_tokens(critic),
            proximal_batch_tokens=learner.pass_tokens if config.proximal is None else call_tokens(config.proximal),
        )

    def _tasks(self) -> Iterator[tuple[int, Task]]:
        """Prompts with lengths of their own, epoch after epoch; otherwise tasks without end."""
        prompts = self._draws.lengths.prompts
        if not prompts:
            return ((0, Task(id=f"task-{number}", prompt="?")) for number in itertools.count())
        tasks = [Task(id=f"task-{number}", prompt="?", data={"number": number}) for number in range(len(prompts))]
        return in_order(tasks, seed=self._config.seed, shuffle=self._config.data.shuffle)

    # ---- while the pipeline runs -----------------------------------------------------------------------------------------

    async def _report_status(self, pipeline: Pipeline) -> None:
        every_s = STATUS_S * max(1, self._config.engine.num_engines / MAX_SHORT_STATUS)
        while True:
            self._sink.emit(structs.replace(await pipeline.status(), loop_s=self._driver.busy_s))
            await asyncio.sleep(every_s)

    def _failures(self) -> list[Any]:
        failures = self._sim.failures
        num_nodes = _num_nodes(self._config, self._sim)
        return [
            self._fail_nodes(failures, num_nodes),
            *(self._fail_at(planned.at_s, planned.node) for planned in failures.planned),
        ]

    async def _fail_nodes(self, failures: SimFailuresConfig, num_nodes: int) -> None:
        """At random, at the same rate for every node."""
        rng = random.Random(derive_seed(self._config.seed, "failures"))
        while failures.node_mean_s is not None:
            await asyncio.sleep(rng.expovariate(num_nodes / failures.node_mean_s))
            self._fail_node(rng.randrange(num_nodes))

    async def _fail_at(self, at_s: float, node: int) -> None:
        await asyncio.sleep(at_s)
        self._fail_node(node)

    def _fail_node(self, node: int) -> None:
        per_node, names = self._sim.failures.engines_per_node, list(self._engines)
        for name in names[node * per_node : (node + 1) * per_node]:
            if not self._engines[name].is_gone:
                self._engines[name].crash(f"its node, {node}, has failed")
