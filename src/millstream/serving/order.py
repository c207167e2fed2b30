"""Replicas in the order of their work, so that a choice among hundreds looks at a few.

`cheapest` gives the replica that a comparison of all of them would give. Without a cached prefix, prices of replicas with equal
slots are in the order of their work; so only the first ones of each number of slots are compared, and those that have computed
a prefix of the request.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

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

    def has_room(self, now: float) -> bool:
        """Whether some replica may take a request."""
        self._update()
        return any(entry[3].may_take(0, now) for entries in self._by_slots.values() for entry in entries)

    def cheapest(self, routed: RoutedRequest, now: float) -> Replica | None:
        """The one with the lowest price that may take the request; of equal ones the first."""
        self._update()
        found = {replica: replica.price(routed) for replica in self._with_prefix(routed, now)}
        for slots, entries in self._by_slots.items():
            missing, least, least_work = PROMPT_TOKEN * len(routed.remaining.tokens), None, -1.0
            for work, _, _, replica in entries:
                if least is not None and (work + missing) / slots > least:
                    break
                if work == least_work or not replica.may_take(routed.floor, now, routed.pin):
                    continue
                found[replica] = price = replica.price(routed)
                is_crowded, value, _ = price
                if not is_crowded and (least is None or value < least):
                    least, least_work = value, work
        return min(found, key=lambda replica: (found[replica], replica.number), default=None)

    def _with_prefix(self, routed: RoutedRequest, now: float) -> Iterator[Replica]:
        for prefix in routed.prefixes:
            for name in prefix.versions:
                replica = self._replicas.get(name)
                if replica is not None and replica.may_take(routed.floor, now, routed.pin):
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
