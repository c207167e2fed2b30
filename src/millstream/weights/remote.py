"""The channel between processes: carries references to published weights. The process that fetches them verifies them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from millstream.errors import WeightsError
from millstream.types import Weights
from millstream.weights.base import NOTHING, Publication
from millstream.weights.transfer.remote_weights import RemoteWeights

Restage = Callable[[int], Awaitable[Weights | None]]


class RemoteChannel:
    """See `millstream.weights.WeightChannel` for the promises. Keeps only the newest version."""

    def __init__(self, restage: Restage | None = None) -> None:
        """`restage` gives a version's weights once more, or None where no process has them any more."""
        self._restage = restage
        self._newest: Publication | None = None

    @property
    def version(self) -> int:
        return NOTHING if self._newest is None else self._newest.version

    async def publish(self, version: int, weights: Weights) -> None:
        """Raises `WeightsError` if they are not `RemoteWeights`. The version within the reference is not looked at."""
        if version <= self.version:
            raise WeightsError(f"version {version} published after {self.version}: versions only rise")
        self._newest = _checked(Publication(version, weights))

    async def fetch(self) -> Publication:
        if self._newest is None:
            raise WeightsError("nothing has been published yet")
        return self._newest

    async def restage(self) -> Weights | None:
        """Concurrent calls stage it once each."""
        if self._restage is None:
            return None
        version = self.version  # another one may be published in the meantime
        weights = await self._restage(version)
        if weights is not None and self._newest is not None and self._newest.version == version:
            self._newest = _checked(Publication(version, weights))
        return weights


def _checked(publication: Publication) -> Publication:
    version, weights = publication
    if not isinstance(weights, RemoteWeights):
        raise WeightsError(
            f"version {version} is a {type(weights).__name__}, expected RemoteWeights: put it into a WeightsPublisher first"
        )
    return publication
