"""One call of a reward, under its time limit. Where it runs is decided once:

    inline                  built-ins that take no time
    on the event loop       coroutines
    on a thread             plain functions; one that overruns keeps its thread, and another takes the place
    in a worker process     `process = true`; one that overruns is killed

Whatever it raises comes out as `RewardFailed`, with the line of the user's own file.
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

from millstream.env.rewards.config import PASSED, RewardConfig
from millstream.env.rewards.find import BUILT_IN, GroupReward, Reward, bind, check, is_built_in, limits_itself
from millstream.env.rewards.pool import Workers
from millstream.errors import ConfigError, RewardFailed
from millstream.rpc import threads
from millstream.rpc.process import Launcher
from millstream.rpc.threads import DaemonThreads
from millstream.types import Task

MAX_THREADS = 16
PACKAGE = str(Path(__file__).parent)

Said = str | tuple[str, ...]  # a completion, or all completions of a group


class Call:
    """One reward as the config has it. The limit is that of the call itself: waiting for a free thread or process does not
    count."""

    def __init__(self, function: Reward | GroupReward, config: RewardConfig, launcher: Launcher | None = None) -> None:
        self._config = config
        known = BUILT_IN[config.function] if is_built_in(function, config) else None
        self._is_quick = known is not None and known.is_quick
        self._workers: Workers | None = None
        if config.process or (config.process is None and known is not None and known.process):
            check(function, config)
            self._workers = Workers(_named(config), launcher)
            return
        self._function = bind(function, config)
        self._limits_itself = limits_itself(function)
        is_async = is_coroutine(self._function)
        self._threads = None if is_async else DaemonThreads("reward", most=MAX_THREADS)

    async def __call__(self, task: Task, said: Said) -> Any:
        name, limit_s = self._config.function, self._config.timeout_s
        try:
            if self._workers is not None:
                return await self._workers.call(task, said)
            if self._is_quick:
                return self._function(task, said)
            if self._threads is None:
                async with asyncio.timeout(None if self._limits_itself else limit_s):
                    return await self._function(task, said)
            work = functools.partial(self._function, task, said)
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
        except Exception as error:  # the border to the user's code: any error fails this rollout, and only it
            raise RewardFailed(f"reward {name} {told(error)}") from error


def _named(config: RewardConfig) -> RewardConfig:
    if config.function.startswith(PASSED):
        raise ConfigError(
            f"reward.process = true, and the reward is a function that was passed from Python, "
            f"{config.function.removeprefix(PASSED)}: another process can only find it by a name. Put it into a file, and "
            'set function = "file.py:function"; or leave process out'
        )
    return config


def is_coroutine(function: Any) -> bool:
    """Whether calling it gives something to await. An object is asked by its `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def told(error: Exception) -> str:
    """What was raised, and where in the user's own file."""
    return f"raised {type(error).__name__} at {_place(error)}: {error}"


def _place(error: Exception) -> str:
    """The line of the user's own file where it was raised, or from where a library that raised it was called."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    if not frames:  # it was not even called: wrong arguments, say
        return "its call"
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _is_ours(file: str) -> bool:
    return file == threads.__file__ or file.startswith((PACKAGE, "<frozen "))


def number(value: Any, name: str) -> float:
    """What a reward returned, as a finite number."""
    try:
        result = float(value)
    except (TypeError, ValueError) as error:
        raise RewardFailed(f"reward {name} returned {value!r}: expected one number") from error
    if not math.isfinite(result):
        raise RewardFailed(f"reward {name} returned {result}: expected a finite number")
    return result


def numbers(values: Any, name: str, *, expected: int) -> list[float]:
    """What a reward of a group returned: so many finite numbers."""
    if isinstance(values, str | bytes) or not (isinstance(values, Sequence) or hasattr(values, "tolist")):
        raise RewardFailed(f"group reward {name} returned {values!r}: expected {expected} numbers, one a completion")
    if len(values) != expected:
        raise RewardFailed(f"group reward {name} returned {len(values)} numbers: expected {expected}, one a completion")
    return [number(value, name) for value in values]
