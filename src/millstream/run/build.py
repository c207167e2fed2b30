"""From a config to the parts of a run: model, environments, engine, learner, store, algorithm. Implementations are chosen here
and nowhere else. Imports torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import structs
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from millstream import imports
from millstream.algo import advantage_of, credit_for, needs_critic, signal_for
from millstream.algo.advantages import overlong_penalty
from millstream.algo.recipe import Recipe
from millstream.clock import Clock
from millstream.engine import Engine, EngineConfig, EngineContext
from millstream.engine.config import ENGINE_KINDS
from millstream.engine.http.engine import HttpEngine
from millstream.engine.http.weight_folder import WeightFolder
from millstream.engine.native.build import cache_kind
from millstream.engine.native.check import check_engine
from millstream.engine.native.engine import TorchEngine
from millstream.engine.native.host import ThreadHost
from millstream.engine.processes import EngineSupply, LocalWeights, process_engine
from millstream.engine.vllm.config import check_installed
from millstream.env import Environment
from millstream.env.config import SINGLE_TURN
from millstream.env.registry import Environments, Hosted
from millstream.env.resolve import EnvironmentKind
from millstream.env.rewards import CompletionScorer, ConfiguredRewards, group_scorer
from millstream.env.single_turn import SingleTurn
from millstream.errors import ConfigError, EngineMisconfigured, LearnerError, MillstreamError
from millstream.events import EventSink
from millstream.learner import LearnerConfig, LearnerContext, RunLearner
from millstream.learner.check import check_learner
from millstream.learner.config import LEARNER_KINDS, call_tokens
from millstream.learner.fsdp import FsdpLearner, PublishingRanks
from millstream.learner.messages import FindStore, ObjectiveSource
from millstream.learner.torch import TorchLearner
from millstream.model.adapters import add_adapters, copy_of
from millstream.model.gpu_share import training_share
from millstream.model.load import context_length, decoder_of, load_model, new_model, num_cores, plain_copy
from millstream.model.locate import check_path
from millstream.model.lora import LoraConfig
from millstream.model.tiny import TinyShape, tiny_model
from millstream.pipeline.pipeline import Algorithm, TokenGroupReward
from millstream.pipeline.schema import Stage, store_tasks
from millstream.rpc.process import Launcher, LocalLauncher, engine_names
from millstream.run.check_machine import check_engine_device, no_gpu
from millstream.run.check_prompts import load_checked_tokenizer, tokenizer_of
from millstream.run.config import (
    ModelConfig,
    RunConfig,
    critic_of,
    is_model_on_host,
    may_learn_in_process,
    server_token,
)
from millstream.run.device import find_device, find_machine, gpu_device, on_cluster
from millstream.run.places import Gpu, Machine
from millstream.run.sizes import CPU, ModelDevice, ModelShape, shape_from
from millstream.run.text import TokenizerText
from millstream.seeds import derive_seed
from millstream.serve.agents.environment import make_agent
from millstream.store import Reads
from millstream.types import Sampling, Task


def build_model(
    config: ModelConfig, *, seed: int, lora: LoraConfig | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that is trained, with adapters if the config has them, and its tokenizer."""
    model, tokenizer = _plain_model(config, seed=seed)
    if lora is not None:
        add_adapters(model, lora, seed=derive_seed(seed, "lora"))
    return model, tokenizer


def skeleton_of(config: RunConfig) -> PreTrainedModel:
    """The model of a config without its weights: names and shapes alone. [model] is made on the spot, or a folder."""
    model, lora = config.model, config.learner.lora
    with torch.device("meta"):
        if model.tiny is not None:
            tiny = model.tiny
            shape = TinyShape(hidden=tiny.hidden, layers=tiny.layers, heads=tiny.heads, context=tiny.context)
            made = tiny_model(shape, tokenizer_of(model), seed=config.seed)
        else:
            found = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
            made = new_model(found, seed=config.seed, trust_remote_code=model.trust_remote_code)
    if lora is not None:
        add_adapters(made, lora, seed=config.seed)
    return made


