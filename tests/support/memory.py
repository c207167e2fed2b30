"""The memory that Python objects take."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
from collections.abc import Iterable
from types import FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import msgspec

FOREIGN = (FrameType, TracebackType, asyncio.AbstractEventLoop, threading.Thread, logging.Logger)
"""From these everything in the process can be reached."""


def held_bytes(*roots: object) -> int:
    """Bytes of all that these objects and the package's modules and classes refer to.

    Not of all objects of the process: threads of libraries make some at any time. And without `tracemalloc`: CPython 3.11
    crashes where it is switched off while a thread of a library takes the interpreter's lock for the first time."""
    gc.collect()
    todo: list[Any] = [*roots, *sys.modules.values()]
    seen: set[int] = set()
    total = 0
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, FOREIGN):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        todo += _held(each)
    return total


def _held(each: Any) -> Iterable[Any]:
    if isinstance(each, ModuleType | type):
        name = each.__name__ if isinstance(each, ModuleType) else each.__module__
        return list(vars(each).values()) if name.partition(".")[0] == "millstream" else []
    if isinstance(each, FunctionType):  # not its globals
        return [each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__]
    if isinstance(each, msgspec.Struct) and not gc.is_tracked(each):  # one with `gc=False` names nothing
        return [getattr(each, name) for name in each.__struct_fields__]
    return gc.get_referents(each)
