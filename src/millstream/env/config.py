"""Which environments there are, and under which limits: the `[[environment]]` tables of a config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from millstream.errors import ConfigError

SINGLE_TURN = "single_turn"


class EnvironmentConfig(Struct, frozen=True, kw_only=True):
    use: str = SINGLE_TURN  # one that is built in, `package.module:Name`, or `file.py:Name`
    name: str = (
        ""  # how it shows, and what a task's field `environment` says to go to it. Empty: the last part of `use`.
    )
    # Keyword arguments: of the class or the function, and, as far as they take them, of its `tasks` and `gold`.
    args: dict[str, Any] = {}
    # Of a chat of several turns. keep: one sequence that only grows. drop: every turn is shown what the chat template
    # shows, which may have removed earlier thinking; where it has, a new part begins (`rollout.max_parts`).
    thinking: Literal["keep", "drop"] = "keep"
    # Episodes at once; more wait their turn, first come, first served. None: as many as there are rollouts.
    max_concurrent: int | None = None
    # For what the environment does between two turns of the model, and before the first. Rewards have a limit of their
    # own.
    step_timeout_s: float = 60.0
    # Whether episodes are played in processes of their own: one that hangs or crashes is killed and replaced.
    process: bool = False
    share: float = 1.0  # where several environments make their own tasks: in which proportion

    def __post_init__(self) -> None:
        if not isinstance(self.use, str):
            raise ConfigError("a config names environments, it does not hold them: use = 'file.py:Name'")
        if not 0 < self.share < math.inf or self.step_timeout_s <= 0:
            raise ValueError("share must be a number above 0, and step_timeout_s, too")
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise ValueError("max_concurrent must be at least 1")
        if self.process and self.use == SINGLE_TURN:
            raise ValueError("single_turn needs no process: its rewards have time limits")

    @property
    def shown(self) -> str:
        return self.name or self.use.rpartition(":")[2]


def check_environments(environments: Sequence[EnvironmentConfig]) -> None:
    """What no single table can see. Raises `ConfigError`."""
    if not environments:
        raise ConfigError("environment = []: leave it out for tasks of a single turn, or name one: [[environment]]")
    names = [environment.shown for environment in environments]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two [[environment]] tables are named {min(twice)!r}: give each a name of its own")
