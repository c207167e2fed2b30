"""What a learner on a GPU did, from calls that return before it is done."""

from __future__ import annotations

import random

import pytest

from millstream.events import Event, Span
from millstream.run.device_queue import begin_of, spans_on_device

TOKEN_S = 2e-5
STEP_S = 0.05
LAUNCH_S = 0.01


def a_run(*, is_queued: bool, compiles_at: int = -1) -> tuple[list[Event], list[Span]]:
    """The events of a run whose passes take `TOKEN_S` a token: as the driver sees them, and as they were on the device."""
    rng, events, on_gpu, now = random.Random(0), list[Event](), list[Span](), 0.0
    for number in range(20):
        free_at = now
        for _ in range(rng.randrange(1, 6)):
            now += rng.expovariate(5)  # until the rows of the next pass are there
            tokens, begin = rng.randrange(2000, 16000), max(now, free_at)
            free_at = begin + tokens * TOKEN_S + (10 if number == compiles_at else 0)
            on_gpu.append(span("accumulate", begin, free_at, tokens))
            called, now = now, now + LAUNCH_S if is_queued else free_at
            events.append(span("accumulate", called, now, tokens))
        end = max(now, free_at) + STEP_S
        on_gpu.append(span("step", max(now, free_at), end))
        events.append(span("step", now, end))
        now = end
    return events, on_gpu


def span(what: str, begin: float, end: float, tokens: int = 0) -> Span:
    return Span(at=end, worker="learner", what=what, seconds=end - begin, num_tokens=tokens)


def spans(events: list[Event]) -> list[Span]:
    return [event for event in events if isinstance(event, Span)]


def test_passes_that_were_queued_are_where_the_device_did_them() -> None:
    events, on_gpu = a_run(is_queued=True)
    assert sum(one.seconds for one in spans(events) if one.what == "accumulate") < 1
    for found, true in zip(spans(spans_on_device(events)), on_gpu, strict=True):
        assert (begin_of(found), found.at) == pytest.approx((begin_of(true), true.at), abs=0.02), true


def test_one_step_in_which_something_is_compiled_changes_no_other() -> None:
    events, on_gpu = a_run(is_queued=True, compiles_at=3)
    late = list(zip(spans(spans_on_device(events)), on_gpu, strict=True))[-20:]
    assert all(found.seconds == pytest.approx(true.seconds, abs=0.02) for found, true in late)


def test_calls_that_wait_for_their_work_stay_as_they_are() -> None:
    events, on_gpu = a_run(is_queued=False)
    assert spans(spans_on_device(events)) == spans(events) == on_gpu
    assert spans_on_device(events[:3]) == events[:3], "too few steps to say"
