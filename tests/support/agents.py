"""Rollouts of the environment `agent`, with a model that says what is written."""

from __future__ import annotations

import asyncio
from typing import Any

from millstream.config import convert
from millstream.env.config import EnvironmentConfig
from millstream.env.registry import Environments, Hosted
from millstream.env.resolve import find_environment
from millstream.env.rewards import CompletionScorer, RewardConfig, exact_match
from millstream.errors import RequestRefused
from millstream.pipeline.episode import EpisodeResult, Player
from millstream.pipeline.limit import Limit
from millstream.serve.agents.environment import make_agent
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, Task
from support.talk import HERMES, text_with


class Model:
    """Says what is written here, and keeps what it was sent."""

    def __init__(self, *says: str, room: int = 10_000, turn_s: float = 0.0) -> None:
        self.text = text_with(HERMES)
        self.requests: list[Request] = []
        self._says = iter(says)
        self._room = room
        self._turn_s = turn_s

    async def generate(self, request: Request) -> Completion:
        if len(request.tokens) > self._room:
            raise RequestRefused("no room")
        await asyncio.sleep(self._turn_s)
        self.requests.append(request)
        tokens = (*self.text.encode(next(self._says, "4")), self.text.end_token)[: request.sampling.max_tokens]
        finish = Finish.STOP if tokens[-1] == self.text.end_token else Finish.LENGTH
        zeros = (0.0,) * len(tokens)
        return Completion(tokens=tokens, logprobs=zeros, versions=(3,) * len(tokens), finish=finish)


def play(args: dict[str, Any], model: Model, **more: Any) -> EpisodeResult:
    (result,) = play_several(1, args, model, **more)
    return result


def play_several(
    num: int,
    args: dict[str, Any],
    model: Model,
    *,
    limit_s: float = 30.0,
    max_parts: int = 8,
    task: Task | None = None,
    **config: Any,
) -> list[EpisodeResult]:
    """Members of one group, at once."""
    kind = find_environment(convert({"use": "agent", "args": args, **config}, EnvironmentConfig, where="environment"))
    task = task or Task(id="1", prompt="2+2=", answer="4")

    async def program() -> list[EpisodeResult]:
        scorer = CompletionScorer([(exact_match, RewardConfig())])
        ends, size = (model.text.end_token,), len(model.text.tokenizer)
        played = kind.environment or make_agent(kind.config, model.text, scorer, end_tokens=ends, vocabulary=size)
        environments = Environments([Hosted(kind, played, model.text)])
        sampling = Sampling(max_tokens=256)
        player = Player(environments, sampling, run_seed=0, role="train", max_parts=max_parts)
        try:
            keys = [RequestKey(group_id=0, member=member) for member in range(num)]
            plays = [player.play(task, key, model.generate, limit=Limit(limit_s)) for key in keys]
            return await asyncio.gather(*plays)
        finally:
            await environments.close()

    return asyncio.run(program())
