"""The `[store]` table."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from millstream import imports

AUTO_STORE = "auto"


class StoreConfig(Struct, frozen=True, kw_only=True):
    """The stream store of a run: where rollouts wait to be settled, scored and trained."""

    kind: str = AUTO_STORE
    """auto: in the driver's memory; with runtime = "ray", rollout workers or memory_gb, shared by the run's processes. Or
    one of your own: file.py:Name (docs/parts.md)."""
    args: dict[str, Any] = {}
    """Keyword arguments of a store of your own."""
    memory_gb: float | None = None
    """Rows beyond this are on disk, on each node (10^9 bytes). None: all rows are in memory."""
    spill_folder: str | None = None
    """The folder for them, which every node has. None: that of temporary files (TMPDIR)."""

    def __post_init__(self) -> None:
        if self.kind != AUTO_STORE and not imports.is_part("store", self.kind):
            raise ValueError(imports.unknown_part("store", self.kind, [AUTO_STORE]))
        if self.args and self.kind == AUTO_STORE:
            raise ValueError("args are of a store of your own: set kind = file.py:Name, or leave them out")
        if self.memory_gb is None and self.spill_folder is not None:
            raise ValueError("spill_folder goes with memory_gb: set that, or leave spill_folder out")
        if self.memory_gb is not None and (self.is_own or not 0 < self.memory_gb < math.inf):
            raise ValueError(f"memory_gb must be above 0 and finite, of a store of kind {AUTO_STORE!r}: leave it out")

    @property
    def is_own(self) -> bool:
        return self.kind != AUTO_STORE

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gb is None else int(self.memory_gb * 1e9)
