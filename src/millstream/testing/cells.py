"""Cells of every kind that a column may have, and the comparison of cells before and after the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any

import numpy as np
from msgspec import Struct


class Correctness(Enum):
    RIGHT = "right"
    WRONG = "wrong"


class Grade(IntEnum):
    PASS = 1
    FAIL = 0


class ScoredText(Struct, frozen=True):
    text: str
    reward: float
    tags: list[str] = []


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: float


PLAIN_CELLS: dict[str, list[Any]] = {
    "strings": ["", "a", "µ × 数", "line\nline"],
    "bytes": [b"", b"\x00\xff", b"abc", b"x" * 1000],
    "integers": [0, -1, 2**63 - 1, -(2**63)],
    "floats": [0.0, -1.5, 1e300, float("inf")],
    "booleans": [True, False, True, False],
    "nothing": [None, None, None, None],
    "lists": [[], [1, 2], ["a", [b"b", None]], [1.5]],
    "dictionaries": [{}, {"a": 1}, {"a": {"b": [1, 2]}}, {1: "one"}],
    "tuples": [(), (1,), (1, "a"), (None, 2.5)],
    "structs": [ScoredText(text=f"{i}", reward=i / 2, tags=["t"] * i) for i in range(4)],
    "dataclasses": [Point(i, i / 2) for i in range(4)],
    "enums": [Correctness.RIGHT, Correctness.WRONG, Correctness.RIGHT, Correctness.RIGHT],
    "integer enums": [Grade.PASS, Grade.FAIL, Grade.PASS, Grade.PASS],
    "of several types": [1, "a", None, b"b"],
    "structs or nothing": [ScoredText(text="a", reward=0.0), None, ScoredText(text="b", reward=1.0), None],
    "enums or tuples": [Correctness.RIGHT, (1, 2), Grade.FAIL, [1, 2]],
}
DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64")


def arrays() -> dict[str, Any]:
    """Dense columns, and lists of arrays: of the same length, of several, empty, with many dimensions."""
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        found[f"dense {dtype}"] = np.arange(12).reshape(4, 3).astype(dtype)
        found[f"dense numbers {dtype}"] = np.arange(4).astype(dtype)
        found[f"ragged {dtype}"] = [np.arange(length).astype(dtype) for length in (3, 0, 1, 700)]
    return {
        **found,
        "dense of nothing": np.zeros((4, 0), np.float32),
        "all empty": [np.zeros(0, np.int32) for _ in range(4)],
        "dense of many dimensions": np.arange(4 * 2 * 3 * 5, dtype=np.float32).reshape(4, 2, 3, 5),
        "ragged of many dimensions": [np.ones(shape, np.int16) * 7 for shape in ((2, 3), (0, 3), (5, 1), (1, 0))],
        "without dimensions": [np.array(i, np.float32) for i in range(4)],
        "of several dimensions": [np.zeros(3), np.zeros((2, 2)), np.zeros(0), np.array(1.0)],
        "of several dtypes": [np.zeros(2, dtype) for dtype in ("int8", "float32", "int64", "bool")],
        "not in a row": list(np.arange(40, dtype=np.int32).reshape(10, 4).T),
        "scalars": [np.float32(i) for i in range(4)],
        "arrays or nothing": [np.arange(3), None, np.arange(2), None],
        "big-endian": [np.arange(length, dtype=">i4") for length in (1, 2, 3, 4)],
        "fixed strings": np.array(["a", "bcd", "", "ef"]),
        "large": [np.arange(5000 + i, dtype=np.float64) for i in range(4)],
    }


def tensors(torch: Any) -> dict[str, Sequence[Any]]:
    found: dict[str, Sequence[Any]] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool):
        found[f"dense {dtype}"] = torch.arange(12).reshape(4, 3).to(dtype)
        found[f"dense numbers {dtype}"] = torch.arange(4).to(dtype)
        found[f"ragged {dtype}"] = [torch.arange(length).to(dtype) for length in (3, 0, 1, 700)]
        found[f"numbers {dtype}"] = [torch.tensor(i).to(dtype) for i in range(4)]
    return {
        **found,
        "many dimensions": [torch.ones(shape, dtype=torch.bfloat16) for shape in ((2, 3), (0, 3), (5, 1), (1, 0))],
        "several dimensions": [torch.zeros(3), torch.zeros(2, 2), torch.zeros(0), torch.tensor(1.0)],
        "several dtypes": [torch.zeros(2, dtype=d) for d in (torch.int8, torch.bfloat16, torch.int64, torch.bool)],
        "not in a row": list(torch.arange(40).reshape(10, 4).t()),
        "tensors or nothing": [torch.zeros(2, dtype=torch.bfloat16), None, torch.ones(3), None],
        "large": [torch.arange(20_000 + i).to(torch.bfloat16) for i in range(4)],
    }


def is_same(left: Any, right: Any) -> bool:
    """The same type, dtype, shape and value, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (np.ndarray, np.generic)) or type(left).__module__.startswith("torch"):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if isinstance(left, (np.ndarray, np.generic)):
            return np.array_equal(left, right)
        return bool((left == right).all())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right)
