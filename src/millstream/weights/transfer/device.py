"""A staged copy in a GPU's memory, which other processes of the node open by its CUDA IPC handle: device to device, no host.

The handle is torch's own, as `torch.multiprocessing` passes it around (`torch/multiprocessing/reductions.py`), but sent without
pickle. It stays valid for as long as the buffer lives; the lock of the slot says when it may be written again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millstream.errors import WeightsUnreachable
from millstream.weights.transfer import Handle


class DeviceBuffer:
    """Room for one version on a device."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._handle: Handle | None = None

    def reserve(self, num_bytes: int) -> None:
        """What is written stays. Whoever has the handle of what was there before keeps that alive."""
        if num_bytes > len(self.bytes):
            room = torch.empty(num_bytes, dtype=torch.uint8, device=self.bytes.device)
            room[: len(self.bytes)].copy_(self.bytes)
            self.bytes = room
            self._handle = None

    def handle(self) -> Handle:
        """Of all that is written. Returns when the device is done with writing it."""
        torch.cuda.synchronize(self.bytes.device)
        if self._handle is None:
            device, memory, num_bytes, offset, counter, counter_offset, event, is_event_waited_for = (
                self.bytes.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            )
            self._handle = Handle(
                gpu=gpu_of(device),
                memory=memory,
                num_bytes=num_bytes,
                offset=offset,
                counter=counter,
                counter_offset=counter_offset,
                event=event,
                is_event_waited_for=is_event_waited_for,
            )
        return self._handle


def open_handle(handle: Handle, num_bytes: int) -> Tensor:
    """The bytes behind it, on the device where they are. Raises `WeightsUnreachable` if this process cannot have them."""
    device = _number_of(handle.gpu)
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


def gpu_of(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def is_seen(gpu: str) -> bool:
    """Whether this process may use it. Ray shows each process its own GPUs, and no other."""
    return gpu in _seen()


def _seen() -> list[str]:
    return [gpu_of(number) for number in range(torch.cuda.device_count())]


def _number_of(gpu: str) -> int:
    """Its number in this process."""
    seen = _seen()
    if gpu not in seen:
        raise WeightsUnreachable(f"GPU {gpu} is not among those that this process sees ({', '.join(seen) or 'none'})")
    return seen.index(gpu)
