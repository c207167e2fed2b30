"""The weight channel: the learner publishes versions, and each engine fetches the newest when it can load it."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from millstream.types import Weights

TransferWay = Literal["shared", "ipc", "nccl", "broadcast", "files"]
"""The transports by which weights reach another process: see `weights.transfer.transports`."""
NOTHING = -1
"""The version of a channel that nothing was published to."""


class Publication(NamedTuple):
    """Weights of one version. As a `WeightSource` it returns itself."""

    version: int
    weights: Weights

    async def fetch(self) -> Publication:
        return self


class WeightSource(Protocol):
    """The owner of the newest weights."""

    async def fetch(self) -> Publication: ...


class WeightChannel(Protocol):
    """The one owner of the newest weights of a run. The weights that its engines start with are published first.

    Promises: `fetch` returns the newest published version, never a partly written one; versions only rise."""

    @property
    def version(self) -> int:
        """The newest published version; before the first, `NOTHING`."""
        ...

    async def publish(self, version: int, weights: Weights) -> None:
        """The weights must not be changed afterwards."""
        ...

    async def fetch(self) -> Publication:
        """Verified: raises `WeightsError` if the weights are not those that were published, or nothing was."""
        ...

    async def restage(self) -> Weights | None:
        """Stage the newest version again, because a process could not fetch it. Returns None if no process has it. From here
        on, `fetch` returns the newly staged copy."""
        ...
