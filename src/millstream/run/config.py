"""The whole config of a run: one table per component, each defined beside its component. Light: imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import Struct, field, structs

from millstream import imports
from millstream.algo import AlgorithmConfig, check_algorithm, needs_critic, needs_reference, reads_proximal
from millstream.cluster.resources import ResourcesConfig, Way, placement_of, ways_of
from millstream.engine import EngineConfig
from millstream.engine.http.config import HttpConfig
from millstream.env.config import SINGLE_TURN, EnvironmentConfig, check_environments
from millstream.env.data import DataConfig
from millstream.env.games import toy
from millstream.env.rewards import PASS_IT, RewardConfig
from millstream.errors import ConfigError
from millstream.learner import CriticConfig, LearnerConfig, ProximalConfig, ReferenceConfig
from millstream.model.lora import check_lora
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.run.checkpoint import CheckpointConfig

MAX_STEPS = 400
"""Of a warm-up that sets no limit of its own."""
Table = TypeVar("Table", ReferenceConfig | None, CriticConfig | None)


class TinyConfig(Struct, frozen=True, kw_only=True):
    """A model made on the spot: characters for tokens, random weights from the run's seed."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    alphabet: str = toy.ALPHABET
    """The characters that it knows."""

    def __post_init__(self) -> None:
        if not self.alphabet or len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError("alphabet must have characters, each of them once")


class ModelConfig(Struct, frozen=True, kw_only=True):
    path: str | None = None
    """A Hugging Face checkpoint: a folder, or a name on the hub."""
    tiny: TinyConfig | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("set either path (a checkpoint) or a [model.tiny] table (a model made on the spot)")


