"""The router's queue: requests that wait for a replica, the most urgent group first, within a group the oldest first.

Groups in training have a rank; requests without one (an evaluation's) have every fourth turn, so that they neither starve nor
delay training. Those of one pin wait together: they may go to the same engines, so that where the first finds no room, the
others are not looked at.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from millstream.serving.replica import Replica
from millstream.serving.request import Pin, RoutedRequest

RequestRank = tuple[float, ...]  # (deadline, minus the expected length, members left): smaller is more urgent
ChooseReplica = Callable[[RoutedRequest], Replica | None]
TURNS = 4  # one turn in this number is for requests without a rank


class WaitingRequest(NamedTuple):
    routed: RoutedRequest
    replica: asyncio.Future[Replica]


NextRequest = tuple[WaitingRequest, Replica]


class RequestQueue:
    def __init__(self) -> None:
        self._ranked = _ByGroup()
        self._unranked: dict[Pin | None, _ByGroup] = {}  # by pin, the one whose turn is next first
        self._turn = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[WaitingRequest]:
        yield from self._ranked
        for of_pin in self._unranked.values():
            yield from of_pin

    def has_ranked(self, group_id: int) -> bool:
        """Whether requests of this group wait."""
        return group_id in self._ranked

    def push(self, waiting: WaitingRequest, rank: RequestRank | None) -> None:
        if rank is None:
            self._unranked.setdefault(waiting.routed.pin, _ByGroup()).push(waiting, (0, 0))
        else:
            self._ranked.push(waiting, rank)
        self._num_waiting += 1

    def rerank(self, group_id: int, rank: RequestRank | None) -> None:
        self._ranked.rerank(group_id, rank)

    def remove(self, waiting: WaitingRequest) -> None:
        """Nothing is done if its turn has come, and passed, between its cancellation and now."""
        pin = waiting.routed.pin
        if self._ranked.remove(waiting) or (pin in self._unranked and self._unranked[pin].remove(waiting)):
            self._num_waiting -= 1

    def pop(self, choose: ChooseReplica, has_room: Callable[[], bool]) -> NextRequest | None:
        """The next request that some replica may take, and that replica."""
        pops = (self._ranked.pop, self._pop_unranked) if self._turn % TURNS else (self._pop_unranked, self._ranked.pop)
        for pop in pops if self._num_waiting else ():
            found = pop(choose, has_room)
            if found is not None:
                self._turn += 1
                self._num_waiting -= 1
                return found
        return None

    def _pop_unranked(self, choose: ChooseReplica, has_room: Callable[[], bool]) -> NextRequest | None:
        for pin, queue in list(self._unranked.items()):
            found = queue.pop(choose, has_room if pin is None else lambda: False)
            if found is not None or not queue:
                del self._unranked[pin]
            if found is not None:
                if queue:
                    self._unranked[pin] = queue  # the last one now
                return found
        return None


class _ByGroup:
    """Requests by group, groups by rank. A rank that changed is entered again; the old entry is skipped when it comes up."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[WaitingRequest]] = {}
        self._ranks: dict[int, RequestRank] = {}
        self._heap: list[tuple[RequestRank, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._waiting

    def __iter__(self) -> Iterator[WaitingRequest]:
        for group in self._waiting.values():
            yield from group

    def push(self, waiting: WaitingRequest, rank: RequestRank) -> None:
        """Last of its group; a request that has lost its replica had its turn before, and becomes the first."""
        group_id = waiting.routed.request.key.group_id
        group = self._waiting.setdefault(group_id, deque())
        if waiting.routed.has_moved:
            group.appendleft(waiting)
        else:
            group.append(waiting)
        self.rerank(group_id, rank)

    def rerank(self, group_id: int, rank: RequestRank | None) -> None:
        if rank is not None and group_id in self._waiting and self._ranks.get(group_id) != rank:
            self._ranks[group_id] = rank
            heapq.heappush(self._heap, (rank, group_id))

    def remove(self, waiting: WaitingRequest) -> bool:
        group_id = waiting.routed.request.key.group_id
        is_here = waiting in self._waiting.get(group_id, ())
        if is_here:
            self._waiting[group_id].remove(waiting)
            self._delete_if_empty(group_id)
        return is_here

    def pop(self, choose: ChooseReplica, has_room: Callable[[], bool]) -> NextRequest | None:
        """The first one that `choose` finds a replica for. Where that finds none, `has_room` says whether to look further."""
        skipped, found = list[tuple[RequestRank, int]](), None
        while self._heap and found is None:
            rank, group_id = self._heap[0]
            if self._ranks.get(group_id) != rank:
                heapq.heappop(self._heap)
                continue
            replica = choose(self._waiting[group_id][0].routed)
            if replica is not None:
                found = self._waiting[group_id].popleft(), replica
                self._delete_if_empty(group_id)
            elif not has_room():
                break  # no need to look further
            else:
                skipped.append(heapq.heappop(self._heap))
        for entry in skipped:
            heapq.heappush(self._heap, entry)
        return found

    def _delete_if_empty(self, group_id: int) -> None:
        if not self._waiting[group_id]:
            del self._waiting[group_id], self._ranks[group_id]
