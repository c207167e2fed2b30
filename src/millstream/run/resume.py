"""Resume: what earlier processes of a run left in its log and its checkpoints, and the random states to restore."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from millstream.errors import CheckpointError
from millstream.events import CheckpointSealed, Event, Resumed, Sizes, SizesChosen, WarmupSealed
from millstream.events.sinks import read_events, read_history
from millstream.run.checkpoint import WARMUP_FOLDER, Found, find_newest
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
    changes: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        return 0 if self.found is None else self.found.manifest.version


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


def find_resume_point(folder: RunFolder, data_digest: str, changes: tuple[str, ...]) -> ResumePoint:
    """The newest intact checkpoint; damaged ones are renamed, with a warning. Raises `CheckpointError` if there are checkpoints
    and none is intact, or if the data is not what the run began with."""
    previous, supervised = read_previous(folder), None
    found, troubles = find_newest(folder.path, previous.sealed)
    if found is None:
        supervised, more = find_newest(folder.path, previous.sealed, WARMUP_FOLDER)
        troubles += more
    for trouble in troubles:
        logger.warning("%s; it is set aside", trouble)
    for one in (found, supervised):
        if one is not None and one.run_state().data_digest != data_digest:
            raise CheckpointError(
                f"the data set is not the one that the run in {folder.path} began with: the run cannot be resumed. Restore "
                "the data, or start a new run"
            )
    return ResumePoint(previous, found, supervised, changes)


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
