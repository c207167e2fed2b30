"""Environments of OpenEnv: a server steps them, and every episode is a session of its own there.

The model's text is one field of the action, or the action as a JSON object. An action that the server does not accept is data:
the model sees why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from millstream.env.base import Step
from millstream.errors import ConfigError, EnvironmentFailed
from millstream.seeds import derive_seed
from millstream.types import Message, Task

JSON = "json"
REFUSED = "VALIDATION_ERROR"
FULL = "CAPACITY_REACHED"
NOT_SHOWN = ("done", "reward", "metadata")


class _NotJson(Exception):
    """What the model said is no action."""


class OpenEnv:
    """`url` of the server. `action`: the field that the model's text is, or "json". `observation`: the field that the model is
    shown; empty is all of them, as JSON. `options` go to its `reset`."""

    def __init__(
        self,
        *,
        url: str,
        action: str = "message",
        observation: str = "",
        options: dict[str, Any] | None = None,
        instruction: str = "",
        is_chat: bool = False,
        max_turns: int = 16,
    ) -> None:
        self.max_turns = max_turns
        self._action = action
        self._observation = observation
        self._options = options or {}
        self._instruction = instruction
        self._is_chat = is_chat
        self._url = url
        self._client = _client(url)

    @staticmethod
    def tasks(num: int, seed: int) -> Iterator[Task]:
        for number in range(num):
            start = derive_seed(seed, "openenv", number) % 2**31
            yield Task(id=str(number), prompt=f"from seed {start}", data={"seed": start})

    async def reset(self, task: Task, seed: int) -> str | tuple[Message, ...]:
        try:
            result = await self._client.reset(**{"seed": int(task.data["seed"]), **self._options})
        except Exception as error:  # a library that raises many kinds: reported as one, with its cause
            is_full = FULL in str(error) or type(error).__name__.startswith("ConnectionClosed")
            hint = "if it has no free session, set environment.max_concurrent to the number that it allows"
            raise self._failed(error, hint if is_full else "") from error
        begin = f"{self._instruction}\n" if self._instruction else ""
        return self._shown(begin + self._text(result.observation))

    async def step(self, action: str) -> Step:
        try:
            result = await self._client.step(self._read(action))
        except _NotJson as error:
            return Step(observation=self._shown(f"Expected a JSON object: {error}\n"))
        except Exception as error:  # as above
            if REFUSED not in str(error):
                raise self._failed(error) from error
            return Step(observation=self._shown(f"{error}\n"))
        shown = self._shown(self._text(result.observation))
        return Step(observation=shown, reward=float(result.reward or 0.0), is_done=bool(result.done))

    async def close(self) -> None:
        await self._client.close()

    def _read(self, said: str) -> dict[str, Any]:
        if self._action != JSON:
            return {self._action: said}
        try:
            action = json.loads(said)
        except (ValueError, RecursionError) as error:
            raise _NotJson(str(error)) from error
        if not isinstance(action, dict):
            raise _NotJson(f"this is {type(action).__name__}")
        return action

    def _text(self, observation: dict[str, Any]) -> str:
        if self._observation in observation:
            return f"{observation[self._observation]}\n"
        if self._observation:
            raise EnvironmentFailed(
                f"the observation of {self._url} has no field {self._observation!r}; it has {', '.join(observation)}"
            )
        return json.dumps({name: value for name, value in observation.items() if name not in NOT_SHOWN}) + "\n"

    def _shown(self, text: str) -> str | tuple[Message, ...]:
        return (Message(role="user", content=text),) if self._is_chat else text

    def _failed(self, error: Exception, hint: str = "") -> EnvironmentFailed:
        return EnvironmentFailed(f"the OpenEnv server at {self._url}: {error}{f': {hint}' if hint else ''}")


def _client(url: str) -> Any:
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise ConfigError("environment openenv needs the library: pip install 'millstream[openenv]'") from error
    return GenericEnvClient(base_url=url)
