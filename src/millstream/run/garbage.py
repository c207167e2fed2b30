"""Garbage collection that a run with many coroutines can afford.

Python looks for cycles after every 700 new objects, and now and then among all there are: with ten thousand environments in
flight that is a third of the scheduler's time, and hardly anything is found. What the libraries made at import is set aside for
good, and the rest is looked through less often.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = (50_000, 50, 100)


@contextmanager
def seldom_collected() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
