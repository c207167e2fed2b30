"""Episodes with tools, played with a script."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from millstream.config import convert
from millstream.env.config import EnvironmentConfig
from millstream.env.registry import Environments, Hosted
from millstream.env.resolve import find_environment
from millstream.env.rewards import CompletionScorer, RewardConfig, exact_match
from millstream.env.single_turn import SingleTurn
from millstream.types import Task
from support.talk import HERMES, Scripted, text_with


def hosted(config: dict[str, Any], template: str | None = HERMES) -> Hosted:
    kind = find_environment(convert(config, EnvironmentConfig, where="environment"))
    single = SingleTurn(CompletionScorer([(exact_match, RewardConfig())]))
    return Hosted(kind, kind.environment or single, text_with(template))


def play(config: dict[str, Any], *says: str, template: str | None = HERMES, **options: Any) -> tuple[Any, Scripted]:
    """The reward of one episode, and what the model saw and said."""
    options = {"task": Task(id="1", prompt="2+2=", answer="4"), **options}
    scripted = Scripted(text_with(template), says, **options)

    async def program() -> Any:
        environments = Environments([hosted(config, template)])
        try:
            return await environments.rollout(scripted.episode)
        finally:
            await environments.close()

    return asyncio.run(program()), scripted


def calling(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def results(scripted: Scripted) -> list[str]:
    """What the tools said, in the order that the model saw it."""
    shown = scripted.shown(scripted.requests[-1].tokens)
    return [part.partition("</tool_response>")[0] for part in shown.split("<tool_response>")[1:]]
