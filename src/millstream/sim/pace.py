"""How far an engine has come: a map between time and *position*, which all running requests share.

Continuous batching gives every running request one token a step, so that one number says how far all of them are. Position
counts seconds at the pace of an empty engine; a token is worth a fixed stretch of it, and a request that begins at position p
with n tokens to go ends at p + n stretches, however the pace changes on the way. Between two changes of the batch every step
takes longer than the one before by the same amount, as every context grows by a token: time is then a parabola of position, and
both directions are exact. What is approximate: position is a real number; a request joins and is cut at any fraction of a step.
"""

from __future__ import annotations

import math


class Pace:
    """Never goes back. While it is stalled or paused, time passes and position does not."""

    def __init__(self) -> None:
        self._time = 0.0
        self._position = 0.0  # of the last change. The time may lie ahead: that is a stall.
        self._slope = 1.0
        self._bend = 0.0
        self._paused_at: float | None = None
        self._reached = 0.0

    def position(self, now: float) -> float:
        elapsed = max(0.0, self._effective(now) - self._time)
        # the root of slope * x + bend * x^2 / 2 = elapsed, in the form that is exact for a bend of 0
        moved = 2 * elapsed / (self._slope + math.sqrt(self._slope**2 + 2 * self._bend * elapsed))
        self._reached = max(self._reached, self._position + moved)
        return self._reached

    def time(self, position: float) -> float:
        """When a position will be reached, as things are."""
        if self._paused_at is not None:
            return math.inf
        ahead = position - self._position
        return self._time + ahead * self._slope + self._bend * ahead**2 / 2

    def arrive(self, position: float) -> None:
        """The time of this position has come, regardless of rounding."""
        self._reached = max(self._reached, position)

    def change(self, now: float, *, slope: float, bend: float) -> None:
        """From here on a unit of position takes `slope` seconds, and `bend` more with every unit."""
        if (slope, bend) == (self._slope, self._bend):
            return  # a constant pace stays exact for ever
        self._anchor(now)
        self._slope = slope
        self._bend = bend

    def stall(self, now: float, seconds: float) -> None:
        """No request gets on for this long."""
        if seconds:
            self._anchor(now)
            self._time += seconds

    def pause(self, now: float) -> None:
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        if self._paused_at is not None:
            self._time += now - self._paused_at
            self._paused_at = None

    def _anchor(self, now: float) -> None:
        self._position = self.position(now)
        self._time = max(self._effective(now), self._time)

    def _effective(self, now: float) -> float:
        return now if self._paused_at is None else self._paused_at
