"""A model's weights in one piece of memory that several processes map.

It has no name in any file system, so that nothing is left behind however a process dies.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile

import torch
from msgspec import Struct
from torch import Tensor

from millstream.errors import WeightsError
from millstream.types import Weights

ALIGNMENT = 64


class Layout(Struct, frozen=True, kw_only=True):
    """Name, dtype and shape of everything in the memory, in its order."""

    tensors: list[tuple[str, str, tuple[int, ...]]]

    @property
    def ends(self) -> list[int]:
        """Where each tensor's place ends, in bytes. Every one begins at a multiple of 64."""
        sizes = (_num_bytes(dtype, shape) for _, dtype, shape in self.tensors)
        return list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))


def layout_of(weights: Weights) -> Layout:
    return Layout(tensors=[(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in weights.items()])


def views_of(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The named tensors in a stretch of bytes, which they share."""
    found: dict[str, Tensor] = {}
    for begin, (name, dtype, shape) in zip([0, *layout.ends], layout.tensors, strict=False):
        end = begin + _num_bytes(dtype, shape)
        found[name] = flat[begin:end].view(getattr(torch, dtype)).view(shape)
    return found


class SharedWeights:
    """The memory behind a descriptor, as named tensors."""

    def __init__(self, descriptor: int, layout: Layout) -> None:
        flat = torch.from_file(f"/dev/fd/{descriptor}", shared=True, size=layout.ends[-1], dtype=torch.uint8)
        self.views = views_of(flat, layout)

    def write(self, weights: Weights) -> None:
        """All of them, or some. Raises `WeightsError` for a name that is not in the layout."""
        if strange := weights.keys() - self.views.keys():
            raise WeightsError(f"the weights do not fit: {sorted(strange)[:4]}")
        for name, value in weights.items():
            self.views[name].copy_(value.detach())


def anonymous_memory(num_bytes: int) -> int:
    """The descriptor of so much shared memory, which is really there. Raises `OSError` if it is not."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("millstream")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@functools.cache
def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size: int = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
    return size
