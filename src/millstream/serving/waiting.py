"""Requests that wait for a replica: the most urgent group first, of these the oldest."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from millstream.serving.replica import Replica
from millstream.serving.request import RoutedRequest

Rank = tuple[int, int]
"""(deadline, members to go): smaller is more urgent."""


class Waiter(NamedTuple):
    flight: RoutedRequest
    replica: asyncio.Future[Replica]


class Waiting:
    """Requests by group, groups by rank. A rank that changed is entered again; the old entry is skipped when it comes up."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Waiter]] = {}
        self._ranks: dict[int, Rank] = {}
        self._heap: list[tuple[Rank, int]] = []

    def __contains__(self, group_id: int) -> bool:
        """Whether requests of it wait."""
        return group_id in self._waiting

    def __iter__(self) -> Iterator[Waiter]:
        for waiters in self._waiting.values():
            yield from waiters

    def push(self, waiter: Waiter, rank: Rank) -> None:
        """Behind the others of its group; one that has lost its replica had its turn before, and goes in front."""
        group_id = waiter.flight.request.key.group_id
        waiters = self._waiting.setdefault(group_id, deque())
        if waiter.flight.has_moved:
            waiters.appendleft(waiter)
        else:
            waiters.append(waiter)
        self.rerank(group_id, rank)

    def rerank(self, group_id: int, rank: Rank | None) -> None:
        if rank is not None and group_id in self._waiting and self._ranks.get(group_id) != rank:
            self._ranks[group_id] = rank
            heapq.heappush(self._heap, (rank, group_id))

    def remove(self, waiter: Waiter) -> bool:
        """False if its turn has come, and passed, between its cancellation and now."""
        group_id = waiter.flight.request.key.group_id
        is_here = waiter in self._waiting.get(group_id, ())
        if is_here:
            self._waiting[group_id].remove(waiter)
            self._shrink(group_id)
        return is_here

    def pop(
        self, choose: Callable[[RoutedRequest], Replica | None], has_room: Callable[[], bool]
    ) -> tuple[Waiter, Replica] | None:
        """The most urgent request that some replica may take, and that replica."""
        skipped, found = list[tuple[Rank, int]](), None
        while self._heap and found is None:
            rank, group_id = self._heap[0]
            if self._ranks.get(group_id) != rank:
                heapq.heappop(self._heap)
                continue
            replica = choose(self._waiting[group_id][0].flight)
            if replica is not None:
                found = self._waiting[group_id].popleft(), replica
                self._shrink(group_id)
            elif not has_room():
                break  # no need to look further
            else:
                skipped.append(heapq.heappop(self._heap))
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found

    def _shrink(self, group_id: int) -> None:
        if not self._waiting[group_id]:
            del self._waiting[group_id], self._ranks[group_id]
