"""Scores of an evaluation as estimates with 95% intervals: pass@k, avg@k, and the paired difference of two models.

`rewards_TK` has the rewards of K samples for each of T tasks. A sample passes if its reward is at least `pass_reward`.

    pass@k   the chance that one of k samples passes, averaged over tasks: 1 - C(K-c, k) / C(K, k) for c passes of K, which is
             unbiased for every k <= K (Chen et al. 2021, "Evaluating large language models trained on code")
    avg@K    the mean reward. With rewards of 0 and 1 it is pass@1.

Samples of one task are not independent, tasks are: every interval is computed from one number per task (clustered by task), so
that more samples of the same few tasks do not look like more evidence than they are. avg@K has Student's t interval of the
mean. pass@k is a proportion and has Wilson's interval, with the number of independent trials that the variance between tasks
corresponds to: it stays within 0 and 1, and has a width where every task passed or none did. Imports nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

from millstream.events import Estimate

Z = NormalDist().inv_cdf(0.975)
PASS = "pass@"


def pass_ks(num_samples: int) -> list[int]:
    """The k of pass@k that are estimated: 1, 2, 4, ... and the number of samples."""
    return sorted({num_samples, *(1 << power for power in range(num_samples.bit_length()))})


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate of the chance that one of k samples passes, from `num_passed` of `num_samples`."""
    if num_samples - num_passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(num_samples - num_passed + 1, num_samples + 1))


def evaluation_scores(rewards_TK: Sequence[Sequence[float]], *, pass_reward: float) -> dict[str, Estimate]:
    """By name: pass@1, pass@2, pass@4 ... pass@K, and avg@K. Empty without a task."""
    return {
        name: proportion(values_T) if name.startswith(PASS) else mean_estimate(values_T)
        for name, values_T in _per_task(rewards_TK, pass_reward).items()
    }


def _per_task(rewards_TK: Sequence[Sequence[float]], pass_reward: float) -> dict[str, list[float]]:
    """By score, its value for every task."""
    if not rewards_TK:
        return {}
    num_samples = len(rewards_TK[0])
    passed_T = [sum(reward >= pass_reward for reward in rewards) for rewards in rewards_TK]
    found = {f"{PASS}{k}": [pass_at_k(num_samples, passed, k) for passed in passed_T] for k in pass_ks(num_samples)}
    return {**found, f"avg@{num_samples}": [fmean(rewards) for rewards in rewards_TK]}


def mean_estimate(values_T: Sequence[float]) -> Estimate:
    """The mean, with Student's t interval. A single task has no interval: both ends are the value."""
    value, num = fmean(values_T), len(values_T)
    half = 0.0 if num < 2 else _t_quantile(num - 1) * math.sqrt(variance(values_T, value) / num)
    return Estimate(value=value, low=value - half, high=value + half)


def proportion(values_T: Sequence[float]) -> Estimate:
    """The mean of values between 0 and 1, with Wilson's interval at their effective number of trials."""
    value, num = min(1.0, max(0.0, fmean(values_T))), len(values_T)
    spread = variance(values_T, value) / num if num > 1 else 0.0
    trials = value * (1 - value) / spread if spread > 1e-12 else float(num)
    centre = (value + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = Z / (1 + Z**2 / trials) * math.sqrt(value * (1 - value) / trials + (Z / (2 * trials)) ** 2)
    return Estimate(value=value, low=max(0.0, centre - half), high=min(1.0, centre + half))


def paired_difference(
    ours_TK: Sequence[Sequence[float]], theirs_TK: Sequence[Sequence[float]], *, pass_reward: float
) -> dict[str, Estimate]:
    """Ours minus theirs by score, on the same tasks: the t interval of the difference per task."""
    ours, theirs = _per_task(ours_TK, pass_reward), _per_task(theirs_TK, pass_reward)
    return {
        name: mean_estimate([one - other for one, other in zip(values_T, theirs[name], strict=True)])
        for name, values_T in ours.items()
        if name in theirs
    }


def _t_quantile(degrees: int) -> float:
    """The 97.5% quantile of Student's t. Exact for 1 and 2 degrees; otherwise Hill's expansion, which is off by under 0.3%."""
    if degrees == 1:
        return 12.7062
    if degrees == 2:
        return 4.30265
    z, n = Z, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum((term / math.pow(n, power) for power, term in enumerate(terms, start=1)), start=0.0)
