"""The memory of a device: a cache that can never fit is refused before it is allocated."""

from __future__ import annotations

import os

import torch

from millstream.errors import EngineError


def check_fits(num_bytes: int, device: torch.device, what_to_set: str) -> None:
    """Raises `EngineError` for a cache larger than all memory of its device. A CPU would grant it, and kill the process."""
    there = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else _machine_bytes()
    if num_bytes > there:
        raise EngineError(
            f"the cache would have {num_bytes / 1e9:.3g} GB, and {device} has {there / 1e9:.3g} GB: set {what_to_set} lower"
        )


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
