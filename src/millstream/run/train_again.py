"""`data.rollouts`: whether the batches that a run has kept can be trained again with a config. Light: imports no torch."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

from millstream.algo import needs_critic
from millstream.config import load
from millstream.errors import ConfigError, DataError
from millstream.events import SettingChanged
from millstream.events.rollouts.reader import RolloutDump
from millstream.events.sinks import read_kinds
from millstream.pipeline.recorded import RecordedBatches
from millstream.run.config import RunConfig, with_absolute_paths
from millstream.run.folder import RunFolder
from millstream.run.missing_rollouts import missing_rollouts

SAME_KEYS = (
    *("model.path", "model.tiny", "model.dtype", "seed", "warmup", "learner.lora"),  # the weights at the start
    *("rollout.group_size", "rollout.extra_members", "rollout.min_group_size", "rollout.temperature"),
    *("pipeline.groups_per_step", "pipeline.max_lag", "pipeline.surplus", "pipeline.filter_zero_signal"),
    *("pipeline.filter", "pipeline.filter_args"),
)
"""Keys that must be those of the run: its batches are what they are, and begin with its weights. Others, such as the learning
rate, may differ; the result is then another one."""
DECISIVE = frozenset(["model", "rollout", "pipeline", "algorithm", "learner", "reference", "reward"])
"""Tables that decide over the weights."""
INDECISIVE = frozenset(["rollout.keep_gb"])


def recorded_batches(config: RunConfig) -> RecordedBatches | None:
    """The batches to train; None: rollouts are new. Raises `ConfigError`, or `DataError` where some were not kept."""
    if config.data.rollouts is None:
        return None
    source = Path(config.data.rollouts)
    _check_keys(config, source)
    _check_history(RunFolder.of_run(source))
    dump, steps = RolloutDump(source), config.pipeline.steps
    num_away, num_lost, by_version = missing_rollouts(dump, RunFolder(source).events)
    if num_missing := sum(num for version, num in by_version.items() if version < steps):
        raise DataError(
            f"data.rollouts = {source}: {num_missing} rollouts that its first {steps} steps trained are missing. Of the whole "
            f"run, {num_away} rollouts were sampled away by its rollout.keep_gb, and {num_lost} were not written. The first "
            f"{min(by_version)} steps are whole. Set rollout.keep_gb higher in the run whose rollouts are to be trained"
        )
    batches = RecordedBatches(dump, groups_per_step=config.pipeline.groups_per_step)
    if steps > len(batches) and batches.num_beyond_gap:
        raise DataError(
            f"data.rollouts = {source}: the rollouts of step {len(batches) + 1} are missing, and {batches.num_beyond_gap} "
            "later steps have theirs: its batches are not whole. Train the rollouts of another run"
        )
    if steps > len(batches):
        raise DataError(
            f"pipeline.steps = {steps}, and data.rollouts = {source} has {len(batches)} finished batches: set "
            f"pipeline.steps = {len(batches)}"
        )
    return batches


def _check_keys(config: RunConfig, source: Path) -> None:
    if needs_critic(config.algorithm):
        raise ConfigError(
            f'algorithm.advantage = "{config.algorithm.advantage}" with data.rollouts: a critic learns from rollouts as they '
            "are settled, and these are settled already"
        )
    for key, value in (("proximal", config.proximal), ("pipeline.rollouts_only", config.pipeline.rollouts_only)):
        if value:
            raise ConfigError(f"{key} is set, and data.rollouts: leave one of them out")
    ours, theirs = with_absolute_paths(config), load(RunFolder.of_run(source).config, RunConfig)
    for key in SAME_KEYS:
        found, expected = _value(ours, key), _value(theirs, key)
        if found != expected:
            raise ConfigError(
                f"{key} = {found}, and the run whose rollouts are to be trained ({source}) has {expected}: set it to that"
            )


def _check_history(source: RunFolder) -> None:
    """Its batches were all trained with one config, from the weights that this config begins with."""
    if source.start.is_dir():
        raise ConfigError(
            f"data.rollouts = {source.path}: that run began with the checkpoint of another one (--from), and its batches are "
            "for those weights. Train the rollouts of a run that began with its own model"
        )
    changed = {event.key for _, event in read_kinds(source.events, SettingChanged) if isinstance(event, SettingChanged)}
    if found := sorted(key for key in changed if key.partition(".")[0] in DECISIVE and key not in INDECISIVE):
        raise ConfigError(
            f"data.rollouts = {source.path}: that run changed {', '.join(found[:4])}: no one config trains "
            "what it trained. Train the rollouts of a run whose settings did not change"
        )


def _value(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)
