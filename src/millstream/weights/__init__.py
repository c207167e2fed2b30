"""The seam that carries weights from the learner to the engines: each engine takes a version when it suits it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from millstream.types import Weights


class Publication(NamedTuple):
    version: int
    weights: Weights


class WeightChannel(Protocol):
    """Promises: `fetch` gives the newest version that was published, never one that is half written; versions only rise."""

    @property
    def version(self) -> int:
        """The newest published version; before the first, that of the weights the engines started with."""
        ...

    async def publish(self, version: int, weights: Weights) -> None:
        """The weights must not be changed afterwards."""
        ...

    async def fetch(self) -> Publication:
        """Verified: raises `WeightsError` if what arrives is not what was published."""
        ...

    async def anew(self) -> Weights | None:
        """Somebody could not have what was fetched, or what the engines start with: the same, from whoever has it now. None if
        that is nobody. From here on, `fetch` gives it."""
        ...
