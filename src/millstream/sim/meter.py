"""What a simulated engine reports of its decoding: spans, as those of a real engine."""

from __future__ import annotations

from millstream.engine.base import SPAN_S
from millstream.events import EventSink, Span


class DecodeMeter:
    """A span ends when the engine has nothing to decode, or at the first change of its batch after `span_s`."""

    def __init__(self, engine: str, step_s: float, sink: EventSink, *, span_s: float = SPAN_S) -> None:
        self._engine = engine
        self._step_s = step_s
        self._sink = sink
        self._span_s = span_s
        self._began: float | None = None
        self._position = 0.0
        self._held = 0.0
        self._steps = 0.0
        self._context = 0.0
        self._tokens = 0.0  # this and the next: at the beginning of the span
        self._prompt = 0

    def advance(self, position: float, held: float) -> None:
        """The batch has come to this position, and holds this many tokens. It changes now."""
        if self._began is not None:
            steps = (position - self._position) / self._step_s
            self._steps += steps
            self._context += steps * (self._held + held) / 2

    def begin(self, now: float, position: float, held: float, *, is_busy: bool, tokens: float, prompt: int) -> None:
        """The batch has changed, and holds this many tokens. `tokens`, `prompt`: sampled and computed by the engine so far."""
        self._position = position
        self._held = held
        if self._began is not None and (not is_busy or now - self._began >= self._span_s):
            self._emit(now, self._began, tokens, prompt)
            self._began = None
        if is_busy and self._began is None:
            self._began = now
            self._steps = 0.0
            self._context = 0.0
            self._tokens = tokens
            self._prompt = prompt

    def _emit(self, now: float, began: float, tokens: float, prompt: int) -> None:
        self._sink.emit(
            Span(
                at=now,
                worker=self._engine,
                what="generate",
                seconds=now - began,
                num_tokens=round(tokens) - round(self._tokens),
                num_steps=round(self._steps),
                num_context=round(self._context),
                num_prompt=prompt - self._prompt,
            )
        )
