"""When a server is asked again, and when it is left alone. Time is a number here."""

from __future__ import annotations

import random

from millstream.engine.http.patience import (
    BUDGET,
    BUDGET_A_SECOND,
    FAILURES_TO_OPEN,
    FIRST_OPEN_S,
    LONGEST_OPEN_S,
    LONGEST_WAIT_S,
    Breaker,
    Budget,
    Circuit,
    back_off_s,
)


def opened() -> Breaker:
    breaker = Breaker()
    verdicts = [breaker.failed(0.0) for _ in range(FAILURES_TO_OPEN)]
    assert verdicts == [False] * (FAILURES_TO_OPEN - 1) + [True]
    return breaker


def test_a_breaker_opens_after_failures_in_a_row_and_a_success_forgets_them() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(FAILURES_TO_OPEN - 1):
            assert not breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state(0.0) is Circuit.CLOSED and breaker.wait_s(0.0) == 0
    assert opened().state(0.0) is Circuit.OPEN


def test_after_a_while_one_request_tries_it_and_decides_for_all() -> None:
    breaker = opened()
    assert breaker.wait_s(0.0) == FIRST_OPEN_S
    assert breaker.state(FIRST_OPEN_S) is Circuit.HALF_OPEN
    breaker.sent(FIRST_OPEN_S)
    assert breaker.state(FIRST_OPEN_S) is Circuit.OPEN and breaker.wait_s(FIRST_OPEN_S) > 0, "nobody else"
    breaker.succeeded()
    assert breaker.state(FIRST_OPEN_S) is Circuit.CLOSED


def test_each_trial_that_fails_doubles_the_time_it_is_left_alone_up_to_a_limit() -> None:
    breaker, now, waits = opened(), 0.0, []
    for _ in range(9):
        waits.append(breaker.wait_s(now))
        now += waits[-1]
        breaker.sent(now)
        assert breaker.failed(now)
    assert waits[:4] == [FIRST_OPEN_S * 2**n for n in range(4)] and waits[-1] == LONGEST_OPEN_S


def test_a_trial_that_was_cut_off_leaves_the_place_to_the_next() -> None:
    breaker = opened()
    breaker.sent(FIRST_OPEN_S)
    breaker.left()
    assert breaker.state(FIRST_OPEN_S) is Circuit.HALF_OPEN


def test_a_late_failure_of_somebody_sent_before_it_opened_does_not_open_it_further() -> None:
    breaker = opened()
    assert not breaker.failed(0.1)
    assert breaker.wait_s(0.0) == FIRST_OPEN_S


def test_a_budget_is_spent_comes_back_with_time_and_never_exceeds_its_size() -> None:
    budget = Budget(0.0)
    assert [budget.take(0.0) for _ in range(int(BUDGET))] == [0.0] * int(BUDGET)
    wait_s = budget.take(0.0)
    assert wait_s == 1.0 / BUDGET_A_SECOND and budget.take(wait_s) == 0.0
    for _ in range(1000):
        budget.succeeded()
    assert sum(budget.take(wait_s + 10_000.0) == 0.0 for _ in range(1000)) == BUDGET


def test_waits_grow_stay_below_their_limit_and_depend_on_the_seed_alone() -> None:
    def waits(seed: int) -> list[float]:
        rng = random.Random(seed)
        return [back_off_s(failures, rng) for failures in range(1, 30)]

    assert waits(1) == waits(1) != waits(2)
    assert waits(1)[0] < 0.1 <= waits(1)[3] and max(waits(1)) <= LONGEST_WAIT_S
