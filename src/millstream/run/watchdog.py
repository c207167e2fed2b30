"""The watchdog: a thread that detects a blocked event loop, and writes what every thread and coroutine is doing.

A reward that blocks (a plain `requests.get` inside an `async def`, say) stops everything, timers included: only another thread
can notice. After `stall_s` the watchdog writes all waits and stacks to a file and emits `Stalled`; after `deadline_s` it ends
the run with the place that blocked. The same dump is written on SIGUSR1, and when a wait lasts longer than `stall_s`. SIGUSR1
writes the stack of the thread that it interrupts at once, even where that never returns to Python, and no others: to read the
stacks of threads that run ends the process now and then.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from millstream.clock import Clock
from millstream.events import EVENT_LOOP, EventSink, Stalled
from millstream.pipeline.waits import Wait, Waits

BEAT_S = 1.0
HANDLE = str(Path("asyncio", "events.py"))
LIBRARIES = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen")


class Watchdog:
    """Start it on the event loop that it watches. `end` is called on its thread when the deadline has passed."""

    def __init__(
        self,
        path: Path,
        waits: Waits,
        *,
        clock: Clock,
        sink: EventSink,
        stall_s: float,
        deadline_s: float,
        end: Callable[[str], None],
    ) -> None:
        self._path = path
        self._waits = waits
        self._clock = clock
        self._sink = sink
        self._stall_s = stall_s
        self._deadline_s = deadline_s
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._watched = threading.current_thread()
        self._num_beats = 0
        self._last_dump = float("-inf")
        self._asked: list[str] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._stacks: io.TextIOWrapper | None = None
        self._handler: Any = signal.SIG_DFL

    def start(self) -> None:
        self._waits.on_stall = self._on_stall
        self._beats = asyncio.create_task(self._beat())
        self._thread.start()
        with suppress(ValueError, AttributeError, OSError):  # only in the main thread, and not on every system
            self._handler = signal.signal(signal.SIGUSR1, lambda number, frame: self._asked.append("SIGUSR1"))
            self._stacks = self._path.open("a")
            faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=False, chain=True)

    def stop(self) -> None:
        self._closing.set()
        self._beats.cancel()
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, self._handler)
            self._stacks.close()
            if not self._path.stat().st_size:
                self._path.unlink()

    def _on_stall(self, wait: Wait) -> None:
        if time.monotonic() - self._last_dump >= self._stall_s:
            self._last_dump = time.monotonic()
            self._asked.append(f"{wait.owner} has waited long for {wait.what}")

    async def _beat(self) -> None:
        while True:
            self._num_beats += 1
            await asyncio.sleep(BEAT_S)

    # ---- on the thread -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Time is counted in wake-ups of this thread: the time in which the whole machine slept does not count."""
        num_beats, blocked_s, looked_at, is_reported = 0, 0.0, time.monotonic(), False
        while not self._closing.wait(BEAT_S):
            while self._asked:
                self._dump(self._asked.pop(0))
            now, is_beating = time.monotonic(), num_beats != self._num_beats
            blocked_s = 0.0 if is_beating else blocked_s + min(now - looked_at, 2 * BEAT_S)
            num_beats, looked_at = self._num_beats, now
            if blocked_s < self._stall_s:
                is_reported = False
            elif not is_reported:
                is_reported = True
                self._report(blocked_s)
            if blocked_s >= self._deadline_s:
                self._end(f"{EVENT_LOOP} has been blocked for {blocked_s:.0f} s by {self._culprit()}")

    def _report(self, blocked_s: float) -> None:
        culprit = self._culprit()
        self._dump(f"{EVENT_LOOP} is blocked by {culprit}")
        self._sink.emit(Stalled(at=self._clock.now(), owner=EVENT_LOOP, what=culprit, seconds=blocked_s))

    def _culprit(self) -> str:
        """The innermost frame of the event loop's last callback that is neither Millstream's nor a library's, if any."""
        frame = sys._current_frames().get(self._watched.ident or 0)
        if frame is None:
            return "a thread that has ended"
        stack = list(traceback.extract_stack(frame))
        calls = [number for number, place in enumerate(stack) if place.filename.endswith(HANDLE)]
        inside = stack[calls[-1] + 1 :] if calls else stack
        foreign = [p for p in inside if not p.filename.startswith(LIBRARIES) and "site-packages" not in p.filename]
        place = (foreign or inside or stack)[-1]
        return f"{place.name} ({place.filename}, line {place.lineno}: {place.line})"

    def _dump(self, reason: str) -> None:
        """Errors are ignored: the watchdog must not end."""
        with suppress(Exception), self._path.open("a") as file:
            file.write("\n".join([*self._waits_now(reason), *_threads(), *self._coroutines()]) + "\n\n")

    def _waits_now(self, reason: str) -> list[str]:
        now = self._clock.now()
        waits = [f"  {wait.owner}: {now - wait.since:.1f} s for {wait.what}" for wait in self._waits.active()]
        time_now = time.strftime("%Y-%m-%d %H:%M:%S")
        return [f"==== {time_now}: {reason}", "", "waits, the longest first:", *(waits or ["  none"])]

    def _coroutines(self) -> list[str]:
        counts = Counter(map(_where, list(asyncio.all_tasks(self._loop))))
        return ["", "coroutines:", *(f"  {count} at {where}" for where, count in counts.most_common())]


def _threads() -> list[str]:
    names, lines = {thread.ident: thread.name for thread in threading.enumerate()}, list[str]()
    for ident, frame in sys._current_frames().items():
        lines += ["", f"thread {names.get(ident, ident)}:", "".join(traceback.format_stack(frame)).rstrip()]
    return lines


def _where(task: asyncio.Task[Any]) -> str:
    """Where a coroutine is suspended: its innermost frame."""
    coroutine: object = task.get_coro()
    name, line = getattr(coroutine, "__qualname__", "?"), 0
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None:
            name, line = frame.f_code.co_qualname, frame.f_lineno
        coroutine = getattr(coroutine, "cr_await", None)
    return f"{name}, line {line}"
