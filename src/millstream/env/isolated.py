"""Episodes in worker processes: one that hangs, crashes or dies affects no other.

A pool of workers that grows as episodes need it, one episode at a time each. A worker (`env.isolated_worker`) imports the
environment (and no torch), drives its episode, and calls back for what only the run can do: let the model generate.
Guarantees: a worker that dies or sends something that is not a message fails its rollout by name and is replaced; a rollout
that is cancelled, by a time limit or an abort, has its worker killed at once, with every process that it started; no worker
outlives the run, however the run ends."""

from __future__ import annotations

import asyncio
import functools
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from msgspec import Struct

from millstream.decoding import to_type
from millstream.env.base import Content, Context, EpisodeReward, SplitReward
from millstream.env.config import EnvironmentConfig
from millstream.errors import EnvironmentFailed, MillstreamError, RequestRefused, RolloutError, WorkerExited
from millstream.rpc.call import Remote
from millstream.rpc.pool import WorkerPool
from millstream.rpc.process import Launcher, LocalLauncher, WorkerProcess
from millstream.types import Message, Task, TurnLimits

ENVIRONMENT_WORKER = "millstream.env.isolated_worker:serve_environment"
MAX_BYTES = 64 << 20  # of one message
MAX_WORKERS = 1 << 16  # without max_concurrent: as many as there are rollouts
START_S = 60.0
PATIENCE_S = 30.0  # on top of the step limit: then a worker that holds the interpreter lock ends itself
GONE_S = 5.0  # for a killed process to exit. A cluster may report the end of an unreachable node much later


class NotMade(EnvironmentFailed):
    """A worker could not create the environment."""


class EnvironmentSetup(Struct, frozen=True):
    config: EnvironmentConfig
    limit_s: float  # the longest time that a step may hold the interpreter lock
    path: list[str]  # sys.path of the run: a worker finds the same modules


class PlayEpisode(Struct, frozen=True):
    task: Task
    seed: int
    has_chat: bool
    end_token: int
    tool_format: str


class EpisodeReply(Struct, frozen=True):
    reward: SplitReward = SplitReward()
    failure: str = ""  # empty: the episode has ended, with this reward


class ContextCall(Struct, frozen=True):
    """A worker's call of a method of the context, or of its text."""

    part: int
    method: str
    argument: Any


class Isolated:
    """An environment whose episodes are played in workers, which are started when first needed."""

    def __init__(self, config: EnvironmentConfig, launcher: Launcher | None = None) -> None:
        """`launcher`: starts the workers on a cluster. None: on this machine."""
        self._name = config.shown
        name = f"a process for {config.shown}"
        self._launch = functools.partial(
            (launcher or LocalLauncher()).launch, "environment", ENVIRONMENT_WORKER, name=name
        )
        self._setup = EnvironmentSetup(config, config.step_timeout_s + PATIENCE_S, sys.path)
        self._started: weakref.WeakSet[_EnvironmentWorker] = weakref.WeakSet()
        self._pool = WorkerPool(self._start, size=config.max_concurrent or MAX_WORKERS, start_s=START_S)

    def _start(self, loop: asyncio.AbstractEventLoop) -> _EnvironmentWorker:
        worker = _EnvironmentWorker(self._launch, self._setup, f"a process for {self._name}", loop)
        self._started.add(worker)
        return worker

    async def rollout(self, context: Context) -> EpisodeReward:
        async with AsyncExitStack() as stack:
            starting = stack.enter_async_context(self._worker())
            worker = await context.waiting(f"a process for {self._name}", starting, is_timed=False)
            try:
                return await worker.play(context)
            except WorkerExited as error:
                raise EnvironmentFailed(f"{self._name}: {error}, in the middle of an episode") from error
            except (TypeError, ValueError) as error:
                what = "what is sent to a process must be plain data within its bound"
                raise EnvironmentFailed(f"{self._name}: {what}: {error}") from error

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[_EnvironmentWorker]:
        where = "in a process"
        async with AsyncExitStack() as stack:
            try:
                worker = await stack.enter_async_context(self._pool.worker())
            except TimeoutError as error:
                raise NotMade(f"{self._name} was not created within {START_S:g} s {where}") from error
            except WorkerExited as error:
                raise NotMade(f"{self._name} has no process: {error}") from error
            except MillstreamError as error:
                kind = type(error).__name__
                raise NotMade(f"{self._name} cannot be created {where}: {kind}: {error}") from error
            assert isinstance(worker, _EnvironmentWorker)
            try:
                yield worker
            finally:
                if not worker.is_idle:
                    worker.kill()
                    await _until_gone(worker)

    async def close(self) -> None:
        """Kill every worker, and wait until they are gone; for a cluster's, at most `GONE_S`."""
        started = list(self._started)
        for worker in started:
            worker.kill()
        await asyncio.gather(*map(_until_gone, started))


