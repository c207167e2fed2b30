"""The sender's end: a version is staged on its node, and a parcel says how to take it.

`put` copies at the speed of memory and waits for nobody: not for those who take, nor for those who still have an older version.
What somebody has taken stays as it is for as long as it has it. What nobody has taken yet stays until two more have been put,
unless others have all other slots.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import torch
from msgspec import Struct
from torch import Tensor

from millstream.errors import WeightsError
from millstream.model.safetensors_io import write_weights
from millstream.model.shared_memory import ALIGNMENT, Layout, layout_of, views_of
from millstream.rpc.process import own_host, own_node
from millstream.weights.transfer import Delivery, Handle, Way, WeightsRef
from millstream.weights.transfer.device import DeviceBuffer
from millstream.weights.transfer.digests import digests_of
from millstream.weights.transfer.rounds import Backend
from millstream.weights.transfer.sender import Sender
from millstream.weights.transfer.slots import Slot, Slots

MAX_SLOTS = 4
MAX_BUFFERS = 2
"""On a device, where memory is dear, and for one receiver on it. Several receivers, by several ways, may have as many slots as
on the host, rather than that a put fails."""
MAX_FOLDERS = 2
BUCKET_BYTES = 64 << 20


class Staged(Struct, frozen=True, kw_only=True):
    """A version in a slot, of which nobody has been told."""

    layout: Layout
    digests: list[int]
    ipc: Handle | None
    folder: str | None


class WeightsPublisher:
    """May be used from several threads. `folder` is in shared memory, and may have several outboxes."""

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        ways: Sequence[Way],
        host: str = "127.0.0.1",
        files: Path | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        device: torch.device | None = None,
        backend: Backend = "gloo",
        round_s: float = 10.0,
    ) -> None:
        """`host`: the address under which other nodes reach this one; nothing listens on any other.

        `device`: the GPU with the copy for "ipc" (by default the current one), and from which NCCL sends. `round_s`: how
        long a broadcast may stand still before those in it begin anew.
        """
        _check(ways, files, bucket_bytes)
        self._node = node
        self._ways = tuple(ways)
        self._files = files
        self._bucket_bytes = bucket_bytes
        self._device = device or torch.device("cuda")
        self._is_on_host = bool({"shared", "broadcast"} & set(ways)) or "ipc" not in ways
        self._slots = Slots(folder, most=MAX_BUFFERS if set(ways) == {"ipc"} else MAX_SLOTS)
        self._buffers: dict[Path, DeviceBuffer] = {}
        self._folders: list[Path] = []
        self._parcels: dict[int, WeightsRef] = {}
        self._num_put = 0
        self._num_bytes = 0
        self._is_closed = False
        self._token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._sender: Sender | None = None
        if "broadcast" in ways:
            try:
                self._sender = Sender(
                    host, self._parcels.get, token=self._token, backend=backend, device=self._device, round_s=round_s
                )
            except WeightsError:
                self._slots.close()
                raise

    @torch.no_grad()
    def put(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> WeightsRef:
        """The tensors are looked at one after the other and may be gone afterwards. When it returns, the parcel can be taken,
        by all of its ways. Raises `WeightsError` if there is no room, or every slot is in use."""
        with self._lock:
            if self._is_closed:
                raise WeightsError(f"version {version} put into an outbox that is closed")
            slot = self._slots.claim()
            try:
                slot.begin(version, serial := self._num_put)
                staged = self._stage(slot, version, weights)
                slot.finish(staged.layout.ends[-1] if self._is_on_host else 0)
            finally:
                slot.unlock()
            self._num_put += 1
            parcel = WeightsRef(
                version=version,
                serial=serial,
                layout=staged.layout,
                digests=staged.digests,
                bucket_bytes=self._bucket_bytes,
                node=self._node,
                path=str(slot.path),
                is_shared="shared" in self._ways,
                ipc=staged.ipc,
                sender=None if self._sender is None else self._sender.address,
                token=self._token,
                folder=staged.folder,
            )
            self._parcels[serial] = parcel
            for gone in self._parcels.keys() - self._slots.serials:
                del self._parcels[gone]
            return parcel

    def _stage(self, slot: Slot, version: int, weights: Iterable[tuple[str, Tensor]]) -> Staged:
        buffer: DeviceBuffer | None = None
        if "ipc" in self._ways:
            buffer = self._buffers.setdefault(slot.path, DeviceBuffer(self._device))
            if not self._num_bytes:  # how large it must be is not known before all have been seen
                weights = list(weights)
                self._num_bytes = layout_of(dict(weights)).ends[-1]
        stage = buffer or slot
        stage.reserve(self._num_bytes)
        layout = fill(stage, weights)
        self._num_bytes = layout.ends[-1]
        flat = stage.bytes[: self._num_bytes]
        if buffer is not None and self._is_on_host:
            slot.reserve(self._num_bytes)
            slot.bytes[: self._num_bytes].copy_(flat)
        return Staged(
            layout=layout,
            digests=digests_of(flat, self._bucket_bytes),
            ipc=None if buffer is None else buffer.handle(),
            folder=self._write(version, flat, layout),
        )

    def _write(self, version: int, flat: Tensor, layout: Layout) -> str | None:
        if self._files is None or "files" not in self._ways:
            return None
        # others may have theirs beside it, a learner before this one, say, whose numbers were the same
        folder = self._files.absolute() / f"version-{version:06d}-{self._slots.name}"
        write_weights(folder, version, views_of(flat, layout), None)
        self._folders = [*(one for one in self._folders if one != folder), folder]
        for old in self._folders[:-MAX_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)
        self._folders = self._folders[-MAX_FOLDERS:]
        return str(folder)

    def close(self) -> None:
        """Nothing more is sent, and its files are removed. Whoever has weights of it keeps them until they are released."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._sender is not None:
                self._sender.close()
            self._parcels.clear()
            self._slots.close()
            self._buffers.clear()
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)


