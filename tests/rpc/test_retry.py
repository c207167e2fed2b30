"""The one back-off and budget."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from millstream.retry import BackOff, Retry


def test_the_wait_doubles_up_to_the_longest() -> None:
    back_off = BackOff(first_s=0.5, longest_s=3.0)
    assert [back_off.wait_s(number) for number in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert back_off.wait_s(10_000) == 3.0
    spread = {back_off.wait_s(2, random.Random(seed)) for seed in range(50)}
    assert len(spread) == 50 and all(0.5 <= wait_s <= 1.0 for wait_s in spread)


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 5))
def test_a_success_forgives_one_failure_and_more_than_the_budget_gives_up(outcomes: list[bool], most: int) -> None:
    retry, counted = Retry(BackOff(first_s=1.0), max_failures=most), 0
    for is_success in outcomes:
        if is_success:
            retry.succeeded()
            counted = max(0, counted - 1)
        else:
            counted += 1
            wait_s = retry.failed(0.0)
            assert (wait_s is None) == (counted > most)
        assert retry.num_failures == counted


def test_a_budget_of_time_runs_from_the_oldest_failure_that_is_not_forgiven() -> None:
    retry = Retry(BackOff(first_s=1.0), give_up_s=10.0)
    assert retry.failed(0.0) == 1.0
    assert retry.failed(9.0) == 2.0
    retry.succeeded()  # that of time 0
    assert retry.failed(15.0) == 2.0
    assert retry.failed(19.0) is None
