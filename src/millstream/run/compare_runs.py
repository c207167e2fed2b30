"""Two run folders side by side: settings that differ, metrics at the same steps, rollouts of the same tasks. No torch."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from millstream.errors import ConfigError, LogError
from millstream.events.metrics import is_step
from millstream.events.rollouts.reader import RolloutDump
from millstream.events.rollouts.text import Decode
from millstream.run.folder import RunFolder
from millstream.run.read_rollouts import RolloutText, as_text, open_dump

MAX_STEPS_SHOWN = 10
TRAINED = ("trained", "kept")  # fates of groups that a batch took
OWN_KEYS = ("run_dir",)  # differ between any two runs
FIRST_METRICS = ("reward", "length", "loss", "lag_mean", "rollouts_per_s", "tokens_per_s")


class SettingPair(Struct, frozen=True, kw_only=True):
    key: str
    values: tuple[str, str]
    """As in the config file; "" where a run does not have the key."""


class MetricPair(Struct, frozen=True, kw_only=True):
    step: int
    metric: str
    values: tuple[Any, Any]


class TaskPair(Struct, frozen=True, kw_only=True):
    """One task in both runs: the group of each that was trained last."""

    task: str
    mean_rewards: tuple[float, float]
    rollouts: tuple[RolloutText, RolloutText]
    """The one with the highest reward of each group."""


class RunComparison(Struct, frozen=True, kw_only=True):
    runs: tuple[str, str]
    settings: list[SettingPair]
    num_steps: tuple[int, int]
    metrics: list[MetricPair]
    tasks: list[TaskPair]
    num_common_tasks: int | None
    """None: one of the runs has no rollouts."""


def compare_runs(first: Path, second: Path, *, num_tasks: int = 3) -> RunComparison:
    """Of the tasks that both runs trained, those whose mean rewards differ the most. Raises `ConfigError` for a folder that is
    not that of a run."""
    folders = RunFolder.of_run(first), RunFolder.of_run(second)
    rows = _metrics(folders[0]), _metrics(folders[1])
    tasks, num_common = _tasks(first, second, num_tasks)
    return RunComparison(
        runs=(str(first), str(second)),
        settings=[
            SettingPair(key=key, values=(one, other))
            for key, (one, other) in differing_settings(
                [tomllib.loads(folder.config.read_text()) for folder in folders]
            )
        ],
        num_steps=(max(rows[0], default=0), max(rows[1], default=0)),
        metrics=list(_metric_pairs(rows[0], rows[1])),
        tasks=tasks,
        num_common_tasks=num_common,
    )


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Keys whose values differ between these tables, each with its value in every one; "" where there is none."""
    flat = [_flat(config) for config in configs]
    for key in sorted({key for one in flat for key in one}):
        values = [one.get(key, "") for one in flat]
        if key.partition(".")[0] not in OWN_KEYS and len(set(values)) > 1:
            yield key, values


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys; a list of tables has its numbers as keys."""
    found: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, list) and any(isinstance(one, dict) for one in value):
            value = {str(number): one for number, one in enumerate(value)}
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.dumps(value, default=str)
    return found


def _metrics(folder: RunFolder) -> dict[int, dict[str, Any]]:
    if not folder.metrics.exists():
        return {}
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    found: dict[int, dict[str, Any]] = {}
    try:
        for line in lines:
            if line.endswith(b"\n"):
                row = json.loads(line)
                own = found.setdefault(int(row["step"]), {})
                own |= (
                    row if is_step(row) else {**row, **own}
                )  # a step's and those of its evaluations: `at` is the step's
    except (ValueError, KeyError, TypeError) as error:
        raise LogError(f"{folder.metrics} cannot be read: {error}") from error
    return found


def _metric_pairs(first: dict[int, dict[str, Any]], second: dict[int, dict[str, Any]]) -> Iterator[MetricPair]:
    """At up to `MAX_STEPS_SHOWN` steps that both runs have: the last one, and others at equal distances before it."""
    common = sorted(first.keys() & second.keys())
    stride = -(-len(common) // MAX_STEPS_SHOWN) or 1
    for step in common[::-1][::stride][::-1]:
        one, other = first[step], second[step]
        for name in (name for name in one if name in other and name != "step"):
            yield MetricPair(step=step, metric=name, values=(one[name], other[name]))


def _tasks(first: Path, second: Path, num: int) -> tuple[list[TaskPair], int | None]:
    try:
        dumps = open_dump(first), open_dump(second)
    except ConfigError:
        return [], None
    trained = _last_trained(dumps[0][0]), _last_trained(dumps[1][0])
    common = [(task, trained[0][task], trained[1][task]) for task in trained[0].keys() & trained[1].keys()]
    common.sort(key=lambda one: (-abs(one[1][1] - one[2][1]), one[0]))
    pairs = []
    for task, one, other in common[:num]:
        best = _best(*dumps[0], one[0]), _best(*dumps[1], other[0])
        if best[0] is not None and best[1] is not None:
            pairs.append(TaskPair(task=task, mean_rewards=(one[1], other[1]), rollouts=(best[0], best[1])))
    return pairs, len(common)


def _last_trained(dump: RolloutDump) -> dict[str, tuple[int, float]]:
    """By task: the group that was trained last, or kept in a run that trains nothing, and the mean of its rewards."""
    found: dict[str, tuple[int, float]] = {}
    for group in dump.groups():
        if group.fate in TRAINED and group.rewards:
            found[group.task_id] = group.group_id, math.fsum(group.rewards) / len(group.rewards)
    return found


def _best(dump: RolloutDump, decode: Decode, group_id: int) -> RolloutText | None:
    """None: its rollouts could not be written."""
    group = dump.group(group_id)
    trained = [] if group is None else [one for one in dump.rollouts(group) if one.fate in TRAINED]
    return as_text(max(trained, key=lambda one: one.reward), decode) if trained else None
