"""The `[[evaluation]]` tables of a config: what they name is found, their tasks are read. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import structs

from millstream.env.config import SINGLE_TURN, check_environments
from millstream.env.data import DataConfig, DataSet, read
from millstream.env.registry import name_of
from millstream.env.resolve import EnvironmentKind, find_environment, make_tasks
from millstream.env.rewards import check_reward, find_reward
from millstream.errors import ConfigError, DataError
from millstream.run.best import split_metric
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
    try:
        found = read(structs.replace(data, holdout=0), seed=seed, make=lambda num, seed: make_tasks(kinds, num, seed))
        for task in found.tasks:
            name_of(task, [kind.name for kind in kinds])
    except DataError as error:
        raise DataError(f"evaluation {one.name}: {error}") from error
    return found


def checked_evaluations(config: RunConfig) -> Iterator[str]:
    """What the tables name is there: in words, one line each."""
    for one in config.evaluations:
        for reward in one.reward:
            check_reward(find_reward(reward.function), reward)
            yield f"checked: the reward {reward.function} of the evaluation {one.name} is there, and takes its arguments"
        if one.is_held_out:
            continue
        kinds = kinds_of(one, config)
        if one.environment and all(kind.config.use != SINGLE_TURN for kind in kinds) and one.reward:
            raise ConfigError(
                f"evaluation {one.name}: its environments have rewards of their own: leave its reward out"
            )
        if one.data is not None and one.data.name is not None:
            yield f"not checked: the data set {one.data.name} of the evaluation {one.name}, which the run loads"
            continue
        num_tasks = len(read_tasks(one, kinds, seed=config.seed).tasks)
        num_used = num_tasks if one.tasks is None else min(num_tasks, one.tasks)
        yield f"checked: the evaluation {one.name} has {num_used} tasks, {one.samples} samples of each"
