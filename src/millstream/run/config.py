"""The config of a run: one table per component, each defined in its component's package. Light: imports no torch.

`run.check` checks it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import Struct, field, structs

from millstream import imports
from millstream.algo import AlgorithmConfig, needs_critic, needs_reference
from millstream.cluster.resources import ResourcesConfig, ways_of
from millstream.engine import EngineConfig
from millstream.engine.http.config import HttpConfig
from millstream.env.config import EnvironmentConfig
from millstream.env.data import DataConfig
from millstream.env.games import toy
from millstream.env.rewards import PASS_IT, RewardConfig
from millstream.errors import ConfigError
from millstream.events import WARMUP
from millstream.learner import CriticConfig, LearnerConfig, ProximalConfig, ReferenceConfig
from millstream.model.lora import LoraConfig
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.run.checkpoint import CheckpointConfig
from millstream.run.tracking.config import AlertsConfig, MetricsConfig, TracesConfig, TrackersConfig
from millstream.sim.config import DrawConfig, SimConfig
from millstream.store.config import StoreConfig
from millstream.weights import TransferWay
from millstream.weights.config import WeightsConfig

MAX_WARMUP_STEPS = 400  # of a [warmup] table that sets no limit
MAX_LEASE_S = 86400.0
HELD_OUT = "held_out"  # the name of an evaluation that is given none
EVALUATION_NAME = re.compile(rf"(?!{WARMUP}$)[A-Za-z0-9_.-]+")
Table = TypeVar("Table", ReferenceConfig | None, CriticConfig | None, LoraConfig | None, DrawConfig)


class TinyConfig(Struct, frozen=True, kw_only=True):
    """A small model with characters for tokens and random weights from the run's seed."""

    hidden: int = 64  # the size of the hidden states
    layers: int = 2  # of the decoder
    heads: int = 4  # of the attention
    context: int = 64  # tokens of a prompt and its completion together
    alphabet: str = toy.ALPHABET
    """The characters that it knows, each once."""
    tokens: tuple[str, ...] = ()  # texts of several characters that are one token each
    chat_template: str = ""  # in Jinja, as in `tokenizer_config.json`; its end of a turn is <eos>. Empty: there is none

    def __post_init__(self) -> None:
        if not all(self.tokens) or len({*self.tokens, *self.alphabet}) < len(self.tokens) + len(self.alphabet):
            raise ValueError("tokens must be texts, each of them once, and none of them a character of the alphabet")
        if not self.alphabet or len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError("alphabet must have characters, each of them once")
        for key, most in (("hidden", 16_384), ("layers", 1_024), ("heads", 1_024), ("context", 1_048_576)):
            if not 1 <= (value := getattr(self, key)) <= most:
                raise ValueError(f"{key} = {value}: expected 1 to {most:,}")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden = {self.hidden} must be a multiple of 2 * heads = {2 * self.heads}")


class ModelConfig(Struct, frozen=True, kw_only=True):
    path: str | None = None
    """A Hugging Face checkpoint: a folder, or a name on the hub."""
    tiny: TinyConfig | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights that engine and learner compute with; the optimizer's are float32. auto: bfloat16 on a GPU, float32 on a
    CPU."""
    trust_remote_code: bool = False
    """Whether code in the folders of this model, the reference and the critic is run, where transformers has none for them."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.tiny is None):
            raise ValueError(
                "set either path (a checkpoint) or a [model.tiny] table (a small model with random weights)"
            )


