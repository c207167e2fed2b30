"""When to try again, and when to leave a server alone. No clock of its own: time is passed in.

*Back-off*: the wait before a request tries again doubles, with jitter from the request's seed, so that many that failed at once
do not come back at once. *Budget*: retries of all requests to one server come out of a bucket, which fills with time and with
every success: a server that is down is not asked more often because more requests wait for it. *Breaker*: after some failures
in a row a server is left alone; then one request tries it, and what comes of that decides for all.
"""

from __future__ import annotations

import math
import random
from enum import StrEnum

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 10.0
BUDGET, BUDGET_A_SECOND, BUDGET_A_SUCCESS = 20.0, 1.0, 0.5
"""Retries: at once, and what comes back with time and with answers."""
FAILURES_TO_OPEN = 5
FIRST_OPEN_S, LONGEST_OPEN_S = 0.5, 30.0
"""How long a server is left alone: doubled each time that the trial fails."""


def back_off_s(num_failures: int, rng: random.Random) -> float:
    """Before the attempt after so many failures in a row."""
    longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (num_failures - 1))
    return longest * (0.5 + rng.random() / 2)


class Budget:
    """A token bucket."""

    def __init__(self, now: float) -> None:
        self._left = BUDGET
        self._at = now

    def take(self, now: float) -> float:
        """0: one retry is taken. Else nothing is, and so many seconds are to be waited."""
        self._left = min(BUDGET, self._left + (now - self._at) * BUDGET_A_SECOND)
        self._at = now
        if self._left < 1.0:
            return (1.0 - self._left) / BUDGET_A_SECOND
        self._left -= 1.0
        return 0.0

    def succeeded(self) -> None:
        self._left = min(BUDGET, self._left + BUDGET_A_SUCCESS)


class Circuit(StrEnum):
    CLOSED = "closed"
    """It is used."""
    OPEN = "open"
    """It is left alone."""
    HALF_OPEN = "half-open"
    """One request tries it."""


class Breaker:
    """Of one server."""

    def __init__(self) -> None:
        self._failures = 0
        self._opened = 0
        self._until = -math.inf
        self._is_tried = False

    def state(self, now: float) -> Circuit:
        if not self._opened:
            return Circuit.CLOSED
        return Circuit.OPEN if now < self._until or self._is_tried else Circuit.HALF_OPEN

    def wait_s(self, now: float) -> float:
        """Until somebody may be sent. While one tries it: a guess, after which to look again."""
        if self.state(now) is not Circuit.OPEN:
            return 0.0
        return max(self._until - now, FIRST_WAIT_S)

    def sent(self, now: float) -> bool:
        """Somebody goes. Whether as the trial of a server that was left alone."""
        self._is_tried = self.state(now) is Circuit.HALF_OPEN
        return self._is_tried

    def succeeded(self) -> None:
        self._failures = 0
        self._opened = 0
        self._is_tried = False

    def failed(self, now: float) -> bool:
        """Whether it is left alone from now on."""
        self._failures += 1
        is_trial = self._is_tried
        self._is_tried = False
        if not is_trial and (self._failures < FAILURES_TO_OPEN or self._opened):
            return False
        self._opened += 1
        self._until = now + min(LONGEST_OPEN_S, FIRST_OPEN_S * 2.0 ** (self._opened - 1))
        return True

    def left(self) -> None:
        """Whoever was sent came back without a verdict: cut off by us."""
        self._is_tried = False
