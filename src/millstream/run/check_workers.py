"""What rollout workers (`rollout.workers`) cannot do, found before a run starts. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.env.rewards import was_passed
from millstream.errors import ConfigError
from millstream.run.config import RunConfig

INSTEAD = "Set rollout.workers = 0"


def check_workers(config: RunConfig) -> None:
    """Raises `ConfigError`."""
    num = config.rollout.workers
    for what in _refused(config) if num else ():
        raise ConfigError(f"rollout.workers = {num}, and {what}")


def _refused(config: RunConfig) -> Iterator[str]:
    if config.data.sessions or config.data.rollouts is not None:
        key = "sessions" if config.data.sessions else "rollouts"
        yield f"data.{key}: such a run plays no rollouts. {INSTEAD}"
    if config.store.is_own:
        yield f"store.kind = {config.store.kind!r}: workers pack rows for the run's own store. Leave it out. Or: {INSTEAD}"
    if was_passed(config.reward):
        yield (
            "the reward is a Python function that was passed to train, which no other process has. Name it in the config "
            f'(function = "file.py:function"). Or: {INSTEAD}'
        )
    if config.resources.reward_gpus:
        yield (
            f"resources.reward_gpus = {config.resources.reward_gpus:g}: workers start the processes of rewards, and see no "
            f"GPU. Serve the model that rewards, and leave reward_gpus out. Or: {INSTEAD}"
        )
    names = [one.use for one in config.environment] + [one.function for one in config.reward]
    names += [str(one.args.get(key, "")) for one in config.environment for key in ("function", "score")]  # of agents
    if own := [name for name in names if name.startswith("__main__:")]:
        yield f'{own[0]} is of the script that runs, which no other process imports: name it "file.py:name". Or: {INSTEAD}'
    for one in config.environment:
        if one.max_concurrent is None:
            continue
        if one.max_concurrent < config.rollout.workers:
            yield (
                f"environment {one.shown} has max_concurrent = {one.max_concurrent}, less than one for each worker: set "
                f"rollout.workers = {one.max_concurrent} at most, or max_concurrent higher"
            )
        if config.pipeline.is_in_lockstep:
            yield (
                f"environment {one.shown} has max_concurrent = {one.max_concurrent}, with pipeline.max_lag = 0: each worker "
                "has its share of it, and the rollouts of a step take their turns together. Leave max_concurrent out. "
                f"Or: {INSTEAD}"
            )
