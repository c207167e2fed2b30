"""The worker process of an environment: episode after episode, until the connection closes. The run's side: `env.isolated`."""

from __future__ import annotations

import asyncio
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from millstream.env.base import Content, Environment, split_reward
from millstream.env.isolated import MAX_BYTES, ContextCall, EnvironmentSetup, EpisodeReply, PlayEpisode
from millstream.env.resolve import find_environment
from millstream.errors import MillstreamError
from millstream.rpc import threads
from millstream.rpc.call import Channel
from millstream.rpc.serve import exit_if_blocked, serve_calls
from millstream.types import Completion, Message, TurnLimits

T = TypeVar("T")
OURS = Path(__file__).parent


class _RemoteText:
    def __init__(self, channel: Channel, episode: PlayEpisode) -> None:
        self._channel = channel
        self.has_chat = episode.has_chat
        self.end_token = episode.end_token
        self.tool_format = episode.tool_format

    def encode(self, text: str) -> list[int]:
        return self._call("encode", text, list[int])  # type: ignore[no-any-return]

    def opening(self, content: Content) -> list[int]:
        return self._call("opening", content if isinstance(content, str) else list(content), list[int])  # type: ignore[no-any-return]

    def render(self, messages: Sequence[Message]) -> str:
        return str(self._call("render", list(messages), str))

    def decode(self, tokens: Sequence[int], *, is_raw: bool = False) -> str:
        return str(self._call("decode_raw" if is_raw else "decode", list(tokens), str))

    def _call(self, method: str, argument: Any, answer: Any) -> Any:
        return self._channel.call(ContextCall(0, method, argument), answer).result()


class _RemoteContext:
    """A `millstream.env.Context` that calls the run for everything."""

    def __init__(self, channel: Channel, episode: PlayEpisode, part: int = 0) -> None:
        self._channel = channel
        self._episode = episode
        self._part = part
        self.task = episode.task
        self.seed = episode.seed
        self.text = _RemoteText(channel, episode)

    async def generate(self, tokens: Sequence[int], limits: TurnLimits | None = None) -> Completion:
        call = ContextCall(self._part, "generate", (list(map(int, tokens)), limits))
        completion: Completion = await asyncio.wrap_future(self._channel.call(call, Completion))
        return completion

    async def ask(self, content: Content, *, is_raw: bool = False) -> str:
        method = "ask_raw" if is_raw else "ask"
        call = ContextCall(self._part, method, content if isinstance(content, str) else list(content))
        return str(await asyncio.wrap_future(self._channel.call(call, str)))

    async def waiting(self, what: str, work: Awaitable[T], *, is_timed: bool = True) -> T:
        return await work  # the run waits for the process

    def earned(self, reward: float) -> None:
        self._channel.call(ContextCall(self._part, "earned", float(reward))).result()

    def part(self, agent: int = 0) -> _RemoteContext:
        number = self._channel.call(ContextCall(self._part, "part", agent), int).result()
        return _RemoteContext(self._channel, self._episode, number)


async def _play(environment: Environment, context: _RemoteContext, name: str) -> EpisodeReply:
    try:
        return EpisodeReply(split_reward(await environment.rollout(context)))
    except MillstreamError as error:
        return EpisodeReply(failure=str(error))
    except Exception as error:  # user code: any error fails this rollout only
        return EpisodeReply(failure=f"{name} raised {type(error).__name__} at {_place(error)}: {error}")


def _place(error: Exception) -> str:
    """The line of the user's file that raised it, or that called the library that did."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if OURS not in Path(frame.filename).parents]
    frames = [frame for frame in frames if frame.filename != threads.__file__]
    if not frames:
        return "its call"
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def serve_environment(connection: socket.socket) -> None:
    channel = Channel(connection, max_bytes=MAX_BYTES)

    def begin(setup: EnvironmentSetup) -> Callable[[PlayEpisode], EpisodeReply]:
        exit_if_blocked(setup.limit_s)
        sys.path += [place for place in setup.path if place not in sys.path]
        environment, name = find_environment(setup.config).environment, setup.config.shown
        assert environment is not None
        runner = asyncio.Runner()
        return lambda episode: runner.run(_play(environment, _RemoteContext(channel, episode), name))

    serve_calls(channel, EnvironmentSetup, begin, PlayEpisode)
