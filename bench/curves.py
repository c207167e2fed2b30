"""Accuracy over training: points of a curve, differences of runs with their intervals, and how curves are drawn.

A difference is of two runs of one seed, which begin with the same model and see the same tasks in the same order; its interval
is Student's, over the seeds. It is within noise if the interval holds 0, and then its half-width is what may have been hidden.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.axes import Axes

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""The 97.5% quantiles, from one degree of freedom on. For more than there are here the last one is taken: a little too wide."""
INK = "#848d97"
"""Of words and lines: to be read on white and on black."""
NUM_ACROSS = 60


class Point(Struct, frozen=True, kw_only=True):
    """A model on the held-out tasks, after a number of steps, trained rollouts and seconds of training."""

    step: int
    samples: int
    seconds: float
    accuracy: float
    greedy: float


class Difference(NamedTuple):
    mean: float
    half_width: float

    @property
    def is_within_noise(self) -> bool:
        return abs(self.mean) <= self.half_width

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half_width:.3f}"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Of two lists in the same order of seeds, with the 95% interval of its mean."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(statistics.mean(differences), STUDENT[min(len(differences), len(STUDENT) + 1) - 2] * spread)


# ---- figures -------------------------------------------------------------------------------------------------------------


@contextmanager
def plots(salt: str) -> Iterator[ModuleType]:
    """pyplot, set up for SVG files that are the same bytes for the same data, and are read on white and on black."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    quiet: dict[Any, Any] = dict.fromkeys(inked, INK)
    with pyplot.rc_context({**quiet, "svg.hashsalt": salt, "font.size": 9, "svg.fonttype": "none"}):
        yield pyplot


def draw_curves(
    panel: Axes, curves: Sequence[tuple[Sequence[float], Sequence[float]]], *, colour: str, label: str
) -> None:
    """One (across, accuracies) a seed: the mean over the seeds, with a band from the lowest to the highest, as far as all
    of them reach."""
    across = np.linspace(0.0, min(max(x) for x, _ in curves), NUM_ACROSS)
    accuracies_SA = np.array([np.interp(across, x, y) for x, y in curves])
    panel.plot(across, accuracies_SA.mean(axis=0), color=colour, linewidth=1.6, label=label)
    panel.fill_between(
        across, accuracies_SA.min(axis=0), accuracies_SA.max(axis=0), color=colour, alpha=0.18, linewidth=0
    )
    panel.spines[["top", "right"]].set_visible(False)
