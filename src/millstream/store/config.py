"""The `[store]` table."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from millstream import imports

AUTO_STORE = "auto"


class StoreConfig(Struct, frozen=True, kw_only=True):
    """The stream store of a run: where rollouts wait to be settled, scored and trained."""

    kind: str = AUTO_STORE
    """auto: in the driver's memory; with runtime = "ray", shared by the run's processes. Or one of your own: file.py:Name
    (docs/parts.md)."""
    args: dict[str, Any] = {}
    """Keyword arguments of a store of your own."""

    def __post_init__(self) -> None:
        if self.kind != AUTO_STORE and not imports.is_part("store", self.kind):
            raise ValueError(imports.unknown_part("store", self.kind, [AUTO_STORE]))
        if self.args and self.kind == AUTO_STORE:
            raise ValueError("args are of a store of your own: set kind = file.py:Name, or leave them out")

    @property
    def is_own(self) -> bool:
        return self.kind != AUTO_STORE
