"""Advantages: of groups, of whole batches, of turns and tokens, by hand; rewards that are shaped before."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from millstream.algo.advantages import (
    ADVANTAGES,
    divide_by_deviation,
    dr_grpo,
    grpo,
    has_signal,
    overlong_penalty,
    rloo,
    whiten_tokens,
)
from millstream.algo.credit import (
    Penalty,
    Played,
    credit_of,
    differ,
    gae,
    returns_to_go,
    token_rewards,
    turn_advantages,
)


def test_grpo_divides_by_the_population_deviation() -> None:
    assert np.allclose(grpo(np.array([1.0, 0.0, 0.0, 1.0])), [1, -1, -1, 1], atol=1e-5)
    assert np.allclose(grpo(np.array([3.0, 1.0])), [1, -1], atol=1e-5)
    assert np.allclose(grpo(np.array([0.5, 0.5])), [0, 0])


def test_dr_grpo_only_centres() -> None:
    assert np.allclose(dr_grpo(np.array([3.0, 1.0, 2.0])), [1, -1, 0])


def test_rloo_compares_with_the_others() -> None:
    assert np.allclose(rloo(np.array([3.0, 1.0, 2.0])), [3 - 1.5, 1 - 2.5, 2 - 2.0])
    assert rloo(np.array([4.0])).tolist() == [0.0]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=16))
def test_advantages_sum_to_zero_and_vanish_without_signal(rewards: list[float]) -> None:
    array = np.array(rewards)
    for function in (grpo, dr_grpo, rloo):
        assert abs(function(array).sum()) < 1e-6
        if not has_signal(array):
            assert np.abs(function(array)).max() < 1e-8


@given(st.integers(1, 12), st.floats(-1e6, 1e6))
def test_equal_rewards_never_make_a_nan(num: int, reward: float) -> None:
    rewards = np.full(num, reward)
    for advantage in ADVANTAGES.values():
        found = advantage.of_group(rewards)
        if advantage.over_batch is not None:
            shift, divisor = advantage.over_batch(rewards, found)
            found = (found - shift) / divisor
        assert np.isfinite(found).all() and np.abs(found).max() < 1e-3


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_batch() -> None:
    # rewards 1 and 0, the first of three tokens, the second of one
    shift, divisor = whiten_tokens(np.array([1.0, 0.0]), np.array([1.0, 1.0, 1.0, 0.0]))
    assert shift == 0.75 and divisor == pytest.approx(0.1875**0.5, abs=2e-6)


def test_lite_ppo_centres_by_group_and_divides_by_the_batch() -> None:
    first, second = np.array([1.0, 0.0]), np.array([3.0, 1.0])
    rewards = np.concatenate([first, second])
    shift, divisor = divide_by_deviation(rewards, np.zeros(4))
    centred = ADVANTAGES["lite_ppo"].of_group(second)
    assert shift == 0 and np.allclose((centred - shift) / divisor, [1 / 1.0897, -1 / 1.0897], atol=1e-4)


def test_gae_by_hand() -> None:
    rewards, expected_values = np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.6, 0.8])
    # surprises: 0.9*0.6 - 0.5 = 0.04, 0.9*0.8 - 0.6 = 0.12, 1 - 0.8 = 0.2
    advantages, returns = gae(rewards, expected_values, discount=0.9, trace=0.5)
    assert np.allclose(advantages, [0.04 + 0.45 * (0.12 + 0.45 * 0.2), 0.12 + 0.45 * 0.2, 0.2])
    assert np.allclose(returns, advantages + expected_values)
    cut_short, _ = gae(rewards, expected_values, discount=0.9, trace=0.5, after=1.0)
    assert cut_short[2] == pytest.approx(0.2 + 0.9)


@given(arrays(np.float64, 6, elements=st.floats(-2, 2)), arrays(np.float64, 6, elements=st.floats(-2, 2)))
def test_gae_with_a_trace_of_1_is_the_return_less_the_value_and_with_0_one_step(r: np.ndarray, v: np.ndarray) -> None:
    monte_carlo, _ = gae(r, v, discount=0.9, trace=1.0)
    assert np.allclose(monte_carlo, returns_to_go(r, discount=0.9) - v)
    one_step, _ = gae(r, v, discount=0.9, trace=0.0)
    assert np.allclose(one_step, r + 0.9 * np.append(v[1:], 0.0) - v)


def test_turns_are_compared_with_those_that_came_as_far() -> None:
    rewards = [np.array([0.0, 0.0, 1.0]), np.array([0.0, 0.5])]
    # to go: 1 1 1 and 0.5 0.5; baselines 0.75 0.75 1
    first, second = turn_advantages(rewards)
    assert np.allclose(first, [0.25, 0.25, 0.0]) and np.allclose(second, [-0.25, -0.25])
    discounted = turn_advantages([np.array([0.0, 1.0]), np.array([0.0, 0.0])], discount=0.5)
    assert np.allclose(discounted[0], [0.25, 0.5])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_with_one_turn_it_is_dr_grpo(rewards: list[float]) -> None:
    found = turn_advantages([np.array([reward]) for reward in rewards])
    assert np.allclose(np.concatenate(found), dr_grpo(np.array(rewards)))


def played(
    rewards: list[float], turns: list[int], mu: float = 0.5, ref: float | None = None, values: list[float] | None = None
) -> Played:
    """Every token was sampled with the probability mu, and has that of ref under the reference."""
    num = len(turns)
    return Played(
        rewards_K=np.array(rewards),
        turn_N=np.array(turns),
        behaviour_N=np.full(num, math.log(mu)),
        reference_N=None if ref is None else np.full(num, math.log(ref)),
        values_N=None if values is None else np.array(values),
    )


def credited(advantage: str, group: list[Played], penalty: Penalty | None = None, **keys: float) -> list[list[float]]:
    credit = credit_of(advantage, dr_grpo, **{"discount": 1.0, "trace": 1.0, **keys}, penalty=penalty)
    assert credit is not None
    return [one.advantages_N.tolist() for one in credit(group)]


TWICE = Penalty("k1", 0.1 / math.log(2))
"""Where mu is twice as high as ref, a token loses 0.1."""


def test_a_turn_earns_with_its_last_token_and_every_token_loses_its_kl() -> None:
    one = played([2.0, -1.0], [0, 0, 1, 1, 1], ref=0.25)
    assert token_rewards(one, None).tolist() == [0, 2, 0, 0, -1]
    assert np.allclose(token_rewards(one, TWICE), [-0.1, 1.9, -0.1, -0.1, -1.1])


def test_every_token_has_the_advantage_of_its_turn() -> None:
    group = [played([0.0, 1.0], [0, 0, 1]), played([0.0, 0.5], [0, 1, 1])]
    # to go: 1 1 and 0.5 0.5, the mean 0.75
    assert credited("turns", group) == [[0.25, 0.25, 0.25], [-0.25, -0.25, -0.25]]
    # half of what comes a turn later: 0.5 1 and 0.25 0.5
    assert credited("turns", group, discount=0.5) == [[0.125, 0.125, 0.25], [-0.125, -0.25, -0.25]]
    # the KL is that of the turn: 0.2 0.1 and 0.1 0.2, so to go 0.7 0.9 and 0.2 0.3
    with_kl = credited("turns", [one._replace(reference_N=one.behaviour_N - math.log(2)) for one in group], TWICE)
    assert np.allclose(with_kl[0], [0.25, 0.25, 0.3]) and np.allclose(with_kl[1], [-0.25, -0.3, -0.3])


def test_a_group_is_compared_by_rewards_that_have_lost_the_kl_of_the_whole_rollout() -> None:
    group = [played([1.0], [0, 0, 0], ref=0.25), played([0.0], [0], ref=0.25)]
    # 1 - 0.3 and 0 - 0.1, the mean 0.3
    assert np.allclose(credited("dr_grpo", group, TWICE)[0], [0.4] * 3)
    assert np.allclose(credited("dr_grpo", group, TWICE)[1], [-0.4])
    assert credit_of("dr_grpo", dr_grpo, discount=1, trace=1, penalty=None) is None


def test_gae_sees_the_kl_of_each_token_and_returns_what_the_critic_is_to_expect() -> None:
    credit = credit_of("gae", dr_grpo, discount=0.9, trace=0.5, penalty=TWICE)
    assert credit is not None
    (found,) = credit([played([1.0], [0, 0, 0], ref=0.25, values=[0.5, 0.6, 0.8])])
    # surprises: 0.04 - 0.1, 0.12 - 0.1, 0.2 - 0.1
    assert np.allclose(found.advantages_N, [-0.06 + 0.45 * (0.02 + 0.45 * 0.1), 0.02 + 0.45 * 0.1, 0.1])
    assert found.returns_N is not None and np.allclose(found.returns_N - found.advantages_N, [0.5, 0.6, 0.8])


def test_distillation_is_the_reverse_kl_to_the_teacher_and_blind_to_rewards() -> None:
    group = [played([1.0], [0, 0], mu=0.5, ref=0.25), played([0.0], [0], mu=0.1, ref=0.2)]
    found = credited("distillation", group)
    assert np.allclose(found[0], [-math.log(2)] * 2) and np.allclose(found[1], [math.log(2)])


def test_rollouts_differ_where_some_turn_earned_more() -> None:
    assert not differ([np.array([0.0]), np.array([0.0, 0.0])]) and not differ([])
    assert differ([np.array([0.0, 1.0]), np.array([1.0, 0.0])]), "the sum is the same"


def test_overlong_answers_lose_up_to_1() -> None:
    lengths = np.array([1.0, 8.0, 9.0, 10.0, 12.0])
    assert np.allclose(overlong_penalty(lengths, max_tokens=10, buffer=2), [0, 0, -0.5, -1, -1])
