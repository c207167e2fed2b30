"""Parcels in place of weights: what goes through the channel is where a version is to be had. Whoever takes it verifies it."""

from __future__ import annotations

from millstream.errors import WeightsError
from millstream.types import Weights
from millstream.weights import Publication
from millstream.weights.staged import StagedWeights


class RemoteChannel:
    """See `millstream.weights.WeightChannel` for the promises. Keeps the newest version only."""

    def __init__(self, version: int = 0) -> None:
        """`version`: that of the weights the engines start with."""
        self._first = version
        self._newest: Publication | None = None

    @property
    def version(self) -> int:
        return self._first if self._newest is None else self._newest.version

    async def publish(self, version: int, weights: Weights) -> None:
        """Raises `WeightsError` if they are not `StagedWeights` of this version."""
        if version <= self.version:
            raise WeightsError(f"version {version} published after {self.version}: versions only rise")
        self._newest = _staged(Publication(version, weights))

    def replace(self, publication: Publication) -> None:
        """The newest version, staged anew: whoever staged it first is gone. Raises `WeightsError` if it is another version."""
        if publication.version != self.version:
            raise WeightsError(f"version {publication.version} cannot take the place of {self.version}: publish it")
        self._newest = _staged(publication)

    async def fetch(self) -> Publication:
        if self._newest is None:
            raise WeightsError("nothing has been published yet")
        return self._newest


def _staged(publication: Publication) -> Publication:
    version, weights = publication
    if not isinstance(weights, StagedWeights):
        raise WeightsError(
            f"version {version} is a {type(weights).__name__}, expected StagedWeights: put it into an Outbox first"
        )
    if weights.parcel.version != version:
        raise WeightsError(f"published as version {version}, and the parcel holds version {weights.parcel.version}")
    return publication
