"""An engine whose other end is outside: programs connect to the run, claim requests, and put what they have sampled.

    generate ──► offers ──► claim: on lease, by a program outside        load ──► a folder, and a notice of its version
        ▲                                  │
        └──── checked, token by token ◄── put

Guarantees. Nothing enters that was not offered, and each token once: a row is refused by name if it is `malformed`, `late` (its
request was aborted, or its group has left), `twice`, `not admitted`, or of a `wrong version`: older than the group's start,
newer than what was announced, or falling. What is refused changes nothing. A program that dies loses its lease, and the next
claim gets its requests, after the tokens that it has put. A program may put an answer in parts.

How many programs there are, and how fast, is theirs: a request waits until one of them takes it (`rollout.timeout_s` limits the
rollout). Seeds are offered; whether an answer repeats is up to the program that gives it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from millstream.clock import Clock
from millstream.engine.base import EngineStats, OnSampled
from millstream.engine.request import PartialCompletion, check_request
from millstream.engine.spans import GenerationSpans
from millstream.errors import EngineError, EngineGone, RequestRefused, StoreError
from millstream.events import EventSink
from millstream.store.base import ONE_GROUP, TRAIN, Choose, Lease, Reads, Want
from millstream.store.memory import MemoryStore
from millstream.types import Completion, Request, RequestKey, Weights

ROLLOUT = "rollout"
"""The task that claims offers."""
MAX_LEFT = 1 << 16  # requests of which it is remembered why they are not in flight any more
MAX_LOGPROB = 1e-4  # float32 may round the logarithm of 1 to a little more than 0
ENDED_BY_RUN = "late: the run has ended it"
PlaceOf = Callable[[int], tuple[int, int] | None]
"""The start and the deadline of a group in training; None for one of an evaluation."""
WriteWeights = Callable[[int, Weights], str]
"""Writes a version, and returns where it is. Raises `EngineError` for weights that do not fit the model."""


class RefusedRows(StoreError):
    """Rows from outside that the run does not take. Begins with the name of the reason."""


class OfferedRequest(PartialCompletion):
    """A request that programs outside may claim."""

    __slots__ = ("deadline", "done", "on_sampled", "start")

    def __init__(self, request: Request, on_sampled: OnSampled | None, start: int, deadline: int) -> None:
        super().__init__(request)
        self.start = start
        self.deadline = deadline
        self.on_sampled = on_sampled
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it is not offered any more

    def cells(self, number: int) -> dict[str, Any]:
        """What is left of it, as a program outside gets it."""
        rest = self.request.behind(self.tokens)
        key, sampling = rest.key, rest.sampling
        return {
            "request": number,
            "prompt": np.array(rest.tokens, np.int32),
            "begin": len(self.tokens),
            "group_id": key.group_id,
            "member": key.member,
            "attempt": key.attempt,
            "turn": key.turn,
            "start_version": self.start,
            "deadline": self.deadline,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "seed": rest.seed,
            "num_sampled": rest.num_sampled,
        }


class Offers(MemoryStore):
    """The requests that are offered, as the rows of a store: leases, expiry and waiting are the store's. A claim shows each
    request as it is now, and none that has ended."""

    def __init__(self) -> None:
        super().__init__({ROLLOUT: Reads(("request",), by_group=False)})
        self.requests: dict[int, OfferedRequest] = {}
        self.is_open = asyncio.Event()  # not while the engine is paused
        self.is_open.set()
        self._claimed: dict[int, set[int]] = {}  # lease -> requests that are left of it
        self._holder: dict[int, Lease] = {}  # request -> the last lease that it was in

    async def offer(self, number: int, one: OfferedRequest) -> None:
        self.requests[number] = one
        await self.put(0, {"request": [number]}, versions=one.start)

    @property
    def num_claimed(self) -> int:
        return len(self._holder)

    async def claim(
        self, task: str, want: Want = ONE_GROUP, *, choose: Choose | None = None, partition: str = TRAIN
    ) -> Lease:
        while True:
            await self.is_open.wait()
            lease = await super().claim(task, want, choose=choose, partition=partition)
            live = [place for place, number in enumerate(lease["request"]) if number in self.requests]
            if live:
                return self._shown(lease, live)
            await super().acknowledge(lease)  # they were aborted, or answered by a program that had lost its lease

    def _shown(self, lease: Lease, live: Sequence[int]) -> Lease:
        numbers = [lease["request"][place] for place in live]
        for number in numbers:
            self._leave_lease(number)  # that has expired, or was given back
        self._claimed[lease.lease_id] = set(numbers)
        self._holder |= dict.fromkeys(numbers, lease)
        cells = [self.requests[number].cells(number) for number in numbers]
        return Lease(
            lease_id=lease.lease_id,
            task=lease.task,
            row_ids=[lease.row_ids[place] for place in live],
            group_ids=[self.requests[number].request.key.group_id for number in numbers],
            versions=[lease.versions[place] for place in live],
            columns={name: [of_row[name] for of_row in cells] for name in cells[0]},
        )

    async def acknowledge(self, lease: Lease, *, step: int | None = None) -> None:
        """Requests of it that have no whole answer are offered again. Of a lease whose requests are all answered: nothing."""
        left = self._claimed.pop(lease.lease_id, None)
        if left is None:
            return
        await super().acknowledge(lease)
        for number in left & self.requests.keys():
            await self.offer(number, self.requests[number])

    async def remove(self, number: int) -> None:
        """It has ended. A lease ends with the last of its requests."""
        self.requests.pop(number, None)
        if (lease := self._leave_lease(number)) is not None:
            with suppress(StoreError):  # it has expired: the next claim removes its rows
                await super().acknowledge(lease)

    def _leave_lease(self, number: int) -> Lease | None:
        """The lease that has no request left without this one."""
        lease = self._holder.pop(number, None)
        left = None if lease is None else self._claimed.get(lease.lease_id)
        if lease is None or left is None:
            return None
        left.discard(number)
        return None if left or self._claimed.pop(lease.lease_id, None) is None else lease


class OutsideEngine:
    """See `millstream.engine.Engine` for the promises; those about tokens are the promises of the programs outside, as far as
    they can be checked here. `num_words`: ids below it are tokens. `start`: where version 0 is. `on_loaded` is called with
    every version and where it is. `place_of` may be set later."""

    def __init__(
        self,
        *,
        slots: int,
        max_length: int | None,
        num_words: int,
        write: WriteWeights,
        clock: Clock,
        sink: EventSink,
        name: str = "engine",
    ) -> None:
        self.name = name
        self.slots = slots
        self.offers = Offers()
        self.place_of: PlaceOf = lambda group_id: None
        self.on_loaded: Callable[[int, str], None] = lambda version, where: None
        self.on_refused: Callable[[str], None] = lambda why: None
        self._max_length = max_length
        self._num_words = num_words
        self._write = write
        self._clock = clock
        self._version = 0
        self._numbers: dict[RequestKey, int] = {}
        self._next = itertools.count()
        self._num_offered = 0
        self._left: dict[int, str] = {}  # request -> why it is not in flight any more
        self._loading = asyncio.Lock()
        self._is_closed = False
        self._num_tokens = 0
        self._num_finished = 0
        self._swap_s = 0.0
        self._spans = GenerationSpans(name, clock, sink)

    @property
    def version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        running = self.offers.num_claimed
        return EngineStats(
            running=running,
            waiting=len(self._numbers) - running,
            tokens_generated=self._num_tokens,
            requests_finished=self._num_finished,
            swap_s=self._swap_s,
        )

    # ---- the engine's methods ------------------------------------------------------------------------------------------

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        self._check(request)
        start, deadline = self.place_of(request.key.group_id) or (self._version, self._version)
        one, number = OfferedRequest(request, on_sampled, start, deadline), next(self._next)
        self._num_offered = number + 1
        self._numbers[request.key] = number
        why = ENDED_BY_RUN
        self._spans.begin(self._num_tokens)
        try:
            await self.offers.offer(number, one)
            why = await one.done
        finally:
            del self._numbers[request.key]
            self._left[number] = why
            if len(self._left) > MAX_LEFT:
                del self._left[next(iter(self._left))]
            await self.offers.remove(number)
            self._spans.end(self._num_tokens, is_last=not self._numbers)
        self._num_finished += 1
        return one.completion()

    def _check(self, request: Request) -> None:
        if self._is_closed:
            raise EngineGone(f"{self.name} is closed")
        if request.key in self._numbers:
            raise EngineError(f"{request.key} is in flight already")
        check_request(request, self._max_length, num_words=self._num_words)
        if request.sampling.stop_strings:
            raise RequestRefused(f"{request.key}: stop strings are not offered to engines outside: leave them out")

    async def abort(self, key: RequestKey) -> None:
        number = self._numbers.get(key)
        if number is not None:
            self._end(self.offers.requests[number], "late: the run has aborted it")

    def _end(self, one: OfferedRequest, why: str) -> None:
        if not one.done.done():
            one.done.set_result(why)

    async def pause(self) -> None:
        """Claims and puts wait: what is sampled meanwhile is not taken."""
        self.offers.is_open.clear()

    async def resume(self) -> None:
        self.offers.is_open.set()

    async def load(self, version: int, weights: Weights) -> None:
        """Returns when they are written and announced. Requests that are offered from then on are for this version or later."""
        async with self._loading:
            if version < self._version:
                raise EngineError(f"version {version} was offered to an engine at {self._version}: versions never fall")
            began = self._clock.now()
            where = await asyncio.to_thread(self._write, version, weights)
            self._version = version
            self._swap_s = self._clock.now() - began
            self.on_loaded(version, where)

    async def close(self) -> None:
        self._is_closed = True
        for one in list(self.offers.requests.values()):
            self._end(one, "late: the run is over")
        self.offers.is_open.set()
        await self.offers.finish()

    # ---- from outside --------------------------------------------------------------------------------------------------

    async def put(self, columns: Mapping[str, Sequence[Any]]) -> int:
        """Takes rows: `request`, `tokens`, `logprobs`, `versions` (one number, or one for each token) and `begin`, which is how
        many tokens of the answer came before; 0 if it is left out. Returns the number of rows. Rows that can be taken are,
        whatever the others are: raises `RefusedRows` with the reason of each that is not."""
        if missing := {"request", "tokens", "logprobs", "versions"} - columns.keys():
            raise RefusedRows(f"malformed: no column {', '.join(sorted(missing))}")
        await self.offers.is_open.wait()
        numbers, refused = list(map(_plain, columns["request"])), list[str]()
        begins = map(_plain, columns.get("begin", [0] * len(numbers)))
        rows = zip(numbers, columns["tokens"], columns["logprobs"], columns["versions"], begins, strict=True)
        for number, tokens, logprobs, versions, begin in rows:
            try:
                self._take(number, tokens, logprobs, versions, begin)
            except RefusedRows as error:
                refused.append(f"request {number}: {error}")
        if refused:
            self.on_refused(refused[0])
            raise RefusedRows(f"{len(refused)} of {len(numbers)} rows were refused: {'; '.join(refused)}")
        return len(numbers)

    def _take(self, number: Any, tokens: Any, logprobs: Any, versions: Any, begin: Any) -> None:
        one = self.offers.requests.get(number) if isinstance(number, int) else None
        if one is None:
            raise RefusedRows(self._why_gone(number))
        if one.done.done():
            raise RefusedRows(ENDED_BY_RUN if one.done.cancelled() else one.done.result())
        tokens_T, logprobs_T, versions_T = self._checked(one, tokens, logprobs, versions)
        if begin != len(one.tokens):
            raise RefusedRows(f"twice: {len(one.tokens)} tokens of it are there, and these begin at {begin}")
        for token, logprob, version in zip(tokens_T, logprobs_T, versions_T, strict=True):
            one.append(token, logprob, version)
        self._num_tokens += len(tokens_T)
        if one.on_sampled is not None:
            one.on_sampled(one.since(begin))
        if one.finish is not None:
            self._end(one, "twice: it was answered")

    def _why_gone(self, number: Any) -> str:
        if isinstance(number, int) and number in self._left:
            return self._left[number]
        is_past = isinstance(number, int) and 0 <= number < self._num_offered
        return "late: it ended long ago" if is_past else "not admitted: the run has offered no such request"

    def _checked(
        self, one: OfferedRequest, tokens: Any, logprobs: Any, versions: Any
    ) -> tuple[list[int], list[float], list[int]]:
        tokens_T, logprobs_T = _numbers("tokens", tokens, "iu"), _numbers("logprobs", logprobs, "fiu")
        given_T = _numbers("versions", versions, "iu")
        versions_T = given_T * len(tokens_T) if np.ndim(versions) == 0 else given_T
        if not tokens_T or not len(tokens_T) == len(logprobs_T) == len(versions_T):
            found = f"{len(tokens_T)} tokens, {len(logprobs_T)} logprobs and {len(versions_T)} versions"
            raise RefusedRows(f"malformed: {found}: expected as many of each, at least one")
        if not all(0 <= token < self._num_words for token in tokens_T):
            raise RefusedRows(f"malformed: a token outside of the vocabulary of {self._num_words}")
        if not all(math.isfinite(value) and value <= MAX_LOGPROB for value in logprobs_T):
            raise RefusedRows("malformed: a logprob that is above 0 or not finite")
        sampling, room = one.request.sampling, one.request.sampling.max_tokens - len(one.tokens)
        if len(tokens_T) > room:
            raise RefusedRows(f"malformed: {len(tokens_T)} tokens, and {room} were left")
        if not {*tokens_T[:-1]}.isdisjoint(sampling.stop):
            raise RefusedRows("malformed: tokens after a stop token")
        least = one.versions[-1] if one.versions else one.start
        if versions_T != sorted(versions_T) or versions_T[0] < least or versions_T[-1] > self._version:
            found = f"versions {versions_T[0]} to {versions_T[-1]}"
            raise RefusedRows(f"wrong version: {found}, expected {least} to {self._version}, never falling")
        return tokens_T, logprobs_T, versions_T


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _numbers(name: str, values: Any, kinds: str) -> list[Any]:
    """As a list. Raises `RefusedRows` for what is no number or list of numbers of these kinds."""
    try:
        found = np.atleast_1d(np.asarray(values))
    except ValueError:
        found = np.array(["lists"])
    if found.ndim != 1 or found.dtype.kind not in kinds:
        raise RefusedRows(f"malformed: {name} is {str(values)[:40]!r}: expected a list of numbers")
    return list(found.tolist())
