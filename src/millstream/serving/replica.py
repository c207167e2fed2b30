"""One engine as the router sees it: its load, how many more requests it may take, and whether it works.

Load is in tokens: what its requests still have to sample, as estimated, and their prompts as far as they must be computed, at
`PROMPT_TOKEN` of a sampled one. How many requests it may have at most follows its cache: additive increase while there is
room, multiplicative decrease when it is full or had to preempt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from millstream.engine import Engine
from millstream.engine.failures import SharedFailures
from millstream.retry import BackOff
from millstream.serving.request import Lengths, Pin, RoutedRequest, num_cached
from millstream.types import RequestKey, Sampled

# What computing one token of a prompt counts for, in sampled tokens. A sampled token takes 5 to 16 times the machine's time,
# but of a difference in load only a part becomes time, since most of a decode step is the same for few requests and for many.
# Of 1/16, 1/4, 1 and 4 this one was chosen: see docs/decisions/15-router.md.
PROMPT_TOKEN = 1.0
CROWDED = 0.95  # a cache that is used to this share counts as full
# One request in this number is sent before its slot is free, so that no slot is idle during the round trip. With the slots, the
# upper bound of what a replica has.
AHEAD = 4
LEAST = 8  # the lower bound: its slots divided by this
DECREASE = 3 / 4  # what is left of the bound when the cache is too small for it
RECOVERY = (
    16  # in the time in which all of its requests are replaced by others, the bound grows by its slots divided by this
)
REST = BackOff(first_s=1.0)  # after a failure
MAX_FAILURES = 3  # that no success forgives: then it is not used any more


class Replica:
    """`is_measured` False: neither measurements nor progress change what it is given, only what was sent and has ended. That is
    what synchronous training needs to be repeatable. `number`: its place among all. `on_change` is called when its work or its
    room has changed."""

    def __init__(
        self, engine: Engine, lengths: Lengths, *, is_measured: bool, number: int, on_change: Callable[[Replica], None]
    ) -> None:
        self.engine = engine
        self.number = number
        self._on_change = on_change
        self.requests: dict[RequestKey, RoutedRequest] = {}
        self.is_leaving = False  # it is given no more requests
        self.emptied = asyncio.Event()  # it is leaving, and has no request any more
        self.failures = SharedFailures(REST, MAX_FAILURES - 1)
        self._prompt_work: dict[int, float] = {}  # by group: of prompts that are not computed yet
        self._lengths = lengths
        self._is_measured = is_measured
        self._work = 0.0
        self._top = engine.slots + max(1, engine.slots // AHEAD) if is_measured else math.inf
        self._max_requests = float(self._top)
        self._num_preempted = engine.stats().num_preempted if is_measured else 0
        # Requests that were there when the bound fell last: the effect shows only after they have ended.
        self._num_to_leave = 0

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def max_requests(self) -> float:
        return self._max_requests

    @property
    def work(self) -> float:
        """Its load, in tokens."""
        return self._work

    @property
    def has_room(self) -> bool:
        return not self.is_leaving and len(self.requests) + 1 <= self._max_requests

    def may_take(self, floor: int, now: float, pin: Pin | None = None) -> bool:
        is_open = now >= self.failures.retry_at and (pin is None or self.name in pin.engines)
        return is_open and self.has_room and self.engine.version >= floor

    @property
    def is_crowded(self) -> bool:
        """Whether its cache is full. Such a replica is chosen last."""
        return self._is_measured and self.engine.stats().cache_used >= CROWDED

    def price(self, routed: RoutedRequest) -> tuple[float, int]:
        """Smaller is better: steps until all that it has is sampled, this request's prompt included where it must be computed.
        Prompt work of the request's own group does not delay it."""
        cached = num_cached(routed.prefixes, self.name, self.engine.version)
        own = min(PROMPT_TOKEN * cached, self._prompt_work.get(routed.request.key.group_id, 0.0))
        missing = PROMPT_TOKEN * (len(routed.remaining.tokens) - cached)
        return (self._work - own + missing) / self.engine.slots, len(self.requests)

    def add(self, routed: RoutedRequest) -> None:
        self.requests[routed.request.key] = routed
        routed.engine = self.engine
        routed.failure_mark = self.failures.mark
        cached = num_cached(routed.prefixes, self.name, self.engine.version)
        routed.prompt_work = PROMPT_TOKEN * (len(routed.remaining.tokens) - cached)
        routed.work = self._tokens_left(routed) + routed.prompt_work
        self._work += routed.work
        group_id = routed.request.key.group_id
        self._prompt_work[group_id] = self._prompt_work.get(group_id, 0.0) + routed.prompt_work
        self._on_change(self)

    def on_sampled(self, routed: RoutedRequest, sampled: Sampled) -> None:
        routed.add(sampled)
        if self._is_measured:
            self._end_prompt_work(routed)
            self._work -= routed.work
            routed.work = self._tokens_left(routed)
            self._work += routed.work
            self._on_change(self)

    def _end_prompt_work(self, routed: RoutedRequest) -> None:
        """Its prompt is computed, or will not be."""
        group_id = routed.request.key.group_id
        if routed.prompt_work:
            left = self._prompt_work[group_id] - routed.prompt_work
            routed.prompt_work = 0.0
            self._prompt_work[group_id] = left
        if not self._prompt_work.get(group_id):
            self._prompt_work.pop(group_id, None)

    def _tokens_left(self, routed: RoutedRequest) -> float:
        at_most = routed.request.sampling.max_tokens - routed.num_sampled
        if not self._is_measured:
            return at_most
        length = routed.length  # other answers, stretched by this, are what is expected of this one
        return length * self._lengths.tokens_left(routed.num_sampled / length, at_most / length)

    def remove(self, routed: RoutedRequest) -> None:
        del self.requests[routed.request.key]
        routed.engine = None
        self._end_prompt_work(routed)
        self._work = self._work - routed.work if self.requests else 0.0  # 0: without what rounding has left
        if self._is_measured:
            self._adapt_limit()
        self._on_change(self)
        self._set_if_emptied()

    def leave(self) -> None:
        self.is_leaving = True
        self._on_change(self)
        self._set_if_emptied()

    def _set_if_emptied(self) -> None:
        if self.is_leaving and not self.requests:
            self.emptied.set()

    def _adapt_limit(self) -> None:
        """A request has left: the moment in which there is room for others, or should not be."""
        stats, slots = self.engine.stats(), self.engine.slots
        is_full = stats.num_preempted > self._num_preempted or stats.cache_used >= CROWDED
        self._num_preempted = stats.num_preempted
        self._num_to_leave -= 1
        if not is_full:
            self._max_requests = min(self._top, self._max_requests + slots / RECOVERY / self._max_requests)
        elif self._num_to_leave <= 0:
            had = min(self._max_requests, len(self.requests) + 1)
            self._max_requests = max(1, slots // LEAST, had * DECREASE)
            self._num_to_leave = len(self.requests)
