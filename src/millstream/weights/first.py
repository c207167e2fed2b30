"""A channel that has something before anything is published: what the engines began with, for those who come late."""

from __future__ import annotations

from millstream.types import Weights
from millstream.weights import Publication, WeightChannel


class WithFirst:
    """See `millstream.weights.WeightChannel` for the promises, which are those of `channel`. `fetch` gives `first` until
    something is published: it is kept no longer than that."""

    def __init__(self, channel: WeightChannel, first: Weights) -> None:
        self._channel = channel
        self._first: Publication | None = Publication(channel.version, first)

    @property
    def version(self) -> int:
        return self._channel.version

    async def publish(self, version: int, weights: Weights) -> None:
        await self._channel.publish(version, weights)
        self._first = None

    async def fetch(self) -> Publication:
        return await self._channel.fetch() if self._first is None else self._first

    async def anew(self) -> Weights | None:
        weights = await self._channel.anew()
        if weights is not None and self._first is not None:
            self._first = Publication(self._first.version, weights)
        return weights
