"""The one walk that checks a config: combinations of keys, then what they name (data, environments, rewards, models, folders).

`--dry-run` and the start of a run use the same walk. All errors are found before one is raised. Light: imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from millstream import imports
from millstream.algo import check_algorithm, needs_critic, reads_proximal
from millstream.cluster.resources import ResourcesConfig, placement_lines, placement_of
from millstream.config import to_toml
from millstream.engine.vllm.config import check_installed
from millstream.env.config import SINGLE_TURN, check_environments
from millstream.env.data import DataSet, PassedData, read
from millstream.env.registry import name_of
from millstream.env.resolve import EnvironmentKind, find_environment, make_tasks
from millstream.env.rewards import check_reward, find_reward
from millstream.env.sandbox.sandbox import what_is_contained
from millstream.errors import ConfigError, MillstreamError
from millstream.model.locate import check_path, check_tokenizer
from millstream.model.lora import check_lora
from millstream.paths import kind_of
from millstream.run.config import RunConfig, server_token, weight_ways


class CheckedConfig(NamedTuple):
    """A config without errors: what was checked and what was not, and what was loaded for it."""

    findings: list[str]
    kinds: list[EnvironmentKind]
    data: DataSet | None  # None: a named data set, which only a run loads


def check_config(
    config: RunConfig, *, is_reward_passed: bool = False, data_passed: PassedData | None = None
) -> CheckedConfig:
    """Walk the whole config. Raises the first error, with the other ones as notes. `is_reward_passed`: the reward is a Python
    function, and the config only has its name; `data_passed`: records that the config does not name."""
    check_combinations(config)
    findings, errors, kinds, data = list[str](), list[MillstreamError](), list[EnvironmentKind](), None
    try:
        kinds = [find_environment(one) for one in config.environment]
        data = _read_data(config, kinds, data_passed)
        findings += _checked_data(config, kinds, data)
    except MillstreamError as error:
        errors.append(error)
    rewards = () if is_reward_passed else (_checked_rewards,)
    steps = (_checked_functions, _checked_models, _checked_engine, _checked_resources, _checked_run_dir)
    for step in (*rewards, *steps):
        try:
            findings += step(config)
        except MillstreamError as error:
            errors.append(error)
    _raise(errors)
    return CheckedConfig(findings, kinds, data)


def check_combinations(config: RunConfig) -> None:
    """Walk the combinations of keys, which no single component can check. Raises as `check_config` does; opens no file."""
    errors = list[MillstreamError]()
    steps: tuple[Callable[[RunConfig], object], ...] = (
        to_toml,  # raises unless it is read back as it is written; for a config made in Python, that checks every value
        _check_algorithm,
        _check_scorers,
        _check_proximal,
        _check_engine,
        _check_resources,
        _check_lora,
        _check_steps,
        _check_environments,
    )
    for step in steps:
        try:
            step(config)
        except MillstreamError as error:
            errors.append(error)
    _raise(errors)


def _raise(errors: Sequence[MillstreamError]) -> None:
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"And: {other}")
        raise errors[0]


# ---- combinations ----------------------------------------------------------------------------------------------------


def _check_algorithm(config: RunConfig) -> None:
    check_algorithm(
        config.algorithm,
        max_lag=config.pipeline.max_lag,
        group_size=config.rollout.group_size,
        temperature=config.rollout.temperature,
        mini_batches=config.learner.mini_batches,
        max_tokens=config.rollout.max_tokens,
        filter_zero_signal=config.pipeline.filter_zero_signal,
        is_one_turn=all(one.use == SINGLE_TURN for one in config.environment),
    )


def _check_scorers(config: RunConfig) -> None:
    if config.critic is not None and not needs_critic(config.algorithm):
        raise ConfigError(
            f'a [critic] table, and algorithm.advantage = "{config.algorithm.advantage}" needs none: leave it out, or set '
            'algorithm.advantage = "gae"'
        )
    if config.algorithm.advantage == "distillation" and (config.reference is None or config.reference.path is None):
        raise ConfigError(
            'algorithm.advantage = "distillation" needs a teacher: set reference.path to a checkpoint with the same tokenizer'
        )


def _check_proximal(config: RunConfig) -> None:
    if config.proximal is None:
        return
    if config.learner.mini_batches == 1:
        raise ConfigError(
            "a [proximal] table, and learner.mini_batches = 1: with one optimizer step a batch the proximal policy is the "
            "policy itself. Leave the table out, or set learner.mini_batches to 2 or more"
        )
    if not reads_proximal(config.algorithm):
        raise ConfigError(
            f'a [proximal] table, and algorithm.loss = "{config.algorithm.loss}" does not look at the proximal policy: leave '
            'it out, or set algorithm.loss = "decoupled_ppo"'
        )


def _check_engine(config: RunConfig) -> None:
    http = config.engine.http
    if config.pipeline.is_in_lockstep and isinstance(config.engine.speculation, int):
        raise ConfigError(
            f"engine.speculation = {config.engine.speculation} with pipeline.max_lag = 0: drafts would make what is decoded "
            "together depend on time. Leave engine.speculation out, or set pipeline.lockstep = false"
        )
    if config.rollout.stop and config.engine.kind != "torch":
        raise ConfigError(
            f'rollout.stop with engine.kind = "{config.engine.kind}": stop strings are looked for by our own engine. Leave '
            'rollout.stop out, or set engine.kind = "torch"'
        )
    if http is None:
        return
    if http.weights == "none":
        raise ConfigError(
            'engine.http.weights = "none", and a run has new weights for its engine after every step: set it to "disk", with '
            "engine.http.folder"
        )
    if config.learner.lora is not None:
        raise ConfigError(
            '[learner.lora] with engine.kind = "http": servers take whole models. Leave [learner.lora] out'
        )
    if config.pipeline.is_in_lockstep:
        raise ConfigError(
            'pipeline.max_lag = 0 with engine.kind = "http": requests reach a server in no order that could be repeated. Set '
            "pipeline.lockstep = false, or max_lag above 0"
        )


def _check_resources(config: RunConfig) -> None:
    if config.runtime == "local":
        if config.resources != ResourcesConfig():
            raise ConfigError(
                'a [resources] table, and runtime = "local": set runtime = "ray", or leave the table out (--set resources=)'
            )
        return
    placement_of(config.resources, replicas=config.engine.replicas, ranks=config.learner.ranks)
    weight_ways(config, is_one_node=config.resources.address == "local")
    if config.engine.kind == "vllm":
        raise ConfigError(
            'engine.kind = "vllm" with runtime = "ray": start vLLM\'s servers yourself and set engine.kind = "http", or set '
            'engine.kind = "torch"'
        )
    if config.engine.process is not None:
        raise ConfigError(
            'engine.process with runtime = "ray": every engine has a process there. Leave engine.process out'
        )
    if config.model.device != "auto":
        raise ConfigError(
            f'model.device = "{config.model.device}" with runtime = "ray": resources.engine_gpus and learner_gpus say what '
            "has a GPU. Leave model.device out"
        )
    for key, table in (("reference", config.reference), ("critic", config.critic), ("proximal", config.proximal)):
        if table is not None and table.device is not None:
            raise ConfigError(
                f'{key}.device = "{table.device}" with runtime = "ray": resources.stage_gpus says whether the reference, the '
                f"critic and the proximal policy have a GPU. Leave {key}.device out"
            )


def _check_lora(config: RunConfig) -> None:
    if config.learner.lora is None:
        return
    if config.learner.ranks > 1:
        raise ConfigError(
            f"[learner.lora] with learner.ranks = {config.learner.ranks}: adapters are trained on one device. Set "
            "learner.ranks = 1, or leave [learner.lora] out"
        )
    if config.engine.kind == "vllm":
        raise ConfigError(
            '[learner.lora] with engine.kind = "vllm": adapters go to our own engine alone. Set engine.kind = "torch", or '
            "leave [learner.lora] out"
        )
    check_lora(config.learner.lora)


def _check_steps(config: RunConfig) -> None:
    groups, minis = config.pipeline.groups_per_step, config.learner.mini_batches
    if groups % minis:
        raise ConfigError(
            f"learner.mini_batches = {minis} does not divide pipeline.groups_per_step = {groups}: "
            "every optimizer step takes the same number of groups"
        )
    if not config.pipeline.steps and config.warmup is None:
        raise ConfigError(
            "pipeline.steps = 0 means supervised training alone, and there is no [warmup] table: add one, or set "
            "pipeline.steps to at least 1"
        )


def _check_environments(config: RunConfig) -> None:
    check_environments(config.environment)
    rollouts = config.pipeline.groups_per_step * config.rollout.num_members
    for one in config.environment:
        if config.pipeline.is_in_lockstep and one.max_concurrent is not None and one.max_concurrent < rollouts:
            raise ConfigError(
                f"environment {one.shown}: max_concurrent = {one.max_concurrent} does not go with pipeline.max_lag = 0, where "
                f"all {rollouts} rollouts of a step take their turns together: leave it out, set lockstep = false, or "
                "max_lag above 0"
            )
    if not config.reward and any(one.use == SINGLE_TURN for one in config.environment):
        raise ConfigError("no [[reward]] table: without a reward there is nothing to learn")


# ---- what the config names -------------------------------------------------------------------------------------------


def _read_data(config: RunConfig, kinds: Sequence[EnvironmentKind], passed: PassedData | None) -> DataSet | None:
    if config.data.name is not None and passed is None:
        return None
    return read(config.data, seed=config.seed, make=lambda num, seed: make_tasks(kinds, num, seed), passed=passed)


def _checked_data(config: RunConfig, kinds: Sequence[EnvironmentKind], data: DataSet | None) -> Iterator[str]:
    if data is None:
        yield f"not checked: the data set {config.data.name}, which the run loads"
    else:
        for task in data.tasks:
            name_of(task, [kind.name for kind in kinds])
        yield f"checked: {len(data.train)} tasks to train on, {len(data.held_out)} held out"
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


def _checked_functions(config: RunConfig) -> Iterator[str]:
    """The user's own advantage and loss. Loading a loss most likely imports torch, so only where there is one."""
    for what, name in (("advantage", config.algorithm.advantage), ("loss", config.algorithm.loss)):
        if imports.is_own(name):
            imports.load_function(name)
            yield f"checked: the {what} {name} is there"


