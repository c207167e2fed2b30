"""One front for all engine replicas. A free slot takes the next request: the most urgent one, on the first engine with room.

A group's requests go only to engines at its start version or later, so that no token is older than the lag bound allows. While
there is room, a request goes to the least loaded engine at once; when there is none, it waits here, and not in the queue of an
engine that may turn out to be the slow one. Who is next: the group with the earliest deadline, of these the one with the
fewest members to go (`rank`), of these the oldest. Requests without a rank (an evaluation's) have every fourth turn, so that
they neither starve nor hold training up.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from millstream.engine import Engine
from millstream.errors import EngineError
from millstream.types import Completion, Request, RequestKey

Rank = tuple[int, int]
"""(deadline, members to go): smaller is more urgent."""
RankOf = Callable[[int], Rank | None]
"""Of a group; None for one that is nobody's, such as an evaluation's."""
AHEAD = 4
"""One request in so many is sent before its slot is free, so that no slot waits for the way here and back."""
TURNS = 4
"""One turn in so many is for requests without a rank."""


class _Waiter(NamedTuple):
    request: Request
    floor: int
    engine: asyncio.Future[int]


class Router:
    """`is_queueing` False: everything goes to the engines at once, in the order of the calls, which is what synchronous
    training needs to be repeatable."""

    def __init__(self, engines: Sequence[Engine], *, is_queueing: bool = True) -> None:
        self.engines = tuple(engines)
        self._most = [engine.slots + max(1, engine.slots // AHEAD) if is_queueing else None for engine in self.engines]
        self._in_flight = [0] * len(self.engines)
        self._serving: dict[RequestKey, Engine] = {}
        self._ranked = _Queue()
        self._others = _Queue()
        self._turn = self._num_waiting = 0
        self.rank_of: RankOf = lambda group_id: None

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def serving_versions(self) -> list[int]:
        """The versions a new group could start at: the oldest lets every replica serve it, the newest only some."""
        return sorted({engine.version for engine in self.engines})

    async def generate(self, request: Request, *, floor: int) -> Completion:
        """On an engine at version `floor` or later. If one has room, the request is queued there before this first suspends."""
        index = None if self._num_waiting else self._free_engine(floor)
        if index is None:
            self._check_floor(floor)
            index = await self._wait_for_engine(request, floor)
        else:
            self._in_flight[index] += 1
        engine = self.engines[index]
        self._serving[request.key] = engine
        try:
            completion = await engine.generate(request)
        finally:
            del self._serving[request.key]
            self._in_flight[index] -= 1
            if self._num_waiting:
                self.dispatch()
        if completion.versions and min(completion.versions) < floor:
            raise EngineError(
                f"{engine.name} sampled {request.key} with version {min(completion.versions)} after it had "
                f"shown version {floor}: an engine's version must never fall"
            )
        return completion

    def _check_floor(self, floor: int) -> None:
        if not any(engine.version >= floor for engine in self.engines):
            raise EngineError(f"no engine is at version {floor} or later: they are at {self.serving_versions()}")

    async def abort(self, key: RequestKey) -> bool:
        """Whether the request is with an engine: its `generate` then returns what there is, with `Finish.ABORT`."""
        engine = self._serving.get(key)
        if engine is not None:
            await engine.abort(key)
        return engine is not None

    def rerank(self, group_id: int) -> None:
        """The group's rank has changed."""
        if group_id in self._ranked:
            self._ranked.rerank(group_id, self.rank_of(group_id))

    def dispatch(self) -> None:
        """Room or versions have changed: whoever is next goes."""
        while self._num_waiting:
            queues = (self._ranked, self._others) if self._turn % TURNS else (self._others, self._ranked)
            found = next((found for queue in queues if (found := queue.pop(self._free_engine)) is not None), None)
            if found is None:
                return
            waiter, index = found
            self._turn += 1
            self._num_waiting -= 1
            if not waiter.engine.done():
                self._in_flight[index] += 1
                waiter.engine.set_result(index)

    async def _wait_for_engine(self, request: Request, floor: int) -> int:
        waiter, group_id = _Waiter(request, floor, asyncio.get_running_loop().create_future()), request.key.group_id
        rank = self.rank_of(group_id)
        queue = self._others if rank is None else self._ranked
        queue.push(waiter, rank or (0, 0))
        self._num_waiting += 1
        self.dispatch()
        try:
            return await waiter.engine
        except asyncio.CancelledError:
            if waiter.engine.done() and not waiter.engine.cancelled():  # it was its turn in the same moment
                self._in_flight[waiter.engine.result()] -= 1
            elif queue.remove(waiter):
                self._num_waiting -= 1
            self.dispatch()
            raise

    def _free_engine(self, floor: int) -> int | None:
        """The least loaded one that is new enough and has room."""
        best, least = None, math.inf
        for index, engine in enumerate(self.engines):
            load, most = self._in_flight[index], self._most[index]
            if load < least and (most is None or load < most) and engine.version >= floor:
                best, least = index, load
        return best


class _Queue:
    """Requests by group, groups by rank. A rank that changed is entered again; the old entry is skipped when it comes up."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[_Waiter]] = {}
        self._ranks: dict[int, Rank] = {}
        self._heap: list[tuple[Rank, int]] = []

    def __contains__(self, group_id: int) -> bool:
        """Whether requests of it wait."""
        return group_id in self._waiting

    def push(self, waiter: _Waiter, rank: Rank) -> None:
        group_id = waiter.request.key.group_id
        self._waiting.setdefault(group_id, deque()).append(waiter)
        self.rerank(group_id, rank)

    def rerank(self, group_id: int, rank: Rank | None) -> None:
        if rank is not None and group_id in self._waiting and self._ranks.get(group_id) != rank:
            self._ranks[group_id] = rank
            heapq.heappush(self._heap, (rank, group_id))

    def remove(self, waiter: _Waiter) -> bool:
        """False if its turn has come, and passed, between its cancellation and now."""
        group_id = waiter.request.key.group_id
        is_here = waiter in self._waiting.get(group_id, ())
        if is_here:
            self._waiting[group_id].remove(waiter)
            self._shrink(group_id)
        return is_here

    def pop(self, free_engine: Callable[[int], int | None]) -> tuple[_Waiter, int] | None:
        """The most urgent request that some engine has room for, and that engine."""
        skipped, found = list[tuple[Rank, int]](), None
        while self._heap and found is None:
            rank, group_id = self._heap[0]
            if self._ranks.get(group_id) != rank:
                heapq.heappop(self._heap)
                continue
            waiter = self._waiting[group_id][0]
            index = free_engine(waiter.floor)
            if index is not None:
                found = self._waiting[group_id].popleft(), index
                self._shrink(group_id)
            elif free_engine(0) is None:
                break  # nobody has room: no need to look further
            else:
                skipped.append(heapq.heappop(self._heap))
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found

    def _shrink(self, group_id: int) -> None:
        if not self._waiting[group_id]:
            del self._waiting[group_id], self._ranks[group_id]
