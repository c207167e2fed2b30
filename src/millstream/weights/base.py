"""The weight channel: the learner publishes versions, and each engine fetches the newest when it can load it."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from millstream.types import Weights

TransferWay = Literal["shared", "ipc", "broadcast", "files"]
"""The transports by which weights reach another process: see `weights.transfer.transports`."""


class Publication(NamedTuple):
    version: int
    weights: Weights


class WeightChannel(Protocol):
    """Promises: `fetch` returns the newest published version, never a partly written one; versions only rise."""

    @property
    def version(self) -> int:
        """The newest published version; before the first, that of the weights the engines started with."""
        ...

    async def publish(self, version: int, weights: Weights) -> None:
        """The weights must not be changed afterwards."""
        ...

    async def fetch(self) -> Publication:
        """Verified: raises `WeightsError` if the weights are not those that were published."""
        ...

    async def anew(self) -> Weights | None:
        """Stage the newest version (or the first weights) again, because a process could not fetch it. Returns None if no
        process has it. From here on, `fetch` returns the newly staged copy."""
        ...
