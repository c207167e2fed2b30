"""The settings of TRL that make its steps fastest, found by trying: from what it has at first, one change after the other; what
makes a step faster is kept. Needs nothing but the standard library: TRL's Python imports it, too."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

GAIN = 0.98
"""A change is kept if a step takes at most this share of the time: less is noise."""
Settings = dict[str, str]
"""What is set, in words: of a name the value."""


class Trial(NamedTuple):
    settings: Settings
    step_s: float
    """Infinite: it failed, or had no step in its time."""

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items()) or "as it is"


def search(
    first: Settings, changes: Sequence[Settings], step_s_of: Callable[[Settings, float], float], limit_s: float
) -> list[Trial]:
    """The trials that there was time for; none begins that would not end if it lasts as long as the longest before it.
    `step_s_of`: seconds a step with these settings, within a limit in seconds; infinite where it failed."""
    ends_at, tried, longest_s = time.monotonic() + limit_s, list[Trial](), 0.0
    for change in ({}, *changes):
        settings = {**(best(tried).settings if tried else first), **change}
        began = time.monotonic()
        if any(settings == trial.settings for trial in tried) or ends_at - began <= longest_s:
            continue
        tried.append(Trial(settings, step_s_of(settings, ends_at - began)))
        longest_s = max(longest_s, time.monotonic() - began)
    return tried


def step_s(step_ends: Sequence[float], cycle: int) -> float:
    """Of whole generations, which `cycle` steps share, without the first. Infinite if there is no second one."""
    whole = len(step_ends) // cycle * cycle
    return (step_ends[whole - 1] - step_ends[cycle - 1]) / (whole - cycle) if whole > cycle else math.inf


def best(tried: Sequence[Trial]) -> Trial:
    """A later one must be faster by more than noise."""
    found, *others = tried
    for trial in others:
        if trial.step_s < GAIN * found.step_s:
            found = trial
    return found


def table(tried: Sequence[Trial]) -> Iterator[str]:
    """Markdown. The best is marked."""
    chosen = best(tried)
    yield "| TRL's settings | s a step |"
    yield "|---|---|"
    for trial in tried:
        seconds = f"{trial.step_s:.2f}" if math.isfinite(trial.step_s) else "failed, or no step in its time"
        yield f"| {trial} | {seconds}{' (best)' if trial is chosen and math.isfinite(trial.step_s) else ''} |"
