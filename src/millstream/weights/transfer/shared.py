"""The transport "shared": other processes of the node map the slot that holds the weights. Nothing is copied."""

from __future__ import annotations

from millstream.model.shared_memory import views_of
from millstream.weights.transfer.base import FetchedWeights, FetchOptions, TransportStage, WeightsRef
from millstream.weights.transfer.digests import verify_all
from millstream.weights.transfer.slots import lock_slot


class SharedStage(TransportStage):
    copy = "host"


class SharedFetch:
    def __init__(self, options: FetchOptions) -> None:
        self._node = options.node

    def can_fetch(self, ref: WeightsRef) -> bool:
        return ref.node == self._node

    def fetch(self, ref: WeightsRef) -> FetchedWeights:
        locked = lock_slot(ref)
        try:
            verify_all(locked.bytes, ref)
            return FetchedWeights(ref, "shared", views_of(locked.bytes, ref.layout), locked.release)
        except BaseException:
            locked.release()
            raise
