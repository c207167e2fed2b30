"""The environment that a config names: a built-in one, a class with `reset` and `step`, or a coroutine function.

    class Game:                                       async def rollout(context) -> float:
        def reset(self, task, seed) -> str: ...           answer = await context.ask("2+2=")
        def step(self, action) -> Step: ...               return float(answer.strip() == "4")

Either may have `tasks(num, seed, **args)`, which makes its tasks, and `gold(task)`, the turns of a perfect player: static
methods of a class, attributes of a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from millstream import imports
from millstream.env.agent import agent_config
from millstream.env.base import Environment
from millstream.env.config import AGENT, BUILT_BY_RUN, SINGLE_TURN, EnvironmentConfig
from millstream.env.multi_turn import MultiTurn, is_quick
from millstream.env.sandbox.config import sandbox_maker
from millstream.env.tools import AUTO, configured_tools, parser_named
from millstream.errors import ConfigError, DataError
from millstream.types import Task

BUILT_IN_ENVIRONMENTS = {
    "frozen_lake": "millstream.env.games.frozen_lake:FrozenLake",
    "gymnasium": "millstream.env.games.gym_text:GymText",
    "lookup": "millstream.env.games.lookup:Lookup",
    "openenv": "millstream.env.games.openenv_server:OpenEnv",
    "reasoning_gym": "millstream.env.games.reasoning:ReasoningGym",
    "shell_tasks": "millstream.env.games.shell_tasks:ShellTasks",
    "textarena": "millstream.env.games.arena:TextArena",
    "verifiers": "millstream.env.games.verifiers_env:Verifiers",
    "verifiers_classic": "millstream.env.games.verifiers_classic:VerifiersClassic",
}
EXPECTED = (
    "expected a class with reset(task, seed) and step(action), a class with rollout(context), or a coroutine function of a "
    "context"
)
Gold = Callable[[Task], list[str]]


class EnvironmentKind(Struct, frozen=True, kw_only=True, eq=False):
    """A resolved environment."""

    config: EnvironmentConfig
    environment: Environment | None  # None: of `BUILT_BY_RUN`
    make_tasks: Callable[[int, int], list[Task]] | None = None  # (num, seed) -> tasks. None: they come from a data set
    gold: Gold | None = None  # empty for a task without gold turns. None: no task has any

    @property
    def name(self) -> str:
        return self.config.shown


def find_environment(config: EnvironmentConfig) -> EnvironmentKind:
    """Raises `ConfigError`, which says what was expected and where."""
    configured_tools(config.tools)  # raises
    if config.sandbox is not None:
        sandbox_maker(config.sandbox)  # raises
    if config.tool_format != AUTO:
        parser_named(config.tool_format)
    if config.use == AGENT:
        agent = agent_config(config)
        function = imports.load_function(agent.function) if agent.function else None
        return _kind(config, None, function)
    if config.use == SINGLE_TURN:
        if config.args:
            raise ConfigError("environment single_turn takes no args: it has [data] and [[reward]]")
        return EnvironmentKind(
            config=config, environment=None, gold=lambda task: [task.answer] if task.answer is not None else []
        )
    target = _target(config.use)
    if inspect.isclass(target) and hasattr(target, "reset") and hasattr(target, "step"):
        return _kind(config, _with_steps(target, config), target)
    if inspect.isclass(target) and hasattr(target, "rollout"):
        environment = _made(_bound(target, config), config)
        return _kind(config, environment, environment)
    if inspect.iscoroutinefunction(target):
        return _kind(config, _FreeForm(_bound(target, config, None)), target)
    raise ConfigError(f"{config.use} is not an environment: {EXPECTED}")


def _made(make: Callable[[], Environment], config: EnvironmentConfig) -> Environment:
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:  # user code: reported as a config error, with its cause
        raise ConfigError(f"environment {config.shown} cannot be made: {type(error).__name__}: {error}") from error


class _FreeForm:
    def __init__(self, rollout: Callable[..., Any]) -> None:
        self.rollout = rollout


def _target(use: str) -> Any:
    if use.endswith(".py"):
        names = [name for name, value in imports.defined_in(use).items() if _is_environment(value)]
        found = f"use {' or '.join(f'{use}:{name}' for name in names)}" if names else f"it has none: {EXPECTED}"
        raise ConfigError(f"{use} is a file, and not an environment in it: {found}")
    if use in BUILT_IN_ENVIRONMENTS:
        return imports.load_function(BUILT_IN_ENVIRONMENTS[use])
    return imports.load_part("environment", use, [*BUILT_BY_RUN, *BUILT_IN_ENVIRONMENTS])


def _is_environment(value: Any) -> bool:
    if inspect.isclass(value):
        return hasattr(value, "rollout") or (hasattr(value, "reset") and hasattr(value, "step"))
    return inspect.iscoroutinefunction(value)


def _with_steps(target: Any, config: EnvironmentConfig) -> MultiTurn:
    """`max_turns` is accepted for every class, whether or not its constructor takes it."""
    max_turns = config.args.get("max_turns")
    if max_turns is not None and (not isinstance(max_turns, int) or max_turns < 1):
        raise ConfigError(f"environment {config.shown}: max_turns must be a whole number from 1, not {max_turns!r}")
    make = _bound(target, config, also=["max_turns"])
    return MultiTurn(
        make,
        config.shown,
        is_quick=is_quick(target),
        max_turns=max_turns,
        parse=None if config.tool_format == AUTO else parser_named(config.tool_format),
        max_rounds=config.max_tool_rounds,
    )


def _bound(
    target: Any, config: EnvironmentConfig, *positional: Any, also: Sequence[str] = ()
) -> functools.partial[Any]:
    """The target with its arguments; `positional` stand for those of the call. An argument that nothing takes is refused."""
    args, signature = accepted(target, config.args), inspect.signature(target)
    others = [getattr(target, name) for name in ("tasks", "gold") if hasattr(target, name)]
    taken = {*args, *also, *(name for other in others for name in accepted(other, config.args))}
    if unknown := [name for name in config.args if name not in taken]:
        raise ConfigError(f"environment.args: {config.use}{signature} takes no {unknown[0]!r}")
    try:
        signature.bind(*positional, **args)
    except TypeError as error:
        raise ConfigError(f"environment.args do not fit {config.use}{signature}: {error}") from error
    return functools.partial(target, **args)


def accepted(function: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the config's arguments that this function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(args)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in args.items() if name in names}


def _kind(config: EnvironmentConfig, environment: Environment | None, has: Any) -> EnvironmentKind:
    tasks, gold, args = getattr(has, "tasks", None), getattr(has, "gold", None), config.args
    return EnvironmentKind(
        config=config,
        environment=environment,
        make_tasks=None if tasks is None else functools.partial(_tasks_of, config, tasks),
        gold=None if gold is None else lambda task: [str(turn) for turn in gold(task, **accepted(gold, args))],
    )


def _tasks_of(config: EnvironmentConfig, tasks: Callable[..., Iterable[Task]], num: int, seed: int) -> list[Task]:
    try:
        return list(tasks(num, seed, **accepted(tasks, config.args)))
    except ConfigError:
        raise
    except Exception as error:  # user code: reported as a data error, with its cause
        raise DataError(f"environment {config.shown}: tasks raised {type(error).__name__}: {error}") from error


def make_tasks(kinds: Sequence[EnvironmentKind], num: int, seed: int) -> list[Task]:
    """Tasks of all environments, in their proportions. With several, the data and the id of a task name its environment."""
    if without := [kind.name for kind in kinds if kind.make_tasks is None]:
        raise DataError(
            f"environment {without[0]} makes no tasks of its own: set one of data.path (a JSONL or Parquet file), data.name "
            "(of `datasets`) and data.toy (a built-in task), or pass records from Python: train(config, data=...)"
        )
    total = sum(kind.config.share for kind in kinds)
    tasks = list[Task]()
    for kind in kinds:
        assert kind.make_tasks is not None
        share = round(num * kind.config.share / total)
        made = _checked(kind.make_tasks(share, seed), kind.name)
        tasks += made if len(kinds) == 1 else [_owned(task, kind.name) for task in made]
    return tasks


def _checked(tasks: Iterable[Any], name: str) -> list[Task]:
    found = list(tasks)
    for task in found:
        if not isinstance(task, Task):
            raise DataError(f"environment {name}: tasks returned {type(task).__name__}: expected millstream.types.Task")
    ids = [task.id for task in found]
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise DataError(f"environment {name}: tasks returned two tasks with the id {twice!r}")
    return found


def _owned(task: Task, name: str) -> Task:
    return structs.replace(task, id=f"{name}/{task.id}", data={"source": name, **task.data, "environment": name})
