"""Back-off and retry budget: when to try again, and when to give up. Pure: time and random numbers are passed in.

The one rule of forgiveness: **a success forgives one failure.** What counts as a success is a unit of useful work and is the
caller's to name: an answered call, a written checkpoint, a minute of service. The wait doubles with every failure that is not
forgiven, and the budget is used up when there are more than `max_failures` of them, or when `give_up_s` have passed since the
oldest of them. So something that fails now and then is tried for ever, and something that only fails is given up.

    retry = Retry(BackOff(first_s=0.5), max_failures=5)
    while True:
        try:
            result = attempt()
            retry.succeeded()
            return result
        except Transient as error:
            if (wait_s := retry.failed(time.monotonic())) is None:
                raise GaveUp(f"failed {retry.num_failures} times in a row: {error}") from error
            time.sleep(wait_s)
"""

from __future__ import annotations

import random

from msgspec import Struct

MAX_DOUBLINGS = 32


class BackOff(Struct, frozen=True, kw_only=True):
    """How long to wait before the next attempt: `first_s`, then twice as long each time, up to `longest_s`."""

    first_s: float
    longest_s: float = 60.0

    def wait_s(self, num_failures: int, rng: random.Random | None = None) -> float:
        """After this many failures, the first being 1. `rng`: spread over the upper half of the wait, so that callers which
        failed together do not return together."""
        doublings = min(max(0, num_failures - 1), MAX_DOUBLINGS)
        wait_s = min(self.longest_s, self.first_s * 2.0**doublings)
        return wait_s if rng is None else wait_s * (0.5 + rng.random() / 2)


class Retry:
    """The failures of one thing that is tried again: see the module for the rule."""

    def __init__(self, back_off: BackOff, *, max_failures: int | None = None, give_up_s: float | None = None) -> None:
        """None: no limit of this kind."""
        self._back_off = back_off
        self._max_failures = max_failures
        self._give_up_s = give_up_s
        self._failed_at: list[float] = []

    @property
    def num_failures(self) -> int:
        """Failures that are not forgiven."""
        return len(self._failed_at)

    def failed(self, now: float, rng: random.Random | None = None) -> float | None:
        """Count a failure. The seconds to wait before the next attempt; None: the budget is used up."""
        self._failed_at.append(now)
        if self._max_failures is not None and self.num_failures > self._max_failures:
            return None
        if self._give_up_s is not None and now - self._failed_at[0] >= self._give_up_s:
            return None
        return self._back_off.wait_s(self.num_failures, rng)

    def succeeded(self) -> None:
        """Forgive one failure: the oldest."""
        if self._failed_at:
            del self._failed_at[0]
