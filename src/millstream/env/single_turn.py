"""The environment of most data sets: send the prompt, let the model answer once, score the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millstream.env.base import Context
from millstream.env.rewards import CompletionScorer
from millstream.types import Task


class SingleTurn:
    def __init__(
        self, *, encode: Callable[[Task], list[int]], decode: Callable[[Sequence[int]], str], scorer: CompletionScorer
    ) -> None:
        self._encode = encode
        self._decode = decode
        self._scorer = scorer

    async def rollout(self, context: Context) -> float:
        completion = await context.generate(self._encode(context.task))
        scoring = self._scorer.score(context.task, self._decode(completion.tokens))
        return await context.waiting(self._scorer.name, scoring)
