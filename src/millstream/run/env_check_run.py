"""What `millstream env check` does: from what was typed to environments, tasks and verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from millstream import config as configs
from millstream.env.config import EnvironmentConfig
from millstream.env.data import read
from millstream.env.registry import name_of
from millstream.env.resolve import EnvironmentKind, find_environment
from millstream.env.rewards import RewardConfig
from millstream.errors import ConfigError
from millstream.run.config import RunConfig
from millstream.run.env_check import Verdict, examine
from millstream.types import Task


def check(
    use: str | None, args: Sequence[str], path: Path | None, *, process: bool = False, num_tasks: int = 8
) -> list[Verdict]:
    """Of one environment, or of all that a config names."""
    if use is None and path is None:
        raise ConfigError("type what to check (millstream env check file.py:Name), or a config (--config RUN.toml)")
    config = None if path is None else configs.load(path, RunConfig)
    tables = _tables(use, args, config)
    if process:
        tables = [structs.replace(table, process=True) for table in tables]
    kinds = [find_environment(table) for table in tables]
    rewards = (RewardConfig(),) if config is None else config.reward
    tasks = [_tasks(kind, [kind.name for kind in kinds], config, num_tasks) for kind in kinds]

    async def all_of_them() -> list[Verdict]:
        return [await examine(kind, of, rewards=rewards) for kind, of in zip(kinds, tasks, strict=True)]

    return asyncio.run(all_of_them())


def _tables(use: str | None, args: Sequence[str], config: RunConfig | None) -> list[EnvironmentConfig]:
    given = _given(args)
    if use is None:
        assert config is not None
        if given:
            raise ConfigError("--args goes with one environment: type which (millstream env check USE --args ...)")
        return list(config.environment)
    named = [] if config is None else [one for one in config.environment if use in (one.use, one.shown)]
    table = named[0] if named else EnvironmentConfig(use=use)
    return [structs.replace(table, args={**table.args, **given})]


def _given(args: Sequence[str]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for arg in args:
        key, equals, _ = arg.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ConfigError(f"--args {arg}: expected KEY=VALUE, such as --args size=5")
        configs._override(data, arg)
    return data


def _tasks(kind: EnvironmentKind, names: Sequence[str], config: RunConfig | None, num_tasks: int) -> list[Task]:
    """Those of the data set that are its own, or those that it makes."""
    data = None if config is None else config.data
    if config is not None and data is not None and (data.path or data.name or data.toy):
        found = read(structs.replace(data, holdout=0), seed=config.seed).tasks
        return [task for task in found if len(names) == 1 or name_of(task, names) == kind.name][:num_tasks]
    if kind.make_tasks is None:
        raise ConfigError(
            f"environment {kind.name} makes no tasks of its own: give the data set with --config RUN.toml"
        )
    return kind.make_tasks(num_tasks, 0 if config is None else config.seed)


def lines(verdict: Verdict) -> Iterator[str]:
    played = f"{verdict.num_tasks} tasks, {verdict.num_episodes} episodes"
    yield from map(str, verdict.findings)
    yield f"{verdict.environment}: {'fit' if verdict.is_fit else 'not fit'} ({played})"
