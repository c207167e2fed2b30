"""A cache of one staged version: staged again only when the weights have changed, and then the old copy is removed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from millstream.errors import WeightsError
from millstream.model.shared_memory import views_of
from millstream.types import Weights
from millstream.weights.transfer.base import WeightsRef
from millstream.weights.transfer.publisher import WeightsPublisher
from millstream.weights.transfer.slots import lock_slot


class CachedStage(NamedTuple):
    publisher: WeightsPublisher
    ref: WeightsRef


class CachedRef:
    """May be used from several threads. `open_publisher`: called for each staged copy; it must stage on the host."""

    def __init__(self, open_publisher: Callable[[], WeightsPublisher]) -> None:
        self._open_publisher = open_publisher
        self._staged: CachedStage | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def put(self, weights: Weights, may_be_old: Callable[[str], bool] = lambda name: False) -> WeightsRef:
        """The reference of the staged copy, if that holds these weights, but for those that `may_be_old`. Else a new one; until
        it is complete there must be room for both copies. A process that has fetched the old copy keeps it, one that comes
        later finds it gone. Raises `WeightsError` as `WeightsPublisher.put` does; the old copy then stays."""
        with self._lock:
            before = self._staged
            if before is not None and _holds(before.ref, weights, may_be_old):
                return before.ref
            publisher = self._open_publisher()
            try:
                self._staged = CachedStage(publisher, publisher.put(next(self._numbers), weights.items()))
            except BaseException:
                publisher.close()
                raise
            if before is not None:
                before.publisher.close()
            return self._staged.ref

    def close(self) -> None:
        """Close the publisher of the staged copy."""
        with self._lock:
            if self._staged is not None:
                self._staged.publisher.close()


def _holds(ref: WeightsRef, weights: Weights, may_be_old: Callable[[str], bool]) -> bool:
    """Whether the slot still exists and holds equal tensors."""
    try:
        locked = lock_slot(ref)
    except WeightsError:  # it was removed
        return False
    try:
        found = views_of(locked.bytes, ref.layout)
        if found.keys() != weights.keys():
            return False
        compared = (name for name in found if not may_be_old(name))
        return all(torch.equal(found[name], weights[name].cpu()) for name in compared)
    finally:
        locked.release()
