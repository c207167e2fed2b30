"""One run from beginning to end, wherever its parts are (`run.backend`).

Steps of a run: data and model, the run folder, supervised training (if asked for), evaluation, reinforcement learning, the
saved model, evaluation, summary, trace. Whatever ends it, the folder says so: the last event is `RunEnded`, with the name of
the error. A run that was stopped or killed goes on from its newest checkpoint (`resume`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from millstream.algo.recipe import Recipe
from millstream.clock import RealClock
from millstream.engine import Engine
from millstream.env.data import in_order
from millstream.env.rewards import Reward, was_passed
from millstream.errors import CheckpointError, ConfigError, MillstreamError, OutputError, Stopped, StoreError
from millstream.events import (
    WARMUP,
    Evaluated,
    EventSink,
    Resumed,
    RunEnded,
    RunStarted,
    Status,
    StopRequested,
    Warned,
)
from millstream.events.sinks import JsonlSink, MetricsSink, Tee, read_history
from millstream.learner import LearnerConfig, RunCritic, RunLearner
from millstream.model.adapters import lora_of, merged, trained_weights
from millstream.model.load import load_weights, save_model
from millstream.pipeline.pipeline import Parts, Pipeline
from millstream.pipeline.state import CRITIC_FOLDER
from millstream.run import build, checkpoint
from millstream.run import sft as supervised
from millstream.run.backend import BackendContext, build_fleet
from millstream.run.build_scorers import Scorers
from millstream.run.checkpoint import Checkpoints, Found, RunState
from millstream.run.config import RunConfig, WarmupConfig, reference_of
from millstream.run.control import SOCKET, Answer, Control, Question, Scale, Scaled, now_of
from millstream.run.evaluator import Evaluator, waits_of
from millstream.run.folder import FINISHED, RunFolder, RunResult, resume_command
from millstream.run.garbage import seldom_collected
from millstream.run.prepare import Prepared, prepare
from millstream.run.replay import ReplayedLearner
from millstream.run.replay_critic import ReplayedCritic
from millstream.run.resume import ResumePoint, generators, last_life, restore_generators
from millstream.run.sft import Supervised
from millstream.run.warmup import Script
from millstream.run.watchdog import Watchdog
from millstream.serving.fleet import Fleet
from millstream.types import Weights
from millstream.weights import Publication

logger = logging.getLogger(__name__)
STATUS_S = 1.0
END_S = 5.0
SILENT = 0.9
"""The share of `pipeline.deadline_s` after which a learner of several ranks that says nothing is taken for dead."""


def train(
    config: RunConfig, *, reward: Reward | None = None, sinks: Sequence[EventSink] = (), name: str = "run"
) -> RunResult:
    """Run a config from beginning to end on this machine."""
    prepared = prepare(config, reward)
    return _carry_out(prepared, RunFolder.create(prepared.config, name), sinks)


def resume(
    path: Path, *, reward: Reward | None = None, sinks: Sequence[EventSink] = (), changes: Sequence[str] = ()
) -> RunResult:
    """Go on with a run that was stopped or died, from its newest checkpoint that is whole. `changes`: see
    `RunFolder.reopen`."""
    folder, config = RunFolder.reopen(path, changes)
    if folder.is_finished():  # killed on its last metres: all that is missing is in the events
        return folder.conclude()
    if reward is not None and not was_passed(config.reward):
        raise ConfigError(
            f"the run in {path} has its reward from its config.toml, and goes on with that: leave reward= out"
        )
    prepared = prepare(config, reward)
    life = last_life(folder)
    found, troubles = checkpoint.newest(path, life.sealed)
    early = None
    if found is None:
        early, more = checkpoint.newest(path, life.sealed, checkpoint.WARMUP_FOLDER)
        troubles += more
    for trouble in troubles:
        logger.warning("%s; it is set aside", trouble)
    for one in (found, early):
        if one is not None and one.run_state().data_digest != prepared.data_digest:
            raise CheckpointError(f"the data set is not the one that the run in {path} began with: it cannot go on")
    if changes:
        folder.keep(prepared.config)
    return _carry_out(prepared, folder, sinks, ResumePoint(found, life, early, tuple(changes)))


def _carry_out(
    prepared: Prepared, folder: RunFolder, sinks: Sequence[EventSink], before: ResumePoint | None = None
) -> RunResult:
    try:
        events = JsonlSink(folder.events)
        metrics = MetricsSink(folder.metrics, upto=before.version if before is not None else 0)
    except OSError as error:
        raise OutputError(folder.cannot_write(folder.events, error)) from error
    tee = Tee([events, metrics], sinks)
    for event in _accuracies_so_far(folder, before):
        tee.show(event)
    run = _Run(prepared, folder, (events, metrics), tee, before)
    outcome = FINISHED
    try:
        asyncio.run(run.run())
    except BaseException as error:  # the folder says how it ended, whatever ended it
        outcome = type(error).__name__
        if isinstance(error, MillstreamError):
            error.add_note(f"The run folder is {folder.path}. Mend it, and go on:\n  {resume_command(folder.path)}")
        raise
    finally:
        run.say_ended(outcome)
        tee.close()
        try:
            metrics.close()
            events.close()
        except OSError as error:
            raise OutputError(folder.cannot_write(folder.events, error)) from error
        finally:
            folder.unlock()
    return folder.conclude()


def _accuracies_so_far(folder: RunFolder, before: ResumePoint | None) -> Iterator[Evaluated]:
    """Of a run that goes on, up to its checkpoint: whoever looks on sees where it comes from."""
    if before is None or before.found is None:
        return
    for event in read_history(folder.events, upto=before.found.manifest.covers_seq):
        if isinstance(event, Evaluated) and event.name != WARMUP:
            yield event


class _Run:
    """One life of a run: from its beginning, or from a checkpoint."""

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder,
        files: tuple[JsonlSink, MetricsSink],
        sink: EventSink,
        before: ResumePoint | None,
    ) -> None:
        self._prepared = prepared
        self._folder = folder
        self._files = files
        self._sink = sink
        self._found = None if before is None else before.found
        self._incarnation = 0 if before is None else before.life.incarnation + 1
        self._clock = RealClock(0.0 if before is None else before.life.ended_at)
        self._waits = waits_of(prepared.config, self._clock, sink)
        self._state = None if self._found is None else self._found.run_state()
        self._run_id = secrets.token_hex(8) if self._state is None else self._state.run_id
        self._version = 0 if before is None else before.version
        self._pipeline: Pipeline | None = None
        self._checkpoints: Checkpoints | None = None
        self._supervised: Supervised | None = None
        self._supervised_step = 0
        """That of its newest checkpoint, when it has ended."""
        self._found_supervised = None if before is None else before.supervised
        self._stopped_by: signal.Signals | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._is_done = False
        if before is not None:
            self._say_resumed(before.changes)
        elif prepared.warning:
            sink.emit(Warned(at=self._clock.now(), message=prepared.warning))

    async def run(self) -> None:
        """To the end, or to a clean stop: then it raises `Stopped`."""
        task = asyncio.current_task()
        assert task is not None
        handlers: dict[signal.Signals, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # only the main thread may handle signals
                handlers[number] = signal.signal(number, self._handler_for(task))
        watchdog = self._watchdog()
        watchdog.start()
        watch = asyncio.create_task(self._watch())
        try:
            await self._run()
        except asyncio.CancelledError:
            if self._stopped_by is None:
                raise
        finally:
            watch.cancel()
            watchdog.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._stopped_by is not None and not self._is_done:
            raise Stopped(self._farewell(), 128 + self._stopped_by)

    def _handler_for(self, task: asyncio.Task[None]) -> Callable[[int, Any], None]:
        loop, seen = asyncio.get_running_loop(), list[int]()

        def handle(number: int, frame: Any) -> None:
            seen.append(number)
            if len(seen) > 1:  # whoever insists is not to be kept waiting by an event loop that is blocked
                forced = threading.Timer(END_S, os._exit, (128 + number,))
                forced.daemon = True
                forced.start()
            loop.call_soon_threadsafe(self._on_signal, signal.Signals(number), task)

        return handle

    def _on_signal(self, number: signal.Signals, task: asyncio.Task[None]) -> None:
        """The first one lets the batch in hand come to its end, for a while; the second ends it now."""
        is_first = self._stopped_by is None
        self._stopped_by = number
        at_work = self._supervised if self._supervised is not None and self._supervised.is_at_work else self._pipeline
        if at_work is None or not is_first:
            task.cancel()
            return
        at_work.stop()
        grace_s = self._prepared.config.checkpoint.grace_s
        self._sink.emit(StopRequested(at=self._clock.now(), signal=number.name, grace_s=grace_s))
        self._grace = asyncio.get_running_loop().call_later(grace_s, task.cancel)

    def _farewell(self) -> str:
        resumed_from = None if self._found is None else self._version
        version = resumed_from if self._checkpoints is None else self._checkpoints.version
        kept = "nothing was trained yet" if version is None else f"the checkpoint of step {version} is written"
        if version is None and self._supervised_step:
            kept = f"the checkpoint of supervised step {self._supervised_step} is written"
        by = signal.Signals(self._stopped_by or 0).name
        return f"stopped by {by}; {kept}. To go on:\n  {resume_command(self._folder.path)}"

    def _watchdog(self) -> Watchdog:
        pipeline = self._prepared.config.pipeline
        return Watchdog(
            self._folder.stacks,
            self._waits,
            clock=self._clock,
            sink=self._sink,
            stall_s=pipeline.stall_s,
            deadline_s=pipeline.deadline_s,
            end=self._end_blocked,
        )

    def _end_blocked(self, reason: str) -> None:
        """The event loop will not come back: nothing can be cleaned up, and nothing needs to be. Even to speak may fail."""
        last_resort = threading.Timer(END_S, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
        self.say_ended("StallError")
        with suppress(OSError):
            self._sync()
        sys.stderr.write(f"StallError: {reason}. Stacks are in {self._folder.stacks}. ")
        sys.stderr.write(f"To go on:\n  {resume_command(self._folder.path)}\n")
        sys.stderr.flush()
        os._exit(1)

    async def _run(self) -> None:
        prepared = self._prepared
        around = BackendContext(
            model=prepared.model,
            tokenizer=prepared.tokenizer_for_stops,
            folder=self._folder.path,
            clock=self._clock,
            sink=self._sink,
        )
        opening = prepared.site.open(around)
        try:  # what is open is closed, even where the rest could not be opened
            await self._waits.on("the run", "a place for its parts", opening, deadline=False)  # it has one of its own
            await self._run_there()
        finally:
            await prepared.site.close()

    async def _run_there(self) -> None:
        prepared, config = self._prepared, self._prepared.config
        fleet = build_fleet(
            prepared.site,
            config.engine,
            is_queueing=not config.pipeline.is_in_lockstep,
            clock=self._clock,
            sink=self._sink,
        )
        evaluator = Evaluator(prepared, fleet.router, self._clock, self._sink, self._waits)
        replacing = asyncio.create_task(fleet.replace(self._adopt))
        control = Control(self._folder.path, partial(self._carry, fleet))
        try:
            await self._open(control)
            if self._found is None:
                await self._begin(fleet, evaluator)
            if self._stopped_by is not None:
                return
            self._checkpoints = self._build_checkpoints()
            building = asyncio.to_thread(self._build_staff, self._checkpoints)
            staff = await self._waits.on("the run", "those who work beside the learner", building)
            try:
                await self._learn(staff, fleet, evaluator, self._checkpoints)
            finally:
                await staff.close()
            if self._stopped_by is not None:
                return
            await evaluator.sampled_and_greedy("after")
            self._is_done = True
        finally:
            await control.close()
            replacing.cancel()
            await prepared.environment.close()
            await fleet.close()

    async def _learn(self, staff: Scorers, fleet: Fleet, evaluator: Evaluator, checkpoints: Checkpoints) -> None:
        """To the saved model, unless it is stopped before."""
        learner = self._build_learner(checkpoints)
        try:
            await self._waits.on("the run", "those beside the learner to be ready", staff.ready())
            await self._waits.on("the run", "the learner to be ready", learner.ready())
            if self._found is not None:
                await self._restore(learner, staff, fleet, self._found)
            await self._reinforce(learner, staff, fleet, evaluator)
            if self._stopped_by is None:
                saving = asyncio.to_thread(self._save, learner)
                await self._waits.on("the run", "the model to be saved", saving)
                assert self._pipeline is not None
                fleet.weights = Publication(self._pipeline.admission.version, trained_weights(self._prepared.model))
        finally:
            await learner.close()

    async def _open(self, control: Control) -> None:
        try:
            await control.open()
        except OSError as error:
            message = f"this run cannot be asked or scaled: {self._folder.path / SOCKET}: {error.strerror or error}"
            self._sink.emit(Warned(at=self._clock.now(), message=message))

    async def _carry(self, fleet: Fleet, question: Question) -> Answer:
        if isinstance(question, Scale):
            joined, left = await fleet.scale(question.engines)
            return Scaled(joined=joined, left=left, engines=fleet.names)
        pipeline = self._pipeline
        status = self._status() if pipeline is None else await pipeline.status()
        version = self._version if pipeline is None else pipeline.admission.version
        return now_of(status, fleet.router, fleet.names, version)

    def _adopt(self, engine: Engine) -> bool:
        return self._pipeline is not None and self._pipeline.sync.adopt(engine)

    async def _begin(self, fleet: Fleet, evaluator: Evaluator) -> None:
        """Supervised training, if it is asked for. What comes after "before" is reinforcement, or, without any, that."""
        config = self._prepared.config
        if not config.pipeline.steps:
            await evaluator.sampled_and_greedy("before")
        if config.warmup is not None:
            await self._warm_up(fleet, evaluator, config.warmup)
        if config.pipeline.steps and self._stopped_by is None:
            await evaluator.sampled_and_greedy("before")

    async def _restore(self, learner: RunLearner, staff: Scorers, fleet: Fleet, found: Found) -> None:
        reading = asyncio.to_thread(learner.restore, found.folder)
        await self._waits.on("the run", "the checkpoint to be read", reading)
        if staff.critic is not None:
            reading = asyncio.to_thread(staff.critic.restore, found.folder / CRITIC_FOLDER)
            await self._waits.on("the run", "the critic's checkpoint to be read", reading)
        weights = await self._waits.on("the run", "the learner to copy weights", learner.weights())
        loading = fleet.load(self._version, weights)
        await self._waits.on("the run", f"every engine to load version {self._version}", loading)

    def _build_staff(self, checkpoints: Checkpoints) -> Scorers:
        """Before the learner changes the model. What a warm-up has made of it is kept, for a life of the run to come."""
        config, model = self._prepared.config, self._prepared.model
        reference = reference_of(config)
        is_kept = reference is not None and reference.path is None and config.warmup is not None
        if is_kept and self._found is None:
            whole = model if lora_of(model) is None else merged(model)
            self._write(
                lambda: save_model(whole, self._prepared.tokenizer, self._folder.reference), self._folder.reference
            )
        kept = self._folder.reference if is_kept and self._found is not None else None
        return self._prepared.site.build_scorers(kept, partial(self._lasting_critic, checkpoints))

    def _lasting_critic(self, checkpoints: Checkpoints, make: Callable[[], RunCritic]) -> ReplayedCritic:
        waits = self._waits
        return ReplayedCritic(
            make,
            checkpoints,
            clock=self._clock,
            sink=self._sink,
            version=self._version,
            patience_s=SILENT * self._prepared.config.pipeline.deadline_s,
            progress=lambda: waits.renew("critic", "stage values", "train", "the run"),
        )

    def _build_learner(self, checkpoints: Checkpoints) -> RunLearner:
        config = self._prepared.config
        recipe = Recipe(algorithm=config.algorithm, max_tokens=config.rollout.max_tokens)
        return self._lasting(config.learner, recipe, config.pipeline.steps, checkpoints, self._version)

    def _lasting(
        self, learner: LearnerConfig, recipe: Recipe, num_steps: int, checkpoints: Checkpoints, version: int
    ) -> RunLearner:
        """Ranks are processes, of which one may die alone: another learner goes on from what is sealed."""
        prepared, waits = self._prepared, self._waits

        def make() -> RunLearner:
            return prepared.site.build_learner(prepared.tokenizer, learner=learner, recipe=recipe, num_steps=num_steps)

        if not prepared.site.has_ranks_elsewhere(learner):
            return make()
        return ReplayedLearner(
            make,
            checkpoints,
            clock=self._clock,
            sink=self._sink,
            version=version,
            patience_s=SILENT * prepared.config.pipeline.deadline_s,
            progress=lambda: waits.renew("train", "the run", "warm-up"),
        )

    def _save(self, learner: RunLearner) -> None:
        self._write(lambda: learner.save(self._folder.model), self._folder.model)
        supervised.remove_checkpoints(self._folder.path)

    def _write(self, write: Callable[[], None], path: Path) -> None:
        try:
            write()
        except OSError as error:
            raise OutputError(self._folder.cannot_write(path, error)) from error

    async def _warm_up(self, fleet: Fleet, evaluator: Evaluator, config: WarmupConfig) -> None:
        prepared = self._prepared
        num_steps, found = config.num_steps(len(prepared.data.train)), self._found_supervised
        checkpoints = self._supervised_checkpoints(num_steps)
        learner = self._lasting(
            supervised.learner_config(prepared.config, config),
            Recipe(algorithm=None),
            num_steps,
            checkpoints,
            0 if found is None else found.manifest.version,
        )
        self._supervised = self._build_supervised(learner, checkpoints, fleet, evaluator, config)
        try:
            await self._waits.on("warm-up", "the learner to be ready", learner.ready())
            await self._supervised.run(self._found_supervised)
            if self._stopped_by is not None:
                return
            weights = await self._waits.on("warm-up", "the learner to copy weights", learner.weights())
            await self._waits.on("warm-up", "every engine to load its weights", fleet.load(0, weights))
            load_weights(prepared.model, weights)  # where the learner has changed another copy
            fleet.weights = Publication(0, trained_weights(prepared.model))  # that copy ends with the learner
        finally:
            self._end_grace()
            self._supervised_step = self._supervised.step_kept
            self._supervised = None  # with its learner, whose masters and moments are several times the model
            await learner.close()

    def _supervised_checkpoints(self, num_steps: int) -> Checkpoints:
        return supervised.build_checkpoints(
            self._folder.path,
            self._prepared.config,
            clock=self._clock,
            sink=self._sink,
            last_seq=lambda: self._files[0].last_seq,
            sync=self._sync,
            run_state=self._run_state,
            num_steps=num_steps,
        )

    def _build_supervised(
        self,
        learner: RunLearner,
        checkpoints: Checkpoints,
        fleet: Fleet,
        evaluator: Evaluator,
        config: WarmupConfig,
    ) -> Supervised:
        prepared, run = self._prepared, self._prepared.config

        async def accuracy_of(weights: Weights) -> float:
            await self._waits.on("warm-up", "every engine to load its weights", fleet.load(0, weights))
            measured, _ = await evaluator.once(WARMUP, prepared.data.train[: supervised.PROBE], prepared.sampling)
            return measured.accuracy

        return Supervised(
            config,
            learner,
            checkpoints,
            tasks=prepared.data.train,
            held_out=prepared.held_out,
            new_script=lambda: Script(prepared.environment, prepared.text, run),
            accuracy_of=accuracy_of,
            micro_batch_tokens=run.learner.micro_batch_tokens * run.learner.ranks,
            seed=run.seed,
            clock=self._clock,
            sink=self._sink,
            waits=self._waits,
        )

    def _end_grace(self) -> None:
        """It was for the batch; the last checkpoint may take what it takes."""
        if self._grace is not None:
            self._grace.cancel()

    async def _reinforce(self, learner: RunLearner, staff: Scorers, fleet: Fleet, evaluator: Evaluator) -> None:
        prepared, config = self._prepared, self._prepared.config
        channel = prepared.site.new_channel(learner)
        weights = await self._waits.on("the run", "the learner to copy weights", learner.weights())
        publishing = channel.publish(self._version, weights)  # what the engines have: for those that start later
        await self._waits.on("the run", f"version {self._version} to be published", publishing)
        opening = prepared.site.open_store(staff.stages)
        parts = Parts(
            engines=fleet.router.engines,
            environment=prepared.environment,
            learner=learner,
            store=await self._waits.on("the run", "the store to be open", opening),
            stages=staff.stages,
            critic=staff.critic,
            proximal=staff.proximal,
            channel=channel,
            clock=self._clock,
            sink=self._sink,
            waits=self._waits,
        )
        assert self._checkpoints is not None
        if self._found is None:
            self._say_started()
        self._pipeline = Pipeline(
            parts,
            in_order(prepared.data.train, seed=config.seed, shuffle=config.data.shuffle),
            build.build_algorithm(config, prepared.sampling, prepared.text, prepared.rewards, prepared.site.launcher),
            config=config.pipeline,
            rollout=config.rollout,
            seed=config.seed,
            after_step=evaluator.beside if config.evaluation.every_steps is not None else None,
            keeper=self._checkpoints,
            resumed=None if self._found is None else self._found.standing(),
            incarnation=self._incarnation,
            router=fleet.router,
        )
        if self._state is not None:
            restore_generators(self._state.generators)
        fleet.weights = channel
        try:
            with seldom_collected():
                await self._pipeline.run()
        finally:
            self._end_grace()
            await self._waits.on("the run", "the last checkpoint to be written", self._checkpoints.close())

    def _build_checkpoints(self) -> Checkpoints:
        config = self._prepared.config
        checkpoints = Checkpoints(
            self._folder.path,
            config.checkpoint,
            last_step=config.pipeline.steps,
            clock=self._clock,
            sink=self._sink,
            last_seq=lambda: self._files[0].last_seq,
            sync=self._sync,
            run_state=self._run_state,
        )
        if self._found is not None:
            checkpoints.goes_on_from(self._version)
        return checkpoints

    def _sync(self) -> None:
        for file in self._files:
            file.sync()

    def _run_state(self) -> RunState:
        return RunState(
            run_id=self._run_id,
            data_digest=self._prepared.data_digest,
            generators=generators(),
        )

    async def _watch(self) -> None:
        """Says about once a second what the run is doing."""
        while True:
            with suppress(StoreError):  # it is being closed: what is said next, if anything, says so
                self._sink.emit(await self._pipeline.status() if self._pipeline is not None else self._status())
            await asyncio.sleep(STATUS_S)

    def _status(self) -> Status:
        """Before there is a pipeline."""
        return Status(
            at=self._clock.now(),
            requests_running=0,
            requests_waiting=0,
            rows_in_store=0,
            groups_outstanding=0,
            groups_taken=0,
            budget=0,
            waits=self._waits.counted(),
        )

    def _say_resumed(self, changes: tuple[str, ...]) -> None:
        found = self._found
        self._sink.emit(
            Resumed(
                at=self._clock.now(),
                incarnation=self._incarnation,
                version=self._version,
                from_seq=-1 if found is None else found.manifest.covers_seq,
                digest="" if found is None else found.digest,
                changes=changes,
            )
        )

    def _say_started(self) -> None:
        config = self._prepared.config
        pipeline, rollout = config.pipeline, config.rollout
        self._sink.emit(
            RunStarted(
                at=self._clock.now(),
                run_id=self._run_id,
                seed=config.seed,
                steps=pipeline.steps,
                num_tasks=len(self._prepared.data.train),
                filter_zero_signal=pipeline.filter_zero_signal,
                min_group_size=rollout.min_group_size,
                groups_per_step=pipeline.groups_per_step,
                group_size=rollout.group_size,
                max_lag=pipeline.max_lag,
                lag_bound=math.ceil(pipeline.max_lag),
                budget=pipeline.most_groups,
                extra_members=rollout.extra_members,
                is_first_to_finish=pipeline.is_first_to_finish,
                max_restarts=pipeline.max_restarts if pipeline.overdue == "restart" else 0,
            )
        )

    def say_ended(self, outcome: str) -> None:
        version = self._version if self._pipeline is None else self._pipeline.admission.version
        self._sink.emit(RunEnded(at=self._clock.now(), outcome=outcome, version=version))
