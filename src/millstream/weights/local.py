"""The channel within one process: passes a reference, and detects by a digest if the weights change after publication."""

from __future__ import annotations

import asyncio
from typing import Any

from millstream.errors import WeightsError
from millstream.types import Weights
from millstream.weights.base import NOTHING, Publication


class LocalChannel:
    """See `millstream.weights.WeightChannel` for the promises. Keeps only the newest version."""

    def __init__(self) -> None:
        self._newest: Publication | None = None
        self._digest = 0

    @property
    def version(self) -> int:
        return NOTHING if self._newest is None else self._newest.version

    async def publish(self, version: int, weights: Weights) -> None:
        if version <= self.version:
            raise WeightsError(f"version {version} published after {self.version}: versions only rise")
        found = await _digest(weights)
        self._newest = Publication(version, weights)
        self._digest = found

    async def fetch(self) -> Publication:
        if self._newest is None:
            raise WeightsError("nothing has been published yet")
        newest, expected = self._newest, self._digest
        found = await _digest(newest.weights)
        if found != expected:
            raise WeightsError(
                f"the weights of version {newest.version} changed after they were published: a learner's `weights()` must "
                "return a copy"
            )
        return newest

    async def restage(self) -> Weights | None:
        """There is no other copy in this process."""
        return None


async def _digest(weights: Weights) -> int:
    if any(hasattr(value, "untyped_storage") for value in weights.values()):
        return await asyncio.to_thread(_tensor_digest, weights)
    return hash(tuple(sorted((name, repr(value)) for name, value in weights.items())))


def _tensor_digest(weights: Weights) -> int:
    """The integer sum of all 4- or 2-byte words: one pass over memory, on the device of the tensors."""
    return sum(int(_words(tensor).sum()) for tensor in weights.values())


def _words(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
