"""Export: the model of a run's checkpoint as a Hugging Face model, whether the run is active, stopped or finished.

Only reads the run's files. The folder is complete or not there: it is written under a temporary name first. Neither the
optimizer's state nor more than one copy of the weights is read. Imports torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from shlex import quote

from msgspec import Struct, structs

from millstream.config import load
from millstream.errors import CheckpointError, ConfigError, LearnerError, OutputError
from millstream.learner.state import read_trained
from millstream.learner.trainer import save_trained
from millstream.model.adapters import save_adapters, trained_weights
from millstream.model.load import load_weights
from millstream.paths import kind_of, program
from millstream.run import build, checkpoint
from millstream.run.best import best_step
from millstream.run.checkpoint import Found
from millstream.run.config import RunConfig
from millstream.run.folder import RunFolder, resume_command

MAX_EXPORT_TRIES = 3  # an active run removes old checkpoints, also the one that is being read, if that takes long


class Exported(Struct, frozen=True, kw_only=True):
    folder: str
    step: int
    is_supervised: bool
    """Whether it is a step of supervised training: there was no checkpoint of reinforcement learning yet."""
    troubles: list[str]
    """What is wrong with checkpoints that were tried before."""

    @property
    def what(self) -> str:
        began = "" if self.step else ", before reinforcement learning"
        return f"supervised step {self.step}" if self.is_supervised else f"step {self.step}{began}"


def export(
    run_dir: str | Path,
    target: str | Path,
    *,
    step: int | None = None,
    is_best: bool = False,
    adapter_only: bool = False,
) -> Exported:
    """Write what a run has trained so far to a new folder that transformers loads. `step`: of the checkpoint; None: the newest
    one or, with `is_best`, that of `checkpoint.keep_best`. With adapters: see `save_trained`; with `adapter_only` a folder that
    peft loads onto the model that was trained."""
    run_dir, target = Path(run_dir), Path(target)
    folder = RunFolder.of_run(run_dir)
    folder.check_trained()
    if kind_of(target) is not None:
        raise ConfigError(f"{target} is there already: choose another folder, or remove it")
    config = load(folder.config, RunConfig)
    if is_best:
        if step is not None:
            raise ConfigError(f"step {step} and the best one: leave one of them out")
        step, _ = best_step(run_dir)
    if adapter_only and config.learner.lora is None:
        raise ConfigError(
            f"the run in {run_dir} trained the whole model: there is no adapter to export. Leave --adapter out"
        )
    for attempt in range(1, MAX_EXPORT_TRIES + 1):
        found, is_supervised, troubles = _find(run_dir, step)
        if step is None and not found.manifest.version and config.pipeline.steps and config.warmup is None:
            raise ConfigError(
                f"the run in {run_dir} has no checkpoint but that of step 0, before training. Wait for the next one, or export "
                f"the model as it began:\n  {program()} export {quote(str(run_dir))} {quote(str(target))} --step 0"
            )
        try:
            _write(config, found, target, adapter_only=adapter_only)
        except LearnerError:
            if found.folder.exists() or attempt == MAX_EXPORT_TRIES:
                raise
        else:
            version = found.manifest.version
            return Exported(folder=str(target), step=version, is_supervised=is_supervised, troubles=troubles)
    raise AssertionError("unreachable")


def _find(run_dir: Path, step: int | None) -> tuple[Found, bool, list[str]]:
    """The checkpoint, whether it is one of supervised training, and what is wrong with others."""
    troubles: list[str] = []
    for name in (checkpoint.FOLDER, checkpoint.WARMUP_FOLDER) if step is None else (checkpoint.FOLDER,):
        found, more = checkpoint.find_for_reading(run_dir, name, step)
        troubles += more
        if found is not None:
            return found, name == checkpoint.WARMUP_FOLDER, troubles
    if troubles:
        raise CheckpointError(f"no checkpoint in {run_dir} is usable: {'; '.join(troubles)}")
    if step is not None and (there := checkpoint.steps_in(run_dir)):
        steps = ", ".join(map(str, there))
        raise ConfigError(
            f"the run in {run_dir} has no checkpoint of step {step}; it has those of {steps}: name one of them, or "
            "leave it out for the newest"
        )
    raise ConfigError(f"the run in {run_dir} has no checkpoint yet. To resume the run:\n  {resume_command(run_dir)}")


def _write(config: RunConfig, found: Found, target: Path, *, adapter_only: bool) -> None:
    of_driver = structs.replace(config.model, device="cpu")
    model, tokenizer = build.build_model(of_driver, seed=config.seed, lora=config.learner.lora)
    trained = read_trained(found.folder)
    if different := sorted(trained.keys() ^ trained_weights(model).keys()):
        raise CheckpointError(
            f"{found.folder} is of another model than {config.model.path or 'the one that was made'}: it differs in "
            f"{different[:4]}. Is the model still the one that the run began with?"
        )
    load_weights(model, trained)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if adapter_only:
            save_adapters(model, partial)
            tokenizer.save_pretrained(partial)
        else:
            save_trained(model, tokenizer, partial)
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OutputError(
            f"cannot write {target}: {error.strerror or error}. Repair that, and type\n  {program()} export "
            f"{quote(str(found.folder.parent.parent))} {quote(str(target))}"
        ) from error
