"""One call of a reward, under its time limit. Where it runs is decided once:

    inline                  fast built-ins
    on the event loop       coroutines
    on a thread             plain functions; one that exceeds the limit keeps its thread, and a new thread replaces it
    in a worker process     `process = true`; one that exceeds the limit is killed

Every error becomes `RewardFailed`, with the line of the user's file.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream.env.rewards.config import RewardConfig
from millstream.env.rewards.find import (
    BUILT_IN_REWARDS,
    GroupReward,
    Reward,
    bind_reward,
    check_reward,
    is_built_in,
    limits_itself,
)
from millstream.env.rewards.pool import RewardWorkers
from millstream.errors import ConfigError, RewardFailed, shown
from millstream.imports import PASSED
from millstream.rpc import threads
from millstream.rpc.process import Launcher
from millstream.rpc.threads import DaemonThreads
from millstream.types import Task

MAX_THREADS = 16
PACKAGE = str(Path(__file__).parent)

RewardInput = str | tuple[str, ...]  # a completion, or all completions of a group


class RewardCall:
    """One configured reward. The limit is that of the call itself: waiting for a free thread or process does not count."""

    def __init__(self, function: Reward | GroupReward, config: RewardConfig, launcher: Launcher | None = None) -> None:
        self._config = config
        known = BUILT_IN_REWARDS[config.function] if is_built_in(function, config) else None
        self._is_quick = known is not None and known.is_quick
        self._workers: RewardWorkers | None = None
        if config.process or (config.process is None and known is not None and known.process):
            check_reward(function, config)
            self._workers = RewardWorkers(_named(config), launcher)
            return
        self._function = bind_reward(function, config)
        self._limits_itself = limits_itself(function)
        is_async = is_coroutine(self._function)
        self._threads = None if is_async else DaemonThreads("reward", most=MAX_THREADS)

    async def __call__(self, task: Task, completions: RewardInput) -> Any:
        name, limit_s = self._config.function, self._config.timeout_s
        try:
            if self._workers is not None:
                return await self._workers.call(task, completions)
            if self._is_quick:
                return self._function(task, completions)
            if self._threads is None:
                async with asyncio.timeout(None if self._limits_itself else limit_s):
                    return await self._function(task, completions)
            work = functools.partial(self._function, task, completions)
            value = await self._threads.call(work, timeout_s=None if self._limits_itself else limit_s)
            if inspect.isawaitable(value):
                async with asyncio.timeout(limit_s):
                    value = await value
            return value
        except RewardFailed:
            raise
        except TimeoutError as error:
            raise RewardFailed(
                f"reward {name} took longer than {limit_s:g} s; reward.timeout_s sets the limit"
            ) from error
        except Exception as error:  # user code: any error fails this rollout only
            raise RewardFailed(f"reward {name} {error_text(error)}") from error


def _named(config: RewardConfig) -> RewardConfig:
    if config.function.startswith(PASSED):
        raise ConfigError(
            f"reward.process = true, and the reward is a function that was passed from Python, "
            f"{config.function.removeprefix(PASSED)}: another process can only find it by a name. Put it into a file, and "
            'set function = "file.py:function"; or leave process out'
        )
    return config


def is_coroutine(function: Any) -> bool:
    """Whether a call returns an awaitable. For an object, its `__call__` decides."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def error_text(error: Exception) -> str:
    """The error, and where in the user's file it was raised."""
    return f"raised {type(error).__name__} at {_place(error)}: {error}"


def _place(error: Exception) -> str:
    """The line of the user's file that raised it, or that called the library that did."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    if not frames:  # it was not called, for example because of wrong arguments
        return "its call"
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _is_ours(file: str) -> bool:
    return file == threads.__file__ or file.startswith((PACKAGE, "<frozen "))


def finite_number(value: Any, name: str) -> float:
    """The value of a reward as a finite number. Text is none, whatever it says: "1.0" is refused as "good" is."""
    try:
        result = float("" if isinstance(value, str | bytes | bytearray) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # RuntimeError: a tensor of several numbers
        missing = ". Does it end without a return?" if value is None else ""
        raise RewardFailed(f"reward {name} returned {shown(repr(value))}: expected one number{missing}") from error
    if not math.isfinite(result):
        raise RewardFailed(f"reward {name} returned {result}: expected a finite number")
    return result


def finite_numbers(values: Any, name: str, *, expected: int) -> list[float]:
    """The values of a group reward: one finite number per completion."""
    if isinstance(values, str | bytes) or not (isinstance(values, Sequence) or hasattr(values, "tolist")):
        raise RewardFailed(
            f"group reward {name} returned {shown(repr(values))}: expected {expected} numbers, one per completion"
        )
    if len(values) != expected:
        raise RewardFailed(
            f"group reward {name} returned {len(values)} numbers: expected {expected}, one per completion"
        )
    return [finite_number(value, name) for value in values]