def fill(stage: Slot | DeviceBuffer, weights: Iterable[tuple[str, Tensor]]) -> Layout:
    """One behind the other, with room made as they come."""
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    begin = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        end = begin + -(-size // ALIGNMENT) * ALIGNMENT
        stage.reserve(end)
        stage.bytes[begin : begin + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        tensors.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        begin = end
    if not tensors:
        raise WeightsError("there are no weights to put: expected at least one tensor")
    return Layout(tensors=tensors)


def _check(ways: Sequence[Way], files: Path | None, bucket_bytes: int) -> None:
    if strange := set(ways) - set(get_args(Way)):
        raise WeightsError(
            f"resources.weights has {', '.join(sorted(strange))}: expected some of {', '.join(get_args(Way))}"
        )
    if not ways:
        raise WeightsError(f"resources.weights is empty: expected some of {', '.join(get_args(Way))}")
    if "files" in ways and files is None:
        raise WeightsError('resources.weights has "files": say in which folder, one that all nodes see')
    if "ipc" in ways and not torch.cuda.is_available():
        raise WeightsError('resources.weights has "ipc", and torch sees no GPU here: use "shared"')
    if bucket_bytes <= 0 or bucket_bytes % ALIGNMENT:
        raise WeightsError(f"bucket_bytes is {bucket_bytes}: expected a multiple of {ALIGNMENT}")


def open_publisher(delivery: Delivery, *, node: str | None = None, host: str | None = None) -> WeightsPublisher:
    """An outbox in this node's shared memory; by default under the names that a cluster has for the node."""
    return WeightsPublisher(
        memory_folder(),
        node=own_node() if node is None else node,
        ways=delivery.ways,
        host=own_host() if host is None else host,
        files=None if delivery.files is None else Path(delivery.files),
    )


def memory_folder() -> Path:
    """One for all outboxes of this user on a node: whoever opens one removes what the dead have left."""
    return (
        Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()) / f"millstream-weights-{os.getuid()}"
    )
