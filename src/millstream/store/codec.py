"""Rows as bytes, without pickle: what a snapshot is on disk. Arrays come back with the type and shape they had."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from millstream.errors import StoreError
from millstream.store import Saved

ARRAY = 1
"""Our code among MessagePack's extension types."""


class _Array(Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def _to_bytes(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = _Array(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(array))
    if isinstance(value, np.generic):
        return value.item()
    raise StoreError(f"a column of type {type(value).__name__} cannot be saved: expected arrays, numbers, strings")


def _from_bytes(code: int, data: memoryview) -> Any:
    if code != ARRAY:
        raise StoreError(f"a saved column of unknown kind {code}")
    array = _read_array(data)
    return np.frombuffer(array.data, dtype=np.dtype(array.dtype)).reshape(array.shape).copy()


_read_array = msgspec.msgpack.Decoder(_Array).decode
_encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_decoder = msgspec.msgpack.Decoder(Saved, ext_hook=_from_bytes)


def pack(saved: Saved) -> bytes:
    return _encoder.encode(saved)


def unpack(data: bytes) -> Saved:
    """Raises `msgspec.DecodeError` if the bytes are not those of a snapshot."""
    saved: Saved = _decoder.decode(data)
    return saved
