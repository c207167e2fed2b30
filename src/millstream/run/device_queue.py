"""When a learner on a GPU works. Its calls return when the device's queue has the work, and only the optimizer step waits for
the device: the spans of its passes are too short, and that of the step has the rest.

The device does one thing after the other. A pass of n tokens that is called at a ends at max(a, end of the pass before) +
n * token_s, and the step step_s after the last of them. `spans_on_device` finds both numbers in the ends of the steps, and
returns the spans as they were on the device. Of a learner whose calls wait (on a CPU) it returns the spans as they are.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct, structs

from millstream.events import Event, Span

PASS, STEP = "accumulate", "step"
QUEUED = 0.5  # of the time of its passes: calls that take less do not wait for them
SEARCHED = [1e-9 * 1.05**number for number in range(380)]  # seconds a token, up to 0.1
MIN_STEPS = 4
HALVINGS = 40


class _Step(Struct, frozen=True):
    """An optimizer step and the passes before it, by number of the event."""

    passes: list[tuple[int, Span]]
    step: tuple[int, Span]

    def called(self) -> float:
        return begin_of(self.step[1])

    def worked_until(self, token_s: float) -> float:
        """When the device has done the passes, or the step is called."""
        end = 0.0
        for _, span in self.passes:
            end = max(end, begin_of(span)) + span.num_tokens * token_s
        return max(end, self.called())


def begin_of(span: Span) -> float:
    return span.at - span.seconds


def spans_on_device(events: Sequence[Event]) -> list[Event]:
    """The events with the spans of the learner's passes and steps as they were on the device."""
    steps, found = _steps(events), list(events)
    if len(steps) < MIN_STEPS:
        return found
    token_s, step_s = _fitted(steps)
    of_passes = [span for one in steps for _, span in one.passes]
    if sum(s.seconds for s in of_passes) > QUEUED * token_s * sum(s.num_tokens for s in of_passes):
        return found
    for one in steps:
        end, own_s = 0.0, _token_s_of(one, step_s)
        for number, span in one.passes:
            begin = max(end, begin_of(span))
            end = begin + span.num_tokens * own_s
            found[number] = structs.replace(span, at=end, seconds=end - begin)
        number, step = one.step
        found[number] = structs.replace(step, seconds=step.at - max(end, one.called()))
    return found


def _steps(events: Sequence[Event]) -> list[_Step]:
    steps, passes = list[_Step](), list[tuple[int, Span]]()
    for number, event in enumerate(events):
        if isinstance(event, Span) and event.worker == "learner":
            if event.what == PASS and event.num_tokens:
                passes.append((number, event))
            elif event.what == STEP and passes:
                steps.append(_Step(passes, (number, event)))
                passes = []
    return steps


def _fitted(steps: Sequence[_Step]) -> tuple[float, float]:
    """Seconds a token and seconds of a step with the least sum of absolute errors of the ends: a few steps in which something
    is compiled do not count much."""
    best = (float("inf"), 0.0, 0.0)
    for token_s in SEARCHED:
        rest = [one.step[1].at - one.worked_until(token_s) for one in steps]
        step_s = max(0.0, statistics.median(rest))
        best = min(best, (sum(abs(one - step_s) for one in rest), token_s, step_s))
    return best[1], best[2]


def _token_s_of(one: _Step, step_s: float) -> float:
    """Of these passes alone, so that the step ends when it did."""
    low, high = 0.0, SEARCHED[-1]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_late = one.worked_until(middle) + step_s > one.step[1].at
        low, high = (low, middle) if is_late else (middle, high)
    return (low + high) / 2
