"""The environment of most data sets: show the prompt, let the model answer once, score the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millstream.env import Context
from millstream.env.rewards import Scorer
from millstream.types import Task

Encode = Callable[[Task], list[int]]
Decode = Callable[[Sequence[int]], str]


class SingleTurn:
    def __init__(self, *, encode: Encode, decode: Decode, scorer: Scorer) -> None:
        self._encode = encode
        self._decode = decode
        self._scorer = scorer

    async def rollout(self, context: Context) -> float:
        completion = await context.generate(self._encode(context.task))
        scoring = self._scorer.score(context.task, self._decode(completion.tokens))
        return await context.waiting(self._scorer.name, scoring)
