"""The publisher: stages a version on its node, and returns a reference by which other processes fetch it.

`put` copies at the speed of memory and does not wait for other processes: neither for those that fetch, nor for those that
still have an older version. Fetched weights stay unchanged until they are released. A version that was not fetched yet stays
until two more have been put, unless readers hold all other slots.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from millstream.errors import WeightsError
from millstream.model.shared_memory import ALIGNMENT, Layout, layout_of
from millstream.rpc.process import own_host, own_node
from millstream.weights.base import TransferWay
from millstream.weights.transfer.base import (
    Delivery,
    StagedVersion,
    StageOptions,
    StagingMemory,
    TransportStage,
    WeightsRef,
)
from millstream.weights.transfer.device_memory import DeviceBuffers
from millstream.weights.transfer.digests import bucket_digests
from millstream.weights.transfer.slots import Slot, Slots
from millstream.weights.transfer.transports import TRANSPORTS

logger = logging.getLogger(__name__)
MAX_SLOTS = 4
MAX_DEVICE_SLOTS = 2
"""Where weights are only on a device, whose memory is scarce. With several transports there may be as many slots as on the
host, so that a put does not fail."""
BUCKET_BYTES = 64 << 20


class WeightsPublisher:
    """May be used from several threads. `folder` is in shared memory, and may have several publishers."""

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        ways: Sequence[TransferWay],
        host: str = "127.0.0.1",
        files: Path | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        device: torch.device | None = None,
        round_s: float = 10.0,
    ) -> None:
        """`host`: the address under which other nodes reach this one; nothing listens on any other. `device`: the GPU with
        the copy for "ipc", and from which "nccl" sends (by default the current one). `round_s`: how long a broadcast may make
        no progress before its processes start it again. "nccl" is tried here, and left out with a warning where it does not
        work and there are other ways."""
        _check(ways, bucket_bytes)
        self._node = node
        self._bucket_bytes = bucket_bytes
        self._refs: dict[int, WeightsRef] = {}
        self._num_put = 0
        self._num_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._slots = Slots(folder, most=MAX_DEVICE_SLOTS if set(ways) <= {"ipc", "nccl"} else MAX_SLOTS)
        self._buffers = DeviceBuffers(device or torch.device("cuda"))
        options = StageOptions(
            name=self._slots.name,
            host=host,
            files=files,
            buffers=self._buffers,
            round_s=round_s,
            find=self._refs.get,
        )
        self._stages: dict[TransferWay, TransportStage] = {}
        try:
            for way in ways:
                try:
                    self._stages[way] = TRANSPORTS[way].stage(options)
                except WeightsError as error:
                    if way != "nccl" or len(ways) == 1:
                        raise
                    logger.warning("weights do not leave this process by nccl: %s", error)
        except WeightsError:
            self._close_all()
            raise
        copies = {stage.copy for stage in self._stages.values()}
        self._has_device_copy = "device" in copies or ("nccl" in self._stages and "host" not in copies)
        self._has_host_copy = "host" in copies or not self._has_device_copy

    @torch.no_grad()
    def put(self, version: int, weights: Iterable[tuple[str, Tensor]], layout: Layout | None = None) -> WeightsRef:
        """Copy the tensors, one after another. When it returns, the reference can be fetched, by all transports. Raises
        `WeightsError` if there is no room, or every slot is in use. `layout`: of the weights, where they are made one at a
        time: memory of a device is allocated at once."""
        with self._lock:
            if self._is_closed:
                raise WeightsError(f"version {version} put into a publisher that is closed")
            slot = self._slots.claim()
            try:
                slot.begin(version, serial := self._num_put)
                if layout is not None:
                    self._num_bytes = layout.ends[-1]
                staged = self._copy(slot, version, weights)
                digests = bucket_digests(staged.flat, self._bucket_bytes)
                offers = {way: stage.stage(staged) for way, stage in self._stages.items()}
                slot.finish(len(staged.flat) if self._has_host_copy else 0)
            finally:
                slot.unlock()
            self._num_put += 1
            ref = WeightsRef(
                version=version,
                serial=serial,
                layout=staged.layout,
                digests=digests,
                bucket_bytes=self._bucket_bytes,
                node=self._node,
                path=str(slot.path),
                offers=offers,
            )
            self._refs[serial] = ref
            for gone in self._refs.keys() - self._slots.serials:
                del self._refs[gone]
            return ref

    def _copy(self, slot: Slot, version: int, weights: Iterable[tuple[str, Tensor]]) -> StagedVersion:
        memory: StagingMemory = self._buffers.of(slot.path) if self._has_device_copy else slot
        if self._has_device_copy and not self._num_bytes:  # device memory is allocated once, at its full size
            weights = list(weights)
            self._num_bytes = layout_of(dict(weights)).ends[-1]
        memory.reserve(self._num_bytes)
        layout = fill(memory, weights)
        self._num_bytes = layout.ends[-1]
        flat = memory.bytes[: self._num_bytes]
        if self._has_device_copy and self._has_host_copy:
            slot.reserve(self._num_bytes)
            slot.bytes[: self._num_bytes].copy_(flat)
        return StagedVersion(version=version, slot=slot.path, layout=layout, flat=flat)

    def close(self) -> None:
        """Stop sending, and remove its files. Processes that have fetched weights keep them until they release them."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._close_all()

    def _close_all(self) -> None:
        for stage in self._stages.values():
            stage.close()
        self._buffers.clear()
        self._refs.clear()
        self._slots.close()


def fill(memory: StagingMemory, weights: Iterable[tuple[str, Tensor]]) -> Layout:
    """Copy tensors one behind another, and make room as they come."""
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    begin = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        end = begin + -(-size // ALIGNMENT) * ALIGNMENT
        memory.reserve(end)
        memory.bytes[begin : begin + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        tensors.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        begin = end
    if not tensors:
        raise WeightsError("there are no weights to put: expected at least one tensor")
    return Layout(tensors=tensors)


def _check(ways: Sequence[TransferWay], bucket_bytes: int) -> None:
    if strange := set(ways) - TRANSPORTS.keys():
        raise WeightsError(
            f"resources.weights has {', '.join(sorted(strange))}: expected some of {', '.join(TRANSPORTS)}"
        )
    if not ways:
        raise WeightsError(f"resources.weights is empty: expected some of {', '.join(TRANSPORTS)}")
    if bucket_bytes <= 0 or bucket_bytes % ALIGNMENT:
        raise WeightsError(f"bucket_bytes is {bucket_bytes}: expected a multiple of {ALIGNMENT}")


def open_publisher(
    delivery: Delivery, *, folder: Path | None = None, node: str | None = None, host: str | None = None
) -> WeightsPublisher:
    """A publisher in this node's shared memory, or in another `folder`; by default under the names that a cluster has for the
    node."""
    return WeightsPublisher(
        slot_folder() if folder is None else folder,
        node=own_node() if node is None else node,
        ways=delivery.ways,
        host=own_host() if host is None else host,
        files=None if delivery.files is None else Path(delivery.files),
    )


def slot_folder() -> Path:
    """One for all publishers of this user on a node: each new one removes what killed processes have left."""
    return (
        Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()) / f"millstream-weights-{os.getuid()}"
    )
