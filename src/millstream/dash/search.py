"""Words in the whole text of kept rollouts: prompts, what the model wrote, calls and answers of tools.

Nothing is indexed: rollouts are decoded one after the other, the newest first, up to a bound. A request continues for a while
and answers with what was found so far.
"""

from __future__ import annotations

import math

from millstream.errors import MillstreamError
from millstream.events.rollouts.reader import KeptGroup, RolloutDump
from millstream.events.rollouts.text import Decode

MAX_SEARCHED_TOKENS = 20_000_000  # about 15 s of processor time


class TextSearch:
    """`found`: the rollouts that have the words in their text, whatever the case. `num_searched`: of how many rollouts."""

    def __init__(self, words: str) -> None:
        self._words = words
        self._dump: RolloutDump | None = None
        self._to_do: list[KeptGroup] = []  # the newest is last
        self._done: set[tuple[int, float]] = set()  # or beyond the bound; by group and the number of its departure
        self._num_tokens = 0  # since `open`
        self._num_in_flight = 0  # rollouts that are searched again
        self.found: set[tuple[int, int, int]] = set()  # group, member and attempt
        self.num_searched = 0

    def open(self, dump: RolloutDump) -> None:
        """What has come since then is searched, and groups in flight are searched again. Raises as reading a dump does."""
        if dump is not self._dump:
            self._dump = dump
            self.num_searched -= self._num_in_flight
            self._num_in_flight = 0
            self._num_tokens = 0
            self._to_do = [one for one in dump.groups() if (one.group_id, one.departure) not in self._done]

    @property
    def is_over(self) -> bool:
        return not self._to_do

    def search_one(self, decode: Decode) -> None:
        """The next group. One that cannot be read is left out: the list of rollouts says so."""
        group = self._to_do.pop()
        try:
            rollouts = [] if self._dump is None else self._dump.rollouts(group)
            for one in rollouts:
                if any(self._words in decode(part.tokens.tolist()).casefold() for part in one.parts):
                    self.found.add((one.group_id, one.member, one.attempt))
        except (MillstreamError, OSError, ValueError, OverflowError):
            return
        self.num_searched += len(rollouts)
        if math.isinf(group.departure):
            self._num_in_flight += len(rollouts)
        else:
            self._done.add((group.group_id, group.departure))
        self._num_tokens += sum(len(part.tokens) for one in rollouts for part in one.parts)
        if self._num_tokens > MAX_SEARCHED_TOKENS:
            self._done |= {(one.group_id, one.departure) for one in self._to_do}
            self._to_do = []
