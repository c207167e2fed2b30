"""Resume: what earlier processes of a run left in its log and its checkpoints, and the random states to restore."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from millstream.config import load
from millstream.errors import CheckpointError, ConfigError
from millstream.events import CheckpointSealed, Event, Resumed, Sizes, SizesChosen, WarmupSealed
from millstream.events.sinks import read_events, read_history
from millstream.run.changes import ChangedSetting, changed_settings, tables_of
from millstream.run.checkpoint import WARMUP_FOLDER, Found, find_newest, set_aside_newer
from millstream.run.config import RunConfig
from millstream.run.folder import RunFolder

logger = logging.getLogger(__name__)


class PreviousRun(NamedTuple):
    """What the log says about earlier processes of this run."""

    incarnation: int
    ended_at: float
    sealed: set[str]  # digests of the checkpoints that they wrote


class ResumePoint(NamedTuple):
    """Where a resumed run continues."""

    previous: PreviousRun
    found: Found | None  # a checkpoint of reinforcement learning
    supervised: Found | None = None  # a checkpoint of supervised training, where there is no other
    changes: tuple[ChangedSetting, ...] = ()  # settings that differ from those of the checkpoint
    is_edited: bool = False  # config.toml was edited by hand

    @property
    def version(self) -> int:
        return 0 if self.found is None else self.found.manifest.version

    @property
    def checkpoints(self) -> list[Found]:
        return [one for one in (self.found, self.supervised) if one is not None]


def read_previous(folder: RunFolder) -> PreviousRun:
    incarnation, ended_at, sealed = 0, 0.0, set[str]()
    for event in read_events(folder.events) if folder.events.exists() else ():
        ended_at = max(ended_at, event.at)
        if isinstance(event, Resumed):
            incarnation = event.incarnation
        elif isinstance(event, CheckpointSealed | WarmupSealed):
            sealed.add(event.digest)
    return PreviousRun(incarnation, ended_at, sealed)


def recorded_sizes(folder: RunFolder) -> Sizes | None:
    """Those that the last process of the run had; None in a log of an earlier version, whose config has every size."""
    found = None
    for event in read_events(folder.events) if folder.events.exists() else ():
        found = event.sizes if isinstance(event, SizesChosen) else found
    return found


def find_resume_point(folder: RunFolder, config: RunConfig, data_digest: str | None) -> ResumePoint:
    """The newest intact checkpoint, and how `config` differs from its settings. Changes nothing. Raises `CheckpointError` if
    there are checkpoints and none is intact or the data is not what the run began with (`data_digest`: None if it was not
    read), and `ConfigError` if the run has made more steps than the config has, or is finished and has no checkpoints."""
    previous, supervised = read_previous(folder), None
    found, troubles = find_newest(folder.path, previous.sealed)
    if found is None:
        supervised, more = find_newest(folder.path, previous.sealed, WARMUP_FOLDER)
        troubles += more
    for trouble in troubles:
        logger.warning("%s; it is set aside", trouble)
    base = folder.logged_config(None if found is None else found.manifest.covers_seq)
    base = tables_of(load(folder.config, RunConfig)) if base is None else base
    changes = tuple(changed_settings(base, tables_of(config)))
    point = ResumePoint(previous, found, supervised, changes, folder.is_edited())
    if config.pipeline.steps < point.version:
        raise ConfigError(
            f"pipeline.steps = {config.pipeline.steps}, and the run has made {point.version} steps: set it to {point.version} "
            "to end the run with what is trained, or higher to train on"
        )
    if point.version == 0 and folder.is_finished() and folder.steps_done():
        raise ConfigError(
            f"the run in {folder.path} is finished, and its checkpoints are gone: there is nothing to resume"
        )
    for one in point.checkpoints:
        if data_digest is not None and one.run_state().data_digest != data_digest:
            raise CheckpointError(
                f"the data set is not the one that the run in {folder.path} began with: the run cannot be resumed. Restore "
                "the data, or start a new run"
            )
    return point


def accept_resume_point(point: ResumePoint) -> None:
    """The folder is changed: damaged checkpoints are renamed."""
    for found in point.checkpoints:
        set_aside_newer(found)


def history_before(folder: RunFolder, resumed: ResumePoint | None) -> Iterator[Event]:
    """The events of earlier processes that the checkpoint covers."""
    if resumed is not None and resumed.found is not None:
        yield from read_history(folder.events, upto=resumed.found.manifest.covers_seq)


def random_states() -> dict[str, Any]:
    """The states of the global generators of Python, numpy and torch, in plain types."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().tolist(),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
