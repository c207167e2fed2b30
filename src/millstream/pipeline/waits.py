"""Every wait has an owner, a name for what it waits for, and a deadline. Nothing polls.

A wait that lasts shows in `active()` (the terminal view reads it), becomes a `Stalled` event after `stall_s`, and past its
deadline a `StallError` that names the culprit. A wait inside another of the same owner stands for both: it is the more exact.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
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
    """`on_stall` is called with every wait that lasts longer than `stall_s`, on the event loop."""

    def __init__(self, *, clock: Clock, sink: EventSink, stall_s: float, deadline_s: float) -> None:
        self._clock = clock
        self._sink = sink
        self._stall_s = stall_s
        self._deadline_s = deadline_s
        self._active: dict[int, Wait] = {}
        self._ticking: dict[_Ticks, str] = {}
        self._next = 0
        self.on_stall: Callable[[Wait], None] = lambda wait: None

    def now(self) -> float:
        return self._clock.now()

    async def on(
        self, owner: str, what: str, awaitable: Awaitable[T], *, has_deadline: bool = True, has_alarm: bool = True
    ) -> T:
        """Await under a name. Without a deadline the wait depends on another that has one. Without an alarm it shows among
        the active ones only: it is in the nature of the work that it may be long. What need not be waited for sets no timer."""
        wait, number = Wait(owner, what, self._clock.now()), self._next
        self._next += 1
        if has_deadline or has_alarm:
            steps = awaitable.__await__()
            try:
                first = next(steps)
            except StopIteration as done:
                result: T = done.value
                return result
            awaitable = _rest(steps, first)
        self._active[number] = wait
        alarm = asyncio.get_running_loop().call_later(self._stall_s, self._report, wait) if has_alarm else None
        try:
            return await (self._within_deadline(wait, awaitable) if has_deadline else awaitable)
        except asyncio.CancelledError as error:
            if not hasattr(error, CUT):
                setattr(error, CUT, wait)
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
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
        """What they wait for gets on: the deadlines of all their waits are counted from now."""
        for ticks, owner in self._ticking.items():
            if owner in owners:
                ticks.renew()

    @staticmethod
    def cut_by(error: TimeoutError) -> Wait | None:
        """The innermost wait that this time limit cut short."""
        cut: Wait | None = getattr(error.__cause__, CUT, None)
        return cut

    def _report(self, wait: Wait) -> None:
        now = self._clock.now()
        self._sink.emit(Stalled(at=now, owner=wait.owner, what=wait.what, seconds=now - wait.since))
        self.on_stall(wait)

    def active(self) -> list[Wait]:
        """What everybody waits for now, the longest wait first; of waits within each other the innermost."""
        begun = sorted(self._active.copy().items())  # another thread may ask; an inner wait may have been entered first
        innermost = {wait.owner: wait for _, wait in begun}
        return sorted(innermost.values(), key=lambda wait: wait.since)

    def counted(self) -> list[WaitNow]:
        """The same for those who watch: members of groups that wait for the same thing are counted together, and tasks of an
        evaluation, too."""
        now, found = self._clock.now(), dict[tuple[str, str], WaitNow]()
        for wait in self.active():
            owner = "rollouts" if wait.owner.startswith("group ") else wait.owner.partition(" task ")[0]
            seen = found.get((owner, wait.what))
            seconds, count = (seen.seconds, seen.count + 1) if seen else (now - wait.since, 1)
            found[owner, wait.what] = WaitNow(owner=owner, what=wait.what, seconds=seconds, count=count)
        return list(found.values())


@types.coroutine
def _rest(steps: Generator[Any, Any, T], first: Any) -> Generator[Any, Any, T]:
    """What is left of an awaitable that has come to its first wait."""
    try:
        while True:
            try:
                sent = yield first
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:  # a cancellation, say: it is the awaitable's own
                first = steps.throw(error)
            else:
                first = steps.send(sent)
    except StopIteration as done:
        result: T = done.value
        return result


class Limit:
    """A time limit, entered once. Time that does not count suspends it (`paused`), be it for several reasons at once: when the
    last of them is over, it goes on with what was left of it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._first = asyncio.get_running_loop().time() + seconds
        self._timeout = asyncio.timeout_at(self._first)
        self._num_paused = 0
        self._left = 0.0

    @property
    def paused_s(self) -> float:
        """What did not count, so far."""
        return (self._timeout.when() or self._first) - self._first

    async def __aenter__(self) -> Limit:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, trace)

    def is_expired(self) -> bool:
        return self._timeout.expired()

    @contextmanager
    def paused(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        if not self._num_paused:
            self._left = (self._timeout.when() or self._first) - loop.time()
            self._reschedule(None)
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1
            if not self._num_paused:
                self._reschedule(loop.time() + self._left)

    def _reschedule(self, deadline: float | None) -> None:
        with suppress(RuntimeError):  # it is over, and somebody of the rollout's own is still at work
            self._timeout.reschedule(deadline)


class _Ticks:
    """Ends a time limit after some ticks. A process that was suspended comes back to one tick that is due, not to all."""

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


class Notifier:
    """Wakes those who wait for a condition on shared state; whoever changes the state calls `notify`."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}

    def notify(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], T | None]) -> T:
        """What the condition returns as soon as that is neither None nor False."""
        while (value := condition()) is None or value is False:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = None
            try:
                await waiter
            finally:
                del self._waiting[waiter]
        return value


class QuiescePoint:
    """One moment of what is changed in several steps: here in memory, in the log, and in a store that may be another process.

    Whoever changes it makes all steps that belong together within `change`; between `stop` and `go_on` nobody is in the middle
    of one. As long as nobody has stopped them, `change` waits for nothing."""

    def __init__(self) -> None:
        self._pulse = Notifier()
        self._num_changing = 0
        self._is_stopped = False

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Not within another one."""
        await self._pulse.until(lambda: not self._is_stopped)
        self._num_changing += 1
        try:
            yield
        finally:
            self._num_changing -= 1
            self._pulse.notify()

    async def stop(self) -> None:
        """Waits for those who are in the middle of a change; nobody else begins. By one at a time."""
        self._is_stopped = True
        try:
            await self._pulse.until(lambda: not self._num_changing)
        except BaseException:  # cancelled: whoever changes something must not wait for ever
            self.go_on()
            raise

    def go_on(self) -> None:
        self._is_stopped = False
        self._pulse.notify()
