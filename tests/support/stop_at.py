"""A sink that stops a run at a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from millstream.events import Event, EventSink, Stepped
from millstream.events.sinks import Tee
from millstream.run import log


class PromptSink:
    """Gets events at once, as files do, wherever this module is imported. Sinks get them a moment later: by then a short run on a
    busy machine has ended, and a signal that was to stop the run ends the process of the tests."""

    def emit(self, event: Event) -> None:
        raise NotImplementedError


class StopAt(PromptSink):
    """Stops the run after this step, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self._step = step

    def emit(self, event: Event) -> None:
        if isinstance(event, Stepped) and event.version == self._step:
            os.kill(os.getpid(), signal.SIGINT)


class PromptTee(Tee):
    def __init__(self, files: Iterable[EventSink], shown: Iterable[EventSink] = ()) -> None:
        shown = list(shown)
        prompt = [sink for sink in shown if isinstance(sink, PromptSink)]
        super().__init__([*files, *prompt], [sink for sink in shown if not isinstance(sink, PromptSink)])


log.Tee = PromptTee  # type: ignore[misc]
