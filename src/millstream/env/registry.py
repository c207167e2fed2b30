"""The environments of a run as one: a task is played in the one that it names, and each is kept within its limits.

Between two turns of the model an environment has `step_timeout_s`; the model's time does not count. At most `max_concurrent`
episodes of a kind run at once; waiting for a place counts against no time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TypeVar

from millstream.env.base import Content, Context, Environment, EpisodeReward, Text
from millstream.env.config import SINGLE_TURN
from millstream.env.data import DataSet
from millstream.env.dialog import Conversation
from millstream.env.isolated import Isolated
from millstream.env.resolve import EnvironmentKind
from millstream.env.sandbox.base import Sandbox
from millstream.env.sandbox.pool import SandboxPool
from millstream.env.tools import AUTO, ToolContext, configured_tools, parser_named
from millstream.errors import ConfigError, DataError, EnvironmentFailed
from millstream.rpc.process import Launcher
from millstream.types import Completion, Task, TurnLimits

T = TypeVar("T")


class Hosted:
    """One environment with its limits. Its contexts accept text as well as tokens."""

    def __init__(
        self, kind: EnvironmentKind, environment: Environment, text: Text, launcher: Launcher | None = None
    ) -> None:
        self.kind = kind
        self.environment = environment
        self._text = text
        has_tools = bool(kind.config.tools) or kind.config.sandbox is not None
        self._tools = configured_tools(kind.config.tools, launcher) if has_tools else None
        self._sandboxes = None if kind.config.sandbox is None else SandboxPool(kind.config.sandbox)
        is_auto = kind.config.tool_format == AUTO
        self._parse = None if is_auto else parser_named(kind.config.tool_format)
        self._isolated = Isolated(kind.config, launcher) if kind.config.process else None
        limit = kind.config.max_concurrent
        self._places = None if limit is None else asyncio.Semaphore(limit)

    async def rollout(self, context: Context) -> EpisodeReward:
        environment, sandbox = self._isolated or self.environment, None
        if self._places is not None:
            await context.waiting(f"a place in {self.kind.name}", self._places.acquire(), is_timed=False)
        try:
            if self._sandboxes is not None:  # one of the rollout's own, closed after it
                sandbox = await context.waiting("a sandbox", self._sandboxes.take(context.task))
            if self.kind.config.use == SINGLE_TURN:  # its rewards have limits of their own
                return await environment.rollout(self._spoken(context, sandbox))
            return await self._play_in_time(environment, context, sandbox)
        finally:
            try:
                if sandbox is not None and self._sandboxes is not None:
                    await self._sandboxes.give_back(sandbox)
            finally:
                if self._places is not None:
                    self._places.release()

    async def _play_in_time(self, environment: Environment, context: Context, sandbox: Sandbox | None) -> EpisodeReward:
        config = self.kind.config
        limit = asyncio.timeout(None)
        clock = _StepClock(limit, config.step_timeout_s)
        try:
            async with limit:
                return await environment.rollout(self._spoken(_Timed(context, clock), sandbox))
        except TimeoutError as error:
            if not limit.expired():
                raise
            end = "; its process was killed" if config.process else ""
            raise EnvironmentFailed(
                f"{config.shown} took longer than {config.step_timeout_s:g} s between two turns{end}. "
                "environment.step_timeout_s sets the limit"
            ) from error
        finally:
            clock.close()

    def _spoken(self, context: Context, sandbox: Sandbox | None) -> Context:
        """With text, and with the tools and the sandbox of the config."""
        config = self.kind.config
        spoken = Conversation(context, self._text, thinking=config.thinking)
        if self._tools is None:
            return spoken
        return ToolContext(spoken, self._tools, parse=self._parse, max_rounds=config.max_tool_rounds, sandbox=sandbox)

    async def close(self) -> None:
        """Close the worker processes, tools and sandboxes, and the environment if it has `close`."""
        if self._sandboxes is not None:
            await self._sandboxes.close()
        if self._tools is not None:
            await self._tools.close()
        if self._isolated is not None:
            await self._isolated.close()
        if hasattr(self.environment, "close"):
            await self.environment.close()


class _StepClock:
    """A time limit that is paused while the model generates (`with clock:`), and restarted after every turn. A turn only stores
    the new deadline; one timer checks it, which is cheaper than to cancel and set a timer in every turn."""

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._num_generating = 0
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._deadline, self._check)

    def __enter__(self) -> None:
        if self._limit.expired():  # and the environment has ignored its cancellation
            raise EnvironmentFailed(
                f"a turn was requested after the step limit of {self._seconds:g} s had passed. "
                "environment.step_timeout_s sets the limit"
            )
        self._num_generating += 1

    def __exit__(self, *error: object) -> None:
        self._num_generating -= 1
        if not self._num_generating:
            self._deadline = self._loop.time() + self._seconds

    def _check(self) -> None:
        now = self._loop.time()
        if not self._num_generating and now >= self._deadline:
            self._limit.reschedule(now)
        else:
            next_check = now + self._seconds if self._num_generating else self._deadline
            self._timer = self._loop.call_at(next_check, self._check)

    def close(self) -> None:
        self._timer.cancel()


class _Timed:
    """A context whose turns pause the step limit."""

    def __init__(self, context: Context, clock: _StepClock) -> None:
        self._context = context
        self._clock = clock
        self.task = context.task
        self.seed = context.seed

    @property
    def text(self) -> Text:
        return self._context.text

    async def ask(self, content: Content, *, is_raw: bool = False) -> str:
        with self._clock:
            return await self._context.ask(content, is_raw=is_raw)

    async def generate(self, tokens: Sequence[int], limits: TurnLimits | None = None) -> Completion:
        with self._clock:
            return await self._context.generate(tokens, limits)

    async def waiting(self, what: str, work: Awaitable[T], *, is_timed: bool = True) -> T:
        with nullcontext() if is_timed else self._clock:
            return await self._context.waiting(what, work, is_timed=is_timed)

    def earned(self, reward: float) -> None:
        self._context.earned(reward)

    def part(self, agent: int = 0) -> _Timed:
        return _Timed(self._context.part(agent), self._clock)


class Environments:
    """All environments of a run, by name."""

    def __init__(self, hosted: Sequence[Hosted]) -> None:
        self._by_name: Mapping[str, Hosted] = {one.kind.name: one for one in hosted}

    async def rollout(self, context: Context) -> EpisodeReward:
        return await self.of(context.task).rollout(context)

    def of(self, task: Task) -> Hosted:
        """Raises `DataError` for a task that names no environment, or an unknown one."""
        return self._by_name[name_of(task, list(self._by_name))]

    def gold(self, task: Task) -> list[str]:
        """The turns of a perfect player; empty if they are unknown."""
        gold = self.of(task).kind.gold
        return [] if gold is None else gold(task)

    async def close(self) -> None:
        """End every worker process."""
        for hosted in self._by_name.values():
            await hosted.close()


def name_of(task: Task, names: Sequence[str]) -> str:
    """The name of a task's environment."""
    named = task.data.get("environment")
    if named is None and len(names) == 1:
        return names[0]
    if named not in names:
        said = "has no field 'environment'" if named is None else f"is for the environment {named!r}"
        raise DataError(f"task {task.id} {said}: expected one of {', '.join(names)}, the names of [[environment]]")
    return str(named)


def single_turn_tasks(kinds: Sequence[EnvironmentKind], tasks: Iterable[Task]) -> Iterator[Task]:
    """Those whose prompt is what the model is shown first, and whose answers the rewards score."""
    names, shown = [kind.name for kind in kinds], {kind.name for kind in kinds if kind.config.use == SINGLE_TURN}
    return (task for task in tasks if name_of(task, names) in shown)


def check_tasks(kinds: Sequence[EnvironmentKind], data: DataSet, *, needs_gold: bool) -> None:
    """Every task has its environment, and where it is needed, with [warmup], every environment has gold turns."""
    by_name, is_golden = {kind.name: kind for kind in kinds}, dict[str, bool]()
    for task in data.tasks:
        name = name_of(task, list(by_name))
        if needs_gold and not is_golden.get(name):
            gold = by_name[name].gold
            is_golden[name] = gold is not None and bool(gold(task))
    for name, is_known in is_golden.items():
        if not is_known:
            raise ConfigError(
                f"[warmup] trains on gold turns, and no task of the environment {name} has any: give it `gold(task)` (a data "
                "set an answer), or leave [warmup] out"
            )
