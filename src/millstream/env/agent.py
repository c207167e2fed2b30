"""`args` of the environment `agent`, a program that calls the model over HTTP (`serve.agents`)."""

from __future__ import annotations

import inspect

from msgspec import Struct

from millstream import imports
from millstream.config import convert
from millstream.env.config import EnvironmentConfig
from millstream.errors import ConfigError


class AgentConfig(Struct, frozen=True, kw_only=True):
    """`args` of an `[[environment]]` with `use = "agent"`."""

    command: tuple[str, ...] = ()  # starts the agent
    function: str = ""  # or `file.py:name`: a function of the task and of `AgentAccess`
    # `file.py:name`: a function of the task and the `AgentResult`. Empty: the agent's own reward, or [[reward]] of its text
    score: str = ""
    max_calls: int = 256  # of the model, in one rollout
    # Names of agents in the program: a call with `model = NAME` is that agent's. Advantages compare each with the same one in
    # the other rollouts. Empty: there is one
    agents: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.function):
            raise ValueError("an agent is one of command and function")
        if self.max_calls < 1:
            raise ValueError("max_calls must be at least 1")
        if len(set(self.agents)) != len(self.agents) or not all(self.agents):
            raise ValueError("agents: expected names that differ")


def agent_config(config: EnvironmentConfig) -> AgentConfig:
    """Raises `ConfigError`."""
    agent = convert(config.args, AgentConfig, where="environment.args")
    for name in filter(None, (agent.function, agent.score)):
        function = imports.load_function(name)
        if inspect.isclass(function):
            raise ConfigError(f"{name} is a class: expected a function of two arguments")
    return agent
