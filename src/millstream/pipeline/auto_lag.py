"""The controller of `pipeline.auto_lag`: uses as little lag as training needs, at most `max_lag`.

Once a step it sees how long the learner waited for groups, how much room the engines had meanwhile, and how far off policy the
batch was (effective sample size):

    raise    the learner waited, and engines had room: with more groups in flight they would have decoded more
    lower    the learner did not wait, or waited while requests queued for engines: the lag bought nothing
    lower    the effective sample size is low: learning needs fresher rollouts

A lag of 0 is a synchronous phase. Guarantees: never above `max_lag`; at most one move a step; each is an event with its reason
(`lag_moved`). After a move nothing moves until groups that were admitted under it are trained. When a lowering has to be taken
back, the next one comes after twice as many steps: noise does not make it swing.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from typing import NamedTuple, TypeVar

from millstream.events import LagMoved
from millstream.pipeline.admission import Admission, full_budget
from millstream.pipeline.context import RunContext
from millstream.serving.router import Router
from millstream.types import Metrics

T = TypeVar("T")

MOVE = 0.5
TO_RAISE = 2
TO_LOWER = 4
"""Steps that a decision is based on: waiting costs time, lag that is not needed does not."""
WAITED = 0.05
"""Share of the time that the learner may wait before the lag is raised."""
DID_NOT_WAIT = 0.01
HAD_ROOM = 0.05
"""Share of the engines' slots."""
HAD_NO_ROOM = 0.01
MIN_SAMPLE_SIZE = 0.5
PATIENCE = 32
MAX_PATIENCE = 256
"""Steps without a lowering, after one that had to be taken back."""


class StepSeen(NamedTuple):
    """What one step showed. `room`: the share of the engines' slots that was free while the learner waited."""

    seconds: float
    waited_s: float
    room: float
    sample_size: float | None = None  # None: the loss has none


class LagMove(NamedTuple):
    max_lag: float
    why: str


class LagController:
    """The decisions: pure bookkeeping over what steps have shown. Begins with all the lag that is allowed."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.max_lag = limit
        self._seen: list[StepSeen] = []  # since the last move, or the last window without one
        self._num_to_skip = 0  # steps until groups are trained that were admitted under the present lag
        self._num_to_hold = 0  # steps in which the lag is not lowered
        self._patience = PATIENCE
        self._was_lowered = False  # by the last move

    def add(self, seen: StepSeen) -> LagMove | None:
        """The move that this step leads to, which is then in force."""
        self._num_to_hold = max(0, self._num_to_hold - 1)
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        self._seen = [*self._seen, seen][-TO_LOWER:]
        move = self._raised() or (self._lowered() if len(self._seen) == TO_LOWER else None)
        if move is None or move.max_lag == self.max_lag:
            return None
        self._was_lowered = move.max_lag < self.max_lag
        self._num_to_skip = math.ceil(max(move.max_lag, self.max_lag)) + 1
        self.max_lag = move.max_lag
        self._seen = []
        return move

    def _raised(self) -> LagMove | None:
        waited, room, size = _shares(self._seen[-TO_RAISE:])
        if len(self._seen) < TO_RAISE or waited <= WAITED or room <= HAD_ROOM or size < MIN_SAMPLE_SIZE:
            return None
        if self._was_lowered:
            self._num_to_hold = self._patience
            self._patience = min(2 * self._patience, MAX_PATIENCE)
        by = 2 * MOVE if waited > 4 * WAITED else MOVE
        why = f"the learner waited {waited:.0%} of the time while {room:.0%} of the slots were free"
        return LagMove(min(self._limit, self.max_lag + by), why)

    def _lowered(self) -> LagMove | None:
        waited, room, size = _shares(self._seen)
        lower = max(0.0, self.max_lag - MOVE)
        if size < MIN_SAMPLE_SIZE:
            return LagMove(lower, f"the effective sample size is {size:.0%}: learning needs fresher rollouts")
        if self._num_to_hold or (waited >= DID_NOT_WAIT and room >= HAD_NO_ROOM):
            return None
        how = "did not wait" if waited < DID_NOT_WAIT else "waited for engines that had no room"
        return LagMove(lower, f"the learner {how}: less lag is as fast")


def _shares(steps: list[StepSeen]) -> tuple[float, float, float]:
    """Of the time that the learner waited, of the slots that were free then, and the effective sample size."""
    seconds = sum(step.seconds for step in steps)
    waited_s = sum(step.waited_s for step in steps)
    room_s = sum(step.room * step.waited_s for step in steps)
    sizes = [step.sample_size for step in steps if step.sample_size is not None]
    return (
        waited_s / seconds if seconds else 0.0,
        room_s / waited_s if waited_s else 0.0,
        sum(sizes) / len(sizes) if sizes else 1.0,
    )


class AutoLag:
    """Watches the learner's waits, and moves the admission rule's terms."""

    def __init__(self, limit: float, context: RunContext, admission: Admission, router: Router) -> None:
        self._context = context
        self._admission = admission
        self._router = router
        self._controller = LagController(limit)
        self._waited_s = 0.0
        self._free_s = 0.0  # waited seconds, weighted with the share of slots that were free

    def start(self) -> None:
        """Before the first group is admitted."""
        self._move(LagMove(self._controller.max_lag, "the start"))

    async def watch(self, group: Awaitable[T]) -> T:
        """Await what the learner waits for."""
        began, room = self._context.now(), self._room()
        value = await group
        waited_s = self._context.now() - began
        self._waited_s += waited_s
        self._free_s += waited_s * (room + self._room()) / 2
        return value

    def on_stepped(self, metrics: Metrics, seconds: float) -> None:
        room = self._free_s / self._waited_s if self._waited_s else 0.0
        seen = StepSeen(seconds, self._waited_s, room, metrics.get("effective_sample_size"))
        self._waited_s = 0.0
        self._free_s = 0.0
        move = self._controller.add(seen)
        if move is not None:
            self._move(move)

    def _move(self, move: LagMove) -> None:
        budget = full_budget(self._admission.groups_per_step, move.max_lag)
        self._admission.change_terms(move.max_lag, budget)
        self._context.emit(
            LagMoved(
                at=self._context.now(),
                version=self._admission.version,
                max_lag=move.max_lag,
                lag_bound=self._admission.bound,
                budget=budget,
                why=move.why,
            )
        )
        self._context.notifier.notify()

    def _room(self) -> float:
        """The share of the engines' slots that no request has or waits for."""
        engines = self._router.engines
        slots = sum(engine.slots for engine in engines)
        used = sum(stats.running + stats.waiting for stats in (engine.stats() for engine in engines))
        return max(0.0, 1 - (used + self._router.num_waiting) / slots) if slots else 0.0
