"""Replicas in the order of their work, so that a choice among hundreds looks at a few.

`cheapest` gives the replica that a comparison of all of them would give. Without a cached prefix, prices of replicas with equal
slots are in the order of their work; so only the first ones of each number of slots are compared, and those that have computed
a prefix of the request.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from operator import itemgetter

from millstream.serving.replica import PROMPT_TOKEN, Replica
from millstream.serving.request import RoutedRequest

_Entry = tuple[float, int, int, Replica]  # work, requests, number: no two replicas have the same number


class ReplicaOrder:
    """`replicas`: by name, those that the router has. One whose work or limit changes must be named with `change`."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        self._replicas = replicas
        self._by_slots: dict[int, list[_Entry]] = {}  # those with room, sorted
        self._entries: dict[Replica, _Entry] = {}
        self._changed: dict[Replica, None] = {}

    def change(self, replica: Replica) -> None:
        self._changed[replica] = None

    def has_room(self) -> bool:
        """Whether some replica may take a request."""
        self._update()
        now = asyncio.get_running_loop().time()
        return any(entry[3].may_take(0, now) for entries in self._by_slots.values() for entry in entries)

    def cheapest(self, routed: RoutedRequest) -> Replica | None:
        """Of those that may take the request, the one with the lowest price, of equal ones the first; crowded ones last."""
        now = asyncio.get_running_loop().time()
        if len(self._replicas) == 1:
            (only,) = self._replicas.values()
            return only if only.may_take(routed.floor, now, routed.pin) else None
        self._update()
        prompt = PROMPT_TOKEN * len(routed.remaining.tokens)
        found, lowest = list[tuple[float, int, int, Replica]](), math.inf  # `lowest`: of those that are not crowded
        for slots, entries in self._by_slots.items():
            least, least_work = math.inf, -1.0
            for work, _, _, replica in entries:
                if (work + prompt) / slots > least:
                    break
                if work == least_work or not replica.may_take(routed.floor, now, routed.pin):
                    continue
                price = replica.price(routed)
                found.append((*price, replica.number, replica))
                if price[0] < least and not replica.is_crowded:
                    least, least_work = price[0], work
            lowest = min(lowest, least)
        for replica in self._with_prefix(routed):  # a prefix is worth its prompt at most twice: see `Replica.price`
            is_near = (replica.work - prompt) / replica.engine.slots <= lowest
            if is_near and replica.may_take(routed.floor, now, routed.pin):
                found.append((*replica.price(routed), replica.number, replica))
        found.sort(key=itemgetter(0, 1, 2))
        in_order = [replica for *_, replica in found]
        return next((replica for replica in in_order if not replica.is_crowded), in_order[0] if in_order else None)

    def _with_prefix(self, routed: RoutedRequest) -> Iterator[Replica]:
        for prefix in routed.prefixes:
            for name in prefix.versions:
                if (replica := self._replicas.get(name)) is not None:
                    yield replica

    def _update(self) -> None:
        for replica in self._changed:
            entries = self._by_slots.setdefault(replica.engine.slots, [])
            old = self._entries.pop(replica, None)
            if old is not None:
                del entries[bisect_left(entries, old)]
            if replica.has_room:
                new = self._entries[replica] = (replica.work, len(replica.requests), replica.number, replica)
                insort(entries, new)
        self._changed.clear()
