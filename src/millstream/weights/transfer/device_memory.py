"""A published version in the memory of a GPU, and the handle by which other processes of the node open it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from msgspec import Struct


class IpcHandle(Struct, frozen=True, kw_only=True):
    """A stretch of a GPU's memory that other processes of the node can open: torch's CUDA IPC handle, field by field."""

    gpu: str
    """The UUID of the device: processes may number devices differently."""
    memory: bytes
    num_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    is_event_waited_for: bool


class DeviceBuffer:
    """Memory for one version on a device."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._handle: IpcHandle | None = None

    def reserve(self, num_bytes: int) -> None:
        """What is written stays. A process that has the handle of the smaller buffer keeps that buffer alive."""
        if num_bytes > len(self.bytes):
            room = torch.empty(num_bytes, dtype=torch.uint8, device=self.bytes.device)
            room[: len(self.bytes)].copy_(self.bytes)
            self.bytes = room
            self._handle = None

    def handle(self) -> IpcHandle:
        """Of all that is written on this thread's stream. Returns when the device has finished writing. Other streams are not
        waited for: the learner's may have work for a long time."""
        torch.cuda.current_stream(self.bytes.device).synchronize()
        if self._handle is None:
            device, memory, num_bytes, offset, counter, counter_offset, event, is_event_waited_for = (
                self.bytes.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            )
            self._handle = IpcHandle(
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


class DeviceBuffers:
    """One buffer for each slot."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[Path, DeviceBuffer] = {}

    def of(self, slot: Path) -> DeviceBuffer:
        if slot not in self._buffers:
            self._buffers[slot] = DeviceBuffer(self.device)
        return self._buffers[slot]

    def find(self, slot: Path) -> DeviceBuffer | None:
        return self._buffers.get(slot)

    def clear(self) -> None:
        self._buffers.clear()


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """What is launched within is on a CUDA stream of its own. On the default one, a decode step or a training pass that
    is launched meanwhile would wait for a transfer, and for the processes at its other end."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def gpu_of(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