class WarmupConfig(Struct, frozen=True, kw_only=True):
    """Supervised steps on the gold answers before reinforcement learning begins, or, with pipeline.steps = 0, instead of it."""

    max_steps: int | None = None
    """Of examples drawn with replacement. None: 400, or what `epochs` makes."""
    epochs: int | None = None
    """Instead: how often each example is trained, every epoch in an order of its own."""
    batch_size: int = 64
    """Examples a step. How many go through one pass is for learner.micro_batch_tokens to say."""
    learning_rate: float = 3e-3
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """The first steps, in which the learning rate rises."""
    stop_at: float | None = None
    """Sampled accuracy on training tasks at which it ends. None: it is not measured, and all steps are made."""
    check_every: int = 10
    """Steps between two measurements: of the loss on held-out tasks, and of the accuracy for `stop_at`."""

    def __post_init__(self) -> None:
        if self.max_steps is not None and self.epochs is not None:
            raise ValueError(
                "set either max_steps (examples drawn with replacement) or epochs (each of them once an epoch)"
            )
        lengths = [self.batch_size, self.check_every, *(n for n in (self.max_steps, self.epochs) if n is not None)]
        if min(lengths) < 1 or self.learning_rate <= 0 or self.warmup_steps < 0:
            raise ValueError(
                "max_steps, epochs, batch_size and check_every must be at least 1, warmup_steps at least 0, learning_rate "
                "above 0"
            )

    def num_steps(self, num_tasks: int) -> int:
        """The most that it makes."""
        if self.epochs is None:
            return MAX_STEPS if self.max_steps is None else self.max_steps
        return -(-self.epochs * num_tasks // self.batch_size)


class EvaluationConfig(Struct, frozen=True, kw_only=True):
    """On the held-out tasks. Before and after training it is sampled and greedy; while training runs, sampled."""

    every_steps: int | None = None
    """None: only before and after."""
    tasks: int | None = None
    """None: all of data.holdout."""

    def __post_init__(self) -> None:
        if (self.every_steps is not None and self.every_steps < 1) or (self.tasks is not None and self.tasks < 1):
            raise ValueError("every_steps and tasks must be at least 1")


class RunConfig(Struct, frozen=True, kw_only=True):
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    seed: int = 0
    run_dir: str | None = None
    """Where the run's folder is made. None: runs/NAME-NUMBER, after the config file."""
    reward: tuple[RewardConfig, ...] = field(default_factory=lambda: (RewardConfig(),))
    environment: tuple[EnvironmentConfig, ...] = field(default_factory=lambda: (EnvironmentConfig(),))
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    reference: ReferenceConfig | None = None
    """None: where the algorithm needs one, the model that it starts from."""
    critic: CriticConfig | None = None
    """None: where the algorithm needs one, with the values that it has by default."""
    proximal: ProximalConfig | None = None
    """None: the learner computes by itself what learner.mini_batches needs of the proximal policy."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    warmup: WarmupConfig | None = None
    runtime: Literal["local", "ray"] = "local"
    """local: this machine, in one process or a few. ray: a Ray cluster, of which [resources] says what the run gets."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)

    def __post_init__(self) -> None:
        """From Python, one reward or environment need not be a tuple."""
        if callable(self.reward):
            raise ConfigError(PASS_IT)
        rewards = (self.reward,) if isinstance(self.reward, RewardConfig) else tuple(self.reward)
        structs.force_setattr(self, "reward", rewards)
        is_one = isinstance(self.environment, EnvironmentConfig)
        structs.force_setattr(self, "environment", (self.environment,) if is_one else tuple(self.environment))


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Files and folders by names that mean the same from everywhere: what a run folder keeps."""
    data, algorithm = config.data, config.algorithm
    advantage, loss = imports.absolute(algorithm.advantage), imports.absolute(algorithm.loss)
    return structs.replace(
        config,
        model=structs.replace(config.model, path=_absolute(config.model.path)),
        reference=_with_absolute_path(config.reference),
        critic=_with_absolute_path(config.critic),
        data=structs.replace(data, path=_absolute(data.path), name=_absolute(data.name)),
        reward=tuple(structs.replace(reward, function=imports.absolute(reward.function)) for reward in config.reward),
        environment=tuple(structs.replace(one, use=imports.absolute(one.use)) for one in config.environment),
        algorithm=structs.replace(algorithm, advantage=advantage, loss=loss),
        engine=_engine_with_absolute_paths(config.engine),
    )


def _with_absolute_path(config: Table) -> Table:
    return config if config is None else structs.replace(config, path=_absolute(config.path))


def _engine_with_absolute_paths(config: EngineConfig) -> EngineConfig:
    """The folder of weights need not be there yet."""
    if config.http is None or config.http.folder is None:
        return config
    folder = str(Path(config.http.folder).resolve())
    return structs.replace(config, http=structs.replace(config.http, folder=folder))


def server_token(config: HttpConfig) -> str | None:
    """Of the engine's servers. Raises `ConfigError` if the variable that should have it has nothing."""
    if config.token_variable is None:
        return None
    token = os.environ.get(config.token_variable, "").strip()
    if not token:
        raise ConfigError(
            f"engine.http.token_variable = {config.token_variable!r}, and that environment variable is not set: type export "
            f"{config.token_variable}=... with the servers' token"
        )
    return token


def reference_of(config: RunConfig) -> ReferenceConfig | None:
    """None: there is no reference. A table alone has one: how far the policy is from it is then measured, and no more."""
    if config.reference is None and needs_reference(config.algorithm):
        return ReferenceConfig()
    return config.reference


def critic_of(config: RunConfig) -> CriticConfig | None:
    """None: there is no critic."""
    return (config.critic or CriticConfig()) if needs_critic(config.algorithm) else None


def _absolute(path: str | None) -> str | None:
    """What is not a file or folder here is a name on the hub, and stays as it is."""
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path


def _check_stages(config: RunConfig) -> None:
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


def weight_ways(config: RunConfig, *, is_one_node: bool) -> tuple[Way, ...]:
    """See `resources.ways_of`."""
    ranks, has_proximal = config.learner.ranks, config.proximal is not None
    return ways_of(config.resources, ranks=ranks, has_proximal=has_proximal, is_one_node=is_one_node)


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
            f'model.device = "{config.model.device}" with runtime = "ray": resources.engine_gpus and learner_gpus say who '
            "has a GPU. Leave model.device out"
        )
    for key, table in (("reference", config.reference), ("critic", config.critic), ("proximal", config.proximal)):
        if table is not None and table.device is not None:
            raise ConfigError(
                f'{key}.device = "{table.device}" with runtime = "ray": resources.stage_gpus says whether those beside the '
                f"learner have a GPU. Leave {key}.device out"
            )


def check_run(config: RunConfig) -> None:
    """What no single component can see: combinations that are wrong. Raises `ConfigError` that says what to set."""
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
    _check_stages(config)
    _check_proximal(config)
    _check_engine(config)
    _check_resources(config)
    if config.learner.lora is not None and config.learner.ranks > 1:
        raise ConfigError(
            f"[learner.lora] with learner.ranks = {config.learner.ranks}: adapters are trained on one device. Set "
            "learner.ranks = 1, or leave [learner.lora] out"
        )
    if config.learner.lora is not None and config.engine.kind == "vllm":
        raise ConfigError(
            '[learner.lora] with engine.kind = "vllm": adapters go to our own engine alone. Set engine.kind = "torch", or '
            "leave [learner.lora] out"
        )
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
    check_lora(config.learner.lora)
    check_environments(config.environment)
    rollouts = groups * config.rollout.num_members
    for one in config.environment:
        if config.pipeline.is_in_lockstep and one.max_concurrent is not None and one.max_concurrent < rollouts:
            raise ConfigError(
                f"environment {one.shown}: max_concurrent = {one.max_concurrent} does not go with pipeline.max_lag = 0, where "
                f"all {rollouts} rollouts of a step take their turns together: leave it out, set lockstep = false, or "
                "max_lag above 0"
            )
    if not config.reward and any(one.use == SINGLE_TURN for one in config.environment):
        raise ConfigError("no [[reward]] table: without a reward there is nothing to learn")
