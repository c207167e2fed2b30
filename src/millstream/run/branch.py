"""A new run that begins with another run's checkpoint: its weights and its optimizer's state. Versions and schedules are at 0.

The run folder has a copy of that state (`RUN/start`): the run never needs the other one again, also where it is resumed. The
copy is the model that reinforcement learning starts from, for a reference that is not named. Imports torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import msgspec
from msgspec import Struct
from torch import Tensor
from transformers import PreTrainedModel

from millstream.config import load
from millstream.errors import CheckpointError, ConfigError
from millstream.events import RunBranched
from millstream.learner.state import read_state, read_trained, write_state
from millstream.model.adapters import is_adapter, lora_of, trained_weights
from millstream.model.load import load_weights
from millstream.pipeline.state import CRITIC_FOLDER
from millstream.run import checkpoint
from millstream.run.checkpoint import Found
from millstream.run.config import RunConfig, with_absolute_paths
from millstream.run.folder import RunFolder, resume_command

LINEAGE = "lineage.json"


class Lineage(Struct, frozen=True, kw_only=True):
    """Where a run began: `RUN/start/lineage.json`."""

    run_dir: str
    run_id: str
    step: int
    digest: str
    """Of the checkpoint, as in its run's log."""


class Branch(NamedTuple):
    lineage: Lineage
    found: Found

    def event(self, at: float) -> RunBranched:
        one = self.lineage
        return RunBranched(at=at, run_dir=one.run_dir, run_id=one.run_id, step=one.step, digest=one.digest)


def find_branch(source: str, config: RunConfig) -> Branch:
    """`source`: RUN or RUN@STEP; without a step, its newest checkpoint. Raises `ConfigError` with the steps that there are."""
    if config.warmup is not None:
        raise ConfigError(
            f"--from {source} with a [warmup] table: a model that was trained needs no warm-up. Leave it out: --set warmup="
        )
    path, step = _parsed(source)
    folder = RunFolder.of_run(path)
    folder.check_trained()
    found, troubles = checkpoint.find_for_reading(path, checkpoint.FOLDER, step)
    if found is None and troubles:
        raise CheckpointError(f"no checkpoint in {path} is usable: {'; '.join(troubles)}")
    if found is None:
        steps = checkpoint.steps_in(path)
        listed = (
            f"it has those of steps {', '.join(map(str, steps))}: type --from {quote(f'{path}@{steps[-1]}')}"
            if steps
            else (f"it has none. To resume it:\n  {resume_command(path)}")
        )
        raise ConfigError(f"the run in {path} has no checkpoint{'' if step is None else f' of step {step}'}; {listed}")
    _check_base(config, load(folder.config, RunConfig), source)
    version, run_id = found.manifest.version, found.manifest.run_id
    return Branch(Lineage(run_dir=str(path.resolve()), run_id=run_id, step=version, digest=found.digest), found)


def _parsed(source: str) -> tuple[Path, int | None]:
    name, at, step = source.rpartition("@")
    if not at or Path(source).exists():
        return Path(source), None
    if not step.isdecimal():
        raise ConfigError(f"--from {source}: expected RUN or RUN@STEP, such as {name}@100")
    return Path(name), int(step)


def _check_base(config: RunConfig, other: RunConfig, source: str) -> None:
    """Adapters are those of one model: what they were trained on."""
    if config.learner.lora is None or other.learner.lora is None:
        return
    ours, theirs = _base_of(config), _base_of(other)
    if ours != theirs:
        raise ConfigError(
            f"--from {source} has adapters of {theirs}, and [model] is {ours}: set [model] as there, or export that run and "
            "train its merged model"
        )


def _base_of(config: RunConfig) -> str:
    path = with_absolute_paths(config).model.path
    return f"a tiny model with random weights of seed {config.seed}" if path is None else path


def write_start(branch: Branch, folder: RunFolder) -> None:
    """The checkpoint's state, with its optimizer's moments, at step 0 of the schedule."""
    unfinished = folder.path / ".start.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        for name in ("", CRITIC_FOLDER):
            if (branch.found.folder / name).is_dir():
                (unfinished / name).mkdir(parents=True)
                write_state({**read_state(branch.found.folder / name), "num_steps_done": 0}, unfinished / name)
        (unfinished / LINEAGE).write_bytes(msgspec.json.format(msgspec.json.encode(branch.lineage), indent=2))
        unfinished.rename(folder.start)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load_start(model: PreTrainedModel, folder: Path) -> None:
    """The weights of a checkpoint into a model. Raises `ConfigError` if they are of another one."""
    load_weights(model, checked_start(model, folder))


def checked_start(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, which are those of a model like this one. Raises `ConfigError` if they are not."""
    trained, own, name = read_trained(folder), trained_weights(model), f"the checkpoint in {folder}"
    has_adapters, needs_adapters = any(map(is_adapter, trained)), lora_of(model) is not None
    if has_adapters != needs_adapters:
        missing, extra = "adapters, and [learner.lora] is not set", "a whole model, and [learner.lora] is set"
        raise ConfigError(
            f"{name} has trained {missing if has_adapters else extra}: set [learner.lora] as there, or export that run and "
            "train the exported model"
        )
    if different := sorted(trained.keys() ^ own.keys()):
        raise ConfigError(
            f"{name} is of another model than [model]: they differ in {', '.join(different[:4])}. Set [model] as there"
        )
    for key, weight in trained.items():
        if weight.shape != own[key].shape:
            raise ConfigError(
                f"{name} is of another model than [model]: {key} has the shape {tuple(weight.shape)} there and "
                f"{tuple(own[key].shape)} here. Set [model] and [learner.lora] as there"
            )
    return trained
