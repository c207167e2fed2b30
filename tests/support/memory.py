"""The memory that Python objects take."""

from __future__ import annotations

import gc
import sys
from typing import Any

import msgspec


def held_bytes() -> int:
    """Bytes of all objects that the garbage collector tracks and of what they refer to; those of before `gc.freeze` are left
    out. Without `tracemalloc`: CPython 3.11 crashes where it is switched off while a thread of a library takes the interpreter's
    lock for the first time."""
    gc.collect()
    todo: list[Any] = gc.get_objects()
    seen = {id(todo)}
    total = 0
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        held = gc.get_referents(each)
        if isinstance(each, msgspec.Struct) and not gc.is_tracked(each):  # one with `gc=False` names nothing
            held = [getattr(each, name) for name in each.__struct_fields__]
        todo += [one for one in held if not gc.is_tracked(one)]
    return total
