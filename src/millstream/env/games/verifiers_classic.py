"""Environments of verifiers 0.1: `SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv`, `StatefulToolEnv`.

The library plays the episode, calls the tools and scores; the model's turns come from the rollout's context
(`verifiers_talk`). Later versions of the library have other environments: `verifiers_env`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millstream.env.base import Context
from millstream.env.games.verifiers_talk import VerifiersTalks
from millstream.errors import ConfigError, EnvironmentFailed
from millstream.types import Task

MODEL = "millstream"


class VerifiersClassic:
    """`id` of an environment that is installed, `options` of its `load_environment`."""

    def __init__(self, *, id: str, options: dict[str, Any] | None = None) -> None:
        try:
            from verifiers import load_environment
        except ImportError as error:
            raise ConfigError(
                f"environment verifiers_classic needs verifiers 0.1: pip install 'verifiers>=0.1.14,<0.2' ({error})"
            ) from error
        try:
            self._environment = load_environment(id, **(options or {}))
        except Exception as error:  # a library that raises many kinds: reported as one, with its cause
            raise ConfigError(f"verifiers cannot load {id!r}: {type(error).__name__}: {error}") from error
        self._rows: list[dict[str, Any]] = []

    def tasks(self, num: int, seed: int) -> Iterator[Task]:
        """The first ones of its data set, in their order. `seed` plays no part."""
        for index, row in enumerate(self._read()[:num]):
            answer = row.get("answer")
            yield Task(
                id=str(index),
                prompt=str(row["prompt"]),
                answer=str(answer) if answer else None,
                data={"index": index},
            )

    def _read(self) -> list[dict[str, Any]]:
        self._rows = self._rows or [dict(row) for row in self._environment.get_dataset()]
        return self._rows

    async def rollout(self, context: Context) -> float:
        row = self._read()[int(context.task.data["index"])]
        client = _client(context)
        played = await self._environment.run_rollout(row, client, MODEL, {})
        if client.error is not None:
            raise client.error
        if error := played.get("error"):
            raise EnvironmentFailed(f"verifiers: {error}")
        return float(played["reward"])


def _client(context: Context) -> Any:
    """A client of verifiers that has no server behind it."""
    from verifiers import Client
    from verifiers.errors import ModelError
    from verifiers.types import Response, ResponseMessage, ToolCall

    talks = VerifiersTalks(context)

    class Ours(Client):  # type: ignore[misc]
        error: Exception | None = None

        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **others: Any
        ) -> Any:
            try:
                said = await talks.say("", 0, prompt, tools)
            except Exception as error:  # kept for the rollout, and raised to verifiers, which ends the episode
                self.error = self.error or error
                raise ModelError(str(error)) from error
            calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in said.tool_calls]
            message = ResponseMessage(
                content=said.content,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id="", created=0, model=model, message=message)

    Ours.__abstractmethods__ = frozenset()  # they belong to clients that speak to a server
    return Ours(None)
