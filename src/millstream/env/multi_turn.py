"""Environments with `reset` and `step`: one instance per episode, turn by turn, until a step is done.

Methods may be plain or coroutine functions. Plain ones are called on a thread, so that a slow one blocks no other, unless the
class has `is_quick = True`. An attribute `tools` lists functions or methods that the model may call before it acts. An
environment with a sandbox finds it in its attribute `sandbox`. An episode that runs out of turns, or of the model's
context, ends with the reward so far.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from millstream.env.base import Context, Step
from millstream.env.tools import MAX_ROUNDS, Parser, ToolContext, tools_of
from millstream.errors import EnvironmentFailed, RequestRefused
from millstream.rpc.threads import DaemonThreads
from millstream.types import Message

MAX_TURNS = 16
MAX_THREADS = 128
CLOSE_S = 2.0


class NothingToShow(EnvironmentFailed):
    """An observation that is empty or None."""


class MultiTurn:
    """Plays the instances of `make`. `max_turns` None: that of the instance, or 16."""

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        *,
        is_quick: bool,
        max_turns: int | None = None,
        parse: Parser | None = None,
        max_rounds: int = MAX_ROUNDS,
    ) -> None:
        self._make = make
        self._name = name
        self._is_quick = is_quick
        self._max_turns = max_turns
        self._parse = parse  # finds calls of tools. None: as the chat template writes them
        self._max_rounds = max_rounds
        self._threads: DaemonThreads | None = None
        self._tool_threads: DaemonThreads | None = None

    async def rollout(self, context: Context) -> float:
        game = await self._call(self._make)
        try:
            return await self._play(game, context)
        finally:
            if hasattr(game, "close"):
                with suppress(TimeoutError):  # it may hang like a step before it
                    async with asyncio.timeout(CLOSE_S):
                        await self._call(game.close)

    async def _play(self, game: Any, context: Context) -> float:
        reward = 0.0
        if isinstance(context, ToolContext) and context.sandbox is not None:
            game.sandbox = context.sandbox
        if tools := getattr(game, "tools", ()):
            self._tool_threads = self._tool_threads or DaemonThreads(f"tools of {self._name}", most=MAX_THREADS)
            own = tools_of(tools, self._tool_threads)
            if isinstance(context, ToolContext):
                await context.open()
                context = context.adding(own)
            else:
                context = ToolContext(context, own, parse=self._parse, max_rounds=self._max_rounds)
        observation = await self._call(lambda: game.reset(context.task, context.seed))
        for turn in range(self._max_turns or int(getattr(game, "max_turns", MAX_TURNS))):
            _check_observation(observation, f"{self._name}.{'step' if turn else 'reset'}")
            try:
                action = await context.ask(observation)
            except RequestRefused:
                if turn == 0:
                    raise
                break  # the model's context is full: the rollout is marked as cut, and its reward so far counts
            step = await self._call(functools.partial(game.step, action))
            reward += _checked(step, self._name).reward
            context.earned(step.reward)
            if step.is_done:
                break
            observation = step.observation
        return reward

    async def _call(self, function: Callable[[], Any]) -> Any:
        if self._is_quick:
            value = function()
        else:
            self._threads = self._threads or DaemonThreads(self._name, most=MAX_THREADS)
            value = await self._threads.call(function)
        return await value if inspect.isawaitable(value) else value


def is_quick(game: type[Any]) -> bool:
    """Whether methods are called on the event loop: also coroutine functions, which return an awaitable at once."""
    if hasattr(game, "is_quick"):
        return bool(game.is_quick)
    return inspect.iscoroutinefunction(game.reset) and inspect.iscoroutinefunction(game.step)


def _check_observation(observation: Any, source: str) -> None:
    if isinstance(observation, str) and observation:
        return
    with suppress(TypeError):
        if observation and all(isinstance(message, Message) for message in observation):
            return
    raise NothingToShow(
        f"{source} returned the observation {observation!r}: expected a text that is not empty, or Messages "
        "(role=..., content=...)"
    )


def _checked(step: Any, name: str) -> Step:
    if not isinstance(step, Step):
        raise EnvironmentFailed(
            f"{name}.step returned {type(step).__name__}: expected Step(observation=..., reward=..., is_done=...)"
        )
    if not math.isfinite(step.reward):
        raise EnvironmentFailed(f"{name}.step returned a reward of {step.reward}: expected a finite number")
    return step