def _plain_model(config: ModelConfig, *, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    device = choose_device(config.device)
    dtype = getattr(torch, config.dtype if config.dtype != "auto" else "bfloat16" if device == "cuda" else "float32")
    if config.tiny is not None:
        tiny = config.tiny
        tokenizer = tokenizer_of(config)
        shape = TinyShape(hidden=tiny.hidden, layers=tiny.layers, heads=tiny.heads, context=tiny.context)
        return tiny_model(shape, tokenizer, seed=seed, dtype=dtype).to(device), tokenizer
    path = config.path or ""
    check_path(path)
    tokenizer = load_checked_tokenizer(config)
    model = load_model(path, device=device, dtype=dtype, trust_remote_code=config.trust_remote_code)
    return model, tokenizer


def check_passes(config: RunConfig, model: PreTrainedModel, *, is_gpu: bool) -> None:
    """A small model of the same architecture goes through the passes of the engine and the learner: what they cannot run is
    refused here, before anything is started. Raises `ModelError`."""
    if config.engine.kind == "torch":
        is_gpu = config.resources.engine_gpus > 0 if config.runtime == "ray" else is_gpu
        check_engine(model, cache_kind(config.engine, "cuda" if is_gpu else "cpu"), is_small_only=True)
    if not config.learner.is_own:
        check_learner(model, is_small_only=True)


def measure_device(config: RunConfig) -> ModelDevice:
    """The first GPU of the run and its free memory now, before the run has anything there. A driver that computes nothing there
    asks the driver's tool, since torch would take some of it."""
    if config.runtime == "ray":
        return on_cluster(config)
    if choose_device(config.model.device) != "cuda":
        return CPU
    if is_model_on_host(config) and (found := find_device(config)).free_bytes is not None:
        return found
    gc.collect()  # the parts of an earlier run in this process
    torch.cuda.empty_cache()
    return gpu_device(float(torch.cuda.mem_get_info()[0]))


def find_machine_here(config: RunConfig) -> Machine | None:
    """As `device.find_machine`, with what torch sees where the driver's tool is not here. With Ray on this machine alone, GPUs
    that are not here are missed before it is started."""
    found = find_machine(config)
    if found is None:
        is_here = config.runtime == "ray" and config.resources.address == "local"
        return Machine(nodes=((),)) if is_here else None
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = found.gpus or tuple(Gpu(name=str(number)) for number in range(num))
    return Machine(nodes=(gpus[:num] if config.runtime == "local" else gpus,))


def measure_shape(model: PreTrainedModel) -> ModelShape | None:
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return shape_from(
        model.config.to_dict(),
        parameters=sum(count for count, _ in counts),
        trained=sum(count for count, is_trained in counts if is_trained),
    )


def choose_device(asked: str) -> str:
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise ConfigError(no_gpu("model", asked))
    return asked if asked != "auto" else "cuda" if has_gpu else "cpu"


def build_sampling(config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    stop = end_tokens(model, tokenizer)
    rollout = config.rollout
    return Sampling(
        max_tokens=rollout.max_tokens, temperature=rollout.temperature, stop=stop, stop_strings=rollout.stop
    )


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a turn: the tokenizer's, and those of the checkpoint's generation config."""
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = ends if isinstance(ends, list) else [ends]
    return tuple(sorted({token for token in (tokenizer.eos_token_id, *ends) if token is not None}))


def build_environment(
    kinds: Sequence[EnvironmentKind],
    text: TokenizerText,
    rewards: ConfiguredRewards,
    launcher: Launcher | None = None,
    *,
    ends: tuple[int, ...] = (),
    takes_stops: bool = True,
) -> Environments:
    """The environments of a run. Data sets and agents are scored with these rewards. `launcher` starts processes on a cluster;
    None: on this machine. `ends`: the tokens that end a turn; empty: the tokenizer's. `takes_stops`: whether the engine
    looks for stop strings."""

    def built(kind: EnvironmentKind) -> Environment:
        if kind.environment is not None:
            return kind.environment
        scorer = CompletionScorer(rewards, launcher)
        if kind.config.use == SINGLE_TURN:
            return SingleTurn(scorer)
        return make_agent(
            kind.config,
            structs.replace(text, max_prompts_kept=1, _opened={}),  # prompts of agents rarely repeat
            scorer,
            end_tokens=ends or (text.end_token,),
            vocabulary=len(text.tokenizer),
            takes_stops=takes_stops,
        )

    watched = structs.replace(text, is_watched=True)
    return Environments([Hosted(kind, built(kind), watched, launcher) for kind in kinds])


def build_engine(
    config: EngineConfig,
    model: PreTrainedModel,
    *,
    clock: Clock,
    sink: EventSink,
    name: str = "engine",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Engine:
    """An engine alone, with what it needs. `tokenizer`: for stop strings. Of several servers, each alone; together they are
    `HttpServers`. Several engines of a run share what they need: `backend.LocalEngines`."""
    if config.is_own:
        return own_engine(config, model, clock=clock, sink=sink, name=name)
    if config.kind == "http":
        servers = HttpServers(config, model, clock=clock, sink=sink)
        engine = servers.engine(name)
        servers.close()
        return engine
    if config.kind == "outside":
        raise ConfigError('engine.kind = "outside": programs connect to a run, and there is none here')
    device = model.device.type
    if not has_process(config, device):
        return thread_engine(config, model, tokenizer, clock=clock, sink=sink, name=name)
    check_engine_here(config, device)
    weights = LocalWeights(config, model)
    try:
        launcher = LocalLauncher(is_warm=config.kind == "torch" and device == "cpu")
        supply = EngineSupply(launcher, weights.first, weights.publish, device)
        return process_engine(
            config, model, tokenizer, supply, clock=clock, sink=sink, name=name, on_close=weights.close
        )
    except BaseException:  # nothing else would remove what is staged
        weights.close()
        raise


def own_engine(config: EngineConfig, model: PreTrainedModel, *, clock: Clock, sink: EventSink, name: str) -> Engine:
    """One of the user's own, with a copy of the model."""
    context = EngineContext(
        name=name,
        slots=config.num_slots,
        model=plain_copy(model).requires_grad_(False),
        max_length=context_length(model),
        clock=clock,
        sink=sink,
    )
    make = imports.load_part("engine", config.kind, ENGINE_KINDS)
    with _named(f"engine.kind = {config.kind!r}", EngineMisconfigured):
        engine: Engine = make(context, **config.args)
    return engine


@contextmanager
def _named(what: str, error_class: type[MillstreamError]) -> Iterator[None]:
    """An error of the user's own code becomes one of this class, with its cause."""
    try:
        yield
    except MillstreamError:
        raise
    except Exception as error:
        raise error_class(f"{what} cannot be made: {type(error).__name__}: {error}") from error


def check_engine_here(config: EngineConfig, device: str) -> None:
    """Raises `ConfigError` where an engine cannot run on this machine. `device`: "cpu" or "cuda", where it would be."""
    if config.kind == "vllm":
        check_installed()
    check_engine_device(config, is_gpu=device != "cpu")


def thread_engine(
    config: EngineConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    clock: Clock,
    sink: EventSink,
    name: str,
) -> TorchEngine:
    """Our own engine on a thread of this process, with its own copy of all weights that training changes: only `load` changes
    it."""
    check_engine_here(config, model.device.type)
    return TorchEngine(
        ThreadHost(copy_of(model), config, None if tokenizer is None else decoder_of(tokenizer)),
        slots=config.num_slots,
        max_length=context_length(model),
        clock=clock,
        sink=sink,
        answer_s=config.answer_s,
        name=name,
    )


def has_process(config: EngineConfig, device: str) -> bool:
    """Whether an engine runs in a process: vLLM always does, our own by default where that is faster."""
    is_faster = config.kind == "vllm" or (device == "cpu" and num_cores() > 1)
    return is_faster if config.process is None else config.process


def has_learner_process(config: RunConfig, device: str, learner: LearnerConfig, *, is_apart: bool = False) -> bool:
    """Whether the learner is one or more processes. A single rank is one where the engine is, on the same device: both need the
    interpreter after every small operation, and so does the event loop. Not on a GPU with a weight channel of the user's own:
    `publishes_by_itself`. `is_apart`: engines have GPUs of their own."""
    if learner.ranks > 1:
        return not learner.is_own
    is_with_engine = not is_apart and has_process(config.engine, device)
    is_taken = device == "cpu" or not config.weights.is_own
    return is_with_engine and is_taken and may_learn_in_process(config, learner)


def publishes_by_itself(config: RunConfig, device: str, learner: LearnerConfig, *, is_apart: bool = False) -> bool:
    """Whether the learner is a process that publishes its weights where engines get them, without the driver: one rank on the
    GPU that engines in processes are on. Several ranks write theirs into memory of the driver."""
    is_one_on_gpu = device == "cuda" and learner.ranks == 1
    return is_one_on_gpu and has_learner_process(config, device, learner, is_apart=is_apart)


class HttpServers:
    """The servers of a run, each an engine by name. Their weights are written once: the folder is there until this and every
    engine is closed. They get the model's weights, whatever they were started with."""

    def __init__(self, config: EngineConfig, model: PreTrainedModel, *, clock: Clock, sink: EventSink) -> None:
        assert config.http is not None
        self._http = config.http
        self._urls = dict(zip(engine_names(config.num_engines), config.http.urls, strict=True))
        self._slots = -(-config.num_slots // config.num_engines)
        self._max_length = context_length(model)
        self._token = server_token(config.http)
        self._clock = clock
        self._sink = sink
        self._weights = None if config.http.folder is None else WeightFolder(Path(config.http.folder), model)
        if self._weights is not None:
            self._weights.open()

    def engine(self, name: str) -> HttpEngine:
        return HttpEngine(
            self._urls[name],
            self._http,
            slots=self._slots,
            max_length=self._max_length,
            weights=self._weights,
            token=self._token,
            clock=self._clock,
            sink=self._sink,
            name=name,
        )

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()


def build_learner(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    learner: LearnerConfig,
    recipe: Recipe,
    num_steps: int | None,
    device: str | None = None,
    store: FindStore = lambda: None,
    is_apart: bool = False,
    publishing: PublishingRanks | None = None,
) -> RunLearner:
    """`is_apart`: engines have GPUs of their own. `device`, `store`, `publishing`: see `FsdpLearner`."""
    temperature, is_proximal_given = config.rollout.temperature, config.proximal is not None
    if learner.is_own:
        context = LearnerContext(
            model=plain_copy(model),
            tokenizer=tokenizer,
            objective=recipe.objective(),
            config=learner,
            temperature=temperature,
            num_steps=num_steps,
        )
        return _own_learner(context)
    if not has_learner_process(config, device or model.device.type, learner, is_apart=is_apart):
        return TorchLearner(
            model,
            learner,
            recipe.objective(),
            temperature=temperature,
            num_steps=num_steps,
            tokenizer=tokenizer,
            is_proximal_given=is_proximal_given,
            gpu_share=1.0 if recipe.algorithm is None else gpu_share(config, learner, is_apart=is_apart),
            is_fixed=config.pipeline.is_in_lockstep,
        )
    source = ObjectiveSource(function="millstream.algo.recipe:from_json", arguments=msgspec.json.encode(recipe))
    return FsdpLearner(
        model,
        learner,
        source,
        temperature=temperature,
        num_steps=num_steps,
        tokenizer=tokenizer,
        is_proximal_given=is_proximal_given,
        is_fixed=config.pipeline.is_in_lockstep,
        records_ratios=config.rollout.keep_gb > 0,
        device=device,
        store=store,
        publishing=publishing,
    )


def _own_learner(context: LearnerContext) -> RunLearner:
    config = context.config
    make = imports.load_part("learner", config.kind, LEARNER_KINDS)
    with _named(f"learner.kind = {config.kind!r}", LearnerError):
        learner: RunLearner = make(context, **config.args)
    return learner


def gpu_share(config: RunConfig, learner: LearnerConfig, *, is_apart: bool = False) -> float:
    """The share of the GPU's multiprocessors for the stream of reinforcement learning. `is_apart`: engines have GPUs of their
    own. One that is a process on the learner's GPU takes turns with it."""
    if learner.gpu_share is not None:
        return learner.gpu_share
    if config.engine.kind != "torch" or config.engine.process or is_apart:
        return 1.0
    return training_share(config.pipeline.most_groups * config.rollout.num_members, config.pipeline.max_lag)


def store_plan(config: RunConfig, stages: Sequence[Stage]) -> Mapping[str, Reads]:
    """The tasks of a run's store. It has no capacity of its own: the admission rule bounds the groups that have rows in it, by
    settings that may change while the run trains, and a store with less room would block the pipeline."""
    return store_tasks(
        stages,
        has_critic=needs_critic(config.algorithm),
        has_proximal=config.proximal is not None,
        is_in_lockstep=config.pipeline.is_in_lockstep,
    )


def build_algorithm(
    config: RunConfig,
    sampling: Sampling,
    text: TokenizerText,
    rewards: ConfiguredRewards,
    launcher: Launcher | None = None,
) -> Algorithm:
    advantage, critic = advantage_of(config.algorithm), critic_of(config)
    tokens = config.learner.pass_tokens
    return Algorithm(
        advantage=advantage.of_group,
        over_batch=advantage.over_batch,
        sampling=sampling,
        micro_batch_tokens=tokens * config.learner.ranks,
        mini_batches=config.learner.mini_batches,
        group_reward=_with_overlong(_group_reward(text, rewards, launcher), config),
        credit=credit_for(config.algorithm),
        signal=signal_for(config.algorithm),
        critic_batch_tokens=tokens if critic is None else call_tokens(critic),
        proximal_batch_tokens=tokens if config.proximal is None else call_tokens(config.proximal),
    )


def _group_reward(
    text: TokenizerText, rewards: ConfiguredRewards, launcher: Launcher | None
) -> TokenGroupReward | None:
    scorer = group_scorer(rewards, launcher)
    if scorer is None:
        return None

    async def score(task: Task, said: Sequence[Sequence[int]]) -> Sequence[float]:
        return await scorer.score(task, [text.decode(tokens) for tokens in said])

    return score


def _with_overlong(reward: TokenGroupReward | None, config: RunConfig) -> TokenGroupReward | None:
    """The reward of a group, minus the penalty of members that are too long."""
    buffer, max_tokens = config.algorithm.overlong_buffer, config.rollout.max_tokens
    if buffer is None:
        return reward

    async def score(task: Task, said: Sequence[Sequence[int]]) -> Sequence[float]:
        lengths_G = np.array([len(tokens) for tokens in said], dtype=np.float64)
        lost_G = overlong_penalty(lengths_G, max_tokens=max_tokens, buffer=buffer)
        earned_G = np.zeros(len(said)) if reward is None else np.array(await reward(task, said))
        return [float(value) for value in earned_G + lost_G]

    return score
