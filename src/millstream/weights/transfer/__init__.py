"""What is said of staged weights: where they are to be had, and what they must be when they arrive.

A parcel is small and plain: it goes through MessagePack to any process, and whoever has it may take the weights by whichever
way reaches them. The token in it opens the outbox's sender, so a parcel is for those who may have the weights; it does not show
when a parcel is printed.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from millstream.model.shared_memory import Layout

Way = Literal["shared", "ipc", "broadcast", "files"]
WAYS: tuple[Way, ...] = ("ipc", "shared", "broadcast", "files")
"""The nearest first: the order in which an inbox tries them."""


class Handle(Struct, frozen=True, kw_only=True):
    """A stretch of a GPU's memory that other processes of the node can open: torch's CUDA IPC handle, field by field."""

    gpu: str
    """The device's UUID: processes may number devices differently."""
    memory: bytes
    num_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    is_event_waited_for: bool


class WeightsRef(Struct, frozen=True, kw_only=True):
    version: int
    serial: int
    """How many the outbox had put before: a version that is staged twice is two parcels."""
    layout: Layout
    digests: list[int]
    """One a bucket."""
    bucket_bytes: int
    node: str
    """Where it is staged."""
    path: str
    """The slot's file in that node's shared memory. Whoever takes the weights there has a lock on it while it has them."""
    is_shared: bool
    """Whether the file holds the weights, for whoever maps it; else it is but the lock of a copy on a device."""
    ipc: Handle | None
    """The copy on a device; None where there is none."""
    sender: tuple[str, int] | None
    """Host and port of the outbox's sender; None where it does not send."""
    token: str
    folder: str | None
    """With safetensors files; None where none are written."""

    @property
    def num_bytes(self) -> int:
        return self.layout.ends[-1]

    def __repr__(self) -> str:
        return (
            f"Parcel(version={self.version}, serial={self.serial}, num_bytes={self.num_bytes}, node={self.node!r}, "
            f"path={self.path!r}, sender={self.sender}, folder={self.folder!r})"
        )


class Delivery(Struct, frozen=True, kw_only=True):
    """How a process lets others have weights: what its outbox is made with."""

    ways: tuple[Way, ...]
    files: str | None = None
    """The folder of the way "files"."""