async def _until_gone(remote: Remote) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(GONE_S):
            await asyncio.shield(asyncio.wrap_future(remote.exited))


class _EnvironmentWorker(Remote):
    """One worker. Its calls are served one after the other."""

    def __init__(
        self,
        launch: Callable[[], WorkerProcess],
        setup: EnvironmentSetup,
        name: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._calls: asyncio.Queue[tuple[ContextCall, int] | None] = asyncio.Queue()
        super().__init__(
            launch, setup, name=name, messages=ContextCall, on_message=self._on_call, loop=loop, max_bytes=MAX_BYTES
        )

    def _on_call(self, call: ContextCall, number: int) -> None:
        self._calls.put_nowait((call, number))

    async def play(self, context: Context) -> EpisodeReward:
        """One episode."""
        contexts = [context]
        failed: RolloutError | None = None
        self._calls = asyncio.Queue()
        text = context.text
        begin = PlayEpisode(context.task, context.seed, text.has_chat, text.end_token, text.tool_format)
        ending = asyncio.wrap_future(self.call(begin, EpisodeReply))
        ending.add_done_callback(lambda _: self._calls.put_nowait(None))
        try:
            while (item := await self._calls.get()) is not None:
                call, number = item
                try:
                    self.answer(number, await _call_context(contexts, call))
                except RolloutError as error:  # the environment may still reach an end of its own
                    failed = error
                    is_full = isinstance(error, RequestRefused)
                    self.fail(number, error if is_full else EnvironmentFailed(str(error)))
            result: EpisodeReply = await ending
        finally:
            ending.cancel()
        if result.failure:
            is_known = failed is not None and str(failed) == result.failure
            raise failed if failed is not None and is_known else EnvironmentFailed(result.failure)
        split = result.reward
        if split.turns is None and split.parts is None and isinstance(split.reward, float | list):
            return split.reward
        return split


async def _call_context(contexts: list[Context], call: ContextCall) -> Any:
    context, text = contexts[call.part], contexts[0].text
    match call.method:
        case "generate":
            return await context.generate(*to_type(call.argument, tuple[list[int], TurnLimits | None]))
        case "ask" | "ask_raw":
            return await context.ask(_content(call.argument), is_raw=call.method == "ask_raw")
        case "earned":
            return context.earned(call.argument)
        case "part":
            contexts.append(context.part(call.argument))
            return len(contexts) - 1
        case "encode":
            return text.encode(call.argument)
        case "opening":
            return text.opening(_content(call.argument))
        case "render":
            return text.render(to_type(call.argument, list[Message]))
        case "decode" | "decode_raw":
            return text.decode(call.argument, is_raw=call.method == "decode_raw")
        case _:
            raise EnvironmentFailed(f"a worker called {call.method!r}, which is not a method of a context")


def _content(value: Any) -> Content:
    return value if isinstance(value, str) else to_type(value, tuple[Message, ...])
