"""The `[[environment]]` tables of a config: environments and their limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from millstream.env.sandbox.config import SandboxConfig
from millstream.env.tools.config import AUTO, SANDBOX_TOOL_NAMES, ToolConfig
from millstream.errors import ConfigError

SINGLE_TURN = "single_turn"
AGENT = "agent"
BUILT_BY_RUN = (SINGLE_TURN, AGENT)
"""Environments that need the run's rewards, or its engines."""


class EnvironmentConfig(Struct, frozen=True, kw_only=True):
    use: str = SINGLE_TURN  # a built-in one, `package.module:Name`, or `file.py:Name`
    name: str = ""  # shown, and matched with a task's field `environment`. Empty: the last part of `use`
    args: dict[
        str, Any
    ] = {}  # keyword arguments of the class or function; also of its `tasks` and `gold`, if they take them
    # In a chat of several turns. keep: one sequence that only grows. drop: every turn gets what the chat template renders,
    # which may have removed earlier thinking; if it has, a new part begins (`rollout.max_parts`).
    thinking: Literal["keep", "drop"] = "keep"
    max_concurrent: int | None = None  # episodes at once; more wait in FIFO order. None: no limit
    # Functions that the model may call while it answers, and MCP servers: see docs/tools.md
    tools: tuple[str | ToolConfig, ...] = ()
    sandbox: SandboxConfig | None = (
        None  # one for every rollout, in which the tools bash and edit act: docs/sandboxes.md
    )
    tool_format: str = AUTO  # how calls are written. auto: as the chat template teaches; else see `env.tools.parse`
    max_tool_rounds: int = 16  # turns with calls before an answer
    step_timeout_s: float = 60.0  # between two turns of the model, and before the first. Rewards have their own limit
    process: bool = False  # play episodes in worker processes: one that hangs or crashes is killed and replaced
    share: float = 1.0  # the proportion of its tasks, if several environments make tasks

    def __post_init__(self) -> None:
        if not isinstance(self.use, str):
            raise ConfigError("a config names environments, it does not hold them: use = 'file.py:Name'")
        if not 0 < self.share < math.inf or self.step_timeout_s <= 0:
            raise ValueError("share must be a number above 0, and step_timeout_s, too")
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise ValueError("max_concurrent must be at least 1")
        if self.max_tool_rounds < 1:
            raise ValueError("max_tool_rounds must be at least 1")
        if self.process and self.use in BUILT_BY_RUN:
            raise ValueError(f"{self.use} needs no process: its rewards and tools, or its program, have time limits")
        if self.tools and self.use == AGENT:
            raise ValueError("an agent has its own tools: leave tools out")
        if self.sandbox is not None and (self.process or self.use == AGENT):
            raise ValueError("a sandbox is for an environment in the driver's process: leave sandbox or process out")
        names = [one if isinstance(one, str) else one.function for one in self.tools]
        if self.sandbox is None and (found := [name for name in names if name in SANDBOX_TOOL_NAMES]):
            raise ValueError(f"the tool {found[0]} needs a sandbox: add sandbox = {{}} (see docs/sandboxes.md)")

    @property
    def shown(self) -> str:
        return self.name or self.use.rpartition(":")[2]


def check_environments(environments: Sequence[EnvironmentConfig]) -> None:
    """Checks across tables. Raises `ConfigError`."""
    if not environments:
        raise ConfigError("environment = []: leave it out for tasks of a single turn, or name one: [[environment]]")
    names = [environment.shown for environment in environments]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two [[environment]] tables are named {min(twice)!r}: give each a name of its own")
