"""What can be wrong with a config and be found without a run: data, environments, rewards, the model's folder. Light: imports
no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from millstream import imports
from millstream.cluster import resources
from millstream.engine.vllm.config import check_installed
from millstream.env.config import SINGLE_TURN
from millstream.env.data import read
from millstream.env.registry import name_of
from millstream.env.resolve import EnvironmentKind, find_environment, make_tasks
from millstream.env.rewards import check_reward, find_reward
from millstream.env.sandbox.sandbox import what_is_contained
from millstream.errors import ConfigError
from millstream.model.locate import check_path, check_tokenizer
from millstream.run.config import RunConfig, server_token


def check_parts(config: RunConfig) -> list[str]:
    """Raises what a run would raise. What was looked at, and what was not, in words."""
    kinds = [find_environment(one) for one in config.environment]
    return [
        *_checked_data(config, kinds),
        *_checked_environments(kinds),
        *_checked_rewards(config),
        *_checked_algorithm(config),
        *_checked_model(config),
        *_checked_engine(config),
        *_checked_resources(config),
    ]


def _checked_data(config: RunConfig, kinds: Sequence[EnvironmentKind]) -> Iterator[str]:
    if config.data.name is not None:
        yield f"not checked: the data set {config.data.name}, which the run loads"
    else:
        data = read(config.data, seed=config.seed, make=lambda num, seed: make_tasks(kinds, num, seed))
        for task in data.tasks:
            name_of(task, [kind.name for kind in kinds])
        yield f"checked: {len(data.train)} tasks to train on, {len(data.held_out)} held out"


def _checked_environments(kinds: Sequence[EnvironmentKind]) -> Iterator[str]:
    for kind in kinds:
        if kind.environment is not None:
            yield f"checked: the environment {kind.name} is there"


def _checked_rewards(config: RunConfig) -> Iterator[str]:
    if all(one.use != SINGLE_TURN for one in config.environment):
        return
    for reward in config.reward:
        check_reward(find_reward(reward.function), reward)
        yield f"checked: the reward {reward.function} is there, and takes its arguments"
        if reward.function == "python_tests":
            yield f"checked: {what_is_contained().words()}"


def _checked_algorithm(config: RunConfig) -> Iterator[str]:
    """A loss of the user's imports torch, most likely: only where there is one."""
    for what, name in (("advantage", config.algorithm.advantage), ("loss", config.algorithm.loss)):
        if imports.is_own(name):
            imports.load(name)
            yield f"checked: the {what} {name} is there"


def _checked_model(config: RunConfig) -> Iterator[str]:
    reference = None if config.reference is None else config.reference.path
    critic = None if config.critic is None else config.critic.path
    for key, path in (("model.path", config.model.path), ("reference.path", reference), ("critic.path", critic)):
        if path is None:
            continue
        check_path(path, key)
        if not Path(path).is_dir():
            yield f"not checked: the model {path}, which is no folder here; the run asks the Hugging Face hub for it"
            continue
        check_tokenizer(path)
        yield f"checked: {path} is a checkpoint's folder with a tokenizer"


def _checked_engine(config: RunConfig) -> Iterator[str]:
    """Servers need not be up yet."""
    if config.engine.kind == "vllm":
        check_installed()
        yield "checked: vLLM is installed"
    http = config.engine.http
    if http is None:
        return
    server_token(http)
    folder = Path(http.folder or "")
    nearest = next(place for place in (folder.resolve(), *folder.resolve().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"engine.http.folder = {http.folder!r}: {nearest} is no folder that can be written to")
    yield f"checked: weights can be written to {folder}"
    yield f"not checked: the servers at {', '.join(http.urls)}, which the run asks at its start"


def _checked_resources(config: RunConfig) -> Iterator[str]:
    """Neither Ray nor a GPU need be here: a config is often written on another machine than it runs on."""
    if config.runtime != "ray":
        return
    said = resources.words(
        config.resources,
        replicas=config.engine.replicas,
        ranks=config.learner.ranks,
        has_proximal=config.proximal is not None,
    )
    yield from (f"checked: {line}" for line in said)
    if find_spec("ray") is None:
        yield "not checked: Ray, which is not installed here"
    if config.resources.address != "local":
        patience = config.resources.patience_s
        yield f"not checked: whether the cluster has that; the run waits {patience:g} s for it"
