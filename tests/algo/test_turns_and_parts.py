"""Advantages of turns and parts: by hand, and against a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.algo import AlgorithmConfig, check_algorithm, credit_for, signal_for
from millstream.algo.credit import Played
from millstream.errors import ConfigError

Turns = list[list[float]]  # of one agent in one rollout: the rewards of each part's turns
numbers = st.floats(-4, 4).map(lambda value: round(value, 3))
turns = st.lists(st.lists(numbers, min_size=1, max_size=4), min_size=1, max_size=3)
groups = st.lists(st.tuples(turns, numbers), min_size=1, max_size=5)


def played(parts: Turns, rest: float = 0.0) -> Played:
    """Every turn has two tokens."""
    rewards = np.array([reward for part in parts for reward in part])
    return Played(
        rewards_K=rewards,
        turn_N=np.repeat(np.arange(len(rewards)), 2),
        behaviour_N=np.zeros(2 * len(rewards)),
        rest=rest,
        part_K=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
    )


def advantages(group: list[Played], **keys: object) -> list[list[float]]:
    """One number a turn."""
    config = AlgorithmConfig(**keys)  # type: ignore[arg-type]
    credit = credit_for(config)
    assert credit is not None
    found = [one.advantages_N for one in credit(group)]
    assert all((one[::2] == one[1::2]).all() for one in found), "the tokens of a turn have one advantage"
    return [one[::2].tolist() for one in found]


def normalized(values: list[float], name: str) -> list[float]:
    """A plain twin of the group advantages."""
    mean = sum(values) / len(values)
    centred = [value - mean for value in values]
    match name:
        case "grpo":
            deviation = math.sqrt(sum(value * value for value in centred) / len(values))
            return [value / (deviation + 1e-6) for value in centred]
        case "rloo":
            return [value * len(values) / max(1, len(values) - 1) for value in centred]
        case _:
            return centred


@pytest.mark.parametrize("normalization", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("baseline", ["turn", "group"])
@given(group=groups, discount=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_turns_are_their_formula(
    baseline: str, normalization: str, group: list[tuple[Turns, float]], discount: float
) -> None:
    returns = []
    for parts, rest in group:
        rewards = [reward for part in parts for reward in part]
        rewards[-1] += rest
        returns.append(
            [sum(discount ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]
        )
    expected = [[0.0] * len(own) for own in returns]
    places = [(member, k) for member, own in enumerate(returns) for k in range(len(own))]
    for compared in [places] if baseline == "group" else [[p for p in places if p[1] == k] for _, k in places]:
        values = normalized([returns[member][k] for member, k in compared], normalization)
        for (member, k), value in zip(compared, values, strict=True):
            expected[member][k] = value
    found = advantages(
        [played(*one) for one in group],
        advantage="turns", discount=discount, turn_baseline=baseline, normalization=normalization,
    )  # fmt: skip
    for own, right in zip(found, expected, strict=True):
        assert np.allclose(own, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normalization", ["grpo", "dr_grpo", "rloo"])
@given(group=groups)
def test_parts_are_their_formula(normalization: str, group: list[tuple[Turns, float]]) -> None:
    values = normalized([sum(part) + rest for parts, rest in group for part in parts], normalization)
    expected = iter(values)
    found = advantages([played(*one) for one in group], advantage="parts", normalization=normalization)
    for own, (parts, _) in zip(found, group, strict=True):
        right = [value for part in parts for value in [next(expected)] * len(part)]
        assert np.allclose(own, right, rtol=1e-4, atol=1e-6)


def test_turns_by_hand() -> None:
    # to go, with a discount of 0.5: 1 2, and 0 0
    group = [played([[0.0, 2.0]]), played([[0.0, 0.0]])]
    assert advantages(group, advantage="turns", discount=0.5) == [[0.5, 1.0], [-0.5, -1.0]]
    found = advantages(group, advantage="turns", discount=0.5, normalization="grpo")
    assert np.allclose(found, [[1, 1], [-1, -1]], atol=1e-5)
    # over all four returns the mean is 0.75
    found = advantages(group, advantage="turns", discount=0.5, turn_baseline="group")
    assert found == [[0.25, 1.25], [-0.75, -0.75]]


def test_parts_by_hand() -> None:
    # what no turn has earned, 0.5 of the second rollout, is every part's: 1 0 and 2 0.5, the mean 0.875
    group = [played([[0.25, 0.75], [0.0]]), played([[1.5], [0.0]], rest=0.5)]
    found = advantages(group, advantage="parts", normalization="dr_grpo")
    assert found == [[0.125, 0.125, -0.875], [1.125, -0.375]]


def test_rollouts_of_one_part_are_compared_as_by_grpo() -> None:
    group = [played([[0.0]], rest=1.0), played([[0.0]]), played([[0.5]])]
    mean, deviation = 0.5, math.sqrt(0.5 / 3)
    expected = [[(value - mean) / (deviation + 1e-6)] for value in (1.0, 0.0, 0.5)]
    assert np.allclose(advantages(group, advantage="parts"), expected)


@pytest.mark.parametrize(
    ("keys", "without", "with_signal"),
    [
        # the same at every turn; the same sum in other turns
        ({"advantage": "turns"}, [[[0.5, 0.5]], [[0.5, 0.5]]], [[[1.0, 0.0]], [[0.0, 1.0]]]),
        ({"advantage": "turns", "turn_baseline": "group"}, [[[0.0, 1.0]], [[1.0]]], [[[1.0, 1.0]], [[1.0, 1.0]]]),
        ({"advantage": "parts"}, [[[1.0], [0.0, 1.0]], [[1.0]]], [[[1.0], [0.0]], [[1.0], [0.0]]]),
    ],
)
def test_a_group_has_a_signal_where_its_advantages_are_not_0(
    keys: dict[str, str], without: list[Turns], with_signal: list[Turns]
) -> None:
    signal = signal_for(AlgorithmConfig(**keys))  # type: ignore[arg-type]
    assert signal is not None
    for rewards, has in ((without, False), (with_signal, True)):
        group = [played(one) for one in rewards]
        assert signal(group) == has
        assert any(value for own in advantages(group, **keys) for value in own) == has


def test_without_turns_or_parts_the_rewards_of_rollouts_are_the_signal() -> None:
    assert signal_for(AlgorithmConfig()) is None and credit_for(AlgorithmConfig()) is None
    assert signal_for(AlgorithmConfig(advantage="gae")) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"normalization": "grpo"}, "algorithm.normalization = grpo is not read here"),
        ({"advantage": "parts", "turn_baseline": "group"}, "algorithm.turn_baseline = group is not read here"),
        ({"advantage": "parts", "discount": 0.5}, "algorithm.discount = 0.5 is not read here"),
        ({"advantage": "part"}, "Did you mean parts"),
    ],
)
def test_keys_that_nothing_reads_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        check_algorithm(AlgorithmConfig(**keys), max_lag=1, group_size=4, temperature=1.0)  # type: ignore[arg-type]


def test_turns_and_parts_compare_members_and_need_two() -> None:
    for advantage in ("turns", "parts"):
        with pytest.raises(ConfigError, match=f"{advantage} compares the rollouts of a group"):
            check_algorithm(AlgorithmConfig(advantage=advantage), max_lag=1, group_size=1, temperature=1.0)
