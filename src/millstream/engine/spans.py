"""What an engine that runs elsewhere reports of its work: stretches of generation, and the tokens that came in each."""

from __future__ import annotations

from millstream.clock import Clock
from millstream.engine.base import SPAN_S
from millstream.events import EventSink, Span


class GenerationSpans:
    """Stretches of generation, reported at least every `SPAN_S`."""

    def __init__(self, name: str, clock: Clock, sink: EventSink) -> None:
        self._name = name
        self._clock = clock
        self._sink = sink
        self._began: float | None = None
        self._tokens_at_begin = 0

    def begin(self, num_tokens: int) -> None:
        if self._began is None:
            self._began = self._clock.now()
            self._tokens_at_begin = num_tokens

    def end(self, num_tokens: int, *, is_last: bool) -> None:
        now = self._clock.now()
        if self._began is None or (not is_last and now - self._began < SPAN_S):
            return
        new, seconds = num_tokens - self._tokens_at_begin, now - self._began
        self._sink.emit(Span(at=now, worker=self._name, what="generate", seconds=seconds, num_tokens=new))
        self._began = None
        if not is_last:
            self.begin(num_tokens)
