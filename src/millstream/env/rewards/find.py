"""The reward function that a config names, with its arguments checked before the run."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import typing
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from millstream import imports
from millstream.config import problems
from millstream.decoding import to_type
from millstream.env.rewards.code import PythonTests
from millstream.env.rewards.config import RewardConfig, functions_of
from millstream.env.rewards.foreign import adapted, check_foreign, library_of, parameters_of
from millstream.env.rewards.judge import Judge, RankingJudge
from millstream.env.rewards.mathematics import math_answer
from millstream.env.rewards.ranking import shortest_right
from millstream.env.rewards.text import Format, exact_match, fuzzy_match
from millstream.errors import ConfigError, shown
from millstream.types import Task

# Also a class that is constructed with `args` and whose objects are called like this.
Reward = Callable[[Task, str], float | Awaitable[float]]
GroupReward = Callable[[Task, Sequence[str]], Sequence[float] | Awaitable[Sequence[float]]]
PassedRewards = Reward | Sequence[Reward]  # from Python: one function, or several


# Names of a first parameter that is not meant to be the task.
NOT_TASKS = (
    *("completion", "completions", "response", "responses", "output", "generation", "prediction", "text"),
    *("answer", "gold", "ground_truth", "target", "label", "reference", "solution"),
)


class BuiltInReward(Struct, frozen=True):
    function: Callable[..., Any]
    is_quick: bool = False  # fast: called without a thread
    process: bool = False  # whether it runs in a worker process by default
    group: bool = False
    needs: tuple[str, str] | None = None  # a module, and the extra of this package that installs it


BUILT_IN_REWARDS: dict[str, BuiltInReward] = {
    "exact_match": BuiltInReward(exact_match, is_quick=True),
    "fuzzy_match": BuiltInReward(fuzzy_match, is_quick=True),
    "format": BuiltInReward(Format, is_quick=True),
    "math_answer": BuiltInReward(math_answer, process=True, needs=("math_verify", "math")),
    "python_tests": BuiltInReward(PythonTests),
    "judge": BuiltInReward(Judge),
    "shortest_right": BuiltInReward(shortest_right, group=True),
    "ranking_judge": BuiltInReward(RankingJudge, group=True),
}


def prepare_rewards(
    configs: Sequence[RewardConfig], reward: PassedRewards | None = None
) -> list[tuple[Reward | GroupReward, RewardConfig]]:
    """The functions that the configs name, or those passed from Python, each with its config: the input of
    `CompletionScorer` and `group_scorer`. Raises `ConfigError`."""
    own = functions_of(reward) if reward is not None else [find_reward(config.function) for config in configs]
    return list(zip(own, configs, strict=True))


def find_reward(name: str) -> Any:
    """The function that a config names. Raises `ConfigError`, which says what was expected and where."""
    if name.startswith(imports.PASSED):
        raise ConfigError(
            f"the reward is a Python function that was passed to train, {name.removeprefix(imports.PASSED)}, and a config "
            "cannot hold it. Pass it again from Python: millstream.resume(RUN, reward=function), or "
            'millstream.evaluate(config, reward=function); or name it in config.toml: function = "file.py:function"'
        )
    if name in BUILT_IN_REWARDS:
        return BUILT_IN_REWARDS[name].function
    return imports.load_part("reward", name, BUILT_IN_REWARDS)


def bind_reward(function: Callable[..., Any], config: RewardConfig) -> Callable[..., Any]:
    """The function with the config's arguments; for a class, an object. Raises what `checked_arguments` and the class raise."""
    arguments = checked_arguments(function, config)
    if not inspect.isclass(function):
        return adapted(functools.partial(function, **arguments) if arguments else function, config.function)
    if limits_itself(function):
        arguments["timeout_s"] = config.timeout_s
    made = function(**arguments)
    if not callable(made):
        raise ConfigError(f"reward {config.function} is a class without __call__(self, task, completion)")
    return adapted(made, config.function)


