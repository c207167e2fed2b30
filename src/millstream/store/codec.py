"""Snapshots as bytes, without pickle. Arrays and tensors are decoded with the type and shape they had."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from millstream.errors import StoreError
from millstream.store.base import Saved

ARRAY, SCALAR, TENSOR = 1, 2, 3
"""Codes of our MessagePack extension types."""
AnyArray = np.ndarray[Any, Any]


class _Array(Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_array(value: Any) -> tuple[AnyArray, str]:
    """As a contiguous array on the host, and the name of its type."""
    if not is_tensor(value):
        if value.dtype.hasobject or value.dtype.names:
            raise StoreError(f"arrays of type {value.dtype} hold objects or records: use a list of them")
        flat: AnyArray = np.ascontiguousarray(value).reshape(value.shape)
        return flat, flat.dtype.str
    host = value.detach().cpu().contiguous()
    if str(host.dtype) == "torch.bfloat16":
        return host.view(sys.modules["torch"].int16).numpy(), "bfloat16"
    array: AnyArray = host.numpy()
    return array, array.dtype.str


def as_tensor(array: AnyArray, dtype: str) -> Any:
    """Shares the array's memory."""
    torch = importlib.import_module("torch")
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that stores it."""
    return np.dtype(np.int16) if dtype == "bfloat16" else np.dtype(dtype)


def to_extension(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)) or is_tensor(value):
        code = TENSOR if is_tensor(value) else ARRAY if isinstance(value, np.ndarray) else SCALAR
        array, dtype = as_array(value)
        packed = _Array(dtype, array.shape, array.tobytes())
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(packed))
    raise StoreError(f"a value of type {type(value).__name__}: expected arrays, numbers, strings, lists, structs")


def from_extension(code: int, data: memoryview) -> Any:
    if code not in (ARRAY, SCALAR, TENSOR):
        raise StoreError(f"a saved column of unknown kind {code}")
    saved = _read_array(data)
    array = np.frombuffer(saved.data, dtype=raw_dtype(saved.dtype)).reshape(saved.shape).copy()
    if code == TENSOR:
        return as_tensor(array, saved.dtype)
    return array if code == ARRAY else array[()]


_read_array = msgspec.msgpack.Decoder(_Array).decode
_encoder = msgspec.msgpack.Encoder(enc_hook=to_extension)
_decoder = msgspec.msgpack.Decoder(Saved, ext_hook=from_extension)


def encode_snapshot(saved: Saved) -> bytes:
    return _encoder.encode(saved)


def decode_snapshot(data: bytes) -> Saved:
    """Raises `msgspec.DecodeError` if the bytes are not those of a snapshot."""
    saved: Saved = _decoder.decode(data)
    return saved
