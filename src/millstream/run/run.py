"""One run from beginning to end, on any backend (`runtime`): prepare, open, warm up, evaluate, reinforce, save, evaluate,
conclude.

Whatever ends a run, its folder says so: the last event is `RunEnded` with the name of the error. A run that was stopped or
killed is resumed from its newest checkpoint (`resume`). Imports torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple, Unpack

from msgspec import UNSET, UnsetType, structs

from millstream.config import load
from millstream.env.data import PassedData, sampled
from millstream.env.rewards import PassedRewards, was_passed
from millstream.errors import ConfigError
from millstream.events import EventSink
from millstream.learner import RunLearner
from millstream.model.adapters import trained_weights
from millstream.model.load import load_weights
from millstream.pipeline.outside import OutsideEnvironment
from millstream.pipeline.pipeline import Parts, Pipeline
from millstream.pipeline.recorded import RecordedBatches
from millstream.pipeline.state import CRITIC_FOLDER
from millstream.run.active import ActiveRun
from millstream.run.backend import BackendContext, build_fleet
from millstream.run.best import BestCheckpoint
from millstream.run.branch import Branch, find_branch, write_start
from millstream.run.build import build_algorithm
from millstream.run.build_scorers import Scorers
from millstream.run.build_training import (
    build_checkpoints,
    build_durable_learner,
    build_run_scorers,
    build_sft_checkpoints,
    build_sft_learner,
    build_supervised,
)
from millstream.run.checkpoint import Checkpoints
from millstream.run.config import RunConfig, WarmupConfig
from millstream.run.evaluate import Evaluator
from millstream.run.folder import FINISHED, RunFolder, RunResult, resume_command
from millstream.run.garbage import seldom_collected
from millstream.run.keep_rollouts import close_rollouts, open_rollouts, void_undone
from millstream.run.learn import LearningEndpoint, check_endpoint, learning_config, open_journal, serving
from millstream.run.log import RunLog
from millstream.run.outside import serving_outside
from millstream.run.own_parts import OwnParts, check_passed_again, with_passed
from millstream.run.own_thread import as_coroutine, outside_loop
from millstream.run.prepare import Prepared, prepare_run
from millstream.run.progress import ProgressLines
from millstream.run.resume import (
    ResumePoint,
    accept_resume_point,
    find_resume_point,
    history_before,
    recorded_sizes,
    restore_random_states,
)
from millstream.run.sft import remove_sft_checkpoints
from millstream.run.supervision import Supervision
from millstream.run.tracking.tracking import Tracking
from millstream.run.train_again import recorded_batches
from millstream.serving.fleet import Fleet
from millstream.store import Store
from millstream.weights import Publication
from millstream.weights.transfer.remote_weights import RemoteWeights

OWNER = "the run"
"""The owner of the waits of the phases."""


@outside_loop
def train(
    config: RunConfig,
    *,
    reward: PassedRewards | None = None,
    data: PassedData | None = None,
    sinks: Sequence[EventSink] = (),
    name: str = "run",
    from_run: str | Path | None = None,
    progress: bool = True,
    endpoint: LearningEndpoint | None = None,
    **parts: Unpack[OwnParts],
) -> RunResult:
    """Run a config from beginning to end in this process; its events also go to `sinks`. A function passed as `reward` replaces
    the one that the config names; several are weighed as its [[reward]] tables say. `data`: records, a list of dicts or a
    `datasets.Dataset`, where the config names none. `from_run`: RUN or RUN@STEP, a checkpoint whose weights and optimizer the
    run begins with. `progress`: whether lines about it are printed to standard error. `endpoint`: serves a run that learns from
    its use (see `learn`). `parts` of your own take the place of those that the config names: engine, learner, store, weights,
    loss, advantage, filter, sampler, schedule (docs/parts.md). It works in a notebook as well; in a coroutine: `await
    train_async(...)`."""
    config = with_passed(config, parts)
    check_endpoint(config, endpoint)
    sinks = [*sinks, ProgressLines(config.pipeline.steps)] if progress else sinks
    source = config.data.rollouts
    recorded = None if source is None else recorded_sizes(RunFolder(Path(source)))
    if from_run is None:
        prepared = prepare_run(config, reward, data_passed=data, recorded=recorded, is_new=True)
        return _run(prepared, RunFolder.create(prepared.written, name), sinks, None, endpoint=endpoint)
    branch = find_branch(str(from_run), config)
    prepared = prepare_run(config, reward, data_passed=data, recorded=recorded, start=branch.found.folder, is_new=True)
    folder = RunFolder.create(prepared.written, name, lambda folder: write_start(branch, folder))
    return _run(prepared, folder, sinks, None, branch, endpoint)


@outside_loop
def resume(
    run_dir: str | Path,
    *,
    reward: PassedRewards | None = None,
    data: PassedData | None = None,
    sinks: Sequence[EventSink] = (),
    changes: Sequence[str] = (),
    progress: bool = True,
    endpoint: LearningEndpoint | None = None,
    **parts: Unpack[OwnParts],
) -> RunResult:
    """Continue a run that was stopped or died, from its newest intact checkpoint. A `reward`, `data` and `parts` that were
    passed to `train` are passed again. `changes` of its config, such as `learner.learning_rate=1e-6`, are in force from here
    on, and are kept in the run folder; which keys may change: `run.changes`. A resume that is refused leaves the folder as
    it was."""
    folder, config = RunFolder.reopen(Path(run_dir), changes)
    sinks = [*sinks, ProgressLines(config.pipeline.steps)] if progress else sinks
    try:
        check_endpoint(config, endpoint)
        if folder.is_finished() and config.pipeline.steps <= folder.steps_done():  # only its result is missing
            return folder.conclude()
        if reward is not None and not was_passed(config.reward):
            raise ConfigError(f"the run in {run_dir} has its reward from its config.toml: leave reward= out")
        # bit for bit: other sizes would change it
        is_repeatable = config.pipeline.is_in_lockstep or config.warmup is not None or config.data.rollouts is not None
        recorded = recorded_sizes(folder) if is_repeatable else None
        check_passed_again(config, parts)
        config = with_passed(config, parts)
        start = folder.start if folder.start.is_dir() else None
        prepared = prepare_run(config, reward, data_passed=data, recorded=recorded, start=start)
        resumed = find_resume_point(folder, config, prepared.data_digest)
        accept_resume_point(resumed)
    except BaseException:
        folder.unlock()
        raise
    return _run(prepared, folder, sinks, resumed, endpoint=endpoint)


def learn(
    run_dir: str | Path, endpoint: LearningEndpoint, *, changes: Sequence[str] = (), sinks: Sequence[EventSink] = ()
) -> RunResult:
    """Serve the model of a run, and train it on the sessions that clients reward: a new run, which begins with the newest
    checkpoint of this one. A run that was begun so is resumed. `changes` of its config, as for `resume`."""
    folder = RunFolder.of_run(Path(run_dir))
    if load(folder.config, RunConfig).data.sessions:
        return resume(run_dir, changes=changes, sinks=sinks, endpoint=endpoint)
    config = learning_config(folder, tuple(changes))
    return train(config, sinks=sinks, name=f"{folder.path.name}-learn", from_run=run_dir, endpoint=endpoint)


train_async = as_coroutine(train)
resume_async = as_coroutine(resume)


def _run(
    prepared: Prepared,
    folder: RunFolder,
    sinks: Sequence[EventSink],
    resumed: ResumePoint | None,
    branch: Branch | None = None,
    endpoint: LearningEndpoint | None = None,
) -> RunResult:
    """All phases but the first, with a log that says how they ended."""
    tracking, best = Tracking(prepared.config), None
    outcome: tuple[str, str | UnsetType] = FINISHED, UNSET
    log: RunLog | None = None
    run: ActiveRun | None = None
    try:
        if prepared.config.checkpoint.keep_best is not None:
            best = BestCheckpoint(prepared.config)
            if resumed is not None:
                best.read(folder)
        upto, own = -1 if resumed is None or resumed.found is None else resumed.version, [] if best is None else [best]
        log = RunLog(folder, [*sinks, *tracking.sinks], upto=upto, own=own)
        for event in history_before(folder, resumed):
            log.recall(event)
        run = ActiveRun(prepared, folder, log, resumed)
        run.best = best
        run.endpoint = endpoint
        if branch is not None:
            log.emit(branch.event(run.clock.now()))
        void_undone(run)
        run.emit_begun()
        tracking.start(run)
        run.send_alerts = tracking.send_alerts
        asyncio.run(_phases(run))
    except BaseException as error:  # whatever ended it: the log says so
        outcome = type(error).__name__, str(error) if isinstance(error, Exception) else UNSET
        if isinstance(error, Exception) and run is not None and not run.is_untouched:
            error.add_note(
                f"The log of the run is {folder.events}. To resume the run:\n  {resume_command(folder.path)}"
            )
        raise
    finally:
        with ExitStack() as closing:  # in reverse order, and all of it, whatever one of them raises
            closing.callback(folder.unlock)
            if outcome[0] != FINISHED:
                if resumed is None and (run is None or run.is_untouched):
                    closing.callback(folder.discard)
                closing.callback(tracking.finish, None)  # before: a tracker may still make a folder in the run's
            if log is not None:
                closing.callback(log.close)
            if run is not None:
                closing.callback(run.emit_ended, *outcome)
                closing.callback(close_rollouts, run)
    result = folder.conclude()
    tracking.finish(result)
    return result


async def _phases(run: ActiveRun) -> None:
    """To the end, or to a clean stop: `Supervision` then raises `Stopped`."""
    steps, warmup, is_training = run.config.pipeline.steps, run.config.warmup, not run.config.pipeline.rollouts_only
    async with Supervision(run) as supervision, _open(run, supervision) as (fleet, evaluator):
        if run.found is None:
            if not steps:  # supervised training alone: "before" is before that
                await evaluator.before()
            if warmup is not None:
                await _warm_up(run, fleet, evaluator, warmup)
            if steps and is_training and not run.is_stopping:
                await evaluator.before()
        if run.is_stopping:
            return
        async with _trainers(run) as trainers:
            if run.found is not None:
                await _restore(run, trainers, fleet, run.found.folder)
            elif run.folder.start.is_dir():
                await _restore(run, trainers, fleet, run.folder.start)
            await _reinforce(run, trainers, fleet, evaluator)
            if is_training and not run.is_stopping:
                await _save(run, trainers.learner, fleet)
        if run.is_stopping:
            return
        if is_training:
            await evaluator.after()
        run.is_done = True


# ---- open ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _open(run: ActiveRun, supervision: Supervision) -> AsyncIterator[tuple[Fleet, Evaluator]]:
    """The backend, the engines and the control socket. They are closed in reverse order, also where only some were opened."""
    prepared = run.prepared
    context = BackendContext(
        model=prepared.model,
        tokenizer=prepared.tokenizer_for_stops,
        folder=run.folder.path,
        clock=run.clock,
        sink=run.log,
    )
    async with AsyncExitStack() as closing:
        closing.push_async_callback(prepared.backend.close)
        opening = prepared.backend.open(context)
        await run.waits.on(OWNER, "a place for its parts", opening, deadline=False)  # it has one of its own
        fleet = build_fleet(
            prepared.backend,
            run.config.engine,
            is_queueing=not run.config.pipeline.is_in_lockstep,
            clock=run.clock,
            sink=run.log,
        )
        closing.push_async_callback(fleet.close)
        closing.push_async_callback(prepared.close)
        replacing = asyncio.create_task(fleet.replace(run.adopt))
        closing.callback(replacing.cancel)
        closing.push_async_callback(supervision.close_control)
        await supervision.open_control(fleet)
        run.outside = await closing.enter_async_context(serving_outside(run, fleet))
        yield fleet, Evaluator(prepared, fleet.router, run.clock, run.log, run.waits)


class Trainers(NamedTuple):
    """What learns, what scores for it, and their checkpoints."""

    learner: RunLearner
    scorers: Scorers
    checkpoints: Checkpoints


@asynccontextmanager
async def _trainers(run: ActiveRun) -> AsyncIterator[Trainers]:
    """Scorers are built before the learner, which changes the model."""
    checkpoints = build_checkpoints(run)
    run.checkpoints = checkpoints
    async with AsyncExitStack() as closing:
        scorers = Scorers()  # recorded rows have been scored
        if run.config.data.rollouts is None:
            building = asyncio.to_thread(build_run_scorers, run, checkpoints)
            scorers = await run.waits.on(OWNER, "the scorers to be built", building)
        closing.push_async_callback(scorers.close)
        learner = build_durable_learner(run, checkpoints)
        closing.push_async_callback(learner.close)
        await run.waits.on(OWNER, "the scorers to be ready", scorers.ready())
        await run.waits.on(OWNER, "the learner to be ready", learner.ready())
        yield Trainers(learner, scorers, checkpoints)


# ---- warm up ---------------------------------------------------------------------------------------------------------


async def _warm_up(run: ActiveRun, fleet: Fleet, evaluator: Evaluator, config: WarmupConfig) -> None:
    """Supervised training. Afterwards the model and every engine have its weights, as version 0."""
    model = run.prepared.model
    checkpoints = build_sft_checkpoints(run, config)
    learner = build_sft_learner(run, config, checkpoints)
    training = build_supervised(run, config, learner, checkpoints, fleet, evaluator)
    try:
        await run.waits.on("warm-up", "the learner to be ready", learner.ready())
        run.begin(training)
        await training.run(None if run.resumed is None else run.resumed.supervised)
        run.at_work = None
        if run.is_stopping:
            return
        weights = await run.waits.on("warm-up", "the learner to copy weights", learner.weights())
        await run.waits.on("warm-up", "every engine to load its weights", fleet.load(0, weights))
        load_weights(model, weights)  # where the learner has changed another copy
        if isinstance(weights, RemoteWeights):
            weights.release()
        fleet.weights = Publication(0, trained_weights(model))  # that copy ends with the learner
    finally:
        run.end_grace()
        run.sft_step_kept = checkpoints.version or 0
        run.at_work = None  # it holds the learner, whose masters and moments are several times the model
        await learner.close()


# ---- reinforce -------------------------------------------------------------------------------------------------------


async def _restore(run: ActiveRun, trainers: Trainers, fleet: Fleet, folder: Path) -> None:
    learner, critic = trainers.learner, trainers.scorers.critic
    reading = asyncio.to_thread(learner.restore, folder)
    await run.waits.on(OWNER, "the checkpoint to be read", reading)
    if critic is not None and (folder != run.folder.start or (folder / CRITIC_FOLDER).is_dir()):
        reading = asyncio.to_thread(critic.restore, folder / CRITIC_FOLDER)
        await run.waits.on(OWNER, "the critic's checkpoint to be read", reading)
    weights = await run.waits.on(OWNER, "the learner to copy weights", learner.weights())
    loading = fleet.load(run.start_version, weights)
    await run.waits.on(OWNER, f"every engine to load version {run.start_version}", loading)


async def _reinforce(run: ActiveRun, trainers: Trainers, fleet: Fleet, evaluator: Evaluator) -> None:
    """Returns when the pipeline has ended and the last checkpoint is written."""
    prepared, config, learner, scorers = run.prepared, run.config, trainers.learner, trainers.scorers
    channel = prepared.backend.new_channel(learner)
    weights = await run.waits.on(OWNER, "the learner to copy weights", learner.weights())
    publishing = channel.publish(run.start_version, weights)  # what the engines have: for those that start later
    await run.waits.on(OWNER, f"version {run.start_version} to be published", publishing)
    state = None if run.found is None else run.found.pipeline_state()
    recorded = await asyncio.to_thread(recorded_batches, prepared.written)
    journal = await open_journal(run) if config.data.sessions else None
    parts = Parts(
        engines=fleet.router.engines,
        environment=prepared.environment if journal is None else OutsideEnvironment(journal),
        learner=learner,
        store=await run.waits.on(OWNER, "the store to be open", _open_store(run, scorers, recorded)),
        stages=scorers.stages,
        critic=scorers.critic,
        proximal=scorers.proximal,
        channel=channel,
        clock=run.clock,
        sink=run.log,
        waits=run.waits,
        rollouts=await run.waits.on(OWNER, "the files of rollouts", asyncio.to_thread(open_rollouts, run)),
        workers=await asyncio.to_thread(prepared.backend.plan_workers, prepared.tokenizer),
        records_turns=config.traces.opentelemetry is not None,
    )
    if run.found is None:
        run.emit_started()
    algorithm = build_algorithm(config, prepared.sampling, prepared.text, prepared.rewards, prepared.backend.launcher)
    run.pipeline = Pipeline(
        parts,
        sampled(prepared.data.train, config.data, seed=config.seed),
        algorithm if journal is None else structs.replace(algorithm, group_reward=None),  # clients reward
        config=config.pipeline,
        rollout=config.rollout,
        seed=config.seed,
        after_step=evaluator.after_step if any(one.every_steps for one in config.evaluations) else None,
        keeper=trainers.checkpoints,
        resumed=state,
        changed=run.changed,
        incarnation=run.incarnation,
        router=fleet.router,
        recorded=recorded,
        outside=journal,
    )
    if run.outside is not None:
        run.outside.use(run.pipeline.admission)
    if run.best is not None:
        run.best.is_awaited = partial(evaluator.is_awaited, run.best.table.name)
    run.begin(run.pipeline)
    if run.state is not None:
        restore_random_states(run.state.generators)
    fleet.weights = channel
    try:
        async with nullcontext() if journal is None else serving(run, fleet.router, journal):
            with seldom_collected():
                await run.pipeline.run()
    finally:
        run.end_grace()
        await run.waits.on(OWNER, "the last checkpoint to be written", trainers.checkpoints.close())


async def _open_store(run: ActiveRun, scorers: Scorers, recorded: RecordedBatches | None) -> Store:
    if recorded is None:
        return await run.prepared.backend.open_store(scorers.stages)
    capacity = run.config.pipeline.most_groups * run.config.rollout.most_rows
    return await asyncio.to_thread(recorded.new_store, capacity)


# ---- save ------------------------------------------------------------------------------------------------------------


async def _save(run: ActiveRun, learner: RunLearner, fleet: Fleet) -> None:
    await run.waits.on(OWNER, "the model to be saved", asyncio.to_thread(_write_model, run, learner))
    if run.config.learner.is_own:  # it has changed a copy
        load_weights(run.prepared.model, await run.waits.on(OWNER, "the learner to copy weights", learner.weights()))
    fleet.weights = Publication(run.version, trained_weights(run.prepared.model))


def _write_model(run: ActiveRun, learner: RunLearner) -> None:
    run.folder.write_folder(run.folder.model, learner.save)
    remove_sft_checkpoints(run.folder.path)
