"""Decoders of JSON, MessagePack and builtins, made one at a time. msgspec 0.22 describes a struct when the first decoder of it
is made; a thread that makes another one meanwhile reads the unfinished description, and the process ends with a segmentation
fault. So all of the package decodes through this module."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
MAX_DECODERS = 1024  # kept; columns of a store may bring types while a run is active
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


@lru_cache(maxsize=MAX_DECODERS)
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _lock:
        return msgspec.json.Decoder(kind)


@lru_cache(maxsize=MAX_DECODERS)
def msgpack_decoder(
    kind: Any,
    *,
    ext_hook: Callable[[int, memoryview], Any] | None = None,
    dec_hook: Callable[[type, Any], Any] | None = None,
) -> msgspec.msgpack.Decoder[Any]:
    with _lock:
        return msgspec.msgpack.Decoder(kind, ext_hook=ext_hook, dec_hook=dec_hook)


@overload
def decode_json(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T: ...
@overload
def decode_json(data: bytes | bytearray | memoryview | str, kind: Any) -> Any: ...
def decode_json(data: bytes | bytearray | memoryview | str, kind: Any) -> Any:
    """Raises `msgspec.DecodeError`, and `msgspec.ValidationError` for a value of another type."""
    return json_decoder(kind).decode(data)


@overload
def decode_msgpack(data: bytes | bytearray | memoryview | msgspec.Raw, kind: type[T]) -> T: ...
@overload
def decode_msgpack(data: bytes | bytearray | memoryview | msgspec.Raw, kind: Any) -> Any: ...
def decode_msgpack(data: bytes | bytearray | memoryview | msgspec.Raw, kind: Any) -> Any:
    """Raises as `decode_json`."""
    return msgpack_decoder(kind).decode(data)


@overload
def to_type(value: Any, kind: type[T]) -> T: ...
@overload
def to_type(value: Any, kind: Any) -> Any: ...
def to_type(value: Any, kind: Any) -> Any:
    """From dicts, lists, numbers and text. Raises `msgspec.ValidationError`."""
    with _lock:
        msgspec.msgpack.Decoder(kind)  # describes the structs of the type
    return msgspec.convert(value, kind)
