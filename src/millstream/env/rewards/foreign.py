"""Reward functions written for TRL and verl: recognized by their parameters, and called as those libraries call them.

    TRL     def reward(prompts, completions, **columns) -> list[float | None]    the first parameter is prompts or completions
    verl    def compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict    it has solution_str

They become functions of a task and a completion, or, with `group = true`, of a task and all completions of a group.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from millstream.errors import ConfigError, RewardFailed
from millstream.types import TOOLS_ROLE, Task

Library = Literal["trl", "verl"]
TRL_FIRST = ("prompts", "completions", "completion_ids")
TRL_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # fields of a record that TRL does not pass on
NOT_PASSED = {
    "completion_ids": "rewards get text. A penalty by length: algorithm.overlong_buffer",
    "trainer_state": "there is no trainer",
    "environments": "a multi-turn task has an environment, which rewards it: docs/environments.md",
}


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Empty where they are unknown: it is built into the interpreter."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def library_of(function: Callable[..., Any]) -> Library | None:
    """The library that it was written for; None: it has Millstream's own form."""
    names = list(parameters_of(function))
    if "solution_str" in names:
        return "verl"
    is_trl = (names and names[0] in TRL_FIRST) or {"prompts", "completions"} <= set(names)
    return "trl" if is_trl else None


def check_foreign(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where it needs what only its library has, or takes no such argument."""
    parameters = parameters_of(function)
    for parameter, why in NOT_PASSED.items():
        if parameter in parameters and parameters[parameter].default is inspect.Parameter.empty:
            raise ConfigError(f"reward {name} takes {parameter}, which is not passed here: {why}")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for argument in arguments:
        if argument not in parameters and not takes_any:
            known = ", ".join(parameters)
            raise ConfigError(f"reward {name} has no argument {argument!r}. Known here: {known}")


def adapted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """As a function of a task and completions. One of Millstream's own form is returned as it is."""
    match library_of(function):
        case "trl":
            arguments, result = functools.partial(_trl_arguments, function, name), _trl_result
        case "verl":
            arguments, result = functools.partial(_verl_arguments, function), _verl_result
        case None:
            return function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004

        async def scored_async(task: Task, completions: str | Sequence[str]) -> Any:
            said = [completions] if isinstance(completions, str) else list(completions)
            values = [await function(**one) for one in arguments(task, said)]
            return _shaped(result(values, name), completions)

        return scored_async

    def scored(task: Task, completions: str | Sequence[str]) -> Any:
        said = [completions] if isinstance(completions, str) else list(completions)
        return _shaped(result([function(**one) for one in arguments(task, said)], name), completions)

    return scored


def _shaped(values: Any, completions: str | Sequence[str]) -> Any:
    """One value for one completion, where there is one."""
    is_one = isinstance(completions, str) and isinstance(values, Sequence) and len(values) == 1
    return values[0] if is_one else values


# ---- TRL -------------------------------------------------------------------------------------------------------------


def _trl_arguments(function: Callable[..., Any], name: str, task: Task, completions: list[str]) -> list[dict[str, Any]]:
    """Of one call for all completions. A chat has completions that are chats, of one message."""
    num = len(completions)
    columns = {task.answer_key: task.answer} if task.answer is not None else {}
    columns |= {key: value for key, value in task.data.items() if key not in TRL_NOT_COLUMNS}
    prompt: Any = task.prompt
    said: list[Any] = list(completions)
    if not isinstance(prompt, str):
        prompt = [message.as_dict() for message in prompt if message.role != TOOLS_ROLE]
        said = [[{"role": "assistant", "content": completion}] for completion in completions]
    passed: dict[str, Any] = {key: [value] * num for key, value in columns.items()}
    passed |= {"prompts": [prompt] * num, "completions": said, "log_extra": _ignored, "log_metric": _ignored}
    parameters = parameters_of(function)
    for parameter in parameters.values():
        is_needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if is_needed and parameter.name not in passed:
            raise RewardFailed(
                f"reward {name} takes {parameter.name!r}, and the record of task {task.id} has no such field; it has "
                f"{', '.join(columns) or 'none'}"
            )
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [{key: value for key, value in passed.items() if takes_any or key in parameters}]


def _ignored(*_: Any, **__: Any) -> None:
    """TRL's log functions: metrics of a reward function are not kept."""


def _trl_result(values: list[Any], name: str) -> Any:
    """None says that the function does not apply to a completion: it adds nothing to the sum of the rewards."""
    (found,) = values
    if isinstance(found, str | bytes) or not (isinstance(found, Sequence) or hasattr(found, "tolist")):
        raise RewardFailed(f"reward {name} returned {found!r}: expected a list, one number or None per completion")
    return [0.0 if value is None else value for value in found]


# ---- verl ------------------------------------------------------------------------------------------------------------


def _verl_arguments(function: Callable[..., Any], task: Task, completions: list[str]) -> list[dict[str, Any]]:
    """Of one call a completion."""
    graded = task.data.get("reward_model")
    ground_truth = graded.get("ground_truth", task.answer) if isinstance(graded, Mapping) else task.answer
    parameters = parameters_of(function)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = {
        "data_source": task.data.get("data_source"),
        "ground_truth": ground_truth,
        "extra_info": dict(task.data.get("extra_info") or {}),  # a copy: verl's functions may write to it
    }
    passed = {key: value for key, value in known.items() if takes_any or key in parameters}
    return [{**passed, "solution_str": completion} for completion in completions]


def _verl_result(values: list[Any], name: str) -> list[Any]:
    """A dict has the reward under `score`."""
    for value in values:
        if isinstance(value, Mapping) and "score" not in value:
            raise RewardFailed(f"reward {name} returned a dict with {', '.join(map(str, value))}: expected a 'score'")
    return [value["score"] if isinstance(value, Mapping) else value for value in values]
