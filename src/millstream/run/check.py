"""The one walk that checks a config: combinations of keys, then what they name (data, environments, rewards, models, folders).

`--dry-run` and the start of a run use the same walk. All errors are found before one is raised. Light: imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from millstream.algo import advantage_of, check_algorithm, needs_critic, reads_proximal
from millstream.cluster.resources import ResourcesConfig, placement_lines, stage_lines
from millstream.config import to_toml
from millstream.engine.vllm.config import VllmConfig, check_args, check_installed, is_installed
from millstream.env.config import AGENT, BUILT_BY_RUN, SINGLE_TURN, check_environments
from millstream.env.data import DataSet, PassedData, check_hub_data, read
from millstream.env.registry import check_tasks, single_turn_tasks
from millstream.env.resolve import EnvironmentKind, find_environment, make_tasks
from millstream.env.rewards import PassedRewards, check_reward, prepare_rewards, swapped_parameters, try_rewards
from millstream.env.sandbox.programs import what_is_contained
from millstream.env.sandbox.walled import check_walls
from millstream.errors import ConfigError, MillstreamError
from millstream.model.locate import check_path, check_tokenizer, check_weights
from millstream.model.lora import check_lora
from millstream.paths import writable_parent
from millstream.run.check_evaluation import check_evaluation_tables, checked_evaluations, of_evaluation
from millstream.run.check_machine import PlayedTasks, check_answers, checked_disk, checked_machine, checked_room
from millstream.run.check_outside import check_outside, checked_outside
from millstream.run.check_workers import check_workers
from millstream.run.config import RunConfig, server_token, weight_ways
from millstream.run.device import find_device, find_shape, heads_of, with_places
from millstream.run.folder import check_free
from millstream.run.one_gpu import check_share
from millstream.run.own_parts import check_own_parts, checked_own_parts
from millstream.run.places import (
    Machine,
    check_heads,
    check_model_fits,
    place,
    placed_bundles,
    stage_numbers,
)
from millstream.run.tracking.config import alert_url, check_traces, check_trackers, listening_socket, split_address
from millstream.run.train_again import recorded_batches
from millstream.run.weight_ways import checked_ways

MAX_LOOKED_AT = 1000  # tasks among which those with a gold answer are looked for
MAX_TRIED = 8  # tasks that a reward may fail before it is refused


class CheckedConfig(NamedTuple):
    """A config without errors: what was checked and what was not, and what was loaded for it."""

    findings: list[str]
    kinds: list[EnvironmentKind]
    data: DataSet | None  # None: one of the hub, which only a start loads
    played: list[PlayedTasks]  # the tasks of training and of evaluations, where they are read


def check_config(
    config: RunConfig,
    *,
    reward: PassedRewards | None = None,
    data_passed: PassedData | None = None,
    is_start: bool = False,
    is_new: bool = True,
    machine: Machine | None = None,
) -> CheckedConfig:
    """Walk the whole config. Raises the first error, with the other ones as notes. `reward`: functions that were passed from
    Python, of which the config only has the names; `data_passed`: records that the config does not name. `is_start`: a run
    follows (see `env.rewards.trial`). `is_new`: it has no folder yet. `machine`: its GPUs; None: they are not known."""
    check_combinations(config)
    findings, errors, kinds, data = list[str](), list[MillstreamError](), list[EnvironmentKind](), None
    played = list[PlayedTasks]()
    try:
        kinds = [find_environment(one) for one in config.environment]
        data = _read_data(config, kinds, data_passed, is_start=is_start)
        findings += _checked_data(config, kinds, data)
        if data is not None:
            played.append(PlayedTasks(kinds, data, config.rollout.max_tokens))
    except MillstreamError as error:
        errors.append(error)
    steps: list[Callable[[RunConfig], Iterable[str]]]
    steps = [
        partial(_checked_rewards, reward),
        _checked_sandboxes,
        checked_own_parts,
        _checked_models,
        partial(_checked_engine, machine),
        checked_outside,
        partial(_checked_places, machine),
        partial(checked_machine, machine),
        _checked_recorded,
        _checked_watching,
        partial(checked_evaluations, data, played, is_start),
    ]
    steps += [_checked_run_dir] if is_new else []
    steps += [partial(_checked_room, played)]
    for step in steps:
        try:
            findings += step(config)
        except MillstreamError as error:
            errors.append(error)
    if not errors and is_new:
        for one in played:
            findings += _tried_rewards(one, reward, config, is_start=is_start)
    _raise(errors)
    return CheckedConfig(findings, kinds, data, played)


def check_combinations(config: RunConfig) -> None:
    """Walk the combinations of keys, which no single component can check. Raises as `check_config` does; opens no file."""
    errors = list[MillstreamError]()
    steps: tuple[Callable[[RunConfig], object], ...] = (
        to_toml,  # raises unless it is read back as it is written; for a config made in Python, that checks every value
        _check_sessions,
        check_workers,
        _check_algorithm,
        _check_scorers,
        _check_proximal,
        _check_rollouts_only,
        _check_engine,
        check_own_parts,
        check_outside,
        _check_resources,
        lambda config: check_lora(config.learner.lora),
        _check_steps,
        _check_environments,
        lambda config: check_trackers(config.trackers),
        lambda config: check_traces(config.traces),
        check_evaluation_tables,
    )
    for step in steps:
        try:
            step(config)
        except MillstreamError as error:
            errors.append(error)
    _raise(errors)


def _raise(errors: Sequence[MillstreamError]) -> None:
    if errors:
        for other in dict.fromkeys(map(str, errors[1:])):  # two checks may find the same
            if other != str(errors[0]):
                errors[0].add_note(f"And: {other}")
        raise errors[0]


# ---- combinations ----------------------------------------------------------------------------------------------------


def _check_sessions(config: RunConfig) -> None:
    """A run that learns from its use has no groups: a session is played once."""
    if not config.data.sessions:
        return
    advantage, what = config.algorithm.advantage, "a run that learns from sessions"
    if advantage_of(config.algorithm).compares_members or config.rollout.num_members > 1:
        raise ConfigError(
            f'{what}, and algorithm.advantage = "{advantage}" with rollout.group_size = {config.rollout.group_size}: a session '
            "has no others to be compared with. Set an advantage without groups: --set algorithm.name=reinforce_plus_plus "
            "--set rollout.group_size=1 --set pipeline.filter_zero_signal=false; or algorithm.name=ppo, with a critic"
        )
    if config.pipeline.max_lag < 1:
        raise ConfigError(
            f"{what}, and pipeline.max_lag = {config.pipeline.max_lag:g}: rewards come later. Set it to 1 or more"
        )
    if config.pipeline.overdue != "wait" or config.pipeline.surplus != "carry_over":
        raise ConfigError(
            f'{what}, and pipeline.overdue = "{config.pipeline.overdue}", pipeline.surplus = "{config.pipeline.surplus}": a '
            'session that was rewarded is neither generated again nor thrown away. Set "wait" and "carry_over"'
        )
    if (
        config.pipeline.rollouts_only
        or config.data.rollouts is not None
        or config.algorithm.overlong_buffer is not None
    ):
        raise ConfigError(f"{what}: leave pipeline.rollouts_only, data.rollouts and algorithm.overlong_buffer out")


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


def _check_rollouts_only(config: RunConfig) -> None:
    if not config.pipeline.rollouts_only:
        return
    if not config.rollout.keep_gb or not config.pipeline.steps:
        key = "pipeline.steps" if config.rollout.keep_gb else "rollout.keep_gb"
        raise ConfigError(f"a run that only keeps rollouts, and {key} = 0: set it above 0")
    if needs_critic(config.algorithm) or config.proximal is not None:
        key = f'algorithm.advantage = "{config.algorithm.advantage}"' if config.proximal is None else "[proximal]"
        raise ConfigError(f"a run that only keeps rollouts, and {key}, which trains or copies a model: leave it out")


def _check_engine(config: RunConfig) -> None:
    http = config.engine.http
    if config.pipeline.is_in_lockstep and isinstance(config.engine.speculation, int):
        raise ConfigError(
            f"engine.speculation = {config.engine.speculation} with pipeline.max_lag = 0: drafts would make what is decoded "
            "together depend on time. Leave engine.speculation out, or set pipeline.lockstep = false"
        )
    if config.rollout.stop and not config.engine.takes_stops:
        raise ConfigError(
            f'rollout.stop with engine.kind = "{config.engine.kind}": stop strings are looked for by our own engine and vLLM. '
            'Leave rollout.stop out, or set engine.kind = "torch"'
        )
    kind = config.engine.kind
    if kind not in ("http", "outside"):
        return
    if http is not None and http.weights == "none":
        raise ConfigError(
            'engine.http.weights = "none", and a run has new weights for its engine after every step: set it to "disk", with '
            "engine.http.folder"
        )
    if config.learner.lora is not None:
        raise ConfigError(
            f'[learner.lora] with engine.kind = "{kind}": servers take whole models. Leave [learner.lora] out'
        )
    if config.pipeline.is_in_lockstep:
        raise ConfigError(
            f'pipeline.max_lag = 0 with engine.kind = "{kind}": requests reach a server in no order that could be repeated. '
            "Set pipeline.lockstep = false, or max_lag above 0"
        )


def _check_resources(config: RunConfig) -> None:
    if config.runtime == "local":
        if structs.replace(config.resources, gpus=None, reward_gpus=0.0, weights=None) != ResourcesConfig():
            raise ConfigError(
                'a [resources] table with other keys than gpus, reward_gpus and weights, and runtime = "local": set runtime = '
                '"ray", or leave the table out (--set resources=)'
            )
        if config.resources.weights is not None:
            _check_one_place_of_weights(config)
        return
    placed, _ = place(config, None)
    placed_bundles(placed)
    weight_ways(placed, is_one_node=config.resources.address == "local")
    _check_one_place_of_weights(config)
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


def _check_one_place_of_weights(config: RunConfig) -> None:
    if (config.engine.vllm or VllmConfig()).weights == "file":
        raise ConfigError(
            'engine.vllm.weights = "file", and resources.weights says how weights reach engines, with runtime = "ray" also '
            "where it is left out: leave engine.vllm.weights out"
        )


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
        if config.pipeline.is_in_lockstep and one.use == AGENT:
            raise ConfigError(
                f"environment {one.shown}: when an agent calls the model depends on its own speed, and pipeline.max_lag = 0 is "
                "in lockstep, bit for bit: set pipeline.lockstep = false, or max_lag above 0"
            )
        if config.pipeline.is_in_lockstep and one.max_concurrent is not None and one.max_concurrent < rollouts:
            raise ConfigError(
                f"environment {one.shown}: max_concurrent = {one.max_concurrent} does not go with pipeline.max_lag = 0, where "
                f"all {rollouts} rollouts of a step take their turns together: leave it out, set lockstep = false, or "
                "max_lag above 0"
            )
    if not config.reward and any(one.use == SINGLE_TURN for one in config.environment):
        raise ConfigError("no [[reward]] table: without a reward there is nothing to learn")


# ---- what the config names -------------------------------------------------------------------------------------------


def _read_data(
    config: RunConfig, kinds: Sequence[EnvironmentKind], passed: PassedData | None, *, is_start: bool
) -> DataSet | None:
    """A data set that must be downloaded is read by a start alone."""
    if config.data.name is not None and passed is None:
        check_hub_data(config.data.name)
        if not is_start and not Path(config.data.name).is_dir():
            return None
    return read(config.data, seed=config.seed, make=lambda num, seed: make_tasks(kinds, num, seed), passed=passed)


def _checked_data(config: RunConfig, kinds: Sequence[EnvironmentKind], data: DataSet | None) -> Iterator[str]:
    if data is None:
        yield f"not checked: the records of the data set {config.data.name}, which the run loads"
    else:
        check_tasks(kinds, data, needs_gold=config.warmup is not None)
        yield f"checked: {len(data.train)} tasks to train on, {len(data.held_out)} held out"
        if len(data.train) < config.pipeline.groups_per_step:
            yield (
                f"warning: a step has pipeline.groups_per_step = {config.pipeline.groups_per_step} prompts, and there are "
                f"{len(data.train)} tasks to train on: the same task is more than once in a step"
            )
    for kind in kinds:
        if kind.config.use != SINGLE_TURN:
            yield f"checked: the environment {kind.name} is there"


def _checked_rewards(reward: PassedRewards | None, config: RunConfig) -> Iterator[str]:
    """That they are there, and take their arguments."""
    if all(one.use not in BUILT_BY_RUN for one in config.environment):
        return
    for function, one in prepare_rewards(config.reward, reward):
        check_reward(function, one)
        if warning := swapped_parameters(function, one):
            yield f"warning: {warning}"
        if one.function == "python_tests":
            yield f"checked: {what_is_contained().words()}"


def _checked_sandboxes(config: RunConfig) -> Iterator[str]:
    if any(one.sandbox is not None and one.sandbox.use == "walls" for one in config.environment):
        yield f"checked: sandboxes: {check_walls()}"


def _checked_room(played: Sequence[PlayedTasks], config: RunConfig) -> Iterator[str]:
    """For the tasks of training; those of evaluations were checked when they were read."""
    check_answers(config, config.rollout.max_tokens)
    for one in played:
        if not one.evaluation:
            yield from checked_room(config, one)


def _tried_rewards(
    played: PlayedTasks, reward: PassedRewards | None, config: RunConfig, *, is_start: bool
) -> list[str]:
    """A few calls of each, with tasks that have a gold answer, if any have. Recorded rollouts have their rewards, and held-out
    tasks those of training."""
    data, table = played.data, next((one for one in config.evaluations if one.name == played.evaluation), None)
    tasks = itertools.islice(
        single_turn_tasks(played.kinds, data.train if table is None else data.tasks), MAX_LOOKED_AT
    )
    chosen = sorted(tasks, key=lambda task: task.answer is None)[:MAX_TRIED]
    is_known = config.data.rollouts is not None if table is None else table.is_held_out and not table.reward
    if not chosen or is_known:
        return []
    own = table.reward if table is not None and table.reward else None
    rewards = prepare_rewards(config.reward, reward) if own is None else prepare_rewards(own)
    with of_evaluation(played.evaluation):
        lines = try_rewards(rewards, {data.place_of(task): task for task in chosen}, is_start=is_start)
    return [f"{line}, of the evaluation {table.name}" for line in lines] if table is not None else lines


def _checked_models(config: RunConfig) -> Iterator[str]:
    reference = None if config.reference is None else config.reference.path
    critic = None if config.critic is None else config.critic.path
    for key, path in (("model.path", config.model.path), ("reference.path", reference), ("critic.path", critic)):
        if path is None:
            continue
        check_path(path, key)
        if not Path(path).is_dir():
            yield f"not checked: the model {path}, which is no folder here; the run gets it from the Hugging Face hub"
            continue
        check_tokenizer(path)
        check_weights(path)
        yield f"checked: {path} is a checkpoint's folder with whole weights and a tokenizer"


def _checked_engine(machine: Machine | None, config: RunConfig) -> Iterator[str]:
    """Servers need not be up yet, and vLLM need not be installed where a config is checked for another machine."""
    if config.engine.kind == "vllm" and machine is not None and machine.is_described and not is_installed():
        yield "not checked: vLLM, which is not installed here"
    elif config.engine.kind == "vllm":
        check_installed()
        check_args(config.engine.vllm or VllmConfig())
        yield "checked: vLLM is installed"
    http = config.engine.http
    if http is None:
        return
    server_token(http)
    folder = Path(http.folder or "")
    writable_parent(folder, "engine.http.folder")
    yield f"checked: weights can be written to {folder}"
    yield f"not checked: the servers at {', '.join(http.urls)}, which the run asks at its start"


def _checked_recorded(config: RunConfig) -> list[str]:
    batches = recorded_batches(config)
    if batches is None:
        return []
    return [f"data.rollouts = {config.data.rollouts}: {len(batches)} finished batches, all of their rollouts are there"]


def _checked_watching(config: RunConfig) -> Iterator[str]:
    """The port of the metrics is free, and the web hook of alerts has a URL."""
    if (address := config.metrics.prometheus) is not None:
        listening_socket(address).close()
        host, port = split_address(address)
        yield f"checked: metrics can be served at http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
    if config.alerts.is_on:
        alert_url(config.alerts)


def _checked_run_dir(config: RunConfig) -> Iterator[str]:
    """It need not exist."""
    if config.run_dir is not None:
        check_free(config.run_dir)
    place = writable_parent(Path(config.run_dir or "runs"), "run_dir")
    yield from checked_disk(config, place)


def _checked_places(machine: Machine | None, config: RunConfig) -> Iterator[str]:
    """Neither Ray nor a GPU need be here: a config is often written on another machine than it runs on."""
    check_heads(config.engine, heads_of(config))
    placed, places = place(config, machine)
    if machine is not None:
        check_model_fits(placed, machine, find_shape(config))
        check_share(placed, with_places(find_device(config, machine), places))
    if config.runtime != "ray":
        yield from [f"checked: {places.words()}"] if places.words() else []
        if machine is not None and (places.engines or config.resources.weights is not None):
            yield checked_ways(machine, placed, places)
        return
    lines = placement_lines(
        placed.resources,
        replicas=placed.engine.num_replicas,
        ranks=config.learner.ranks,
        has_proximal=config.proximal is not None,
    )
    lines += stage_lines(placed.resources, stage_numbers(placed))
    yield from (f"checked: {line}" for line in lines)
    if find_spec("ray") is None:
        yield "not checked: Ray, which is not installed here"
    if config.resources.address != "local" and machine is None:
        patience = config.resources.patience_s
        yield f"not checked: whether the cluster has that; the run waits {patience:g} s for it"
