"""What the components of one run share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from millstream.clock import Clock
from millstream.events import Event, EventSink, RolloutSpan
from millstream.events.rollouts import NO_ROLLOUTS, RolloutSink
from millstream.pipeline.lengths import ExpectedLengths
from millstream.pipeline.notify import Notifier, QuiescePoint
from millstream.pipeline.waits import Waits
from millstream.store import Store
from millstream.types import RequestKey, Task


class GroupInFlight:
    """The prompt of one admitted group, and what a resumed run has to know of it."""

    __slots__ = ("epoch", "first_attempt", "next_attempt", "num_kept", "prompt", "restarts", "task", "task_id", "to_do")

    def __init__(
        self,
        task_id: str,
        epoch: int,
        task: Task | None = None,
        *,
        prompt: int,
        first_attempt: int = 0,
        restarts: int = 0,
        num_kept: int = 0,
        to_do: Iterable[int] = (),
    ) -> None:
        self.task_id = task_id
        self.epoch = epoch
        self.task = task  # None until a resumed run has read it from the data set
        self.prompt = prompt  # its number in the data
        self.first_attempt = first_attempt  # of its rollouts, since its last restart
        self.next_attempt = first_attempt  # that no member has begun
        self.restarts = restarts  # how often its rollouts were aborted and started again
        self.num_kept = num_kept  # rollouts that a resumed run found in the store
        self.to_do = set(to_do)  # members that a resumed run has not started yet


class RunContext:
    """The store, the clock, the sinks of events and rollouts, named waits, the run's tasks, and the table of groups in
    flight."""

    def __init__(
        self, *, store: Store, waits: Waits, clock: Clock, sink: EventSink, rollouts: RolloutSink = NO_ROLLOUTS
    ) -> None:
        self.store = store
        self.waits = waits
        self.notifier = Notifier()  # notified when state has changed that a loop of the run waits for
        self.quiesce = QuiescePoint()  # a change of state that a checkpoint must not cut in two enters it
        self.groups: dict[int, GroupInFlight] = {}
        self.next_group = 0  # the id of the next group
        self.next_prompt = 0  # the data cursor
        self.to_feed: set[int] = set()  # prompts before it that are fed again: those of superseded groups
        self.vacant: set[int] = set()  # groups whose place in the batch stays empty: nothing of them is trained
        self.lengths: ExpectedLengths | None = None  # longest first
        self.tasks: asyncio.TaskGroup | None = None  # while the run lasts
        self.now = clock.now
        self.keep = rollouts.add  # a record of rollouts, after the event of the same moment
        self._sink = sink

    def emit(self, event: Event) -> None:
        self._sink.emit(event)

    @contextmanager
    def record_span(self, key: RequestKey, what: str) -> Iterator[Callable[[int], None]]:
        """A part of a rollout, as an event: see `episode.RecordSpan`."""
        began, tokens = self.now(), [0]
        try:
            yield tokens.append
        finally:
            self.emit_span(key, what, self.now() - began, tokens[-1])

    def emit_span(self, key: RequestKey, what: str, seconds: float, num_tokens: int) -> None:
        self.emit(
            RolloutSpan(
                at=self.now(),
                group_id=key.group_id,
                member=key.member,
                attempt=key.attempt,
                what=what,
                seconds=seconds,
                num_tokens=num_tokens,
            )
        )

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the run; its error ends the run."""
        assert self.tasks is not None, "the run has not started"
        return self.tasks.create_task(coroutine)