def _checked_models(config: RunConfig) -> Iterator[str]:
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
    places = (folder.absolute(), *folder.absolute().parents)
    nearest = next(place for place in places if kind_of(place, "engine.http.folder") is not None)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"engine.http.folder = {http.folder!r}: {nearest} is no folder that can be written to")
    yield f"checked: weights can be written to {folder}"
    yield f"not checked: the servers at {', '.join(http.urls)}, which the run asks at its start"


def _checked_run_dir(config: RunConfig) -> Iterator[str]:
    """It need not exist."""
    if config.run_dir is not None and kind_of(config.run_dir, "run_dir") not in (None, "folder"):
        raise ConfigError(f"run_dir = {config.run_dir!r} is a file: expected a folder, or a name that is free")
    yield from ()


def _checked_resources(config: RunConfig) -> Iterator[str]:
    """Neither Ray nor a GPU need be here: a config is often written on another machine than it runs on."""
    if config.runtime != "ray":
        return
    lines = placement_lines(
        config.resources,
        replicas=config.engine.replicas,
        ranks=config.learner.ranks,
        has_proximal=config.proximal is not None,
    )
    yield from (f"checked: {line}" for line in lines)
    if find_spec("ray") is None:
        yield "not checked: Ray, which is not installed here"
    if config.resources.address != "local":
        patience = config.resources.patience_s
        yield f"not checked: whether the cluster has that; the run waits {patience:g} s for it"
