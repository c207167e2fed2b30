"""Weights of another process as a mapping: they are fetched when a tensor is read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from torch import Tensor

from millstream.weights.transfer.base import FetchedWeights, WeightsRef
from millstream.weights.transfer.fetcher import WeightsFetcher


class RemoteWeights(Mapping[str, Tensor]):
    """Names are known without a fetch. Fetched weights stay until `release`, or until this object is gone. A process that can
    use `ref` itself need not read a tensor."""

    def __init__(self, ref: WeightsRef, fetcher: WeightsFetcher) -> None:
        """`fetcher`: of the node of the process that reads it."""
        self.ref = ref
        self._fetcher = fetcher
        self._fetched: FetchedWeights | None = None
        self._lock = threading.Lock()

    @property
    def is_fetched(self) -> bool:
        return self._fetched is not None

    def __getitem__(self, name: str) -> Tensor:
        """Raises `WeightsError` and blocks as `WeightsFetcher.take` does."""
        with self._lock:
            if self._fetched is None:
                self._fetched = self._fetcher.take(self.ref)
            return self._fetched.weights[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _, _ in self.ref.layout.tensors)

    def __len__(self) -> int:
        return len(self.ref.layout.tensors)

    def release(self) -> None:
        """The fetched tensors must not be read any more; reading an item again fetches again."""
        with self._lock:
            fetched = self._fetched
            self._fetched = None
        if fetched is not None:
            fetched.release()

    def __repr__(self) -> str:
        return f"RemoteWeights({self.ref!r})"
