"""Weights that are elsewhere, as a mapping: who looks at a tensor makes it take them, who can take the parcel need not."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from torch import Tensor

from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.fetcher import Taken, WeightsFetcher


class RemoteWeights(Mapping[str, Tensor]):
    """Names are known without taking anything. What is taken stays until `release`, or until nobody has it any more."""

    def __init__(self, parcel: WeightsRef, inbox: WeightsFetcher) -> None:
        """`inbox`: of the node of whoever may look at it."""
        self.parcel = parcel
        self._inbox = inbox
        self._taken: Taken | None = None
        self._lock = threading.Lock()

    @property
    def is_taken(self) -> bool:
        return self._taken is not None

    def __getitem__(self, name: str) -> Tensor:
        """Raises `WeightsError` as `WeightsFetcher.take` does, and blocks as it does."""
        with self._lock:
            if self._taken is None:
                self._taken = self._inbox.take(self.parcel)
            return self._taken.weights[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _, _ in self.parcel.layout.tensors)

    def __len__(self) -> int:
        return len(self.parcel.layout.tensors)

    def release(self) -> None:
        """Of what was taken nothing may be looked at any more; a later look takes it anew."""
        with self._lock:
            taken = self._taken
            self._taken = None
        if taken is not None:
            taken.release()

    def __repr__(self) -> str:
        return f"StagedWeights({self.parcel!r})"
