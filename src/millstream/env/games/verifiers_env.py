"""Environments of the verifiers library (0.4, its `v1`): tasks, turns and scoring are theirs, the model is ours.

Everything that verifiers lets a model say goes through one client, which answers from the rollout's context (`verifiers_talk`).
Several roles are several agents, in the order in which the environment declares them. Roles are played by a chat loop in this
process, which calls the tools of the task (`Toolset`), unless the config names a harness.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from msgspec import Struct, field

from millstream.env.base import Context
from millstream.env.games.verifiers_talk import NO_CALL, VerifiersTalks
from millstream.env.tools import MAX_ROUNDS
from millstream.errors import ConfigError, EnvironmentFailed
from millstream.types import Task

HARNESS = "millstream_chat"  # what verifiers knows our chat loop by: it looks for a module of that name
ENDED = 400  # the status that no program tries again after


class Verifiers:
    """`taskset` is the name of a package (or module) with a taskset, `env` that of an environment to pair it with; `config` is
    the rest of what verifiers calls [env], such as {"taskset": {...}, "player": {"max_turns": 4}}."""

    def __init__(self, *, taskset: str, env: str = "", config: dict[str, Any] | None = None) -> None:
        self._env = _made(taskset, env, config or {})
        self._roles = [name for name, _ in _roles(self._env.config)]
        self._tasks: dict[int, Any] = {}
        self._unread: Iterator[Any] = iter(self._env.taskset)
        self._playing: dict[str, _Play] = {}
        self._number = itertools.count()
        self._serving: asyncio.Task[None] | None = None
        self._is_ready = asyncio.Event()
        self._is_over = asyncio.Event()

    def tasks(self, num: int, seed: int) -> Iterator[Task]:
        """The first ones, in the order in which the taskset has them. `seed` plays no part."""
        for index in range(num):
            found = self._task(index)
            if found is None:
                return
            answer = getattr(found.data, "answer", None)
            yield Task(
                id=found.data.id or str(index),
                prompt=found.data.prompt_text,
                answer=None if answer is None else str(answer),
                data={"index": index},
            )

    def gold(self, task: Task) -> list[str]:
        """The field `answer`, where its data has one."""
        return [] if task.answer is None else [task.answer]

    async def rollout(self, context: Context) -> float | list[float]:
        from verifiers.v1 import ModelContext

        found = self._task(int(context.task.data["index"]))
        if found is None:
            raise EnvironmentFailed(f"the taskset has no task {context.task.data['index']}")
        await self._serve()
        key = f"millstream-{next(self._number)}"
        play = self._playing[key] = _Play(talks=VerifiersTalks(context), roles=self._roles)
        try:
            model = ModelContext(model=key, client=_endpoint())
            episode = await self._env.run_episode(found, model, on_trace=play.on_trace)
        finally:
            del self._playing[key]
        if play.error is not None:
            raise play.error
        if not episode.ok:
            raise EnvironmentFailed(_what_failed(episode))
        rewards = [_mean([t.reward for t in episode.traces if t.agent.name in _names(role)]) for role in self._roles]
        return rewards[0] if len(rewards) == 1 else rewards

    async def close(self) -> None:
        self._is_over.set()
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)

    def _task(self, index: int) -> Any:
        while index not in self._tasks:
            task = next(self._unread, None)
            if task is None:
                return None
            self._tasks[len(self._tasks)] = task
        return self._tasks[index]

    async def _serve(self) -> None:
        """What verifiers needs for all episodes together is begun and ended by one task, as its context managers ask for."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._keep_serving())
        ready = asyncio.ensure_future(self._is_ready.wait())
        await asyncio.wait({ready, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if not self._is_ready.is_set():
            ready.cancel()
            raise EnvironmentFailed(f"verifiers could not begin to serve: {self._serving.exception()!r}")

    async def _keep_serving(self) -> None:
        async with self._env.serving():
            self._env._interception.clients[_endpoint().model_dump_json()] = _client(self._playing)
            self._is_ready.set()
            await self._is_over.wait()


class _Play(Struct, eq=False):
    """One episode on its way."""

    talks: VerifiersTalks
    roles: list[str]
    agents: dict[str, int] = field(default_factory=dict)  # by trace: whose it is
    error: Exception | None = None

    def on_trace(self, trace: Any) -> None:
        self.agents[trace.id] = next((i for i, role in enumerate(self.roles) if trace.agent.name in _names(role)), 0)

    async def say(self, trace: str, request: Any) -> Any:
        """The model's answer to a request, as a message of verifiers."""
        from verifiers.v1 import AssistantMessage, ToolCall

        said = await self.talks.say(trace, self.agents.get(trace, 0), request.messages, request.tools)
        calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in said.tool_calls]
        return AssistantMessage(content=said.content, tool_calls=calls or None)


def _names(role: str) -> tuple[str | None, ...]:
    """The one role of a plain environment goes without a name."""
    return (role, None, "") if role == "agent" else (role,)


def _mean(rewards: list[float]) -> float:
    return sum(rewards) / len(rewards) if rewards else 0.0


def _what_failed(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return (
        f"verifiers: {errors[-1].type}: {errors[-1].message}" if errors else "verifiers: the episode did not end well"
    )


def _roles(config: Any) -> list[tuple[str, Any]]:
    from verifiers.v1.configs.agent import agent_config_fields

    return list(agent_config_fields(config).items())


def _made(taskset: str, env: str, config: Mapping[str, Any]) -> Any:
    """The environment, whose roles have our chat loop, in this process, where the config names no harness."""
    try:
        from verifiers.v1.interception import InterceptionServerConfig
        from verifiers.v1.runtimes import SubprocessConfig
        from verifiers.v1.utils.loaders import harness_config_type, load_environment, resolve_env_config
    except ImportError as error:
        raise ConfigError(
            f"environment verifiers needs the library, 0.4 or later: pip install 'millstream[verifiers]' ({error})"
        ) from error
    _register_harness()
    table = {**config, "id": env, "taskset": {**config.get("taskset", {}), "id": taskset}}
    try:
        resolved = resolve_env_config(table)
        ours = harness_config_type(HARNESS)(id=HARNESS)
        changes: dict[str, Any] = {"interception": InterceptionServerConfig()}
        for name, role in _roles(resolved):
            if role.harness is None:
                changes[name] = role.model_copy(update={"harness": ours, "runtime": SubprocessConfig()})
        return load_environment(resolved.model_copy(update=changes))
    except Exception as error:  # a library that raises many kinds: reported as one, with its cause
        raise ConfigError(f"verifiers cannot load taskset {taskset!r}: {type(error).__name__}: {error}") from error


def _endpoint() -> Any:
    """What stands for our client: verifiers finds clients by their config."""
    from verifiers.v1 import EvalClientConfig

    return EvalClientConfig(base_url="http://millstream.invalid/v1", api_key_var="MILLSTREAM_NO_KEY")


def _client(playing: Mapping[str, _Play]) -> Any:
    from verifiers.v1 import Client, Response, Usage
    from verifiers.v1.clients.train import serialize_completion
    from verifiers.v1.errors import ProviderError

    class Ours(Client):  # type: ignore[misc]
        async def get_response(
            self, dialect: Any, body: Any, sampling: Any, session_id: Any = None, turn: Any = None, headers: Any = None
        ) -> Any:
            play, request = playing[body["model"]], dialect.parse_request(body)
            try:
                message = await play.say(str(session_id), request)
            except Exception as error:  # kept for the rollout, and raised to verifiers, which ends the episode
                play.error = play.error or error
                raise ProviderError(str(error), status_code=ENDED) from error
            response = Response(
                id=str(session_id),
                created=0,
                model=body["model"],
                message=message,
                finish_reason="tool_calls" if message.tool_calls else "stop",
                usage=Usage(prompt_tokens=0, completion_tokens=0),
            )
            response.raw = serialize_completion(response, body["model"])
            return response

    return Ours()


def _register_harness() -> None:
    """A chat loop in this process, as verifiers allows it: it sends the conversation until the model answers without a call."""
    if HARNESS in sys.modules:
        return
    import httpx2
    from verifiers.v1 import Harness, HarnessConfig, ProgramResult
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    class Chat(Harness[HarnessConfig]):  # type: ignore[misc]
        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = SUPPORTS_MCP = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
            messages += [message_to_wire(one) for one in prompt or []] if not isinstance(prompt, str) else []
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(httpx2.AsyncClient(timeout=None))
                schemas, places, connected = await connect_mcp({"mcpServers": servers}, stack)
                for _ in range(MAX_ROUNDS + 1):
                    answer = await client.post(
                        f"{endpoint}/chat/completions",
                        json={"model": ctx.model, "messages": messages, **({"tools": schemas} if schemas else {})},
                        headers={"Authorization": f"Bearer {secret}"},
                    )
                    if answer.status_code != httpx2.codes.OK:
                        return ProgramResult(1, "", answer.text)
                    said = answer.json()["choices"][0]["message"]
                    if not (calls := said.get("tool_calls")):
                        break
                    messages.append(said)
                    messages += [await self.result(call, connected, places) for call in calls]
            return ProgramResult(0, "", "")

        async def result(self, call: Any, connected: Any, places: Any) -> dict[str, Any]:
            """What the model sees of a call: its result, or what was wrong."""
            name, text = call["function"]["name"], call["function"]["arguments"]
            if name == NO_CALL:
                content = f"Error: this is not a call of a tool ({text})"
            elif name not in places:
                content = f"Error: there is no tool {name!r}. Tools: {', '.join(places)}"
            else:
                try:
                    content = await call_mcp(connected, places, name, json.loads(text))
                except Exception as error:  # the border to the user's tool
                    content = f"Error: {name}: {type(error).__name__}: {error}"
            return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    module = types.ModuleType(HARNESS)
    Chat.__module__ = HARNESS
    module.__dict__.update(Chat=Chat, __all__=["Chat"])
    sys.modules[HARNESS] = module
