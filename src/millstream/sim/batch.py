"""The requests that a simulated engine decodes at the same time, and the tokens that they hold in its cache."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from bisect import bisect_right

from msgspec import Struct

from millstream.engine import OnSampled
from millstream.sim.costs import Costs
from millstream.types import Completion, Finish, Request, RequestKey, Sampled

ROUNDING = 1e-3  # of a token: so close to full is full
SAMPLED = tuple(random.Random(0).randbytes(2**16))
LOGPROBS = tuple(map([-(1 + byte) / 64 for byte in range(256)].__getitem__, random.Random(1).randbytes(2**16)))


class SimRequest(Struct, eq=False):
    """A request on its way."""

    request: Request
    length: int
    finish: Finish
    on_sampled: OnSampled | None
    done: asyncio.Future[Completion]
    num_reported: int = 0
    versions: list[int] = []
    before: int = 0  # while it runs: the tokens that it had when it was admitted,
    begin: float = 0.0  # and the position where it was
    ticket: int = -1

    @property
    def size(self) -> int:
        """Tokens of cache that it needs to begin or to continue."""
        return len(self.request.tokens) + len(self.versions)

    def complete(self) -> None:
        if self.done.done():
            return
        tokens, logprobs, versions = self.sampled(0, self.versions)
        self.done.set_result(Completion(tokens=tokens, logprobs=logprobs, versions=versions, finish=self.finish))

    def report(self, versions: list[int]) -> None:
        """All that it has sampled has these versions."""
        if self.on_sampled is not None and len(versions) > self.num_reported and not self.done.done():
            news = self.sampled(self.num_reported, versions)
            self.num_reported = len(versions)
            self.on_sampled(Sampled(*news))

    def sampled(self, begin: int, versions: list[int]) -> tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]:
        """Token i and its log-probability are functions of the seed and of i: a request that was cut has a prefix, and one that
        was interrupted continues after it. They are a slice of a table, which begins again after its end."""
        start = self.request.seed % len(SAMPLED) + self.request.num_sampled
        first, last = start + begin, start + len(versions)
        times = math.ceil(last / len(SAMPLED))
        return (SAMPLED * times)[first:last], (LOGPROBS * times)[first:last], tuple(versions[begin:])


class SimBatch:
    """Running requests, in the order of admission. Every position is one of `sim.pace`."""

    def __init__(self, costs: Costs, *, kv_tokens: float, version: int) -> None:
        self._costs = costs
        self._kv_tokens = kv_tokens
        self._loaded_at: list[float] = [-math.inf]
        self._versions: list[int] = [version]
        self._running: dict[int, SimRequest] = {}  # by ticket
        # A heap of (position, ticket); tickets that no longer run are passed over.
        self._ends: list[tuple[float, int]] = []
        self._tickets = itertools.count()
        self._sizes = 0.0  # of the running requests: tokens when admitted, summed
        self._begins = 0.0  # and the positions where they were admitted
        self._num_removed = 0  # tokens that requests had sampled here when they were removed

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, job: SimRequest) -> bool:
        return job.ticket in self._running

    @property
    def version(self) -> int:
        return self._versions[-1]

    @property
    def jobs(self) -> list[SimRequest]:
        return list(self._running.values())

    @property
    def newest(self) -> SimRequest:
        return self._running[next(reversed(self._running))]

    def load(self, position: float, version: int) -> None:
        """Steps that begin from here on sample with this version."""
        self._loaded_at.append(position)
        self._versions.append(version)

    def add(self, job: SimRequest, position: float) -> None:
        job.begin = position
        job.before = len(job.versions)
        job.ticket = next(self._tickets)
        self._running[job.ticket] = job
        self._sizes += job.size
        self._begins += position
        end = position + (job.length - job.before) * self._costs.step_s
        heapq.heappush(self._ends, (end, job.ticket))

    def remove(self, job: SimRequest, num_tokens: int) -> None:
        """With the tokens that it has sampled since it was admitted. Its slot and its cache are free."""
        del self._running[job.ticket]
        self._sizes -= job.size
        self._begins -= job.begin
        if not self._running:
            self._sizes = 0.0
            self._begins = 0.0  # without what rounding has left
        self._num_removed += num_tokens
        job.versions += self.versions_from(job.begin, num_tokens)

    def pop_done(self, position: float) -> SimRequest | None:
        """The next request that has all of its tokens, removed from the batch."""
        while self._ends and self._ends[0][0] <= position:
            _, ticket = heapq.heappop(self._ends)
            if ticket in self._running:
                job = self._running[ticket]
                self.remove(job, job.length - job.before)
                return job
        return None

    def next_end(self) -> float:
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def progress(self, job: SimRequest, position: float) -> int:
        """Whole tokens since it was admitted."""
        return min(job.length - job.before, int((position - job.begin) / self._costs.step_s))

    def sampled_versions(self, job: SimRequest, position: float) -> list[int]:
        """Of all tokens that a running request has."""
        return job.versions + self.versions_from(job.begin, self.progress(job, position))

    def versions_from(self, begin: float, num_tokens: int) -> list[int]:
        """A token is of the version that was there when its step began."""
        found: list[int] = []
        while len(found) < num_tokens:
            loaded = bisect_right(self._loaded_at, begin + len(found) * self._costs.step_s)
            until = self._loaded_at[loaded] if loaded < len(self._loaded_at) else math.inf
            steps = min((until - begin) / self._costs.step_s, num_tokens)
            found += [self._versions[loaded - 1]] * max(1, math.ceil(steps) - len(found))
        return found

    def held(self, position: float) -> float:
        """Tokens in the cache."""
        return self._sizes + (len(self._running) * position - self._begins) / self._costs.step_s

    def num_sampled(self, position: float) -> float:
        """Tokens of all requests that run or ran."""
        return self._num_removed + (len(self._running) * position - self._begins) / self._costs.step_s

    def fits(self, job: SimRequest, position: float) -> bool:
        """Whether there is room for it, and for the next token of every request."""
        return self.held(position) + job.size + (len(self._running) + 1) <= self._kv_tokens

    def until_full(self, position: float) -> float:
        """Stretches of position until the cache runs over: every running request adds a token a step."""
        if self._kv_tokens == math.inf or not self._running:
            return math.inf
        room = self._kv_tokens - self.held(position)
        return 0.0 if room < ROUNDING else room * self._costs.step_s / len(self._running)


class PrefixCache:
    """Lengths of the prefixes that have been computed, by conversation and by group. It takes no room. Not `is_on`: every
    prompt is computed."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._lengths: dict[tuple[int, ...], int] = {}

    def reuse(self, key: RequestKey, size: int) -> int:
        """How many of the `size` tokens of this request are known: at most all but the last. From now on all are."""
        if not self._is_on:
            return 0
        conversation, group = (key.group_id, key.member, key.attempt), (key.group_id,)
        known = min(size - 1, max(self._lengths.get(conversation, 0), self._lengths.get(group, 0)))
        self._lengths[conversation] = size
        self._lengths.setdefault(group, size)
        return known

    def keep(self, key: RequestKey, size: int) -> None:
        """A request of this conversation has ended with this many tokens."""
        if self._is_on:
            self._lengths[key.group_id, key.member, key.attempt] = size

    def drop(self, key: RequestKey) -> None:
        self._lengths.pop((key.group_id, key.member, key.attempt), None)

    def clear(self) -> None:
        self._lengths.clear()
