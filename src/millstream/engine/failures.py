"""Failures of something that many calls use at once: an engine, or a server.

Calls that were under way together when it failed count as one failure, and an answer to a call that started before the failure
says nothing of its state now. After each failure it is left alone for a back-off; `millstream.retry` has the rule.
"""

from __future__ import annotations

import math

from millstream.retry import BackOff, Retry

NOT_FORGIVEN = "failures that no success has made up for (a success makes up for one)"  # in messages


class SharedFailures:
    """Time is passed in, on any one clock. `max_failures`: more that no success forgives, and the budget is used up."""

    def __init__(self, back_off: BackOff, max_failures: int) -> None:
        self._back_off = back_off
        self._retry = Retry(back_off, max_failures=max_failures)
        self._num_ever = 0
        self._is_failing = False  # no call that started after the last failure has succeeded yet
        self.is_used_up = False
        self.retry_at = -math.inf

    @property
    def mark(self) -> int:
        """What a call that starts now passes to the methods below."""
        return self._num_ever

    @property
    def num_failures(self) -> int:
        """That no success has forgiven."""
        return self._retry.num_failures

    def has_failed_since(self, mark: int) -> bool:
        return mark != self._num_ever

    def reserve(self, now: float) -> None:
        """A call starts. While nothing succeeds, the next one is to wait for another back-off: it is not tried more often
        because more calls wait."""
        if self._is_failing:
            self.retry_at = now + self._back_off.wait_s(self.num_failures)

    def succeeded(self, mark: int) -> None:
        if not self.has_failed_since(mark):
            self._retry.succeeded()
            self._is_failing = False
            self.retry_at = -math.inf

    def failed(self, mark: int, now: float, at_least_s: float = 0.0) -> bool:
        """Whether it is a new failure. `at_least_s`: a wait that was asked for."""
        is_new = not self.has_failed_since(mark)
        if is_new:
            wait_s = self._retry.failed(now)
            self._num_ever += 1
            self._is_failing = True
            self.is_used_up = wait_s is None
            self.retry_at = now + max(wait_s or 0.0, at_least_s)
        return is_new
