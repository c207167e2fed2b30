"""The `[weights]` table."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from millstream import imports

AUTO_CHANNEL = "auto"


class WeightsConfig(Struct, frozen=True, kw_only=True):
    """The weight channel of a run: the learner publishes versions to it, and engines fetch the newest."""

    kind: str = AUTO_CHANNEL
    """auto: in the driver's memory, or with runtime = "ray" in that of rank 0; resources.weights says how other processes get
    them. Or a channel of your own: file.py:Name (docs/parts.md)."""
    args: dict[str, Any] = {}
    """Keyword arguments of a channel of your own."""

    def __post_init__(self) -> None:
        if self.kind != AUTO_CHANNEL and not imports.is_part("weights", self.kind):
            raise ValueError(imports.unknown_part("weights", self.kind, [AUTO_CHANNEL]))
        if self.args and self.kind == AUTO_CHANNEL:
            raise ValueError("args are of a channel of your own: set kind = file.py:Name, or leave them out")

    @property
    def is_own(self) -> bool:
        return self.kind != AUTO_CHANNEL
