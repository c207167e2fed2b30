"""From an active run to what it trains with: checkpoints, learners, scorers, supervised training. Imports torch.

A learner or critic with processes of its own, of which one may die alone, is wrapped in one that outlives them (`run.replay`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from millstream.algo.recipe import Recipe
from millstream.events import WARMUP, EventSink, PathChosen
from millstream.learner import LearnerConfig, RunLearner
from millstream.learner.frozen import FrozenLearner
from millstream.learner.path import learner_path
from millstream.model.adapters import lora_of, merged
from millstream.model.load import save_model
from millstream.run.active import ActiveRun
from millstream.run.best import BestCheckpoint
from millstream.run.build_scorers import Scorers
from millstream.run.checkpoint import FOLDER, WARMUP_FOLDER, Checkpoints
from millstream.run.config import WarmupConfig, reference_of
from millstream.run.evaluate import Evaluator
from millstream.run.replay import ReplayedCritic, ReplayedLearner
from millstream.run.sft import (
    MAX_PROBE_TASKS,
    GoldExamples,
    SftCheckpointSink,
    SupervisedTraining,
    learner_config,
)
from millstream.serving.fleet import Fleet
from millstream.types import ComputePath, Weights

SILENT_SHARE = 0.9
"""The share of `pipeline.deadline_s` after which a learner with processes of its own that does not answer counts as dead."""


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def build_checkpoints(run: ActiveRun) -> Checkpoints:
    checkpoints = _checkpoints(run, FOLDER, run.log, last_step=run.config.pipeline.steps, best=run.best)
    if run.found is not None:
        checkpoints.resume_from(run.start_version)
    return checkpoints


def build_sft_checkpoints(run: ActiveRun, config: WarmupConfig) -> Checkpoints:
    """By the `[checkpoint]` table; none after the last step, since reinforcement learning begins with one."""
    num_steps = config.num_steps(len(run.prepared.data.train))
    return _checkpoints(run, WARMUP_FOLDER, SftCheckpointSink(run.log), last_step=num_steps + 1)


def _checkpoints(
    run: ActiveRun, folder: str, sink: EventSink, *, last_step: int, best: BestCheckpoint | None = None
) -> Checkpoints:
    return Checkpoints(
        run.folder.path / folder,
        run.config.checkpoint,
        last_step=last_step,
        clock=run.clock,
        sink=sink,
        last_seq=run.log.last_seq,
        sync=run.sync,
        run_state=run.checkpoint_state,
        best=best,
    )


# ---- learners --------------------------------------------------------------------------------------------------------


def build_durable_learner(run: ActiveRun, checkpoints: Checkpoints) -> RunLearner:
    config = run.config
    if config.pipeline.rollouts_only:
        return FrozenLearner(run.prepared.model)
    if run.outside is not None and config.learner.kind == "outside":
        return run.outside.build_learner(run)
    recipe = Recipe(algorithm=config.algorithm, max_tokens=config.rollout.max_tokens)
    return _learner(run, config.learner, recipe, config.pipeline.steps, checkpoints, run.start_version)


def build_sft_learner(run: ActiveRun, config: WarmupConfig, checkpoints: Checkpoints) -> RunLearner:
    found = None if run.resumed is None else run.resumed.supervised
    return _learner(
        run,
        learner_config(run.config, config),
        Recipe(algorithm=None),
        config.num_steps(len(run.prepared.data.train)),
        checkpoints,
        0 if found is None else found.manifest.version,
    )


def _learner(
    run: ActiveRun,
    config: LearnerConfig,
    recipe: Recipe,
    num_steps: int,
    checkpoints: Checkpoints,
    version: int,
) -> RunLearner:
    backend, tokenizer, waits = run.prepared.backend, run.prepared.tokenizer, run.waits
    model, device = run.prepared.model, backend.learner_device
    path = ComputePath(config.kind) if config.is_own else learner_path(model, config, device)
    run.log.emit(PathChosen(at=run.clock.now(), worker="learner", path=path.name, why=path.why))

    def make() -> RunLearner:
        return backend.build_learner(tokenizer, learner=config, recipe=recipe, num_steps=num_steps)

    if not backend.has_learner_processes(config):
        return make()
    return ReplayedLearner(
        make,
        checkpoints,
        clock=run.clock,
        sink=run.log,
        version=version,
        patience_s=SILENT_SHARE * run.config.pipeline.deadline_s,
        progress=lambda: waits.renew("train", "the run", "warm-up"),
    )


def build_run_scorers(run: ActiveRun, checkpoints: Checkpoints) -> Scorers:
    """Called before the learner changes the model. Where the reference is the model after its warm-up, that model is saved, so
    that a resumed run has it."""
    waits, reference = run.waits, reference_of(run.config)
    saved: Path | None = None
    if reference is not None and reference.path is None and run.config.warmup is not None:
        saved = run.folder.reference
        if run.found is None:
            _save_start(run, saved)
            saved = None
    return run.prepared.backend.build_scorers(
        saved,
        lambda make: ReplayedCritic(
            make,
            checkpoints,
            clock=run.clock,
            sink=run.log,
            version=run.start_version,
            patience_s=SILENT_SHARE * run.config.pipeline.deadline_s,
            progress=lambda: waits.renew("critic", "stage values", "train", "the run"),
        ),
    )


def _save_start(run: ActiveRun, path: Path) -> None:
    model = run.prepared.model
    whole = model if lora_of(model) is None else merged(model)
    run.folder.write_folder(path, partial(save_model, whole, run.prepared.tokenizer))


# ---- supervised training ---------------------------------------------------------------------------------------------


def build_supervised(
    run: ActiveRun,
    config: WarmupConfig,
    learner: RunLearner,
    checkpoints: Checkpoints,
    fleet: Fleet,
    evaluator: Evaluator,
) -> SupervisedTraining:
    prepared = run.prepared

    async def accuracy_of(weights: Weights) -> float:
        await run.waits.on("warm-up", "every engine to load its weights", fleet.load(0, weights))
        tasks = prepared.data.train[:MAX_PROBE_TASKS]
        measured, _ = await evaluator.measure(WARMUP, tasks, prepared.sampling)
        return measured.accuracy

    return SupervisedTraining(
        config,
        learner,
        checkpoints,
        tasks=prepared.data.train,
        held_out=prepared.held_out,
        new_examples=lambda: GoldExamples(prepared.environment, prepared.text, run.config),
        accuracy_of=accuracy_of,
        micro_batch_tokens=run.config.learner.pass_tokens * run.config.learner.ranks,
        seed=run.config.seed,
        clock=run.clock,
        sink=run.log,
        waits=run.waits,
    )
