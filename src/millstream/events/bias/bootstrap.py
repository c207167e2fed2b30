"""The mean of a censored quantity (Kaplan-Meier), and its bootstrap over whole groups.

The bootstrap needs sums of every group only: a resample is a weighted sum of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from millstream.events.bias.table import Doubles, Ints
from millstream.types import Mask

RESAMPLES = 1000
CHUNK = 100  # resamples at once: bounds the memory
MAX_EDGES = 16  # distinct lengths of censored rollouts in the bootstrap: more are rounded to this many


class Quantity(NamedTuple):
    """One quantity of all rollouts. `value` is of the first attempt, the one admitted; `outcome` is of the one that was
    kept."""

    name: str
    group: Ints
    value: Doubles
    is_cut: Mask  # the value is a lower bound
    outcome: Doubles
    chosen: tuple[Mask, Mask]  # trained; kept
    lost: int
    known: int  # lost rollouts of which something is known


class ResampledMeans(NamedTuple):
    """One entry per resample."""

    kaplan_meier: Doubles
    seen: Doubles  # as if all had ended where they were cut off
    chosen: tuple[Doubles, Doubles]


def kaplan_meier_mean(values: Doubles, is_cut: Mask) -> float:
    """Kaplan & Meier 1958: the mean up to the largest value, where some values are lower bounds. At a tie, ends come first."""
    order = np.lexsort((is_cut, values))
    values, is_cut = values[order], is_cut[order]
    at_risk = np.arange(len(values), 0, -1)
    survival = np.cumprod(np.where(is_cut, 1.0, 1 - 1 / at_risk))
    ended = np.concatenate(([1.0], survival[:-1])) - survival
    return float(ended @ values + survival[-1] * values[-1])


def bootstrap(quantities: list[Quantity], rng: np.random.Generator) -> list[ResampledMeans]:
    """All quantities from the same resamples."""
    num_groups = 1 + max(int(quantity.group.max(initial=-1)) for quantity in quantities)
    edges = [cut_edges(quantity.value[quantity.is_cut]) for quantity in quantities]
    sums = [group_sums(quantity, some, num_groups) for quantity, some in zip(quantities, edges, strict=True)]
    borders = np.cumsum([columns.shape[1] for columns in sums])[:-1]
    drawn = np.split(resample(np.hstack(sums), rng), borders, axis=1)
    return [resampled_means(totals, some) for totals, some in zip(drawn, edges, strict=True)]


def resample(sums: Doubles, rng: np.random.Generator) -> Doubles:
    """(group, column) to (resample, column): totals over groups drawn with replacement."""
    size = len(sums)
    if not size:
        return np.zeros((RESAMPLES, sums.shape[1]))
    rows = np.arange(CHUNK)[:, None] * size
    chunks = []
    for _ in range(RESAMPLES // CHUNK):
        picks = rng.integers(size, size=(CHUNK, size)) + rows
        counts = np.bincount(picks.ravel(), minlength=CHUNK * size).reshape(CHUNK, size)
        chunks.append(counts.astype(np.float64) @ sums)
    return np.concatenate(chunks)


def cut_edges(cuts: Doubles) -> Doubles:
    """The lengths at which rollouts were cut off; of many, `MAX_EDGES` quantiles, denser in the tail, where an edge weighs
    more."""
    distinct = np.unique(cuts)
    if len(distinct) <= MAX_EDGES:
        return distinct
    return np.unique(np.quantile(cuts, 1 - np.linspace(1, 0, MAX_EDGES) ** 3, method="nearest"))


def group_sums(quantity: Quantity, edges: Doubles, num_groups: int) -> Doubles:
    """Between two edges no rollout is cut off: there Kaplan-Meier needs only how many ended, and their sum.

    Columns: for every cell between edges how many ended, their sum, how many were cut off at its end; then five totals."""
    width, is_cut = len(edges) + 1, quantity.is_cut
    nearest, below = (
        np.searchsorted((edges[1:] + edges[:-1]) / 2, quantity.value),
        np.searchsorted(edges, quantity.value),
    )
    cell = quantity.group * width + np.where(is_cut, nearest, below)
    cells = [np.bincount(cell, weights, num_groups * width) for weights in (~is_cut, ~is_cut * quantity.value, is_cut)]
    totals = [quantity.value, *quantity.chosen, *(chosen * quantity.outcome for chosen in quantity.chosen)]
    return np.hstack(
        [column.reshape(num_groups, width) for column in cells]
        + [np.bincount(quantity.group, weights, num_groups)[:, None] for weights in totals]
    )


def resampled_means(totals: Doubles, edges: Doubles) -> ResampledMeans:
    width = len(edges) + 1
    ended, sums, cut = (totals[:, number * width : (number + 1) * width] for number in range(3))
    everything, num_trained, num_kept, trained, kept = totals[:, 3 * width :].T
    num_rollouts = ended.sum(axis=1) + cut.sum(axis=1)
    return ResampledMeans(
        kaplan_meier=_kaplan_meier_means(ended, sums, cut, edges),
        seen=everything / np.maximum(num_rollouts, 1),
        chosen=(trained / np.maximum(num_trained, 1), kept / np.maximum(num_kept, 1)),
    )


def _kaplan_meier_means(ended: Doubles, sums: Doubles, cut: Doubles, edges: Doubles) -> Doubles:
    """`kaplan_meier_mean` of every resample, cell by cell."""
    at_risk, survival = ended.sum(axis=1) + cut.sum(axis=1), np.ones(len(ended))
    mean = np.zeros(len(ended))
    for cell, edge in enumerate(np.append(edges, 0.0)):
        share = survival / np.maximum(at_risk, 1)
        mean += share * sums[:, cell]
        survival = share * (at_risk - ended[:, cell])
        at_risk = at_risk - ended[:, cell] - cut[:, cell]
        mean += np.where(at_risk == 0, survival * edge, 0.0)
        survival = np.where(at_risk == 0, 0.0, survival)
    return mean
