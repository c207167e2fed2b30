"""Least squares for `run.calibrate`: what a span of decoding or a pass of training costs, and how much slower it is while
something else works on the same device.

Shapes: N spans, P costs.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
MAX_RATIO = 16.0  # of a slowdown; the search for it ends there
ROUNDS = 5
UNDISTURBED = 0.1  # of the spans: these are taken to have had the device for themselves
MIN_EXPECTED = 1e-3  # of the mean seconds of a span


class Fit(Struct, frozen=True):
    values: list[float]
    errors: list[float]
    ratio: float
    ratio_error: float  # nan: it was not fitted


def fit_costs(columns_NP: Numbers, seconds_N: Numbers, shares_N: Numbers) -> Fit:
    """seconds = columns @ values / (1 - shares * (1 - 1 / ratio)), with values >= 0 and ratio >= 1: in its share of the time,
    work is `ratio` times as slow. Each residual is divided by the root of the seconds that are expected: a span is a sum of
    steps, whose errors add up in squares. With the expected seconds, not the measured ones, slow spans count as much as fast
    ones, and the costs add up to the time that was measured."""
    expected_N = seconds_N
    for _ in range(ROUNDS):
        fit = _fit_weighted(columns_NP, seconds_N, shares_N, 1 / np.sqrt(expected_N))
        expected_N = columns_NP @ np.array(fit.values) * slower(fit.ratio, shares_N)
        expected_N = np.maximum(expected_N, MIN_EXPECTED * seconds_N.mean())
    return fit


def fit_with(columns_NP: Numbers, seconds_N: Numbers, shares_N: Numbers, ratio: float) -> Fit:
    """As `fit_costs`, with a ratio that is known from elsewhere."""
    fit = fit_costs(columns_NP * slower(ratio, shares_N)[:, None], seconds_N, np.zeros_like(seconds_N))
    return Fit(fit.values, fit.errors, ratio, math.nan)


def fit_alone(columns_NP: Numbers, seconds_N: Numbers) -> Fit:
    """The costs of the spans that nothing disturbed: those of all, times what the fastest tenth took of what they should have
    taken. Whatever slows the others, it is not in the costs."""
    fit = fit_costs(columns_NP, seconds_N, np.zeros_like(seconds_N))
    expected_N = np.maximum(columns_NP @ np.array(fit.values), MIN_EXPECTED * seconds_N.mean())
    factor = float(np.quantile(seconds_N / expected_N, UNDISTURBED))
    return Fit([factor * one for one in fit.values], [factor * one for one in fit.errors], 1.0, math.nan)


def _fit_weighted(columns_NP: Numbers, seconds_N: Numbers, shares_N: Numbers, weight_N: Numbers) -> Fit:
    def solved(ratio: float) -> tuple[Numbers, float]:
        factor_N = slower(ratio, shares_N)
        values_P = _not_negative(columns_NP * (factor_N * weight_N)[:, None], seconds_N * weight_N)
        residual_N = (columns_NP @ values_P * factor_N - seconds_N) * weight_N
        return values_P, float(residual_N @ residual_N)

    low, high = 1.0, MAX_RATIO
    while high - low > 1e-3:  # the error has one minimum: golden section would save little
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if solved(left)[1] <= solved(right)[1] else (left, high)
    ratio = (low + high) / 2
    if solved(1.0)[1] <= solved(ratio)[1]:
        ratio = 1.0
    values_P, error = solved(ratio)
    factor_N = slower(ratio, shares_N)
    by_ratio_N = (columns_NP @ values_P) * factor_N**2 * shares_N / ratio**2
    jacobian = np.column_stack([columns_NP * factor_N[:, None], by_ratio_N]) * weight_N[:, None]
    used = [i for i in range(jacobian.shape[1]) if np.any(jacobian[:, i]) and (i == len(values_P) or values_P[i] > 0)]
    errors = np.full(len(values_P) + 1, math.inf)
    scale = np.linalg.norm(jacobian[:, used], axis=0)
    spread = error / max(1, len(seconds_N) - len(used))
    covariance = np.linalg.pinv((jacobian[:, used] / scale).T @ (jacobian[:, used] / scale)) * spread
    errors[used] = np.sqrt(np.maximum(np.diag(covariance), 0)) / scale
    return Fit(values_P.tolist(), errors[:-1].tolist(), ratio, float(errors[-1]))


def slower(ratio: float, shares_N: Numbers) -> Numbers:
    """How many times as long a span takes, of which this share is `ratio` times as slow."""
    slower_N: Numbers = 1 / (1 - shares_N * (1 - 1 / ratio))
    return slower_N


def _not_negative(columns_NP: Numbers, target_N: Numbers) -> Numbers:
    """Least squares without negative values: columns whose value would be below 0 are left out, the lowest first. Greedy: a
    column that was left out does not come back, so that the result need not be the least of all."""
    kept = list(range(columns_NP.shape[1]))
    values_P = np.zeros(columns_NP.shape[1])
    while kept:
        scale = np.maximum(np.linalg.norm(columns_NP[:, kept], axis=0), 1e-300)
        found = np.linalg.lstsq(columns_NP[:, kept] / scale, target_N, rcond=None)[0]
        if found.min() >= 0:
            values_P[kept] = found / scale
            break
        del kept[int(found.argmin())]
    return values_P
