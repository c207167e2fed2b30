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
count_frozen = gc.get_freeze_count  # it takes 40 ms where a million objects are frozen
FROZEN_AT_START = count_frozen()  # Python 3.12 starts with some objects frozen


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Afterwards all is as before: what stays frozen is never freed, and a model and its cache are part of cycles."""
    before, was_frozen = gc.get_threshold(), count_frozen() > FROZEN_AT_START
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not was_frozen:
            gc.unfreeze()