class WarmupConfig(Struct, frozen=True, kw_only=True):
    """Supervised steps on gold answers before reinforcement learning, or, with pipeline.steps = 0, instead of it."""

    max_steps: int | None = None
    """Steps on examples drawn with replacement. None: 400, or what `epochs` makes."""
    epochs: int | None = None
    """Instead: how often each example is trained. Every epoch has another order."""
    batch_size: int = 64
    """Examples a step. learner.micro_batch_tokens limits how many are in one forward pass."""
    learning_rate: float = 3e-3  # after the steps in which it rises
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # as learner.schedule
    warmup_steps: int = 0
    """The first steps, in which the learning rate rises from 0."""
    stop_at: float | None = None
    """Sampled accuracy on training tasks at which it ends. None: accuracy is not measured, and all steps are made."""
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
        """The maximal number of steps."""
        if self.epochs is None:
            return MAX_WARMUP_STEPS if self.max_steps is None else self.max_steps
        return -(-self.epochs * num_tasks // self.batch_size)


class OutsideConfig(Struct, frozen=True, kw_only=True):
    """Where programs outside connect to the run, with `kind = "outside"` of [engine] or [learner] (docs/outside.md). They send
    the token in the environment variable MILLSTREAM_TOKEN, if the run was started with one."""

    host: str = "127.0.0.1"
    """An address that other machines can reach (0.0.0.0) needs a token."""
    port: int = 7077
    """0: a free one. The URL is in RUN/outside.url."""
    lease_s: float = 60.0
    """How long a program may keep what it claimed without renewing it, unless it asks for another time."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536 or not 0 < self.lease_s <= MAX_LEASE_S:
            raise ValueError(f"port must be 0 to 65535, lease_s above 0 and at most {MAX_LEASE_S:g}")


class EvaluationConfig(Struct, frozen=True, kw_only=True):
    """One evaluation: which tasks, how they are sampled, and when. Without other data, of the run's held-out tasks."""

    every_steps: int | None = None
    """While training runs. None: only before and after."""
    tasks: int | None = None
    """The first of its tasks. None: all of them."""
    name: str = HELD_OUT
    """In events, metrics and `checkpoint.keep_best`. Several tables need a name each."""
    data: DataConfig | None = None
    """All tasks of another data set, or, with an environment that makes tasks, `size` of these. None: data.holdout."""
    environment: tuple[EnvironmentConfig, ...] = ()
    """[[evaluation.environment]] tables. Empty: those of the run."""
    reward: tuple[RewardConfig, ...] = ()
    """[[evaluation.reward]] tables. Empty: those of the run."""
    samples: int = 1
    """Of each task, where it is sampled."""
    decoding: Literal["both", "sampled", "greedy"] = "both"
    """greedy: the most likely tokens, one sample a task. both: sampled and, before and after training, greedy as well."""
    temperature: float | None = None
    """None: rollout.temperature."""
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability
    max_tokens: int | None = None
    """None: rollout.max_tokens."""
    pass_reward: float = 1.0
    """A sample with this reward or more has passed."""
    at_start: bool = True  # evaluate before training
    at_end: bool = True  # evaluate after training

    def __post_init__(self) -> None:
        counts = [n for n in (self.every_steps, self.tasks, self.samples, self.max_tokens) if n is not None]
        if min(counts) < 1:
            raise ValueError("every_steps, tasks, samples and max_tokens must be at least 1")
        if not EVALUATION_NAME.fullmatch(self.name):
            raise ValueError(f"name = {self.name!r}: expected letters, digits, '_', '-' and '.', and not {WARMUP}")
        if not 0 < self.top_p <= 1 or (self.temperature is not None and self.temperature <= 0):
            raise ValueError('top_p must be above 0 and at most 1, temperature above 0 (greedy: decoding = "greedy")')
        if self.data is not None and self.data.sampler:
            raise ValueError("data.sampler: all tasks of this data are evaluated. Leave sampler out")
        if self.data is not None and self.data.holdout not in (0, DataConfig().holdout):
            raise ValueError("data.holdout: all tasks of this data are evaluated. Leave holdout out, or set tasks")

    @property
    def is_held_out(self) -> bool:
        """Whether its tasks are those that the run's data sets aside."""
        return self.data is None and not self.environment

    @property
    def is_sampled(self) -> bool:
        return self.decoding != "greedy"


class RunConfig(Struct, frozen=True, kw_only=True):
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    seed: int = 0  # of all random numbers: data, weights, sampling
    run_dir: str | None = None
    """The run's folder. None: runs/NAME-NUMBER, named after the config file."""
    reward: tuple[RewardConfig, ...] = field(default_factory=lambda: (RewardConfig(),))
    environment: tuple[EnvironmentConfig, ...] = field(default_factory=lambda: (EnvironmentConfig(),))
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    reference: ReferenceConfig | None = None
    """None: where the algorithm needs one, the model that reinforcement learning starts from."""
    critic: CriticConfig | None = None
    """None: where the algorithm needs one, one with default values."""
    proximal: ProximalConfig | None = None
    """None: the learner itself computes the proximal policy that learner.mini_batches needs."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    evaluation: EvaluationConfig | tuple[EvaluationConfig, ...] = field(default_factory=EvaluationConfig)
    """One table, or several: [[evaluation]]."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    warmup: WarmupConfig | None = None
    runtime: Literal["local", "ray"] = "local"
    """local: processes on this machine. ray: a Ray cluster; [resources] says what the run gets of it."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    outside: OutsideConfig = field(default_factory=OutsideConfig)
    """The address of programs that sample or train for the run."""
    sim: SimConfig | None = None
    """What things cost in `millstream sim`. A real run does not read it."""
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    """Where else the run is recorded: W&B, TensorBoard, MLflow, trackio."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """An endpoint for Prometheus."""
    traces: TracesConfig = field(default_factory=TracesConfig)
    """Spans for OpenTelemetry."""
    alerts: AlertsConfig = field(default_factory=AlertsConfig)
    """A command or a web hook on findings, stalls, failures and the end."""

    def __post_init__(self) -> None:
        """In Python, one reward or environment need not be a tuple."""
        if callable(self.reward):
            raise ConfigError(PASS_IT)
        rewards = (self.reward,) if isinstance(self.reward, RewardConfig) else tuple(self.reward)
        structs.force_setattr(self, "reward", rewards)
        is_one = isinstance(self.environment, EnvironmentConfig)
        structs.force_setattr(self, "environment", (self.environment,) if is_one else tuple(self.environment))

    @property
    def evaluations(self) -> tuple[EvaluationConfig, ...]:
        return (self.evaluation,) if isinstance(self.evaluation, EvaluationConfig) else tuple(self.evaluation)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """With absolute paths of files and folders, as the run folder keeps it."""
    algorithm, learner = config.algorithm, config.learner
    evaluations = tuple(map(_evaluation_with_absolute_paths, config.evaluations))
    advantage, loss = imports.absolute(algorithm.advantage), imports.absolute(algorithm.loss)
    return structs.replace(
        config,
        model=structs.replace(config.model, path=_absolute(config.model.path)),
        reference=_with_absolute_path(config.reference),
        critic=_with_absolute_path(config.critic),
        learner=structs.replace(
            learner,
            lora=_with_absolute_path(learner.lora),
            kind=imports.absolute(learner.kind),
            schedule=imports.absolute(learner.schedule),
        ),
        pipeline=structs.replace(config.pipeline, filter=imports.absolute(config.pipeline.filter)),
        store=structs.replace(
            config.store, kind=imports.absolute(config.store.kind), spill_folder=_absolute(config.store.spill_folder)
        ),
        weights=structs.replace(config.weights, kind=imports.absolute(config.weights.kind)),
        trackers=structs.replace(config.trackers, use=tuple(map(imports.absolute, config.trackers.use))),
        data=_data_with_absolute_paths(config.data),
        reward=_rewards_with_absolute_paths(config.reward),
        environment=_environments_with_absolute_paths(config.environment),
        evaluation=evaluations[0] if isinstance(config.evaluation, EvaluationConfig) else evaluations,
        algorithm=structs.replace(algorithm, advantage=advantage, loss=loss),
        engine=_engine_with_absolute_paths(config.engine),
        sim=None if config.sim is None else _sim_with_absolute_paths(config.sim),
    )


def _data_with_absolute_paths(data: DataConfig) -> DataConfig:
    paths = {"path": _absolute(data.path), "name": _absolute(data.name), "rollouts": _absolute(data.rollouts)}
    return structs.replace(data, **paths, sampler=imports.absolute(data.sampler))


def _rewards_with_absolute_paths(rewards: Sequence[RewardConfig]) -> tuple[RewardConfig, ...]:
    return tuple(structs.replace(reward, function=imports.absolute(reward.function)) for reward in rewards)


def _environments_with_absolute_paths(environments: Sequence[EnvironmentConfig]) -> tuple[EnvironmentConfig, ...]:
    return tuple(map(_environment_with_absolute_paths, environments))


def _environment_with_absolute_paths(one: EnvironmentConfig) -> EnvironmentConfig:
    tools = [
        imports.absolute(tool)
        if isinstance(tool, str)
        else structs.replace(tool, function=imports.absolute(tool.function))
        for tool in one.tools
    ]
    sandbox = None if one.sandbox is None else structs.replace(one.sandbox, use=imports.absolute(one.sandbox.use))
    return structs.replace(
        one,
        use=imports.absolute(one.use),
        tool_format=imports.absolute(one.tool_format),
        tools=tuple(tools),
        sandbox=sandbox,
    )


def _evaluation_with_absolute_paths(config: EvaluationConfig) -> EvaluationConfig:
    return structs.replace(
        config,
        data=None if config.data is None else _data_with_absolute_paths(config.data),
        reward=_rewards_with_absolute_paths(config.reward),
        environment=_environments_with_absolute_paths(config.environment),
    )


def _with_absolute_path(config: Table) -> Table:
    return config if config is None else structs.replace(config, path=_absolute(config.path))


def _engine_with_absolute_paths(config: EngineConfig) -> EngineConfig:
    """The folder of weights need not exist yet."""
    config = structs.replace(config, kind=imports.absolute(config.kind))
    if config.http is None or config.http.folder is None:
        return config
    folder = str(Path(config.http.folder).resolve())
    return structs.replace(config, http=structs.replace(config.http, folder=folder))


def _sim_with_absolute_paths(config: SimConfig) -> SimConfig:
    environment = structs.replace(
        config.environment,
        turns=_with_absolute_path(config.environment.turns),
        latency_s=_with_absolute_path(config.environment.latency_s),
    )
    return structs.replace(config, lengths=_with_absolute_path(config.lengths), environment=environment)


def scheduled_engine(config: RunConfig) -> EngineConfig:
    """The engine of the run. In lockstep it has no drafts: they would make what is decoded together depend on time."""
    is_in_lockstep = config.pipeline.is_in_lockstep and config.engine.kind == "torch"
    return structs.replace(config.engine, speculation="off") if is_in_lockstep else config.engine


def uses_lines(config: RunConfig) -> bool:
    """Whether rollout workers send requests to engines themselves, if those are processes of ours or vLLM's. Not in lockstep:
    requests then reach engines in the order of their keys, which the driver alone can keep."""
    has_processes = config.engine.kind in ("torch", "vllm")
    return bool(config.rollout.workers) and has_processes and not config.pipeline.is_in_lockstep


def may_learn_in_process(config: RunConfig, learner: LearnerConfig) -> bool:
    """Whether a learner of one rank may be a process where our own engine is one. Not where nothing is trained here, not a
    learner of the user's own, and not with a loss or a schedule that no other process can import."""
    is_ours = config.engine.kind == "torch" and learner.kind == "torch" and not config.pipeline.rollouts_only
    return is_ours and not any(map(imports.is_only_here, (config.algorithm.loss, learner.schedule)))


def is_model_on_host(config: RunConfig) -> bool:
    """Whether the driver's copy of the model is in the host's memory where there are GPUs, too: the driver computes nothing
    with it. With Ray; without, where the learner is several ranks, and engines are processes or servers."""
    engine = config.engine
    is_elsewhere = engine.kind in ("http", "outside") or (engine.is_placed and engine.process is not False)
    return config.runtime == "ray" or (config.learner.ranks > 1 and not config.learner.is_own and is_elsewhere)


def server_token(config: HttpConfig) -> str | None:
    """The token of the engine's servers, if any. Raises `ConfigError` if its environment variable is not set."""
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
    """The reference model, if any. A [reference] table alone makes one: the distance to it is then measured only."""
    if config.reference is None and needs_reference(config.algorithm):
        return ReferenceConfig()
    return config.reference


def critic_of(config: RunConfig) -> CriticConfig | None:
    """The critic, if the algorithm needs one."""
    return (config.critic or CriticConfig()) if needs_critic(config.algorithm) else None


def _absolute(path: str | None) -> str | None:
    """A path that does not exist here is a name on the hub, and is not changed."""
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path


def weight_ways(config: RunConfig, *, is_one_node: bool) -> tuple[TransferWay, ...]:
    """The ways in which weights reach engines on a cluster: see `resources.ways_of`; without Ray `weight_ways.local_ways`."""
    ranks, has_proximal = config.learner.ranks, config.proximal is not None
    return ways_of(config.resources, ranks=ranks, has_proximal=has_proximal, is_one_node=is_one_node)
