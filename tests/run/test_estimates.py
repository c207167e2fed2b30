"""Scores of evaluations: pass@k is unbiased, and intervals cover the truth as often as they say."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from millstream.run.estimates import evaluation_scores, mean_estimate, paired_difference, pass_at_k, proportion


def test_pass_at_k_is_the_share_of_the_subsets_of_k_samples_in_which_one_passed() -> None:
    for num, passed in ((n, c) for n in range(1, 8) for c in range(n + 1)):
        samples = [True] * passed + [False] * (num - passed)
        for k in range(1, num + 1):
            subsets = list(itertools.combinations(samples, k))
            assert pass_at_k(num, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_expectation_of_pass_at_k_is_the_closed_form_on_a_known_distribution(k: int) -> None:
    """A task that a sample passes with p: one of k passes with 1 - (1 - p)^k. Exact: summed over the binomial distribution."""
    num = 8
    for p in (Fraction(0), Fraction(1, 10), Fraction(1, 2), Fraction(9, 10), Fraction(1)):
        expected = sum(
            math.comb(num, c) * p**c * (1 - p) ** (num - c) * Fraction(pass_at_k(num, c, k)).limit_denominator(10**6)
            for c in range(num + 1)
        )
        assert float(expected) == pytest.approx(float(1 - (1 - p) ** k), abs=1e-5)


def test_pass_at_k_of_a_known_distribution_of_tasks_is_its_closed_form_within_the_interval() -> None:
    """Tasks whose chance p is uniform: pass@k = k / (k + 1)."""
    generator = np.random.default_rng(3)
    chances_T = generator.random(2000)
    rewards_TK = (generator.random((2000, 8)) < chances_T[:, None]).astype(float).tolist()
    scores = evaluation_scores(rewards_TK, pass_reward=1.0)
    assert list(scores) == ["pass@1", "pass@2", "pass@4", "pass@8", "avg@8"]
    for k in (1, 2, 4, 8):
        one = scores[f"pass@{k}"]
        assert one.low < k / (k + 1) < one.high and one.high - one.low < 0.05
    assert scores["avg@8"].value == pytest.approx(scores["pass@1"].value)


@pytest.mark.parametrize(("num_tasks", "num_samples"), [(20, 1), (30, 8), (100, 4)])
def test_95_percent_intervals_cover_the_truth_in_about_95_of_100_experiments(num_tasks: int, num_samples: int) -> None:
    """Samples of a task share its chance: an interval that took them as independent would cover far less."""
    generator, covered, num = np.random.default_rng(0), dict.fromkeys(("pass@1", "avg"), 0), 1000
    for _ in range(num):
        chances_T = generator.beta(0.5, 0.5, num_tasks)  # most tasks are easy or hard
        rewards_TK = (generator.random((num_tasks, num_samples)) < chances_T[:, None]).astype(float)
        scores = evaluation_scores(rewards_TK.tolist(), pass_reward=1.0)
        for name, one in (("pass@1", scores["pass@1"]), ("avg", scores[f"avg@{num_samples}"])):
            covered[name] += one.low <= 0.5 <= one.high
    assert all(0.93 * num <= count <= 0.975 * num for count in covered.values()), covered


def test_an_interval_of_a_proportion_has_a_width_where_all_tasks_passed_and_stays_within_0_and_1() -> None:
    for value in (0.0, 1.0):
        one = proportion([value] * 20)
        assert one.value == value and 0.0 <= one.low <= value <= one.high <= 1.0
        assert one.high - one.low == pytest.approx(0.161, abs=0.001)  # Wilson's, 20 of 20


def test_the_interval_of_a_mean_is_students() -> None:
    one = mean_estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (one.low, one.high) == pytest.approx((1.0368, 4.9632), abs=0.003)  # 3 +- 2.7764 * sqrt(2.5 / 5)
    assert mean_estimate([7.0]).low == 7.0


def test_a_paired_difference_is_narrower_than_two_intervals_and_finds_a_small_gain() -> None:
    generator = np.random.default_rng(1)
    chances_T = generator.beta(0.5, 0.5, 300)
    ours, theirs = (
        (generator.random((300, 8)) < np.clip(chances_T + gain, 0, 1)[:, None]).astype(float).tolist()
        for gain in (0.05, 0.0)
    )
    difference = paired_difference(ours, theirs, pass_reward=1.0)["pass@1"]
    alone = evaluation_scores(ours, pass_reward=1.0)["pass@1"]
    assert difference.low > 0 and difference.high - difference.low < 0.6 * (alone.high - alone.low)


def test_a_reward_counts_as_passed_from_pass_reward_on() -> None:
    scores = evaluation_scores([[0.4, 0.6], [0.2, 0.1]], pass_reward=0.5)
    assert scores["pass@1"].value == 0.25 and scores["pass@2"].value == 0.5
    assert scores["avg@2"].value == pytest.approx(0.325)
    assert evaluation_scores([], pass_reward=1.0) == {}
