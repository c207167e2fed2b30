"""Garbage collection settings for a run with many coroutines.

By default Python looks for reference cycles after every 700 new objects, and at times among all objects: with ten thousand
environments in flight that takes a third of the scheduler's time and finds hardly anything. Within the block, objects made
before are frozen, and the others are scanned less often.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 50, 100)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Afterwards nothing is frozen, whatever was before (Python 3.12 starts with some objects frozen): what stays frozen is
    never freed, and a model and its cache are part of cycles."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
