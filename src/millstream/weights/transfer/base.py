"""The descriptor of a published weight version, and the interface of a transport.

A new transport is a `TransportStage` and a `TransportFetch` in a file of its own, one line in `transports.TRANSPORTS`, its name
in `weights.base.TransferWay`, its words and default in `cluster/resources.py` (`TRANSFER_WORDS`, `ways_of`), and where it can
be used without Ray in `run/weight_ways.py` (`local_ways`). One that needs a GPU is also named in `run/ray_backend.py`
(`ON_HOST`) and in `publisher.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

import torch
from msgspec import Struct
from torch import Tensor

from millstream.model.shared_memory import Layout
from millstream.weights.base import TransferWay
from millstream.weights.transfer.device_memory import DeviceBuffers

BroadcastBackend = Literal["gloo", "nccl"]


class WeightsRef(Struct, frozen=True, kw_only=True):
    """A published version: layout, checksums, and how to fetch it by each transport. Small and plain: it is sent to other
    processes as MessagePack.

    Offers contain secrets (the token of a broadcast): a reference is for processes that may have the weights. They are not
    shown when a reference is printed."""

    version: int
    """The number that the publisher was given: a run's version, or how often a learner's process has published."""
    serial: int
    """The number of earlier puts of the publisher: a version that is staged twice has two references."""
    layout: Layout
    digests: list[int]
    """One for each bucket."""
    bucket_bytes: int
    node: str
    """The node that it is staged on."""
    path: str
    """The slot: a file in the shared memory of that node. A process that reads the weights there holds a lock on it."""
    offers: dict[TransferWay, bytes]
    """By transport, in the order in which a fetcher tries them: its own message, for its `TransportFetch`."""

    @property
    def num_bytes(self) -> int:
        return self.layout.ends[-1]

    @property
    def of_node(self) -> str:
        """In messages; empty without a cluster."""
        return f" of node {self.node}" if self.node else ""

    def __repr__(self) -> str:
        return (
            f"WeightsRef(version={self.version}, serial={self.serial}, num_bytes={self.num_bytes}, node={self.node!r}, "
            f"path={self.path!r}, ways={list(self.offers)})"
        )


class Delivery(Struct, frozen=True, kw_only=True):
    """How a process publishes weights: the options of its publisher."""

    ways: tuple[TransferWay, ...]
    """In the order in which a fetcher tries them."""
    files: str | None = None
    """The folder of the transport "files"."""


class FetchedWeights:
    """Weights that have arrived. They may be read until `release`, and must not be written."""

    def __init__(
        self, ref: WeightsRef, way: TransferWay, weights: dict[str, Tensor], on_release: Callable[[], object]
    ) -> None:
        self.version = ref.version
        self.way = way
        self.weights = weights
        self._on_release = on_release
        self._is_released = False

    def release(self) -> None:
        """The memory may be reused: no tensor of it may be read any more."""
        if not self._is_released:
            self._is_released = True
            self.weights = {}
            self._on_release()

    def __enter__(self) -> FetchedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class StageOptions(Struct, frozen=True, kw_only=True):
    """Of a publisher, for the stages of its transports."""

    name: str
    """Unique among publishers."""
    host: str
    """The address under which other nodes reach this one; nothing listens on any other."""
    files: Path | None
    buffers: DeviceBuffers
    """The copies on the publisher's device, where a transport needs them."""
    round_s: float
    find: Callable[[int], WeightsRef | None]
    """The reference with a serial number, if it is still staged."""


class StagedVersion(Struct, frozen=True, kw_only=True):
    """A version that was copied into memory, and of which no other process knows yet."""

    version: int
    slot: Path
    layout: Layout
    flat: Tensor
    """Its bytes, where they were copied first."""


class StagingMemory(Protocol):
    """Room that tensors are copied into, one after another."""

    bytes: Tensor

    def reserve(self, num_bytes: int) -> None:
        """Make room; what is written stays."""
        ...


StagedCopy = Literal["host", "device", "either"]


class TransportStage:
    """The publisher's side of a transport. Raises `WeightsError` from `__init__` if the transport cannot work here."""

    copy: StagedCopy = "either"
    """Where it needs the bytes: in the slot, on the device, or in one of them. Tensors are copied to the device first."""

    def __init__(self, options: StageOptions) -> None:
        self._options = options

    def stage(self, staged: StagedVersion) -> bytes:
        """Make the version available. Returns the offer for `TransportFetch`."""
        return b""

    def close(self) -> None: ...


class FetchOptions(Struct, frozen=True, kw_only=True):
    node: str
    """The node of the process that fetches."""
    timeout_s: float
    device: torch.device


class TransportFetch(Protocol):
    """The fetching side of a transport. May be used from several threads."""

    def __init__(self, options: FetchOptions) -> None: ...

    def can_fetch(self, ref: WeightsRef) -> bool:
        """Whether this process can use the offer, as far as that can be known without trying."""
        ...

    def fetch(self, ref: WeightsRef) -> FetchedWeights:
        """Verified, bucket by bucket. Raises `WeightsSuperseded` if newer weights are in their place, `WeightsUnreachable` if
        the transport failed (the next one is tried), and `WeightsError` if the weights are not those that were staged."""
        ...
