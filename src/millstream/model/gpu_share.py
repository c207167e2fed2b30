"""One GPU that decodes and trains at the same time: what runs first, and on which multiprocessors.

The kernels of a decode step are short and wait for one another; those of training are long and fill the device. Without a rule
each of the many kernels of a step waits until training leaves a multiprocessor. Two rules help: kernels of a step with few
requests are urgent (a priority of their stream, kept in captured graphs), and training may be given a part of the
multiprocessors only (a *green context* of the driver), so that the others are always free. With many requests both sides are
bound by the bandwidth of the memory: there neither goes first, and training has the whole device.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)
URGENT_ROWS = 256  # of a decode step: up to here its latency decides, beyond it the bandwidth of the memory
FEW_REQUESTS = 384  # in flight: most steps have fewer rows
TRAINING_SHARE = 0.61  # of the multiprocessors: 80 of 132
URGENT = -5  # a stream's priority: the driver takes the highest that it has
SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
RESOURCE_BYTES = 1024  # more than a CUdevResource has
COUNT_AT = slice(96, 100)  # of its number of multiprocessors
DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which must be set
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


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
