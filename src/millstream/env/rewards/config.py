"""The [[reward]] tables of a config, and how a config refers to a function that was passed from Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct, structs

from millstream.errors import ConfigError
from millstream.imports import PASSED

Function = TypeVar("Function", bound=Callable[..., Any])
PASS_IT = "a config names functions, it does not hold them: pass a function to train(config, reward=function)"


class RewardConfig(Struct, frozen=True, kw_only=True):
    # A name of `millstream.env.rewards.BUILT_IN`, `package.module:function`, or `file.py:function`.
    function: str = "exact_match"
    weight: float = 1.0  # a rollout's reward is the sum of its rewards times their weights
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


def passed(
    reward: Callable[..., Any] | Sequence[Callable[..., Any]], rewards: Sequence[RewardConfig]
) -> tuple[RewardConfig, ...]:
    """The configs of functions that were passed from Python: they replace the rewards one by one, or the one that there is, and
    keep weights and limits."""
    functions = functions_of(reward)
    if len(rewards) == 1:
        rewards = [*rewards] * len(functions)
    if not functions or len(rewards) != len(functions):
        what = (
            "reward=function stands for one reward"
            if len(functions) == 1
            else f"reward= has {len(functions)} functions"
        )
        raise ConfigError(f"{what}, and the config has {len(rewards)}")
    return tuple(
        structs.replace(one, function=f"{PASSED}{getattr(function, '__module__', None)}.{_name(function)}")
        for function, one in zip(functions, rewards, strict=True)
    )


def functions_of(reward: Function | Sequence[Function]) -> list[Function]:
    """Those that were passed from Python: one, or several."""
    return list(reward) if isinstance(reward, Sequence) else [reward]


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def was_passed(rewards: Sequence[RewardConfig]) -> bool:
    return any(reward.function.startswith(PASSED) for reward in rewards)
