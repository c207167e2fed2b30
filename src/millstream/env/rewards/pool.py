"""Worker processes for a reward that may hang, crash or run out of memory: a process can be killed, a thread cannot.

Guarantees (`rpc.pool`): a worker has one call at a time, so one that is killed or dies takes no other call with it; its
successor is started at once; no worker outlives the process that started it.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import Struct, structs

from millstream.env.rewards.config import RewardConfig
from millstream.errors import ConfigError, RewardFailed, WorkerExited
from millstream.rpc.call import Remote
from millstream.rpc.pool import WorkerPool
from millstream.rpc.process import Launcher, LocalLauncher
from millstream.types import Task

REWARD_WORKER = "millstream.env.rewards.worker:serve_rewards"
MAX_WORKERS = 8
START_S = 60.0  # for a worker to import the reward and its libraries


class ScoreCall(Struct, frozen=True, kw_only=True):
    task: Task
    completions: str | tuple[str, ...]  # one, or all of a group


class Scores(Struct, frozen=True, kw_only=True):
    """One number, or one per completion of the group; or the message of a failure."""

    values: tuple[float, ...] = ()
    failure: str = ""


class RewardWorkers:
    """At most `config.workers` processes, started when first needed; a call waits for one that is free."""

    def __init__(self, config: RewardConfig, launcher: Launcher | None = None) -> None:
        """`launcher`: starts the workers on a cluster. None: on this machine."""
        self._config = config
        name = f"a worker of reward {config.function}"
        launch = functools.partial((launcher or LocalLauncher()).launch, "reward", REWARD_WORKER, name=name)
        setup = structs.replace(config, process=False)
        size = config.workers or min(MAX_WORKERS, os.cpu_count() or 1)
        self._pool = WorkerPool(
            lambda loop: Remote(launch, setup, name=name, loop=loop), size=size, start_s=START_S, is_eager=True
        )

    async def call(self, task: Task, completions: str | tuple[str, ...]) -> float | tuple[float, ...]:
        """One number, or one per completion. Raises `RewardFailed`."""
        async with self._worker() as worker:
            scores = await self._score(worker, ScoreCall(task=task, completions=completions))
        if scores.failure:
            raise RewardFailed(scores.failure)
        return scores.values[0] if isinstance(completions, str) else scores.values

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[Remote]:
        who = f"reward {self._config.function}"
        try:
            async with self._pool.worker() as worker:
                yield worker
        except TimeoutError as error:
            what = f"its worker process took longer than {START_S:g} s to start: check what its file imports"
            raise RewardFailed(f"{who}: {what}") from error
        except WorkerExited as error:
            raise RewardFailed(f"{who}: its worker did not start: {error}") from error
        except ConfigError as error:
            raise RewardFailed(str(error)) from error

    async def _score(self, worker: Remote, call: ScoreCall) -> Scores:
        who, limit_s = f"reward {self._config.function}", self._config.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                scores: Scores = await asyncio.wrap_future(worker.call(call, Scores))
                return scores
        except TimeoutError as error:
            what = f"took longer than {limit_s:g} s, and its worker process was killed; reward.timeout_s sets the limit"
            raise RewardFailed(f"{who} {what}") from error
        except WorkerExited as error:
            is_memory = "(SIGKILL)" in str(error)
            hint = " (out of memory?)" if is_memory else ""
            raise RewardFailed(f"{who}: {error}{hint} during the call; another worker takes its place") from error
        except (TypeError, ValueError) as error:
            what = f"task {call.task.id} cannot be sent to a worker process ({error}): its fields must be plain data"
            raise RewardFailed(f"{who}: {what}") from error
