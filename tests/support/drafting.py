"""A speculator for tests: drafts that are right, wrong and half right, in any step."""

from __future__ import annotations

import random
from collections.abc import Sequence

from millstream.engine.native.sequence import TokenSequence
from millstream.engine.native.speculation import MAX_ROWS, MAX_RUNNING, Speculator
from millstream.types import RequestKey
from support.tiny import VOCABULARY


class Oracle(Speculator):
    """Drafts in any step, whatever it costs: what plain steps have sampled, with mistakes here and there."""

    def __init__(self, truth: dict[RequestKey, tuple[int, ...]], seed: int = 0, *, share: float = 0.8) -> None:
        super().__init__(7)
        self.truth = truth
        self.rng = random.Random(seed)
        self.share = share

    def begin_step(self, running: Sequence[TokenSequence]) -> bool:
        return 0 < len(running) <= MAX_RUNNING and self.rng.random() < self.share

    def draft(self, decoding: Sequence[TokenSequence]) -> None:
        for one in decoding:
            most = one.request.sampling.max_tokens - len(one.tokens) - 1
            begin = len(one.tokens)
            draft = list(self.truth.get(one.request.key, ())[begin : begin + 9])
            draft += [self.rng.randrange(VOCABULARY) for _ in range(9 - len(draft))]
            if self.rng.random() < 0.5:
                draft[self.rng.randrange(9)] = self.rng.randrange(VOCABULARY)
            one.draft = tuple(draft[: self.rng.randint(0, max(0, min(MAX_ROWS // len(decoding) - 1, most, 9)))])
