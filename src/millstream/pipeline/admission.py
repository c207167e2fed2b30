"""The admission rule: the one place that bounds staleness, by construction.

Words. B groups make a batch; the learner is at version n and has taken T groups of its current batch. A group's *start*
is the version of the engine that serves it when its oldest member is dispatched, its *deadline* start + ceil(max_lag).
It is *outstanding* from its admission until it is taken or removed.

The invariant, at all times:

    for every d >= n:   outstanding groups with deadline <= d   number at most   (d - n + 1) B - T

It says that the batches up to version d have room for all that must be trained by then.

Why it bounds the lag. Put d = n - 1: the right side is at most 0, so no outstanding group has a deadline before n. A group
is therefore always taken at a version n <= deadline = start + ceil(max_lag), which is the bound; every member of it
started at `start` or later.

Why the three moves keep it.
- *Admit* and *take* are allowed only if it holds afterwards (`may_admit`, `may_take`).
- *Remove* (filtered, failed) lowers the left side only.
- *Step* (T = B, n becomes n + 1, T becomes 0): for d >= n + 1 the right side was (d - n + 1) B - B = (d - n) B and is
  (d - (n + 1) + 1) B = (d - n) B: unchanged. For d = n it said that no group with deadline n is left.

Why it cannot deadlock. The outstanding group with the earliest deadline D may always be taken once it is complete: for
d >= D both sides fall by one; for n <= d < D the left side is 0 and the right side (d - n + 1) B - T - 1 >= 0, as T < B.
And when nothing is outstanding, a group served by an engine at version e may be admitted if e + ceil(max_lag) >= n:
every engine gets there, because it is sent every version. So some move is always possible, as long as rollouts end.

How much is in flight. Groups outstanding or taken number at most the budget, floor((1 + max_lag) B) by default. For
whole max_lag the invariant alone implies it; the budget makes the fractions mean something. A full budget leaves no room
to reorder: groups are then taken batch by batch and a straggler is waited for. A smaller budget under the same deadline
leaves slack, so that complete groups may pass it.

Two rules that look right and are not: a budget without an order (B = 1, max_lag = 2 breaks it: one group can be passed for
ever), and "earliest deadline of the *complete* groups first" without the invariant (the late ones pile up on one deadline).

max_lag = 0 is synchronous training: B groups, one version. With `is_in_order` they are taken in the order of their ids, so
that the order of micro-batches does not depend on timing.

*Other terms* (a resume changes B, max_lag or the number of steps): `beyond_reach` lists the groups in flight that are removed.
The others are counted in the order of their deadlines, and each stays only if the right side has room for it: the invariant
holds for what stays, whatever the terms were before.

*Restart* (an overdue group is rolled out again, under the same id): a deadline D <= D' is exchanged for D'. The left side falls
by one for D <= d < D' and stays as it is elsewhere, so that it is always allowed.

*Another max_lag while groups are in flight* (`change_terms`): each group keeps the deadline that it was admitted with, and the
new max_lag gives those that are admitted from then on. The invariant is about deadlines, so it holds as before.

First to finish (`is_greedy`) gives the invariant up: more groups are in flight than can be trained in time, complete ones are
taken as they come, and all groups that are due when the batch is full, and are not in it, must be removed before the step
(`overdue`).
The bound holds, because no group is left whose deadline is past. The cost: slow groups are thrown away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from millstream.errors import InvariantError, LagError


class Place(NamedTuple):
    start: int
    deadline: int

    @property
    def bound(self) -> int:
        """The lag that the group may have."""
        return self.deadline - self.start


class Admission:
    """The ledger of what is outstanding. Pure bookkeeping: it neither waits nor knows tasks, threads or time."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_lag: float,
        budget: int | None = None,
        num_steps: int | None = None,
        is_in_order: bool = False,
        is_greedy: bool = False,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.is_in_order = is_in_order
        self.is_greedy = is_greedy
        self.bound = math.ceil(max_lag)
        self.budget = budget if budget is not None else full_budget(groups_per_step, max_lag)
        self.num_steps = num_steps
        self.version = 0
        self.taken = 0
        self._places: dict[int, Place] = {}
        self._deadlines: Counter[int] = Counter()

    @property
    def outstanding(self) -> int:
        return len(self._places)

    @property
    def is_batch_full(self) -> bool:
        return self.taken == self.groups_per_step

    @property
    def is_finished(self) -> bool:
        return self.num_steps is not None and self.version >= self.num_steps

    @property
    def _is_last_batch(self) -> bool:
        return self.num_steps is not None and self.version + 1 >= self.num_steps

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._places

    def places(self) -> Iterable[tuple[int, Place]]:
        """What is outstanding, in the order of admission."""
        return self._places.items()

    def place(self, group_id: int) -> Place:
        return self._places[group_id]

    def restore(self, version: int, places: Mapping[int, Place]) -> None:
        """Continue between two batches, with these groups in flight. Raises `InvariantError` if they break the invariant."""
        self.version = version
        self.taken = 0
        self._places = dict(places)
        self._deadlines = Counter(place.deadline for place in places.values())
        if not self.is_greedy and not self._holds(taken=0):
            raise InvariantError(f"groups were restored that cannot all be trained in time: {self}")

    def change_terms(self, max_lag: float, budget: int) -> None:
        """For the groups that start from now on."""
        self.bound = math.ceil(max_lag)
        self.budget = budget

    # ---- the three moves ---------------------------------------------------------------------------------------------

    def may_admit(self, start: int) -> bool:
        """Whether a group that starts at this version can be trained within its deadline, and within the run."""
        in_flight = self.outstanding + self.taken
        if in_flight >= self.budget or in_flight >= self._room_until_the_end():
            return False
        if self.is_greedy:
            is_over = self.is_finished or (self.is_batch_full and self._is_last_batch)
            return not is_over and start + self.bound >= self.version + self.is_batch_full
        return self._holds(taken=self.taken, extra=start + self.bound)

    def admit(self, group_id: int, start: int) -> Place:
        if group_id in self._places:
            raise InvariantError(f"group {group_id} was admitted twice")
        if not self.may_admit(start):
            raise InvariantError(f"group {group_id} at start {start} may not enter: {self}")
        place = self._places[group_id] = Place(start, start + self.bound)
        self._deadlines[place.deadline] += 1
        return place

    def may_take(self, group_id: int) -> bool:
        """Whether this group may join the current batch without leaving too little room for the others."""
        if self.is_batch_full or group_id not in self._places:
            return False
        if self.is_in_order and group_id != min(self._places):
            return False
        return self.is_greedy or self._holds(taken=self.taken + 1, without=self._places[group_id].deadline)

    def blockers(self, ready: Iterable[int]) -> list[int]:
        """The groups that are not complete and without which the complete ones would fill the batch now: the most urgent of
        them, as many as places are open. None unless the learner waits for these alone."""
        complete, places = set(ready), self.groups_per_step - self.taken
        if not places or len(complete & self._places.keys()) < places or self.choose(complete) is not None:
            return []
        late = sorted((place.deadline, group) for group, place in self._places.items() if group not in complete)
        return [group for _, group in late[:places]]

    def overdue(self) -> list[int]:
        """First to finish: the groups that cannot be trained any more after this batch."""
        due = math.inf if self._is_last_batch else self.version
        return [group for group, place in self._places.items() if place.deadline <= due] if self.is_greedy else []

    def restart(self, group_id: int, start: int) -> Place:
        """The group starts again at this version. Raises `InvariantError` if that is older than its start."""
        old = self._places[group_id]
        if start < old.start:
            raise InvariantError(f"group {group_id} started at {old.start} and may not restart at {start}")
        self._leave(group_id)
        place = self._places[group_id] = Place(start, max(old.deadline, start + self.bound))
        self._deadlines[place.deadline] += 1
        return place

    def choose(self, ready: Iterable[int]) -> int | None:
        """The complete group to take next: the earliest deadline that the invariant lets through; None to wait."""
        lowest: dict[int, int] = {}  # id by deadline: where the lowest may not be taken, no other of that deadline may
        for group_id in ready:
            place = self._places.get(group_id)
            if place is not None and group_id <= lowest.get(place.deadline, group_id):
                lowest[place.deadline] = group_id
        return next((lowest[deadline] for deadline in sorted(lowest) if self.may_take(lowest[deadline])), None)

    def take(self, group_id: int) -> Place:
        """The group joins the current batch. Raises `LagError` if it is older than its bound."""
        place = self._places[group_id]
        if self.version > place.deadline:
            raise LagError(
                f"group {group_id} started at version {place.start} and would be trained at {self.version}: "
                f"the bound is {place.bound}"
            )
        if not self.may_take(group_id):
            raise InvariantError(f"group {group_id} may not be taken now: {self}")
        self._leave(group_id)
        self.taken += 1
        return place

    def remove(self, group_id: int) -> Place:
        """The group leaves untrained (filtered or failed); its place is free for another."""
        return self._leave(group_id)

    def step(self) -> int:
        """The batch is trained: the version rises. A batch that is not full (end of data) must be the last there is."""
        if (not self.is_batch_full and self._places) or self.overdue():
            raise InvariantError(f"a step with {self.taken} groups while others are outstanding: {self}")
        self.version += 1
        self.taken = 0
        return self.version

    def beyond_reach(self, version: int, places: Mapping[int, Place]) -> set[int]:
        """Of groups that were admitted under other terms: those that these terms cannot train in time, from this version on.
        What stays has the earliest deadlines, then the lowest ids, and keeps the invariant. In order, nothing stays."""
        last = math.inf if self.num_steps is None else self.num_steps - 1
        due = {group_id: min(place.deadline, last) for group_id, place in places.items()}
        stay = set[int]()
        for group_id in () if self.is_in_order else sorted(due, key=lambda group_id: (due[group_id], group_id)):
            room = math.inf if self.is_greedy else (due[group_id] - version + 1) * self.groups_per_step
            if due[group_id] >= version and len(stay) < room:
                stay.add(group_id)
        return places.keys() - stay

    # ---- the invariant -----------------------------------------------------------------------------------------------

    def _holds(self, *, taken: int, extra: int | None = None, without: int | None = None) -> bool:
        """Whether the invariant holds with one deadline more, or one less. Deadlines span at most bound + 1 values."""
        deadlines = set(self._deadlines)
        if extra is not None:
            deadlines.add(extra)
        count = 0
        for deadline in sorted(deadlines | {self.version}):
            count += self._deadlines[deadline] + (deadline == extra) - (deadline == without)
            if count > (deadline - self.version + 1) * self.groups_per_step - taken:
                return False
        return True

    def _leave(self, group_id: int) -> Place:
        place = self._places.pop(group_id)
        self._deadlines[place.deadline] -= 1
        if not self._deadlines[place.deadline]:
            del self._deadlines[place.deadline]
        return place

    def _room_until_the_end(self) -> float:
        """Groups that the remaining steps can train, and what first to finish has to spare: no group is admitted that no batch
        would take."""
        if self.num_steps is None:
            return math.inf
        spare = max(0, self.budget - full_budget(self.groups_per_step, self.bound)) if self.is_greedy else 0
        return (self.num_steps - self.version) * self.groups_per_step + spare

    def __str__(self) -> str:
        return (
            f"version {self.version}, {self.taken} of {self.groups_per_step} taken, outstanding by deadline "
            f"{dict(sorted(self._deadlines.items()))}, bound {self.bound}, budget {self.budget}"
        )


def full_budget(groups_per_step: int, max_lag: float) -> int:
    """floor((1 + max_lag) * groups_per_step), of the decimal number that the user wrote: 1.05 is not the float next to it."""
    return math.floor((1 + Fraction(str(max_lag))) * groups_per_step)
