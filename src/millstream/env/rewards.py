"""Rewards: plain functions of a task and a completion, sync or async, called with a time limit.

A reward that raises, hangs, or returns something that is not a finite number fails its rollout with `RewardFailed`; the
run goes on. Functions are named by a name of this file, by `package.module:function`, or by `file.py:function`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from millstream import threads
from millstream.errors import ConfigError, RewardFailed
from millstream.threads import DaemonThreads
from millstream.types import Task

MOST_THREADS = 16
Reward = Callable[[Task, str], float | Awaitable[float]]


def exact_match(task: Task, completion: str) -> float:
    """1 if the completion, without surrounding space, is the task's answer."""
    if task.answer is None:
        raise RewardFailed(f"no answer to compare with: task {task.id} has none; set data.answer_key")
    return float(completion.strip() == task.answer.strip())


PASSED = "callable:"
"""Before the name of a function that was passed from Python, and that a config can only tell of."""
BUILT_IN: dict[str, Reward] = {"exact_match": exact_match}


PASS_IT = "a config names functions, it does not hold them: pass a function to train(config, reward=function)"


class RewardConfig(Struct, frozen=True, kw_only=True):
    function: str = "exact_match"
    """A name of `millstream.env.rewards`, `package.module:function`, or `file.py:function`."""
    weight: float = 1.0
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.function, str):
            raise ConfigError(PASS_IT)
        if self.timeout_s <= 0 or not math.isfinite(self.weight):
            raise ValueError("timeout_s must be above 0 and weight a finite number")


class Scorer:
    """The weighted sum of several rewards."""

    def __init__(self, rewards: Sequence[tuple[Reward, RewardConfig]]) -> None:
        self._rewards = [(_Timed(function, config), config.weight) for function, config in rewards]
        self.name = "reward " + " + ".join(config.function for _, config in rewards)

    async def score(self, task: Task, completion: str) -> float:
        return sum([weight * await timed(task, completion) for timed, weight in self._rewards])


class _Timed:
    """One reward under its time limit: a coroutine on the event loop, a plain function on a thread. The limit is that of the
    call itself: waiting for a free thread does not count."""

    def __init__(self, function: Reward, config: RewardConfig) -> None:
        self._function, self._config = function, config
        self._is_quick = function in BUILT_IN.values()
        self._threads = None if inspect.iscoroutinefunction(function) else DaemonThreads("reward", most=MOST_THREADS)

    async def __call__(self, task: Task, completion: str) -> float:
        name = self._config.function
        try:
            value: Any
            if self._is_quick:
                value = self._function(task, completion)
            elif self._threads is None:
                async with asyncio.timeout(self._config.timeout_s):
                    value = await self._function(task, completion)  # type: ignore[misc]
            else:
                value = await self._threads.call(
                    lambda: self._function(task, completion), timeout_s=self._config.timeout_s
                )
                if inspect.isawaitable(value):
                    async with asyncio.timeout(self._config.timeout_s):
                        value = await value
        except RewardFailed:
            raise
        except TimeoutError as error:
            raise RewardFailed(
                f"reward {name} took longer than {self._config.timeout_s:g} s; reward.timeout_s sets the limit"
            ) from error
        except Exception as error:  # the border to the user's code: any error fails this rollout, and only it
            what = f"{type(error).__name__} at {_place(error)}"
            raise RewardFailed(f"reward {name} raised {what}: {error}") from error
        return _number(value, name)


OURS = (__file__, threads.__file__)


def _place(error: Exception) -> str:
    """The line of the user's own file where it was raised, or from where a library that raised it was called."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in OURS]
    if not frames:  # it was not even called: wrong arguments, say
        return "its call"
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise RewardFailed(f"reward {name} returned {value!r}: expected one number") from error
    if not math.isfinite(number):
        raise RewardFailed(f"reward {name} returned {number}: expected a finite number")
    return number


def passed(function: Reward, rewards: Sequence[RewardConfig]) -> tuple[RewardConfig]:
    """How a config tells of a function that is passed from Python: in the place of its one reward, with that one's limits."""
    if len(rewards) != 1:
        raise ConfigError(f"reward=function stands for one reward, and the config has {len(rewards)}")
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__qualname__)
    return (structs.replace(rewards[0], function=f"{PASSED}{module}.{name}"),)


def was_passed(rewards: Sequence[RewardConfig]) -> bool:
    return any(reward.function.startswith(PASSED) for reward in rewards)


def find(name: str) -> Reward:
    """The function that a config names. Raises `ConfigError` that says what was looked for, and where."""
    if name.startswith(PASSED):
        raise ConfigError(
            f"the reward is a Python function that was passed to train, {name.removeprefix(PASSED)}, and a config cannot hold "
            "it. Pass it again from Python: millstream.resume(RUN, reward=function), or millstream.evaluate(config, "
            'reward=function); or name it in config.toml: function = "file.py:function"'
        )
    module_name, colon, function_name = name.rpartition(":")
    if not colon:
        if name in BUILT_IN:
            return BUILT_IN[name]
        raise ConfigError(
            f"no reward {name!r}: use {', '.join(BUILT_IN)}, or one of your own: file.py:function or package.module:function"
        )
    module = _module_from(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{module_name} has no function {function_name!r}")
    reward: Reward = function
    return reward


def _module_from(name: str) -> Any:
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"cannot import {name}: {error}") from error
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"no file {path} (looked for it from {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the border to the user's code: said as a config error, with its cause
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
