"""The receiver's end: what it hands out is verified, bucket by bucket, and stays as it is until it is released.

The nearest way that the parcel has and this process can go is tried first; where one fails for a reason of transport, the next.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from millstream.errors import WeightsError, WeightsUnreachable
from millstream.model.safetensors_io import read_weights
from millstream.model.shared_memory import layout_of, views_of
from millstream.weights.transfer import WAYS, Way, WeightsRef
from millstream.weights.transfer.device import is_seen, open_handle
from millstream.weights.transfer.digests import check, spans
from millstream.weights.transfer.receiver import receive
from millstream.weights.transfer.rounds import Backend
from millstream.weights.transfer.slots import hold

logger = logging.getLogger(__name__)


class Taken:
    """Weights that have arrived. They may be read until `release`, not written."""

    def __init__(self, parcel: WeightsRef, way: Way, weights: dict[str, Tensor], let_go: Callable[[], object]) -> None:
        self.version = parcel.version
        self.way = way
        self.weights = weights
        self._let_go = let_go
        self._is_released = False

    def release(self) -> None:
        """The memory may be used for something else: no tensor of it may be looked at any more."""
        if not self._is_released:
            self._is_released = True
            self.weights = {}
            self._let_go()

    def __enter__(self) -> Taken:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class WeightsFetcher:
    """May be used from several threads."""

    def __init__(self, node: str, *, timeout_s: float = 120.0, device: torch.device | None = None) -> None:
        """`timeout_s`: how long a take may last in which broadcasts fail and are begun anew. `device`: where weights are that
        NCCL brings (by default the current GPU); gloo brings them to the host."""
        self.node = node
        self._timeout_s = timeout_s
        self._device = device or torch.device("cuda")
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, parcel: WeightsRef) -> Taken:
        """Raises `WeightsSuperseded` if newer weights are in their place, `WeightsUnreachable` if no way led to them (it says
        why of each), and `WeightsError` if what arrived is not what was staged. May block for `timeout_s` and a transfer."""
        failures: list[str] = []
        for way in self.ways(parcel):
            try:
                return self._by(way, parcel)
            except WeightsUnreachable as failure:
                failures.append(f"{way}: {failure}")
                logger.warning("version %d did not come by way of %s (%s)", parcel.version, way, failure)
        if failures:
            raise WeightsUnreachable(
                f"version {parcel.version} of node {parcel.node} was not to be had; " + "; ".join(failures)
            )
        if parcel.node == self.node and parcel.ipc is not None:
            raise WeightsUnreachable(
                f"version {parcel.version} is staged on GPU {parcel.ipc.gpu} for those who see it, and this process does not: "
                'add "shared" to resources.weights'
            )
        raise WeightsUnreachable(
            f"version {parcel.version} is staged on node {parcel.node} for its own processes, and this is node {self.node}: "
            'add "broadcast" to resources.weights, or "files" with a folder that both nodes see'
        )

    def ways(self, parcel: WeightsRef) -> list[Way]:
        """Those that are open to this process, the nearest first."""
        is_here = parcel.node == self.node
        is_open: dict[Way, bool] = {
            "ipc": is_here and parcel.ipc is not None and is_seen(parcel.ipc.gpu),
            "shared": is_here and parcel.is_shared,
            "broadcast": parcel.sender is not None,
            "files": parcel.folder is not None,
        }
        return [way for way in WAYS if is_open[way]]

    def _by(self, way: Way, parcel: WeightsRef) -> Taken:
        match way:
            case "ipc":
                return self._from_device(parcel)
            case "shared":
                return self._from_memory(parcel)
            case "broadcast":
                return self._from_sender(parcel)
            case "files":
                return self._from_files(parcel)

    def _from_memory(self, parcel: WeightsRef) -> Taken:
        held = hold(parcel)
        try:
            _check_all(held.bytes, parcel)
            return Taken(parcel, "shared", views_of(held.bytes, parcel.layout), held.release)
        except BaseException:  # whatever it is, nobody else has the lock
            held.release()
            raise

    def _from_device(self, parcel: WeightsRef) -> Taken:
        assert parcel.ipc is not None
        held = hold(parcel)
        try:
            flat = open_handle(parcel.ipc, parcel.num_bytes)
            _check_all(flat, parcel)
            device = flat.device

            def let_go() -> None:
                torch.cuda.synchronize(device)  # what was launched may still read it
                held.release()

            return Taken(parcel, "ipc", views_of(flat, parcel.layout), let_go)
        except BaseException:  # as above
            held.release()
            raise

    def _from_sender(self, parcel: WeightsRef) -> Taken:
        @functools.cache
        def memory(backend: Backend) -> Tensor:
            return self._room(parcel.num_bytes, self._device if backend == "nccl" else torch.device("cpu"))

        flat = receive(
            parcel, memory, deadline=time.monotonic() + self._timeout_s
        )  # what a failure leaves is not used again
        return Taken(parcel, "broadcast", views_of(flat, parcel.layout), lambda: self._free.append(flat))

    def _room(self, num_bytes: int, device: torch.device) -> Tensor:
        """Memory of our own: what was released, where it fits."""
        with self._lock:
            for index, memory in enumerate(self._free):
                if len(memory) == num_bytes and memory.device.type == device.type:
                    return self._free.pop(index)
            self._free.clear()
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def _from_files(self, parcel: WeightsRef) -> Taken:
        assert parcel.folder is not None
        try:
            manifest, weights = read_weights(Path(parcel.folder))
        except WeightsError as error:
            raise WeightsUnreachable(str(error)) from error
        weights = {name: weights[name] for name, _, _ in parcel.layout.tensors if name in weights}
        if manifest.version != parcel.version or layout_of(weights) != parcel.layout:
            raise WeightsUnreachable(f"{parcel.folder} holds version {manifest.version}, expected {parcel.version}")
        return Taken(parcel, "files", weights, lambda: None)


def _check_all(flat: Tensor, parcel: WeightsRef) -> None:
    if len(flat) != parcel.num_bytes:
        raise WeightsError(f"version {parcel.version} has {len(flat)} bytes in its slot, expected {parcel.num_bytes}")
    for number, (begin, end) in enumerate(spans(parcel.num_bytes, parcel.bucket_bytes)):
        check(flat[begin:end], number, parcel)
