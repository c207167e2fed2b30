"""The transport "ipc": a staged copy in a GPU's memory, which other processes of the node open by its CUDA IPC handle.

Device to device, without the host. The handle is torch's own, as `torch.multiprocessing` passes it around
(`torch/multiprocessing/reductions.py`), but sent without pickle. It is valid while the buffer exists. The lock of the slot says
when the buffer may be written again.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from millstream.decoding import decode_msgpack
from millstream.errors import WeightsError, WeightsUnreachable
from millstream.model.shared_memory import views_of
from millstream.weights.transfer.base import (
    FetchedWeights,
    FetchOptions,
    StagedVersion,
    StageOptions,
    TransportStage,
    WeightsRef,
)
from millstream.weights.transfer.device_memory import IpcHandle, gpu_of
from millstream.weights.transfer.digests import verify_all
from millstream.weights.transfer.slots import lock_slot


class IpcStage(TransportStage):
    copy = "device"

    def __init__(self, options: StageOptions) -> None:
        super().__init__(options)
        if not torch.cuda.is_available():
            raise WeightsError('resources.weights has "ipc", and torch sees no GPU here: use "shared"')

    def stage(self, staged: StagedVersion) -> bytes:
        return msgspec.msgpack.encode(self._options.buffers.of(staged.slot).handle())


class IpcFetch:
    def __init__(self, options: FetchOptions) -> None:
        self._node = options.node

    def can_fetch(self, ref: WeightsRef) -> bool:
        return ref.node == self._node and handle_in(ref).gpu in _visible_gpus()

    def fetch(self, ref: WeightsRef) -> FetchedWeights:
        locked = lock_slot(ref)
        try:
            flat = open_handle(handle_in(ref), ref.num_bytes)
            verify_all(flat, ref)
            device = flat.device

            def release() -> None:
                torch.cuda.synchronize(device)  # kernels that were launched may still read it
                locked.release()

            return FetchedWeights(ref, "ipc", views_of(flat, ref.layout), release)
        except BaseException:
            locked.release()
            raise


def handle_in(ref: WeightsRef) -> IpcHandle:
    return decode_msgpack(ref.offers["ipc"], IpcHandle)


def open_handle(handle: IpcHandle, num_bytes: int) -> Tensor:
    """The bytes behind it, on their device. Raises `WeightsUnreachable` if this process cannot open it."""
    visible = _visible_gpus()
    if handle.gpu not in visible:
        raise WeightsUnreachable(
            f"GPU {handle.gpu} is not among those that this process sees ({', '.join(visible) or 'none'})"
        )
    device = visible.index(handle.gpu)
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device,
            handle.memory,
            handle.num_bytes,
            handle.offset,
            handle.counter,
            handle.counter_offset,
            handle.event,
            handle.is_event_waited_for,
        )
    except RuntimeError as error:  # the process that made it is gone, or it is this one
        raise WeightsUnreachable(f"the copy on GPU {handle.gpu} cannot be opened: {error}") from error
    flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)
    return flat[:num_bytes]


def _visible_gpus() -> list[str]:
    """By number in this process. Ray shows each process only its own GPUs."""
    return [gpu_of(number) for number in range(torch.cuda.device_count())]
