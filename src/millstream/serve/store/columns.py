"""Columns over HTTP: JSON, or the same in MessagePack. No pickle, no code.

A column is a list with one cell for each row. An array is `{"dtype": "int32", "shape": [3], "data": ...}`, the data
little-endian and in C order, as base64 in JSON and as bytes in MessagePack. A whole column may be one such array, its first
dimension the rows. Lists become arrays if `dtypes` names a type for their column; in JSON, lists of numbers always do (int64,
float64 or bool).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from millstream.errors import StoreError

_Array = np.ndarray[Any, Any]
JSON, MESSAGEPACK = "application/json", "application/msgpack"
ARRAY_KEYS = {"dtype", "shape", "data"}
NUMBERS = "biufc"


class BadColumns(ValueError):
    """The body has no valid columns; the message says where, and what was expected."""


# ---- decoding


def columns_in(
    columns: Mapping[str, Any], dtypes: Mapping[str, str] | None = None, *, is_json: bool = False
) -> dict[str, list[Any]]:
    """Columns for the store: all with the same number of rows, at least one."""
    dtypes = dtypes or {}
    if unknown := set(dtypes) - set(columns):
        raise BadColumns(f"dtypes names {', '.join(sorted(unknown))}, which is not among the columns")
    found = {name: _column_in(name, cells, dtypes.get(name), is_json) for name, cells in columns.items()}
    counts = {name: len(cells) for name, cells in found.items()}
    if len(set(counts.values())) != 1 or not next(iter(counts.values())):
        raise BadColumns(f"columns: expected the same number of rows in each, at least one, found {counts or 'none'}")
    return found


def _column_in(name: str, cells: Any, dtype: str | None, is_json: bool) -> list[Any]:
    try:
        if _is_array(cells):
            whole = _array_in(cells)
            if not whole.ndim:
                raise BadColumns("an array without dimensions, which has no rows")
            if len(whole) and not whole.size:
                raise BadColumns(f"an array of shape {whole.shape}, whose rows are empty: send a list of cells")
            return list(whole)
        if not isinstance(cells, list):
            raise BadColumns(f"expected a list with one cell for each row, found {type(cells).__name__}")
        if dtype is not None:
            return _typed_in([_cell_in(cell) for cell in cells], _dtype(dtype))
        found = [_cell_in(cell) for cell in cells]
        return _numbers_in(found) if is_json else found
    except (BadColumns, TypeError, ValueError, OverflowError) as error:
        raise BadColumns(f"column {name!r}: {error}") from error


def _is_array(cell: Any) -> bool:
    return isinstance(cell, dict) and cell.keys() == ARRAY_KEYS


def _cell_in(cell: Any) -> Any:
    return _array_in(cell) if _is_array(cell) else cell


def _dtype(name: Any) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in NUMBERS:
        raise BadColumns(
            f"dtype {name!r}: expected bool, int8 to int64, uint8 to uint64, float16 to float64, or complex"
        )
    return dtype


def _array_in(cell: dict[str, Any]) -> _Array:
    data, shape, dtype = cell["data"], cell["shape"], _dtype(cell["dtype"])
    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise BadColumns(f"data: not base64: {error}") from error
    if not isinstance(data, bytes):
        raise BadColumns(f"data: expected base64 or, in MessagePack, bytes, found {type(data).__name__}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise BadColumns(f"shape: expected a list of sizes, found {shape!r}")
    expected = dtype.itemsize
    for size in shape:
        expected *= size
    if len(data) != expected:
        raise BadColumns(f"data: expected {expected} bytes for {dtype.name} of shape {shape}, found {len(data)}")
    return np.frombuffer(bytearray(data), dtype.newbyteorder("<")).reshape(shape)


def _typed_in(cells: list[Any], dtype: np.dtype[Any]) -> list[Any]:
    """Cells of this type, if it can represent the values."""
    arrays = [np.asarray(cell) for cell in cells]
    for array in arrays:
        if array.size and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise BadColumns(f"expected numbers that fit {dtype.name}, found {array.dtype.name}")
    typed = [np.asarray(cell, dtype) for cell in cells]
    return typed if any(array.ndim for array in typed) else list(np.array(typed))


def _numbers_in(cells: list[Any]) -> list[Any]:
    """Lists of numbers become arrays of one type for the whole column; anything else is unchanged."""
    if not cells or not all(isinstance(cell, list) for cell in cells):
        return cells
    try:
        arrays = [np.array(cell) for cell in cells]
    except ValueError:  # lists of lists of different lengths
        return cells
    dtypes = {array.dtype for array in arrays if array.size}
    if not dtypes or any(dtype.kind not in NUMBERS for dtype in dtypes):
        return cells
    common = np.result_type(*dtypes)
    return [array.astype(common) for array in arrays]


# ---- encoding


def columns_out(columns: Mapping[str, Sequence[Any]], *, as_lists: bool = False) -> dict[str, list[Any]]:
    return {name: [_cell_out(cell, as_lists) for cell in cells] for name, cells in columns.items()}


def _cell_out(cell: Any, as_lists: bool) -> Any:
    """Tensors are sent as arrays; bfloat16 as float32, which represents the same values."""
    if hasattr(cell, "detach"):
        host = cell.detach().cpu()
        cell = (host.float() if str(host.dtype) == "torch.bfloat16" else host).numpy()
    if isinstance(cell, np.generic):
        return cell.item()
    if not isinstance(cell, np.ndarray):
        return cell
    if as_lists or cell.dtype.kind not in NUMBERS:
        return cell.tolist()
    little = np.ascontiguousarray(cell, cell.dtype.newbyteorder("<"))
    return {"dtype": cell.dtype.name, "shape": list(cell.shape), "data": little.tobytes()}


def _other(value: Any) -> Any:
    """Arrays nested inside of a cell."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise StoreError(f"a value of type {type(value).__name__} cannot be sent over HTTP")


_json = msgspec.json.Encoder(enc_hook=_other)
_msgpack = msgspec.msgpack.Encoder(enc_hook=_other)


def encode_body(value: Any, kind: str) -> bytes:
    return _msgpack.encode(value) if kind == MESSAGEPACK else _json.encode(value)
