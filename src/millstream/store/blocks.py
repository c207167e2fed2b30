"""Columns as one block of bytes and back: packed once per batch, not once per cell, without pickle. And snapshots as bytes.

    | length of the header | header: MessagePack, one entry a column | pad | buffer | pad | buffer | ...

Arrays are concatenated, so that a cell is read as a view of the bytes and nothing is copied. A cell is read with the type, the
shape and the values that it was written with; a tensor is read on the host.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from millstream.decoding import decode_msgpack, msgpack_decoder
from millstream.errors import StoreError
from millstream.store.base import Columns, Saved

BUFFER_ALIGNMENT = 64
LENGTH_BYTES = 8
MSGPACK_TYPES = (int, float, str, bytes, bool, type(None), list, dict)
"""Types that MessagePack restores by itself."""
SEVERAL = "*"
"""In place of a type: each cell is stored with its own."""


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
    saved = decode_msgpack(data, _Array)
    array = np.frombuffer(saved.data, dtype=raw_dtype(saved.dtype)).reshape(saved.shape).copy()
    if code == TENSOR:
        return as_tensor(array, saved.dtype)
    return array if code == ARRAY else array[()]


# ---- columns ---------------------------------------------------------------------------------------------------------


class ColumnLayout(Struct, array_like=True):
    """How one column is stored in the buffers."""

    name: str
    kind: Literal["dense", "ragged", "constant", "packed"]
    num_rows: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """dense: of the column; ragged and constant: one number, the dimensions of a cell."""
    is_tensor: bool = False
    type: str = ""
    """packed: the type of all cells, as module:name; empty for types of MessagePack; `SEVERAL` if they differ."""
    buffers: list[tuple[int, int]] = []
    """Where the buffers begin, counted from the end of the header, and their sizes."""


_header = msgpack_decoder(list[ColumnLayout])
_encoder = msgspec.msgpack.Encoder(enc_hook=to_extension)


class Packing:
    """Columns to be packed: `nbytes` first, then `write` into a buffer of the caller."""

    def __init__(self, columns: Columns) -> None:
        self._pieces: list[tuple[int, int, Sequence[AnyArray] | bytes]] = []
        self._end = 0
        self._columns = [self._plan(name, cells) for name, cells in columns.items()]
        header = msgspec.msgpack.encode(self._columns)
        self._header = len(header).to_bytes(LENGTH_BYTES, "little") + header
        self._begin = _aligned(len(self._header))
        self.nbytes = self._begin + self._end
        self.has_tensors = any(column.is_tensor for column in self._columns)

    def _plan(self, name: str, cells: Sequence[Any]) -> ColumnLayout:
        try:
            return self._plan_cells(name, cells)
        except (TypeError, OverflowError, msgspec.EncodeError, StoreError) as error:
            raise StoreError(f"column {name!r} cannot be stored: {error}") from error

    def _plan_cells(self, name: str, cells: Sequence[Any]) -> ColumnLayout:
        count = len(cells)
        if isinstance(cells, np.ndarray) or is_tensor(cells):
            array, dtype = as_array(cells)
            return self._dense(name, array, dtype, is_tensor=is_tensor(cells))
        first, kinds = cells[0], set(map(type, cells))
        is_alike = len(kinds) == 1
        if is_alike and isinstance(first, np.generic) and first.dtype.kind in "biufc":
            return self._dense(name, np.array(cells), first.dtype.str, is_tensor=False)
        if is_alike and type(first) is np.ndarray and first.ndim > 0 and not first.dtype.hasobject:
            dtype, dims = first.dtype, first.ndim
            if all(cell.dtype == dtype and cell.strides == (0,) for cell in cells):
                return self._constant(name, cells, dtype)
            if all(cell.dtype == dtype and cell.ndim == dims for cell in cells):
                return self._ragged(name, cells, dtype.str, is_tensor=False)
        if is_alike and (type(first) is np.ndarray or is_tensor(first)):
            arrays, dtypes = zip(*map(as_array, cells), strict=True)
            is_uniform = len(set(dtypes)) == 1 and len({array.ndim for array in arrays}) == 1
            if is_uniform and first.ndim > 0:
                return self._ragged(name, arrays, dtypes[0], is_tensor=is_tensor(first))
            if is_uniform and is_tensor(first):
                return self._dense(name, np.stack(arrays), dtypes[0], is_tensor=True)
        names = {kind: "" if kind in MSGPACK_TYPES else _type_name(kind) for kind in kinds}
        column = ColumnLayout(name, "packed", count, type=names[type(first)] if is_alike else "")
        if is_alike or not any(names.values()):
            column.buffers.append(self._place(_encoder.encode(list(cells))))
        else:
            column.type = SEVERAL
            column.buffers.append(self._place(_encoder.encode([(names[type(cell)], cell) for cell in cells])))
        return column

    def _dense(self, name: str, array: AnyArray, dtype: str, *, is_tensor: bool) -> ColumnLayout:
        column = ColumnLayout(name, "dense", len(array), dtype, array.shape, is_tensor, buffers=[])
        column.buffers.append(self._place([array.reshape(-1)], array.nbytes))
        return column

    def _ragged(self, name: str, arrays: Sequence[AnyArray], dtype: str, *, is_tensor: bool) -> ColumnLayout:
        dims = arrays[0].ndim
        column = ColumnLayout(name, "ragged", len(arrays), dtype, (dims,), is_tensor, buffers=[])
        if dims == 1:
            lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
            flat: Sequence[AnyArray] = arrays
            size = int(lengths.sum())
        else:
            shapes = np.array([array.shape for array in arrays], np.int64)
            lengths, flat = shapes.reshape(-1), [array.reshape(-1) for array in arrays]
            size = int(shapes.prod(axis=1).sum())
        column.buffers.append(self._place([lengths], lengths.nbytes))
        column.buffers.append(self._place(flat, size * arrays[0].itemsize))
        return column

    def _constant(self, name: str, arrays: Sequence[AnyArray], dtype: np.dtype[Any]) -> ColumnLayout:
        """Cells of one value each (`numpy.broadcast_to`), however long they are."""
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        values = np.array([array[0] if len(array) else 0 for array in arrays], dtype)
        column = ColumnLayout(name, "constant", len(arrays), dtype.str, (1,), buffers=[])
        column.buffers += (self._place([lengths], lengths.nbytes), self._place([values], values.nbytes))
        return column

    def _place(self, piece: Sequence[AnyArray] | bytes, size: int | None = None) -> tuple[int, int]:
        begin = self._end
        size = len(piece) if size is None else size
        self._pieces.append((begin, size, piece))
        self._end = _aligned(begin + size)
        return begin, size

    def write(self, target: memoryview) -> None:
        """Into at least `nbytes` bytes."""
        target[: len(self._header)] = self._header
        for begin, size, piece in self._pieces:
            part = target[self._begin + begin : self._begin + begin + size]
            if isinstance(piece, bytes):
                part[:] = piece
            elif size:
                np.concatenate(piece, out=np.frombuffer(part, piece[0].dtype))

    def to_bytes(self) -> bytearray:
        data = bytearray(self.nbytes)
        self.write(memoryview(data))
        return data


class Block:
    """Packed columns. Cells are views: they keep the bytes alive, and are writable only if the bytes are."""

    def __init__(self, data: Any) -> None:
        view = memoryview(data)
        length = int.from_bytes(view[:LENGTH_BYTES], "little")
        self._columns = {column.name: column for column in _header.decode(view[LENGTH_BYTES : LENGTH_BYTES + length])}
        self._data = np.frombuffer(view, np.uint8)[_aligned(LENGTH_BYTES + length) :]
        self._starts: dict[str, list[int]] = {}
        self._flat: dict[str, Any] = {}

    @property
    def names(self) -> Iterable[str]:
        return self._columns

    @property
    def num_rows(self) -> int:
        return max((column.num_rows for column in self._columns.values()), default=0)

    def cells(self, name: str, start: int, count: int) -> list[Any]:
        column = self._columns[name]
        if name not in self._flat:
            self._open(column)
        flat = self._flat[name]
        if column.kind == "constant":
            lengths = self._buffer(column, 0, np.int64)
            return [np.broadcast_to(flat[i : i + 1], (int(lengths[i]),)) for i in range(start, start + count)]
        if column.kind != "ragged":
            return list(flat[start : start + count])
        starts = self._starts[name]
        if column.shape[0] == 1:
            return [flat[starts[i] : starts[i + 1]] for i in range(start, start + count)]
        shapes = self._shapes(column)
        return [flat[starts[i] : starts[i + 1]].reshape(tuple(shapes[i])) for i in range(start, start + count)]

    def _buffer(self, column: ColumnLayout, number: int, dtype: Any) -> AnyArray:
        begin, size = column.buffers[number]
        found: AnyArray = self._data[begin : begin + size].view(dtype)
        return found

    def _shapes(self, column: ColumnLayout) -> list[list[int]]:
        shapes: list[list[int]] = self._buffer(column, 0, np.int64).reshape(column.num_rows, -1).tolist()
        return shapes

    def _open(self, column: ColumnLayout) -> None:
        if column.kind == "packed":
            self._flat[column.name] = _unpack(bytes(self._buffer(column, 0, np.uint8)), column)
            return
        flat: Any = self._buffer(column, len(column.buffers) - 1, raw_dtype(column.dtype))
        if column.is_tensor:
            flat = as_tensor(flat, column.dtype)
        if column.kind == "dense":
            flat = flat.reshape(column.shape)
        elif column.kind == "ragged":
            sizes = self._buffer(column, 0, np.int64).reshape(column.num_rows, -1).prod(axis=1)
            self._starts[column.name] = [0, *np.cumsum(sizes).tolist()]
        self._flat[column.name] = flat


def _aligned(size: int) -> int:
    return (size + BUFFER_ALIGNMENT - 1) // BUFFER_ALIGNMENT * BUFFER_ALIGNMENT


def _type_name(kind: type) -> str:
    """The name of a type that can be restored from MessagePack; empty for arrays and tensors."""
    is_known = issubclass(kind, (Struct, Enum, tuple, set, frozenset)) or dataclasses.is_dataclass(kind)
    if not is_known and not issubclass(kind, (np.ndarray, np.generic)) and not _is_tensor_type(kind):
        raise StoreError(f"cells of type {kind.__name__}: expected arrays, tensors, numbers, strings, lists, structs")
    return f"{kind.__module__}:{kind.__qualname__}" if is_known else ""


def _is_tensor_type(kind: type) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.Tensor)


def _unpack(data: bytes, column: ColumnLayout) -> list[Any]:
    if column.type == SEVERAL:
        pairs = decode_msgpack(data, list[tuple[str, msgspec.Raw]])
        return [_decode(cell, _find_type(name)) for name, cell in pairs]
    cells: list[Any] = _decode(data, list[_find_type(column.type)])  # type: ignore[misc]
    return cells


def _decode(data: bytes | msgspec.Raw, kind: Any) -> Any:
    return msgpack_decoder(kind, ext_hook=from_extension, dec_hook=_already).decode(data)


def _find_type(name: str) -> Any:
    if not name:
        return Any
    module, _, path = name.partition(":")
    kind: Any = builtins if module == "builtins" else importlib.import_module(module)
    for part in path.split("."):
        kind = getattr(kind, part)
    if not isinstance(kind, type):
        raise StoreError(f"a column holds cells of {name}, which is not a type")
    _type_name(kind)
    return kind


def _already(kind: type, value: Any) -> Any:
    """Fields of a struct that an extension has decoded already."""
    if isinstance(value, kind):
        return value
    raise StoreError(f"expected {kind.__name__}, found {type(value).__name__}")


# ---- snapshots -------------------------------------------------------------------------------------------------------

_snapshot = msgpack_decoder(Saved, ext_hook=from_extension)


def encode_snapshot(saved: Saved) -> bytes:
    return _encoder.encode(saved)


def decode_snapshot(data: bytes) -> Saved:
    """Raises `msgspec.DecodeError` if the bytes are not those of a snapshot."""
    found: Saved = _snapshot.decode(data)
    return found
