"""One engine as the router sees it: what it has to do, how much more it may be given, and whether it can be trusted.

Load is in tokens: what its requests still have to sample, as guessed, and their prompts as far as they must be computed, at
`PROMPT_TOKEN` of a sampled one. How many requests it may have at most follows its cache: additive increase while there is
room, multiplicative decrease when it is full or had to preempt.
"""

from __future__ import annotations

import asyncio
import math

from millstream.engine import Engine
from millstream.serving.request import Lengths, RoutedRequest, num_known
from millstream.types import RequestKey, Sampled

PROMPT_TOKEN = 1.0
"""What computing one token of a prompt counts for, in sampled tokens. A sampled token takes 5 to 16 times the machine's time;
but of a difference in load only a part becomes time, since most of a decode step is the same for few requests and for many.
Of 1/16, 1/4, 1 and 4 this one was taken: see docs/decisions/15-router.md."""
CROWDED = 0.95
"""A cache that is so full is full."""
AHEAD = 4
"""One request in so many is sent before its slot is free, so that no slot waits for the way here and back. With the slots, the
upper bound of what a replica has."""
LEAST = 8
"""The lower bound: one in so many of its slots."""
BACK_OFF = 3 / 4
"""What is left of the bound when the cache is too small for it."""
RECOVERY = 16
"""In the time that all of its requests take to be replaced by others, the bound grows by one in so many of its slots."""
REST_S = 1.0
"""After a failure; twice as long after the next."""
MAX_FAILURES = 3
"""In a row: then it is not used any more."""


class Replica:
    """`is_measured` False: neither measurements nor progress change what it is given, only what was sent and has ended. That is
    what synchronous training needs to be repeatable."""

    def __init__(self, engine: Engine, lengths: Lengths, *, is_measured: bool) -> None:
        self.engine = engine
        self.flights: dict[RequestKey, RoutedRequest] = {}
        self.is_leaving = False
        """It is given nothing any more."""
        self.emptied = asyncio.Event()
        """It is leaving, and has nothing any more."""
        self.rests_until = -math.inf
        self._prompt_work: dict[int, float] = {}
        """By group: of prompts that are not computed yet."""
        self._num_failures = 0
        self._num_in_a_row = 0
        self._lengths = lengths
        self._is_measured = is_measured
        self._work = 0.0
        self._top = engine.slots + max(1, engine.slots // AHEAD) if is_measured else math.inf
        self._most = float(self._top)
        self._num_preempted = engine.stats().num_preempted if is_measured else 0
        self._num_to_leave = 0
        """Requests that were there when the bound fell last: only without them does it show what that did."""

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def most(self) -> float:
        """Requests that it may have."""
        return self._most

    def may_take(self, floor: int, now: float) -> bool:
        is_open = not self.is_leaving and now >= self.rests_until
        return is_open and len(self.flights) + 1 <= self._most and self.engine.version >= floor

    def price(self, flight: RoutedRequest) -> tuple[bool, float, int]:
        """Smaller is better: steps until all that it has is sampled, this request's prompt included where it must be computed.
        What is computed for the request's own group is no queue for it. A replica whose cache is full comes last."""
        is_crowded = self._is_measured and self.engine.stats().cache_used >= CROWDED
        known = num_known(flight.known, self.name, self.engine.version)
        own = min(PROMPT_TOKEN * known, self._prompt_work.get(flight.request.key.group_id, 0.0))
        missing = PROMPT_TOKEN * (len(flight.asked.tokens) - known)
        return is_crowded, (self._work - own + missing) / self.engine.slots, len(self.flights)

    def add(self, flight: RoutedRequest) -> None:
        self.flights[flight.request.key] = flight
        flight.engine = self.engine
        flight.num_failures = self._num_failures
        known = num_known(flight.known, self.name, self.engine.version)
        flight.prompt_work = PROMPT_TOKEN * (len(flight.asked.tokens) - known)
        flight.work = self._still_to_come(flight) + flight.prompt_work
        self._work += flight.work
        group_id = flight.request.key.group_id
        self._prompt_work[group_id] = self._prompt_work.get(group_id, 0.0) + flight.prompt_work

    def hear(self, flight: RoutedRequest, sampled: Sampled) -> None:
        """News of a request that it has."""
        flight.hear(sampled)
        if self._is_measured:
            self._compute_prompt(flight)
            self._work -= flight.work
            flight.work = self._still_to_come(flight)
            self._work += flight.work

    def _compute_prompt(self, flight: RoutedRequest) -> None:
        """Its prompt is computed, or will not be."""
        group_id = flight.request.key.group_id
        if flight.prompt_work:
            left = self._prompt_work[group_id] - flight.prompt_work
            flight.prompt_work = 0.0
            self._prompt_work[group_id] = left
        if not self._prompt_work.get(group_id):
            self._prompt_work.pop(group_id, None)

    def _still_to_come(self, flight: RoutedRequest) -> float:
        at_most = flight.request.sampling.max_tokens - flight.num_sampled
        return self._lengths.still_to_come(flight.num_sampled, at_most) if self._is_measured else at_most

    def remove(self, flight: RoutedRequest) -> None:
        del self.flights[flight.request.key]
        flight.engine = None
        self._compute_prompt(flight)
        self._work = self._work - flight.work if self.flights else 0.0  # and with them what rounding has left
        if self._is_measured:
            self._feel_pressure()
        self._look_whether_empty()

    def leave(self) -> None:
        self.is_leaving = True
        self._look_whether_empty()

    def _look_whether_empty(self) -> None:
        if self.is_leaving and not self.flights:
            self.emptied.set()

    def _feel_pressure(self) -> None:
        """A request has left: the moment in which there is room for others, or should not be."""
        stats, slots = self.engine.stats(), self.engine.slots
        is_pressed = stats.num_preempted > self._num_preempted or stats.cache_used >= CROWDED
        self._num_preempted = stats.num_preempted
        self._num_to_leave -= 1
        if not is_pressed:
            self._most = min(self._top, self._most + slots / RECOVERY / self._most)
        elif self._num_to_leave <= 0:
            had = min(self._most, len(self.flights) + 1)
            self._most = max(1, slots // LEAST, had * BACK_OFF)
            self._num_to_leave = len(self.flights)

    def succeed(self, flight: RoutedRequest) -> None:
        """Answers that were on their way when it failed say nothing of how it is now."""
        if flight.num_failures == self._num_failures:
            self._num_in_a_row = 0

    def fail(self, flight: RoutedRequest, now: float) -> bool:
        """Whether that is a failure of its own: of those that were on their way together, only the first is."""
        is_new = flight.num_failures == self._num_failures
        if is_new:
            self.rests_until = now + REST_S * 2**self._num_in_a_row
            self._num_in_a_row += 1
            self._num_failures += 1
        return is_new

    @property
    def is_hopeless(self) -> bool:
        return self._num_in_a_row >= MAX_FAILURES
