"""The seam that carries weights from the learner to the engines: each engine takes a version when it suits it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from millstream.types import Weights

NOTHING = -1
"""The version of a channel that nothing was published to."""


class Publication(NamedTuple):
    """Weights of one version. As a `WeightSource` it gives itself."""

    version: int
    weights: Weights

    async def fetch(self) -> Publication:
        return self


class WeightSource(Protocol):
    """The owner of the newest weights."""

    async def fetch(self) -> Publication: ...


class WeightChannel(Protocol):
    """The one owner of the newest weights of a run. The weights that its engines start with are published first.

    Promises: `fetch` gives the newest version that was published, never one that is half written; versions only rise."""

    @property
    def version(self) -> int:
        """The newest published version; before the first, `NOTHING`."""
        ...

    async def publish(self, version: int, weights: Weights) -> None:
        """The weights must not be changed afterwards."""
        ...

    async def fetch(self) -> Publication:
        """Verified: raises `WeightsError` if what arrives is not what was published, or nothing has been."""
        ...

    async def anew(self) -> Weights | None:
        """What was fetched could not be reached: the same weights from a process that has them now. None if there is none. From
        here on, `fetch` gives it."""
        ...
