"""A sink that stops a run at a step."""

from __future__ import annotations

import os
import signal

from millstream.events import Event, Stepped


class StopAt:
    """Stops the run, as Ctrl-C does, at this step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def emit(self, event: Event) -> None:
        if isinstance(event, Stepped) and event.version == self._step:
            os.kill(os.getpid(), signal.SIGINT)
