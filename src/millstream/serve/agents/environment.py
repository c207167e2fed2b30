"""The environment `agent`: every rollout starts a program that calls the model over HTTP, and is scored when it ends."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from msgspec import structs

from millstream import imports
from millstream.env import Context, EpisodeReward, SplitReward, Text
from millstream.env.agent import agent_config
from millstream.env.config import EnvironmentConfig
from millstream.env.rewards import CompletionScorer
from millstream.env.rewards.call import finite_number, is_coroutine
from millstream.env.tools import AUTO, parser_named
from millstream.errors import EnvironmentFailed, RolloutError, shown
from millstream.rpc.threads import DaemonThreads
from millstream.serve.agents.gateway import MODEL, AgentGateway, AgentSession
from millstream.serve.agents.program import AgentAccess, AgentPlaces, AgentResult, run_command, run_function
from millstream.types import Task

MAX_THREADS = 256
END_S = 5.0


def make_agent(
    config: EnvironmentConfig,
    text: Text,
    scorer: CompletionScorer,
    *,
    end_tokens: tuple[int, ...],
    vocabulary: int,
    takes_stops: bool = True,
) -> AgentEnvironment:
    """Raises `ConfigError`. `takes_stops`: whether the engine looks for stop strings."""
    agent = agent_config(config)
    gateway = AgentGateway(
        text,
        end_tokens=end_tokens,
        vocabulary=vocabulary,
        max_calls=agent.max_calls,
        agents=agent.agents,
        takes_stops=takes_stops,
        parse=parser_named(text.tool_format if config.tool_format == AUTO else config.tool_format),
    )
    return AgentEnvironment(config, gateway, scorer)


class AgentEnvironment:
    """`scorer`: the run's rewards, of the text that an agent returns or prints."""

    def __init__(self, config: EnvironmentConfig, gateway: AgentGateway, scorer: CompletionScorer) -> None:
        agent = agent_config(config)
        self._name = config.shown
        self._gateway = gateway
        self._scorer = scorer
        self._agents = agent.agents
        self._command = agent.command
        self._function: Callable[..., Any] | None = imports.load_function(agent.function) if agent.function else None
        self._score: Callable[..., Any] | None = imports.load_function(agent.score) if agent.score else None
        self._is_threaded = self._function is not None and not is_coroutine(self._function)
        self._free_threads = asyncio.Semaphore(MAX_THREADS)
        self._places = AgentPlaces()
        self._threads = DaemonThreads(f"agents of {self._name}", most=MAX_THREADS)

    async def rollout(self, context: Context) -> EpisodeReward:
        async with (
            self._thread(context),
            self._places.folder() as folder,
            self._gateway.opened(context) as session,
        ):
            model = self._agents[0] if self._agents else MODEL
            access = AgentAccess(base_url=session.url, api_key=session.key, model=model, folder=folder)
            result = await self._result(context, session, access)
            return await self._reward(context, result)

    @asynccontextmanager
    async def _thread(self, context: Context) -> AsyncIterator[None]:
        """Waiting for the threads of other agents is not this agent's time."""
        if not self._is_threaded:
            yield
            return
        await context.waiting("a thread for the agent", self._free_threads.acquire(), is_timed=False)
        try:
            yield
        finally:
            self._free_threads.release()

    async def _result(self, context: Context, session: AgentSession, access: AgentAccess) -> AgentResult:
        """Run the program, and generate its turns in this task."""
        running = asyncio.create_task(self._run(context, access))
        running.add_done_callback(lambda _: session.calls.put_nowait(None))
        try:
            while (call := await session.calls.get()) is not None:
                await session.answer(call)
                if session.failure is not None:
                    raise session.failure
            if session.failure is not None:
                raise session.failure
            return await running
        finally:
            running.cancel()
            await asyncio.wait([running], timeout=END_S)  # an agent that does not let itself be cancelled is left alone

    async def _run(self, context: Context, access: AgentAccess) -> AgentResult:
        if self._function is None:
            return await run_command(self._command, context.task, access, self._places)
        try:
            return await run_function(self._function, context.task, access, self._threads)
        except (RolloutError, asyncio.CancelledError):
            raise
        except BaseException as error:  # user code, also if it calls sys.exit: any error fails this rollout only
            raise EnvironmentFailed(f"{self._name} raised {type(error).__name__}: {shown(str(error))}") from error

    async def _reward(self, context: Context, result: AgentResult) -> EpisodeReward:
        if self._score is not None:
            scored = await context.waiting("the score of the agent", self._scored(self._score, context.task, result))
            return self._checked(scored, "score")
        if result.reward is not None:
            return self._checked(result.reward, self._name)
        return await context.waiting(self._scorer.name, self._scorer.score(context.task, result.text))

    def _checked(self, reward: Any, name: str) -> EpisodeReward:
        """Agents that were rewarded by name are in their order afterwards."""
        if isinstance(reward, Mapping):
            reward = SplitReward(reward=dict(reward))
        if not isinstance(reward, SplitReward):
            return finite_number(reward, name)
        if not isinstance(reward.reward, dict):
            return reward
        if set(reward.reward) != set(self._agents):
            found, expected = ", ".join(map(str, reward.reward)), ", ".join(self._agents) or "none: set args.agents"
            raise EnvironmentFailed(f"{name} rewards the agents {shown(found)}: expected {expected}")
        return structs.replace(reward, reward=[reward.reward[agent] for agent in self._agents])

    async def _scored(self, score: Callable[..., Any], task: Task, result: AgentResult) -> Any:
        try:
            value = await self._threads.call(functools.partial(score, task, result))
            return await value if inspect.isawaitable(value) else value
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # user code, also if it calls sys.exit: any error fails this rollout only
            raise EnvironmentFailed(f"its score raised {type(error).__name__}: {shown(str(error))}") from error

    async def close(self) -> None:
        await self._gateway.close()
        await self._places.close()
