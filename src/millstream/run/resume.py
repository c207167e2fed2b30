"""The lives of a run before this one: what a run that goes on has behind it, and the state of global generators it takes up."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

from millstream.events import (
    CheckpointSealed,
    Resumed,
    WarmupSealed,
)
from millstream.events.sinks import read_events
from millstream.run.checkpoint import Found
from millstream.run.folder import RunFolder


class PreviousRun(NamedTuple):
    """Of the processes before this one."""

    incarnation: int
    ended_at: float
    sealed: set[str]
    """Digests of the checkpoints that they wrote."""


def last_life(folder: RunFolder) -> PreviousRun:
    incarnation, ended_at, sealed = 0, 0.0, set[str]()
    for event in read_events(folder.events) if folder.events.exists() else ():
        ended_at = max(ended_at, event.at)
        if isinstance(event, Resumed):
            incarnation = event.incarnation
        elif isinstance(event, CheckpointSealed | WarmupSealed):
            sealed.add(event.digest)
    return PreviousRun(incarnation, ended_at, sealed)


class ResumePoint(NamedTuple):
    """What a resumed run has behind it."""

    found: Found | None
    life: PreviousRun
    supervised: Found | None = None
    """A checkpoint of supervised training, where there is none of reinforcement learning."""
    changes: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        return 0 if self.found is None else self.found.manifest.version


def generators() -> dict[str, Any]:
    """The states of the global generators, in plain types."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().tolist(),
    }


def restore_generators(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
