"""Supervision of an active run in one `async with`: signals, the watchdog, a status every second, the control socket.

SIGINT and SIGTERM. The first one lets the current batch finish, for at most `checkpoint.grace_s`, and a checkpoint is written.
The second ends the run now. A run that was stopped raises `Stopped`, whose message has the command that resumes it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from msgspec import structs

from millstream.errors import Stopped, StoreError
from millstream.events import StopRequested
from millstream.run.active import ActiveRun
from millstream.run.control import (
    CONTROL,
    Control,
    ControlReply,
    ControlRequest,
    ScaleRequest,
    ScaleResult,
    SetRequest,
    SetResult,
    run_status,
)
from millstream.run.folder import resume_command
from millstream.run.own_thread import RunThread
from millstream.run.watchdog import Watchdog
from millstream.serving.fleet import Fleet

STATUS_S = 1.0
FORCED_EXIT_S = 5.0


class Supervision:
    """Enter it in the task that runs the phases: that task is cancelled when the run must end."""

    def __init__(self, run: ActiveRun) -> None:
        self._run = run
        self._handlers: dict[signal.Signals, Any] = {}
        self._num_signals = 0
        self._control: Control | None = None

    async def __aenter__(self) -> Supervision:
        run, pipeline = self._run, self._run.config.pipeline
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # only the main thread may handle signals
                self._handlers[number] = signal.signal(number, self._handle)
        if isinstance(thread := threading.current_thread(), RunThread):
            thread.listen(lambda number: self._loop.call_soon_threadsafe(self._on_signal, number))
        self._watchdog = Watchdog(
            run.folder.stacks,
            run.waits,
            clock=run.clock,
            sink=run.log,
            stall_s=pipeline.stall_s,
            deadline_s=pipeline.deadline_s,
            end=self._end_blocked,
        )
        self._watchdog.start()
        self._reporting = asyncio.create_task(self._report_status())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._reporting.cancel()
        self._watchdog.stop()
        if isinstance(thread := threading.current_thread(), RunThread):
            thread.listen(None)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if not self._run.is_stopping or (error is not None and not is_cancelled):
            return False
        if not self._run.is_done:
            raise self._stopped() from None
        return is_cancelled

    async def _report_status(self) -> None:
        lag_s = 0.0
        while True:
            with suppress(StoreError):  # the store is being closed
                status = await self._run.status()
                self._run.log.emit(structs.replace(status, loop_s=time.thread_time(), loop_lag_s=lag_s))
            due = self._loop.time() + STATUS_S
            await asyncio.sleep(STATUS_S)
            lag_s = max(0.0, self._loop.time() - due)

    # ---- stopping ----------------------------------------------------------------------------------------------------

    def _handle(self, number: int, frame: Any) -> None:
        self._num_signals += 1
        if self._num_signals > 1:  # the event loop may be blocked: then the process ends all the same
            _exit_later(128 + number)
        self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        run = self._run
        is_first = not run.is_stopping
        run.stopped_by = number
        if run.at_work is None or not is_first:
            self._task.cancel()
            return
        run.at_work.stop()
        grace_s = run.config.checkpoint.grace_s
        run.log.emit(StopRequested(at=run.clock.now(), signal=number.name, grace_s=grace_s))
        run.grace = self._loop.call_later(grace_s, self._task.cancel)

    def _stopped(self) -> Stopped:
        run = self._run
        number = signal.Signals(run.stopped_by or 0)
        version = None if run.found is None else run.start_version
        if run.checkpoints is not None:
            version = run.checkpoints.version
        if version is not None:
            kept = f"the checkpoint of step {version} is written"
        elif run.sft_step_kept:
            kept = f"the checkpoint of supervised step {run.sft_step_kept} is written"
        elif run.is_untouched:
            return Stopped(
                f"stopped by {number.name}; nothing was trained yet, and nothing is left behind", 128 + number
            )
        else:
            kept = "nothing was trained yet"
        return Stopped(
            f"stopped by {number.name}; {kept}. To resume the run:\n  {resume_command(run.folder.path)}", 128 + number
        )

    def _end_blocked(self, reason: str) -> None:
        """Called on the watchdog's thread: the event loop is blocked for good, so nothing can be closed. The log is written as
        far as possible, and the process exits."""
        run = self._run
        _exit_later(1)  # even the log may block
        run.emit_ended("StallError", reason)
        with suppress(OSError):
            run.log.sync()
        sys.stderr.write(f"StallError: {reason}. Stacks are in {run.folder.stacks}. ")
        sys.stderr.write(f"To resume the run:\n  {resume_command(run.folder.path)}\n")
        sys.stderr.flush()
        run.log.show_rest()
        run.send_alerts()
        os._exit(1)

    # ---- the control socket ------------------------------------------------------------------------------------------

    async def open_control(self, fleet: Fleet) -> None:
        """Answer questions while there are engines. A run without a control socket warns and runs."""
        self._control = Control(self._run.folder.path, partial(self._answer, fleet))
        try:
            await self._control.open()
        except OSError as error:
            path = error.filename or self._run.folder.path / CONTROL
            self._run.warn(f"this run cannot be asked or scaled: {path}: {error.strerror or error}")

    async def close_control(self) -> None:
        if self._control is not None:
            await self._control.close()

    async def _answer(self, fleet: Fleet, request: ControlRequest) -> ControlReply:
        if isinstance(request, ScaleRequest):
            joined, left = await fleet.scale(request.engines)
            return ScaleResult(joined=joined, left=left, engines=fleet.names)
        if isinstance(request, SetRequest):
            changes = self._run.change_settings(request.settings)
            return SetResult(changes=[str(change) for change in changes], version=self._run.version)
        pipeline = self._run.pipeline
        bound = None if pipeline is None else pipeline.admission.bound
        return run_status(await self._run.status(), fleet.router, fleet.names, self._run.version, bound)


def _exit_later(code: int) -> None:
    timer = threading.Timer(FORCED_EXIT_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
