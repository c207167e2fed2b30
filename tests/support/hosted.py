"""Environments of a config, played with a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.env.config import EnvironmentConfig
from millstream.env.registry import Environments, Hosted
from millstream.env.resolve import EnvironmentKind, find_environment
from millstream.types import Rollout, Task
from support.talk import Scripted, text_with


def found(use: str, **config: Any) -> EnvironmentKind:
    return find_environment(EnvironmentConfig(use=use, **config))


async def play_parts(
    kind: EnvironmentKind, task: Task, says: Sequence[str], template: str | None = None, *, max_parts: int = 1
) -> tuple[list[Rollout], Scripted]:
    text = text_with(template)
    assert kind.environment is not None
    environments = Environments([Hosted(kind, kind.environment, text)])
    scripted = Scripted(text, says, task=task, max_parts=max_parts)
    try:
        reward = await environments.rollout(scripted.episode)
    finally:
        await environments.close()
    return list(scripted.episode.finish(reward)), scripted


async def play(
    kind: EnvironmentKind, task: Task, says: Sequence[str], template: str | None = None
) -> tuple[float, Scripted]:
    parts, scripted = await play_parts(kind, task, says, template)
    return parts[0].reward, scripted
