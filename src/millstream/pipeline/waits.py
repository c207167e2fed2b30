"""Every wait has an owner, a name for what it waits for, and a deadline. Nothing polls.

A wait shows in `active()` (the terminal view reads it), becomes a `Stalled` event after `stall_s`, and a `StallError` that
names its owner after `deadline_s`. Of nested waits of one owner the innermost is shown: it is the most exact.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, TypeVar

from millstream.clock import Clock
from millstream.errors import StallError
from millstream.events import EventSink, Stalled, WaitNow

T = TypeVar("T")
CUT = "millstream_wait"


class Wait(NamedTuple):
    owner: str
    what: str
    since: float


class Waits:
    """The waits of a run. `on_stall` is called on the event loop with every wait that lasts longer than `stall_s`."""

    def __init__(self, *, clock: Clock, sink: EventSink, stall_s: float, deadline_s: float) -> None:
        self._clock = clock
        self._sink = sink
        self._stall_s = stall_s
        self._deadline_s = deadline_s
        self._active: dict[int, tuple[str, str, float]] = {}  # (owner, what, since): plain tuples are made faster
        self._ticking: dict[_Ticks, str] = {}
        self._next = 0
        self.on_stall: Callable[[Wait], None] = lambda wait: None

    def now(self) -> float:
        return self._clock.now()

    def idle(self, owner: str, what: str) -> IdleWait:
        """`with waits.idle(owner, what): await ...` is a wait without a warning and without a deadline: one that may be long by
        its nature, or whose time is limited elsewhere (`rollout.timeout_s`)."""
        number = self._next
        self._next += 1
        self._active[number] = wait = (owner, what, self._clock.now())
        return IdleWait(self._active, number, wait)

    async def on(self, owner: str, what: str, awaitable: Awaitable[T], *, deadline: bool = True) -> T:
        """Await under a name: a `Stalled` event after `stall_s`, a `StallError` after `deadline_s`. `deadline=False` where the
        awaited work consists of waits that have deadlines of their own. What does not suspend is not registered."""
        began = self._clock.now()
        number = self._next  # before the first step: a wait inside this one has a higher number
        self._next += 1
        steps = awaitable.__await__()
        try:
            first = next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        rest = _rest(steps, first)
        wait = Wait(owner, what, began)
        self._active[number] = wait
        warning = asyncio.get_running_loop().call_later(self._stall_s, self._report, wait)
        try:
            return await (self._within_deadline(wait, rest) if deadline else rest)
        except asyncio.CancelledError as error:
            if not hasattr(error, CUT):
                setattr(error, CUT, wait)
            raise
        finally:
            warning.cancel()
            del self._active[number]

    async def _within_deadline(self, wait: Wait, awaitable: Awaitable[T]) -> T:
        limit = asyncio.timeout(None)
        ticks = _Ticks(limit, self._deadline_s)
        self._ticking[ticks] = wait.owner
        try:
            async with limit:
                return await awaitable
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StallError(
                f"{wait.owner} has waited {self._deadline_s:g} s for {wait.what}; pipeline.deadline_s sets the limit"
            ) from error
        finally:
            ticks.cancel()
            del self._ticking[ticks]

    def renew(self, *owners: str) -> None:
        """What they wait for makes progress: the deadlines of all their waits are counted from now."""
        for ticks, owner in self._ticking.items():
            if owner in owners:
                ticks.renew()

    @staticmethod
    def cut_by(error: TimeoutError) -> Wait | None:
        """The innermost wait that this timeout ended."""
        cut: Wait | None = getattr(error.__cause__, CUT, None)
        return cut

    def _report(self, wait: Wait) -> None:
        now = self._clock.now()
        self._sink.emit(Stalled(at=now, owner=wait.owner, what=wait.what, seconds=now - wait.since))
        self.on_stall(wait)

    def active(self) -> list[Wait]:
        """The current waits, the longest first; of nested waits of one owner the innermost."""
        begun = sorted(
            self._active.copy().items()
        )  # called by other threads, too; an inner wait may be registered first
        innermost = {wait[0]: Wait(*wait) for _, wait in begun}
        return sorted(innermost.values(), key=lambda wait: wait.since)

    def counted(self) -> list[WaitNow]:
        """The same for display: members of groups that wait for the same thing are counted together, and so are tasks of an
        evaluation."""
        now, found = self._clock.now(), dict[tuple[str, str], WaitNow]()
        for wait in self.active():
            owner = "rollouts" if wait.owner.startswith("group ") else wait.owner.partition(" task ")[0]
            seen = found.get((owner, wait.what))
            seconds, count = (seen.seconds, seen.count + 1) if seen else (now - wait.since, 1)
            found[owner, wait.what] = WaitNow(owner=owner, what=wait.what, seconds=seconds, count=count)
        return list(found.values())


class IdleWait:
    """A registered wait, until the end of its `with` block. Not a coroutine: a wait costs no frame on the way to what is
    awaited."""

    __slots__ = ("_active", "_number", "_wait")

    def __init__(self, active: dict[int, tuple[str, str, float]], number: int, wait: tuple[str, str, float]) -> None:
        self._active = active
        self._number = number
        self._wait = wait

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        del self._active[self._number]
        if isinstance(error, asyncio.CancelledError) and not hasattr(error, CUT):
            setattr(error, CUT, Wait(*self._wait))


@types.coroutine
def _rest(steps: Generator[Any, Any, T], first: Any) -> Generator[Any, Any, T]:
    """The rest of an awaitable that has been run up to its first suspension."""
    try:
        while True:
            try:
                sent = yield first
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:  # a cancellation, say: the awaitable handles it
                first = steps.throw(error)
            else:
                first = steps.send(sent)
    except StopIteration as done:
        result: T = done.value
        return result


class _Ticks:
    """Ends a time limit after `COUNT` ticks. A process that was suspended comes back to one tick that is due, not to all, so
    that the time in which it could not run hardly counts."""

    COUNT = 4

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds / self.COUNT
        self._left = self.COUNT
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(self._seconds, self._tick)

    def renew(self) -> None:
        self._handle.cancel()
        self._left = self.COUNT
        self._handle = self._loop.call_later(self._seconds, self._tick)

    def _tick(self) -> None:
        self._left -= 1
        if self._left:
            self._handle = self._loop.call_later(self._seconds, self._tick)
        else:
            self._limit.reschedule(self._loop.time())

    def cancel(self) -> None:
        self._handle.cancel()
