"""Failures of an engine or a server that many calls use at once."""

from __future__ import annotations

from millstream.engine.failures import SharedFailures
from millstream.retry import BackOff

BACK_OFF = BackOff(first_s=1.0, longest_s=8.0)


def test_calls_that_were_under_way_together_are_one_failure() -> None:
    failures = SharedFailures(BACK_OFF, max_failures=1)
    mark = failures.mark
    assert failures.failed(mark, 10.0)
    assert not failures.failed(mark, 10.5) and failures.num_failures == 1 and not failures.is_used_up
    assert failures.retry_at == 11.0, "and the second does not move the time of the next attempt"


def test_an_answer_to_a_call_from_before_the_failure_forgives_nothing() -> None:
    failures = SharedFailures(BACK_OFF, max_failures=3)
    before = failures.mark
    failures.failed(before, 0.0)
    failures.succeeded(before)
    assert failures.num_failures == 1 and failures.retry_at == 1.0
    failures.succeeded(failures.mark)
    assert failures.num_failures == 0 and failures.retry_at < 0


def test_the_back_off_doubles_and_the_budget_is_used_up_after_the_last_failure() -> None:
    failures, waits = SharedFailures(BACK_OFF, max_failures=5), []
    while not failures.is_used_up:
        failures.failed(failures.mark, 0.0)
        waits.append(failures.retry_at)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 0.0]


def test_a_wait_that_was_asked_for_is_kept() -> None:
    failures = SharedFailures(BACK_OFF, max_failures=5)
    failures.failed(failures.mark, 0.0, at_least_s=5.0)
    assert failures.retry_at == 5.0


def test_while_it_fails_attempts_are_one_back_off_apart_until_one_succeeds() -> None:
    failures = SharedFailures(BACK_OFF, max_failures=5)
    failures.reserve(0.0)
    assert failures.retry_at < 0, "nothing has failed"
    failures.failed(failures.mark, 0.0)
    failures.reserve(1.0)
    assert failures.retry_at == 2.0, "the next attempt does not follow at once"
    failures.succeeded(failures.mark)
    assert failures.retry_at < 0
