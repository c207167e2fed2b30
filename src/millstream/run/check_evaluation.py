"""The `[[evaluation]]` tables of a config: what they name is found, their tasks are read. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import structs

from millstream.env.config import SINGLE_TURN, check_environments
from millstream.env.data import DataConfig, DataSet, check_hub_data, read
from millstream.env.registry import name_of
from millstream.env.resolve import EnvironmentKind, find_environment, make_tasks
from millstream.env.rewards import check_reward, find_reward
from millstream.errors import ConfigError
from millstream.run.best import split_metric
from millstream.run.check_machine import PlayedTasks, check_answers, checked_room
from millstream.run.config import EvaluationConfig, RunConfig
from millstream.seeds import derive_seed


def check_evaluation_tables(config: RunConfig) -> None:
    """Checks across tables, and of `checkpoint.keep_best`. Opens no file."""
    names = [one.name for one in config.evaluations]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f'two [[evaluation]] tables are named {min(twice)!r}: give each a name of its own: name = "..."'
        )
    http = config.engine.http
    for one in config.evaluations:
        if one.environment:
            check_environments(one.environment)
        if one.top_p < 1 and http is not None and http.flavour == "sglang":
            raise ConfigError(
                f"evaluation {one.name}: top_p = {one.top_p:g} with SGLang, whose log-probabilities are those of all tokens: "
                "leave top_p out, or evaluate checkpoints with `millstream eval`"
            )
    if config.checkpoint.keep_best is not None:
        _check_keep_best(config, config.checkpoint.keep_best)


def _check_keep_best(config: RunConfig, keep_best: str) -> None:
    name, _ = split_metric(config)
    (table,) = (one for one in config.evaluations if one.name == name)
    if table.is_held_out and not config.data.holdout:
        raise ConfigError(
            f"checkpoint.keep_best = {keep_best!r}, and the evaluation {name} has no tasks: data.holdout = 0. Set data.holdout "
            "higher, or give the evaluation data of its own"
        )
    if table.every_steps is None:
        raise ConfigError(
            f"checkpoint.keep_best = {keep_best!r}, and the evaluation {name} is not made while training runs: there would be "
            "nothing to choose from. Set its every_steps"
        )


def kinds_of(one: EvaluationConfig, config: RunConfig) -> list[EnvironmentKind]:
    return [find_environment(environment) for environment in one.environment or config.environment]


def read_tasks(one: EvaluationConfig, kinds: Sequence[EnvironmentKind], *, seed: int) -> DataSet:
    """All tasks of an evaluation's own data. Tasks that are made on the spot are others than those of training."""
    data, seed = one.data or DataConfig(size=one.tasks or DataConfig().size), derive_seed(seed, "evaluation", one.name)
    found = read(structs.replace(data, holdout=0), seed=seed, make=lambda num, seed: make_tasks(kinds, num, seed))
    for task in found.tasks:
        name_of(task, [kind.name for kind in kinds])
    return found


@contextmanager
def of_evaluation(name: str) -> Iterator[None]:
    """Errors say which evaluation they are of; `name` is empty for training."""
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        raise type(error)(f"evaluation {name}: {error}") from error


def played_in(one: EvaluationConfig, config: RunConfig, data: DataSet) -> PlayedTasks:
    """What an evaluation plays: tasks of its own, or those that are held out of `data`."""
    kinds = kinds_of(one, config)
    found = data if one.is_held_out else read_tasks(one, kinds, seed=config.seed)
    tasks = (found.held_out if one.is_held_out else found.tasks)[: one.tasks]
    most, key = one.max_tokens or config.rollout.max_tokens, "max_tokens" if one.max_tokens else "rollout.max_tokens"
    return PlayedTasks(kinds, structs.replace(found, train=(), held_out=tasks), most, one.name, key)


def checked_evaluations(
    data: DataSet | None, played: list[PlayedTasks], is_start: bool, config: RunConfig
) -> Iterator[str]:
    """What the tables name is there, and fits into the model's context: in words, one line each. What they play is put into
    `played`. `data`: the run's; None: it is on the hub."""
    for one in config.evaluations:
        with of_evaluation(one.name):
            yield from _checked(one, data, played, is_start, config)


def _checked(
    one: EvaluationConfig, data: DataSet | None, played: list[PlayedTasks], is_start: bool, config: RunConfig
) -> Iterator[str]:
    for reward in one.reward:
        check_reward(find_reward(reward.function), reward)
        yield f"checked: the reward {reward.function} of the evaluation {one.name} is there, and takes its arguments"
    if one.max_tokens is not None:
        check_answers(config, one.max_tokens, "max_tokens")
    if one.reward and one.environment and all(kind.config.use != SINGLE_TURN for kind in kinds_of(one, config)):
        raise ConfigError("its environments have rewards of their own: leave its reward out")
    name = None if one.data is None else one.data.name
    if name is not None:
        check_hub_data(name)
    if name is not None and not is_start and not Path(name).is_dir():
        yield f"not checked: the data set {name} of the evaluation {one.name}, which the run loads"
    elif data is not None or not one.is_held_out:
        found = played_in(one, config, data or DataSet(train=(), held_out=()))
        warnings = list(checked_room(config, found))
        played.append(found)
        if not one.is_held_out:
            yield from (f"{warning}, for the evaluation {one.name}" for warning in warnings)
            yield f"checked: the evaluation {one.name} has {len(found.data.held_out)} tasks, {one.samples} samples of each"
