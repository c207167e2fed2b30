"""Watches the event loop from a thread of its own, and says what everything is doing when nothing moves.

A reward that blocks (a plain `requests.get` inside an `async def`, say) stops everything, timers included: only another thread
can tell. After `stall_s` the watchdog writes all waits and stacks to a file and says so; after `deadline_s` it ends the run
with the place that blocked. The same dump is written on SIGUSR1, and whenever a wait lasts too long.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from millstream.clock import Clock
from millstream.events import EventSink, Stalled
from millstream.runtime.waits import Wait, Waits

BEAT_S = 1.0
LOOP = "the event loop"
OURS = str(Path(__file__).parents[1])


class Watchdog:
    """Start it on the event loop that it is to watch. `end` is called on its thread when the deadline has passed."""

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
        self._path, self._waits, self._clock, self._sink = path, waits, clock, sink
        self._stall_s, self._deadline_s, self._end = stall_s, deadline_s, end
        self._loop = asyncio.get_running_loop()
        self._watched = threading.current_thread()
        self._last_beat, self._last_dump = time.monotonic(), float("-inf")
        self._asked: list[str] = []
        self._wake, self._is_closing = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._stacks: io.TextIOWrapper | None = None

    def start(self) -> None:
        self._waits.on_stall = self._on_stall
        self._beats = asyncio.create_task(self._beat())
        self._thread.start()
        with suppress(
            ValueError, AttributeError, OSError
        ):  # signals belong to the main thread, and not every system has it
            signal.signal(signal.SIGUSR1, lambda number, frame: self.ask("SIGUSR1"))
            self._stacks = self._path.open("a")
            faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True, chain=True)

    def stop(self) -> None:
        self._is_closing = True
        self._wake.set()
        self._beats.cancel()
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            self._stacks.close()
            if not self._path.stat().st_size:
                self._path.unlink()

    def ask(self, reason: str) -> None:
        """Write a dump soon. May be called from anywhere."""
        self._asked.append(reason)
        self._wake.set()

    def _on_stall(self, wait: Wait) -> None:
        if time.monotonic() - self._last_dump >= self._stall_s:
            self._last_dump = time.monotonic()
            self.ask(f"{wait.owner} has waited long for {wait.what}")

    async def _beat(self) -> None:
        while True:
            self._last_beat = time.monotonic()
            await asyncio.sleep(BEAT_S)

    # ---- on the thread -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        is_told = False
        while not self._is_closing:
            self._wake.wait(BEAT_S)
            self._wake.clear()
            asked, self._asked = self._asked, []
            for reason in asked:
                self._dump(reason)
            blocked_s = time.monotonic() - self._last_beat
            if blocked_s < self._stall_s:
                is_told = False
            elif not is_told:
                is_told = True
                self._tell(blocked_s)
            if blocked_s >= self._deadline_s:
                self._end(f"the event loop has been blocked for {blocked_s:.0f} s by {self._culprit()}")

    def _tell(self, blocked_s: float) -> None:
        culprit = self._culprit()
        self._dump(f"the event loop is blocked by {culprit}")
        self._sink.emit(Stalled(at=self._clock.now(), owner=LOOP, what=culprit, seconds=blocked_s))

    def _culprit(self) -> str:
        """Where the watched thread is: the innermost place that is not a library's, if there is one."""
        frame = sys._current_frames().get(self._watched.ident or 0)
        if frame is None:
            return "a thread that has ended"
        stack = traceback.extract_stack(frame)
        foreign = [
            f for f in stack if "site-packages" not in f.filename and not f.filename.startswith((OURS, sys.prefix))
        ]
        place = next(iter(reversed([f for f in foreign if os.sep + "lib" + os.sep not in f.filename])), stack[-1])
        return f"{place.name} ({place.filename}, line {place.lineno}: {place.line})"

    def _dump(self, reason: str) -> None:
        """All waits, all threads, all coroutines."""
        lines = [f"==== {time.strftime('%Y-%m-%d %H:%M:%S')}: {reason}", "", "waits, the longest first:"]
        now = self._clock.now()
        lines += [f"  {wait.owner}: {now - wait.since:.1f} s for {wait.what}" for wait in self._waits.active()] or [
            "  none"
        ]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            lines += ["", f"thread {names.get(ident, ident)}:", "".join(traceback.format_stack(frame)).rstrip()]
        with suppress(RuntimeError):  # the set of tasks changed while it was read
            counts: dict[str, int] = {}
            for task in list(asyncio.all_tasks(self._loop)):
                where = _where(task)
                counts[where] = counts.get(where, 0) + 1
            lines += ["", "coroutines:"]
            lines += [f"  {count} at {where}" for where, count in sorted(counts.items(), key=lambda c: -c[1])]
        with suppress(OSError), self._path.open("a") as file:
            file.write("\n".join(lines) + "\n\n")


def _where(task: asyncio.Task[object]) -> str:
    """The innermost place at which a coroutine is suspended."""
    coroutine: object = task.get_coro()
    name, line = getattr(coroutine, "__qualname__", "?"), 0
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None:
            name, line = frame.f_code.co_qualname, frame.f_lineno
        coroutine = getattr(coroutine, "cr_await", None)
    return f"{name}, line {line}"
