"""The environment of most data sets: send the prompt, let the model answer, score the answer."""

from __future__ import annotations

from millstream.env.base import Context
from millstream.env.rewards import CompletionScorer


class SingleTurn:
    """One turn of the model, or, with tools, as many as it has calls to make."""

    def __init__(self, scorer: CompletionScorer) -> None:
        self._scorer = scorer

    async def rollout(self, context: Context) -> float:
        answer = await context.ask(context.task.prompt)
        return await context.waiting(self._scorer.name, self._scorer.score(context.task, answer))
