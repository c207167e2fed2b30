"""Parcels in place of weights: what goes through the channel is where a version is to be had. Whoever takes it verifies it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from millstream.errors import WeightsError
from millstream.types import Weights
from millstream.weights import NOTHING, Publication
from millstream.weights.transfer.remote_weights import RemoteWeights

Restage = Callable[[int], Awaitable[Weights | None]]


class RemoteChannel:
    """See `millstream.weights.WeightChannel` for the promises. Keeps the newest version only."""

    def __init__(self, restage: Restage | None = None) -> None:
        """`restage` gives a version's weights once more, or None where no process has them any more."""
        self._restage = restage
        self._newest: Publication | None = None

    @property
    def version(self) -> int:
        return NOTHING if self._newest is None else self._newest.version

    async def publish(self, version: int, weights: Weights) -> None:
        """Raises `WeightsError` if they are not `RemoteWeights`. The number of a parcel is its outbox's, and no version."""
        if version <= self.version:
            raise WeightsError(f"version {version} published after {self.version}: versions only rise")
        self._newest = _staged(Publication(version, weights))

    async def fetch(self) -> Publication:
        if self._newest is None:
            raise WeightsError("nothing has been published yet")
        return self._newest

    async def anew(self) -> Weights | None:
        """Asked for by several, it is staged for each: whoever comes later finds it there, and the rest is taken back."""
        if self._restage is None:
            return None
        version = self.version  # what is published meanwhile is another
        weights = await self._restage(version)
        if weights is not None and self._newest is not None and self._newest.version == version:
            self._newest = _staged(Publication(version, weights))
        return weights


def _staged(publication: Publication) -> Publication:
    version, weights = publication
    if not isinstance(weights, RemoteWeights):
        raise WeightsError(
            f"version {version} is a {type(weights).__name__}, expected StagedWeights: put it into an Outbox first"
        )
    return publication
