"""Speculative tokens: the next tokens of a request are guessed from what it repeats, and one step checks the whole guess.

A *draft* is what followed the latest earlier occurrence of the request's last tokens, in its prompt and its answer. One pass
computes the logits after the newest token and after every token of the draft, and each position is sampled with its own random
number. A token is a function of logits, temperature and that number (`sampling`): up to and including the first one that
differs from the draft, they are the tokens, with the log-probabilities, that plain steps would sample. The rest is dropped.

Whether it pays is measured, not assumed:

- while plain steps run, each token is compared with the draft that could have been checked, which costs the device nothing.
  Requests that repeat nothing are never drafted for;
- a step with drafts waits for the tokens of the step before, and has more rows. Both kinds of steps are timed, and after
  `PROBE_EVERY` steps of one kind the other is timed again.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from millstream.engine.native.drafts import DraftHistory
from millstream.engine.native.sequence import TokenSequence

MAX_RUNNING = 16  # requests; with more of them the device is busy
MAX_ROWS = 64  # of a step with drafts: one for each request, and one for each token of a draft
MIN_ACCEPTED = 0.2  # tokens of a draft, on average, below which a request gets none
MIN_GAIN = 0.1  # tokens that drafts add to each token, on average, below which no step has drafts
SEEN_PER_STEP = 256  # tokens that histories read in a step, so that many long requests do not delay it
PROBE_STEPS = 6
PROBE_EVERY = 500
NUM_TIMED = PROBE_STEPS - 1


class Speculator:
    """Decides for every step whether it has drafts, and makes them. `max_draft`: tokens of the longest; 0: there are none."""

    def __init__(self, max_draft: int, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._max_draft = max_draft
        self._max_running = MAX_RUNNING if max_draft else 0
        self._now = now
        self._is_drafting = False  # whether the last step had drafts
        self._num_same = 0  # steps since the last change between plain ones and ones with drafts
        self._was_pure = False  # whether it had nothing else
        self._ended_at = 0.0
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=NUM_TIMED) for kind in (False, True)}
        self.num_drafted = 0
        self.num_accepted = 0

    def begin_step(self, running: Sequence[TokenSequence]) -> bool:
        """Whether this step has drafts: for them, all tokens must be known."""
        is_drafting = self._chooses_drafts(running)
        self._num_same = self._num_same + 1 if is_drafting == self._is_drafting else 0
        self._is_drafting = is_drafting
        return is_drafting

    def _chooses_drafts(self, running: Sequence[TokenSequence]) -> bool:
        if not 0 < len(running) <= self._max_running:
            return False
        gain = sum(_accepted(sequence) for sequence in running) / len(running)
        if gain < MIN_GAIN:
            return False
        if self._num_same < NUM_TIMED:
            return self._is_drafting
        if self._num_same >= PROBE_EVERY:
            return not self._is_drafting
        return 1 + gain > self._relative_cost()

    def _relative_cost(self) -> float:
        """Seconds of a step with drafts, in those of a plain one. Before both are known: 1."""
        plain, drafting = (statistics.median(self._seconds[kind] or [0.0]) for kind in (False, True))
        return drafting / plain if plain and drafting else 1.0

    def end_step(self, *, is_pure: bool) -> None:
        """`is_pure`: nothing but decoding was launched. Steps after such a step of the same kind are timed."""
        now = self._now()
        if is_pure and self._was_pure and self._num_same > 0:
            self._seconds[self._is_drafting].append(now - self._ended_at)
        self._was_pure = is_pure
        self._ended_at = now

    def observe(self, running: Sequence[TokenSequence]) -> None:
        """Read the tokens that are new."""
        room = SEEN_PER_STEP
        for sequence in running if len(running) <= self._max_running else ():
            if sequence.history is None:
                sequence.history = DraftHistory(sequence.request.tokens, self._max_draft)
            room -= sequence.history.read(sequence.tokens, room)

    def draft(self, decoding: Sequence[TokenSequence]) -> None:
        """Give a draft to each of them for which it pays: the longer, the more of its last ones was right."""
        self.observe(decoding)
        chosen = [(one, one.history) for one in decoding if one.history is not None and _accepted(one)]
        room = (MAX_ROWS - len(decoding)) // max(1, len(chosen))
        for sequence, history in chosen:
            most = sequence.request.sampling.max_tokens - len(sequence.tokens) - 1
            sequence.draft = history.guess(min(self._max_draft, room, most, 1 + int(2 * history.accepted)))


def _accepted(sequence: TokenSequence) -> float:
    """Tokens that a draft adds, on average; 0: it gets none."""
    accepted = 0.0 if sequence.history is None else sequence.history.accepted
    return accepted if accepted >= MIN_ACCEPTED else 0.0
