"""Distributions of lengths and latencies. A draw is a function of a random generator and of nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Draw = Callable[[random.Random], float]


def constant(value: float) -> Draw:
    return lambda rng: value


def uniform(low: float, high: float) -> Draw:
    return lambda rng: rng.uniform(low, high)


def lognormal(mean: float, sigma: float) -> Draw:
    """A heavy tail: `mean` is the mean itself, `sigma` the deviation of the logarithm."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng: rng.lognormvariate(mu, sigma)


def truncated_normal(mean: float, sigma: float, low: float = 0.0) -> Draw:
    """A normal distribution of which what lies below `low` is drawn again: its mean is above `mean`."""
    if sigma <= 0 or mean < low - 3 * sigma:
        raise ValueError(f"normal({mean:g}, {sigma:g}) has next to nothing above {low:g}: raise the mean or the sigma")

    def draw(rng: random.Random) -> float:
        while (value := rng.gauss(mean, sigma)) < low:
            pass
        return value

    return draw


def pareto(low: float, alpha: float) -> Draw:
    """The tail of a power law: above x with probability (low / x)^alpha. Its mean is low * alpha / (alpha - 1)."""
    return lambda rng: low * rng.paretovariate(alpha)


def mixture(*parts: tuple[float, Draw]) -> Draw:
    """One of several, each with its weight."""
    weights, draws = [weight for weight, _ in parts], [draw for _, draw in parts]
    return lambda rng: rng.choices(draws, weights)[0](rng)


def at_most(high: float, draw: Draw) -> Draw:
    return lambda rng: min(high, draw(rng))