def check_reward(function: Callable[..., Any], config: RewardConfig) -> None:
    """All checks that need no call. Built-in classes are constructed, which checks the rest; a user's may be expensive."""
    if is_built_in(function, config):
        bind_reward(function, config)
    else:
        checked_arguments(function, config)


def checked_arguments(function: Callable[..., Any], config: RewardConfig) -> dict[str, Any]:
    """Raises `ConfigError` for an argument that is unknown, missing, or (of a built-in) of the wrong type, and for an extra
    that is not installed."""
    if not is_built_in(function, config):
        if not inspect.isclass(function) and library_of(function) is not None:
            check_foreign(function, config.function, config.args)
        else:
            _check_names(function, config)
        return dict(config.args)
    known = BUILT_IN_REWARDS[config.function]
    _check_kind(known, config)
    _check_needs(known, config)
    _check_names(function, config)
    return _typed(function, config)


def is_built_in(function: Callable[..., Any], config: RewardConfig) -> bool:
    known = BUILT_IN_REWARDS.get(config.function)
    return known is not None and known.function is function


def limits_itself(function: Callable[..., Any]) -> bool:
    """Whether it is a class that takes `timeout_s` and enforces the limit itself: it knows which waits do not count."""
    return inspect.isclass(function) and "timeout_s" in parameters_of(function)


def _check_kind(known: BuiltInReward, config: RewardConfig) -> None:
    if known.group != config.group:
        what = "a whole group: set group = true" if known.group else "one completion: leave group out"
        raise ConfigError(f"reward {config.function} is a reward of {what}")


def _check_needs(known: BuiltInReward, config: RewardConfig) -> None:
    if known.needs is not None and importlib.util.find_spec(known.needs[0]) is None:
        raise ConfigError(
            f"reward {config.function} needs {known.needs[0]}: pip install 'millstream[{known.needs[1]}]'"
        )


def _check_names(function: Callable[..., Any], config: RewardConfig) -> None:
    parameters = parameters_of(function)
    if not parameters and not inspect.isclass(function):
        return
    ours = ["timeout_s"] if inspect.isclass(function) else list(parameters)[:2]
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if name not in ours and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in config.args:
        if name not in named and not (takes_any and name not in ours):
            raise ConfigError(f"reward {config.function} has no argument {name!r}{_nearest(name, list(named))}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in config.args:
            raise ConfigError(f"reward {config.function} needs an argument {name!r}: set args = {{ {name} = ... }}")


def swapped_parameters(function: Callable[..., Any], config: RewardConfig) -> str:
    """A warning where the first parameter is named like something else than the task; empty where it is not."""
    if is_built_in(function, config) or inspect.isclass(function) or library_of(function) is not None:
        return ""
    first, *others = [*parameters_of(function), ""]
    if first not in NOT_TASKS and not (others and others[0] == "task"):
        return ""
    called = f"({', '.join([first, *others[:1]])})".replace(", )", ")")
    return (
        f"the reward {config.function} takes {called}, and is called with the task (its answer is task.answer) and then the "
        f"{'completions' if config.group else 'completion'}: expected (task, completion{'s' * config.group})"
    )


def _nearest(name: str, names: Sequence[str]) -> str:
    if near := imports.meant(name, names):
        return near
    return f". Known here: {', '.join(names)}" if names else ": it takes none"


def _typed(function: Callable[..., Any], config: RewardConfig) -> dict[str, Any]:
    """The arguments of a built-in, checked against their types."""
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    typed = {}
    for name, value in config.args.items():
        for problem in problems(value, hints[name], f"args.{name}."):
            raise ConfigError(f"reward {config.function}, {problem}")
        try:
            typed[name] = to_type(value, hints[name])
        except msgspec.ValidationError as error:
            raise ConfigError(f"reward {config.function}, args.{name} = {shown(repr(value))}: {error}") from error
    return typed
