"""One version of what a process has, for whoever comes for it: staged once, for as long as it does not change, and with nothing
of before kept beside it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from millstream.errors import WeightsError
from millstream.model.shared_memory import views_of
from millstream.types import Weights
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.publisher import WeightsPublisher
from millstream.weights.transfer.slots import hold


class Staged(NamedTuple):
    outbox: WeightsPublisher
    parcel: WeightsRef


class CachedRef:
    """May be used from several threads. `open_publisher`: what is staged on the host, in an outbox of its own each time."""

    def __init__(self, open_publisher: Callable[[], WeightsPublisher]) -> None:
        self._open_outbox = open_publisher
        self._staged: Staged | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def put(self, weights: Weights) -> WeightsRef:
        """The parcel of before, where it holds these weights. Else another, for which there must be room beside it until it is
        whole: whoever has what was there before keeps it, whoever comes for it finds it gone. Raises `WeightsError` as
        `WeightsPublisher.put` does; what was there before then stays."""
        with self._lock:
            before = self._staged
            if before is not None and _holds(before.parcel, weights):
                return before.parcel
            outbox = self._open_outbox()
            try:
                self._staged = Staged(outbox, outbox.put(next(self._numbers), weights.items()))
            except BaseException:  # whatever it is, nobody else knows of this one
                outbox.close()
                raise
            if before is not None:
                before.outbox.close()
            return self._staged.parcel

    def close(self) -> None:
        """As that of its outbox."""
        with self._lock:
            if self._staged is not None:
                self._staged.outbox.close()


def _holds(parcel: WeightsRef, weights: Weights) -> bool:
    """Whether it is there, and the same, every number."""
    try:
        held = hold(parcel)
    except WeightsError:  # somebody has removed it
        return False
    try:
        found = views_of(held.bytes, parcel.layout)
        return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name].cpu()) for name in found)
    finally:
        held.release()
