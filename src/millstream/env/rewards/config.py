"""The [[reward]] tables of a config, and how a config refers to a function that was passed from Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct, structs

from millstream.errors import ConfigError

PASSED = "callable:"  # prefix of the name of a function that was passed from Python, which a config cannot hold
PASS_IT = "a config names functions, it does not hold them: pass a function to train(config, reward=function)"


class RewardConfig(Struct, frozen=True, kw_only=True):
    # A name of `millstream.env.rewards.BUILT_IN`, `package.module:function`, or `file.py:function`.
    function: str = "exact_match"
    weight: float = 1.0
    timeout_s: float = 30.0  # of one call, without the wait for a free thread, process or connection
    args: dict[str, Any] = {}  # keyword arguments of the function, or of the constructor of a class
    # Call it in a worker process, which is killed past the limit. None: the default of a built-in; false for your own.
    process: bool | None = None
    workers: int | None = None  # the most worker processes. None: the number of cores, at most 8
    group: bool = False  # a function of a task and all completions of a group, which returns one number for each

    def __post_init__(self) -> None:
        if not isinstance(self.function, str):
            raise ConfigError(PASS_IT)
        if self.timeout_s <= 0 or not math.isfinite(self.weight):
            raise ValueError("timeout_s must be above 0 and weight a finite number")
        if self.workers is not None and self.workers < 1:
            raise ValueError("workers must be at least 1")


def passed(function: Callable[..., Any], rewards: Sequence[RewardConfig]) -> tuple[RewardConfig]:
    """The config of a function that was passed from Python: it replaces the one reward, and keeps its limits."""
    if len(rewards) != 1:
        raise ConfigError(f"reward=function stands for one reward, and the config has {len(rewards)}")
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__qualname__)
    return (structs.replace(rewards[0], function=f"{PASSED}{module}.{name}"),)


def was_passed(rewards: Sequence[RewardConfig]) -> bool:
    return any(reward.function.startswith(PASSED) for reward in rewards)
