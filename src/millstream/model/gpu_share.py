"""One GPU that decodes and trains at the same time: what runs first, and on which multiprocessors.

The kernels of a decode step are short and wait for one another; those of training are long and fill the device. Without a rule
each of the many kernels of a step waits until training leaves a multiprocessor. Two rules help: kernels of a step with few
requests are urgent (a priority of their stream, kept in captured graphs), and training may be given a part of the
multiprocessors only (a *green context* of the driver), so that the others are always free. With many requests both sides are
bound by the bandwidth of the memory: there neither goes first, and training has the whole device.

While a graph is captured, no other thread may wait for the whole device, as compilers do when they measure what they have
compiled: the wait fails, and so does the capture. So training and captures take turns (`TURNS`).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)
URGENT_ROWS = 256  # of a decode step: up to here its latency decides, beyond it the bandwidth of the memory
FEW_REQUESTS = 384  # in flight: most steps have fewer rows
TRAINING_SHARE = 0.61  # of the multiprocessors: 80 of 132
MAX_WAIT_S = 0.1  # of training, for a capture: an engine that has nothing to do captures nothing
URGENT = -5  # a stream's priority: the driver takes the highest that it has
SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
RESOURCE_BYTES = 1024  # more than a CUdevResource has
COUNT_AT = slice(96, 100)  # of its number of multiprocessors
DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which must be set
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class Turns:
    """Training that may wait for the whole device, and captures of graphs: never both at once. A capture does not wait for
    training, which may take long: it is tried again, and training lets it go first when its next call begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_wanted = threading.Event()  # by a capture that found training at work
        self._is_served = threading.Event()

    @contextmanager
    def training(self) -> Iterator[None]:
        if self._is_wanted.is_set():
            self._is_served.wait(MAX_WAIT_S)
            self._is_wanted.clear()
        with self._lock:
            yield

    @contextmanager
    def capture(self) -> Iterator[bool]:
        """Whether the graph may be captured now."""
        is_free = self._lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._is_wanted.clear()
                self._is_served.set()
                self._lock.release()
            else:
                self._is_served.clear()
                self._is_wanted.set()


TURNS = Turns()  # of this process: a wait for the device concerns all of its threads


def training_share(num_requests: int, max_lag: float) -> float:
    """The share of the multiprocessors for training, where up to `num_requests` are decoded on the same GPU. With `max_lag = 0`
    much of training happens after decoding."""
    return TRAINING_SHARE if max_lag > 0 and num_requests <= FEW_REQUESTS else 1.0


def training_stream(device: torch.device, share: float) -> torch.cuda.Stream:
    """A stream whose kernels run on this share of the multiprocessors; on all of them where the driver cannot divide them."""
    if share < 1:
        try:
            return _part_of(device, share)
        except (OSError, AttributeError, RuntimeError) as error:
            logger.warning("training shares all multiprocessors with decoding, which slows decoding down: %s", error)
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _part_of(device: torch.device, share: float) -> torch.cuda.Stream:
    """Raises `RuntimeError` with the driver's number of what failed, `AttributeError` for a driver without green contexts."""
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # there is a context now
        whole, part, rest = (ctypes.create_string_buffer(RESOURCE_BYTES) for _ in range(3))
        handle, number = ctypes.c_int(), ctypes.c_uint(1)
        description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        _call(driver.cuDeviceGet, ctypes.byref(handle), torch.cuda.current_device())
        _call(driver.cuDeviceGetDevResource, handle, whole, SM_RESOURCE)
        wanted = max(1, round(share * int.from_bytes(whole.raw[COUNT_AT], "little")))
        _call(driver.cuDevSmResourceSplitByCount, part, ctypes.byref(number), whole, rest, 0, ctypes.c_uint(wanted))
        _call(driver.cuDevResourceGenerateDesc, ctypes.byref(description), part, 1)
        _call(driver.cuGreenCtxCreate, ctypes.byref(context), description, handle, DEFAULT_STREAM)
        _call(driver.cuGreenCtxStreamCreate, ctypes.byref(stream), context, NON_BLOCKING, 0)
    return torch.cuda.ExternalStream(stream.value, device)  # type: ignore[no-untyped-call]


def _call(function: Callable[..., int], *arguments: Any) -> None:
    if status := function(*arguments):
        raise RuntimeError(f"{getattr(function, '__name__', function)} gave {status}")
