"""From a config to parts: the one place where implementations are chosen. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from jinja2 import TemplateError
from msgspec import Struct, field, structs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.algo import advantage_of, credit_for, needs_critic, shaping
from millstream.algo.recipe import Recipe
from millstream.clock import Clock
from millstream.engine import EngineConfig
from millstream.engine.http.engine import HttpEngine
from millstream.engine.http.weight_folder import Pushes
from millstream.engine.native.engine import TorchEngine
from millstream.engine.native.host import EngineHost, ThreadHost
from millstream.engine.native.process import local_process
from millstream.engine.vllm.engine import build_vllm
from millstream.env import Content
from millstream.env.data import DataSet
from millstream.env.registry import Environments, Hosted
from millstream.env.resolve import Kind
from millstream.env.rewards import Rewards, Scorer, group_scorer
from millstream.env.single_turn import SingleTurn
from millstream.errors import ConfigError, DataError, ModelError
from millstream.events import EventSink
from millstream.learner import LearnerConfig, RunLearner
from millstream.learner.fsdp import FsdpLearner
from millstream.learner.messages import ObjectiveSource
from millstream.learner.torch import TorchLearner
from millstream.model.adapters import add_adapters, copy_of
from millstream.model.load import context_length, decoder_of, load_model, load_tokenizer, num_cores
from millstream.model.locate import check_path
from millstream.model.lora import LoraConfig
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.pipeline.pipeline import Algorithm, GroupReward
from millstream.pipeline.stages import Stage, store_tasks
from millstream.rpc.process import Launcher
from millstream.run.config import ModelConfig, RunConfig, critic_of, server_token
from millstream.seeds import derive_seed
from millstream.store import Reads
from millstream.store.memory import MemoryStore
from millstream.types import Message, Sampling, Task

logger = logging.getLogger(__name__)
MAX_PROMPTS_CHECKED = 10_000
MAX_PIECES = 5
MAX_PROMPTS_KEPT = 32_768
MAX_CHARACTERS_KEPT = 256
"""Of a text that is kept with its tokens."""


class Text(Struct, frozen=True, kw_only=True, eq=False):
    """Between text and tokens, for one tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    is_watched: bool = False
    """Whether to say, once, that something in a text is unknown to the tokenizer."""
    told: list[str] = field(default_factory=list)
    most_prompts_kept: int = MAX_PROMPTS_KEPT
    """With their tokens, however long they are."""
    _opened: dict[str | tuple[Message, ...], list[int]] = field(default_factory=dict)
    _encoded: dict[str, list[int]] = field(default_factory=dict)

    @property
    def has_chat(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def end_token(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """What environments say is short and comes again and again: the tokenizer is asked once."""
        found = self._encoded.get(text)
        if found is None:
            found = list(self.tokenizer(text, add_special_tokens=False).input_ids)
            self._tell_unknown(text, found)
            if len(text) <= MAX_CHARACTERS_KEPT:
                if len(self._encoded) >= MAX_PROMPTS_KEPT:
                    self._encoded.clear()
                self._encoded[text] = found
        return found.copy()

    def opening(self, content: Content) -> list[int]:
        """Encoded once: by the check before the run, or by the first member of a group."""
        key = content if isinstance(content, str) else tuple(content)
        if key not in self._opened:
            if len(self._opened) >= self.most_prompts_kept:
                self._opened.clear()
            self._opened[key] = (
                list(self.tokenizer(key).input_ids) if isinstance(key, str) else self.encode(self.render(key))
            )
            self._tell_unknown(key, self._opened[key])
        return self._opened[key]

    def render(self, messages: Sequence[Message]) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(
                "a prompt is a list of messages, and the model's tokenizer has no chat template: "
                "use string prompts, or a model that has one"
            )
        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        except (TemplateError, TypeError) as error:  # a template may add what cannot be added
            roles = ", ".join(message.role for message in messages)
            raise DataError(f"the model's chat template refuses a chat of {roles}: {error}") from error

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether nothing of it is unknown to the tokenizer. One of bytes knows everything."""
        tokenizer = self.tokenizer
        others = (None, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        return tokenizer.unk_token_id in others or tokenizer.unk_token_id not in tokens

    def _tell_unknown(self, text: object, tokens: Sequence[int]) -> None:
        """Prompts are looked at before the run; what an environment says is known when it says it."""
        if self.is_watched and not self.told and not self.knows(tokens):
            self.told.append(
                f"the tokenizer does not know something in {text!r}: the model sees {self.tokenizer.unk_token}"
            )
            logger.warning("%s", self.told[0])

    def unknown_pieces(self, task: Task) -> list[str]:
        """Of a prompt that is a string, what the tokenizer does not know, each once."""
        if not isinstance(task.prompt, str) or not self.tokenizer.is_fast:
            return []
        found = self.tokenizer(task.prompt, return_offsets_mapping=True)
        spans = zip(found.input_ids, found.offset_mapping, strict=True)
        pieces = (task.prompt[begin:end] for token, (begin, end) in spans if token == self.tokenizer.unk_token_id)
        return list(dict.fromkeys(pieces))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def build_model(
    config: ModelConfig, *, seed: int, lora: LoraConfig | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that is trained: with adapters, if they are asked for."""
    model, tokenizer = _plain_model(config, seed=seed)
    if lora is not None:
        add_adapters(model, lora, seed=derive_seed(seed, "lora"))
    return model, tokenizer


def _plain_model(config: ModelConfig, *, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    device, dtype = choose_device(config.device), getattr(torch, config.dtype)
    if config.tiny is not None:
        tiny = config.tiny
        tokenizer = character_tokenizer(tiny.alphabet)
        shape = TinyShape(hidden=tiny.hidden, layers=tiny.layers, heads=tiny.heads, context=tiny.context)
        return tiny_model(shape, tokenizer, seed=seed, dtype=dtype).to(device), tokenizer
    path = config.path or ""
    check_path(path)
    tokenizer = load_tokenizer(path)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer in {path} has no end token: a rollout could never stop by itself")
    return load_model(path, device=device, dtype=dtype), tokenizer


def choose_device(asked: str) -> str:
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise ConfigError('model.device = "cuda", and torch sees no GPU here: set model.device = "cpu"')
    return asked if asked != "auto" else "cuda" if has_gpu else "cpu"


def build_sampling(config: RunConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    stop = end_tokens(model, tokenizer)
    rollout = config.rollout
    return Sampling(
        max_tokens=rollout.max_tokens, temperature=rollout.temperature, stop=stop, stop_strings=rollout.stop
    )


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """A turn ends with the tokenizer's end token, or with one of those that the checkpoint generates with."""
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = ends if isinstance(ends, list) else [ends]
    return tuple(sorted({token for token in (tokenizer.eos_token_id, *ends) if token is not None}))


def is_prompt_shown(task: Task, environments: Environments) -> bool:
    """Whether what the model is shown first is known before it is played."""
    return isinstance(environments.of(task).environment, SingleTurn)


def check_lengths(
    config: RunConfig, model: PreTrainedModel, text: Text, data: DataSet, environments: Environments
) -> None:
    """Prompts that leave no room for an answer are found before the run, not in it."""
    limit, max_tokens = context_length(model), config.rollout.max_tokens
    if limit is None:
        return
    for task in data.tasks[:MAX_PROMPTS_CHECKED]:
        if not is_prompt_shown(task, environments):
            continue
        try:
            length = len(text.opening(task.prompt))
        except DataError as error:
            raise DataError(f"{data.place_of(task)}: {error}") from error
        if length + max_tokens > limit:
            raise DataError(
                f"{data.place_of(task)}: the prompt has {length} tokens, which with rollout.max_tokens = {max_tokens} exceeds "
                f"the model's context of {limit}: set rollout.max_tokens lower, or drop the task"
            )


def unknown_text(text: Text, data: DataSet, environments: Environments) -> str:
    """What to say of prompts with something in them that the tokenizer does not know; nothing if there are none."""
    tasks = [task for task in data.tasks[:MAX_PROMPTS_CHECKED] if is_prompt_shown(task, environments)]
    strange = [task for task in tasks if not text.knows(text.opening(task.prompt))]
    if not strange:
        return ""
    pieces = ", ".join(map(repr, text.unknown_pieces(strange[0])[:MAX_PIECES]))
    return (
        f"{len(strange)} of {len(tasks)} prompts have something in them that the tokenizer does not know, and the model sees "
        f"{text.tokenizer.unk_token} instead. The first is {data.place_of(strange[0])}: {pieces or 'its text'}"
    )


def build_environment(
    kinds: Sequence[Kind], text: Text, rewards: Rewards, launcher: Launcher | None = None
) -> Environments:
    """Data sets are scored with these rewards, other environments by themselves. `launcher`: of processes on a cluster."""

    def single_turn() -> SingleTurn:
        return SingleTurn(
            encode=lambda task: text.opening(task.prompt), decode=text.decode, scorer=Scorer(rewards, launcher)
        )

    watched = structs.replace(text, is_watched=True)
    return Environments([Hosted(kind, kind.environment or single_turn(), watched, launcher) for kind in kinds])


RunEngine = TorchEngine | HttpEngine


def build_engine(
    config: EngineConfig,
    model: PreTrainedModel,
    *,
    clock: Clock,
    sink: EventSink,
    name: str = "engine",
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> RunEngine:
    """`seed`: of the run, for what is random about an engine itself. `tokenizer`: for stop strings."""
    match config.kind:
        case "torch":
            return _torch_engine(config, model, tokenizer, clock=clock, sink=sink, name=name)
        case "vllm":
            return build_vllm(config, model, clock=clock, sink=sink, name=name)
        case "http":
            return _http_engine(config, model, clock=clock, sink=sink, seed=seed)


def _torch_engine(
    config: EngineConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    clock: Clock,
    sink: EventSink,
    name: str,
) -> TorchEngine:
    """The engine has a copy of its own of all that training changes: it is changed by `load` alone."""
    is_process, is_cpu = has_process(config, model), model.device.type == "cpu"
    if is_cpu and config.cache is None and config.cache_gb is not None:
        raise ConfigError(
            f'engine.cache_gb = {config.cache_gb:g}, and on a CPU every request has a slot: set engine.cache = "pages", or '
            "leave cache_gb out"
        )
    if is_process and not is_cpu:
        raise ConfigError("engine.process = true works on a CPU only: leave it out where the model is on a GPU")
    host: EngineHost
    if is_process:
        host = local_process(model, config, tokenizer, name)
    else:
        host = ThreadHost(copy_of(model), config, None if tokenizer is None else decoder_of(tokenizer))
    return TorchEngine(
        host,
        slots=config.slots,
        max_length=context_length(model),
        clock=clock,
        sink=sink,
        answer_s=config.answer_s,
        name=name,
    )


def has_process(config: EngineConfig, model: PreTrainedModel) -> bool:
    """Whether our own engine has one of its own, by default where that is faster."""
    is_faster = model.device.type == "cpu" and num_cores() > 1
    return is_faster if config.process is None else config.process


def _http_engine(
    config: EngineConfig, model: PreTrainedModel, *, clock: Clock, sink: EventSink, seed: int
) -> HttpEngine:
    """The servers get the model's weights, whatever they were started with."""
    http = config.http
    assert http is not None
    return HttpEngine(
        http,
        slots=config.slots,
        max_length=context_length(model),
        pushes=None if http.folder is None else Pushes(Path(http.folder), model),
        token=server_token(http),
        seed=derive_seed(seed, "engine"),
        clock=clock,
        sink=sink,
    )


def build_learner(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    learner: LearnerConfig,
    recipe: Recipe,
    num_steps: int | None,
) -> RunLearner:
    temperature, is_proximal_given = config.rollout.temperature, config.proximal is not None
    if learner.ranks == 1:
        return TorchLearner(
            model,
            learner,
            recipe.objective(),
            temperature=temperature,
            num_steps=num_steps,
            tokenizer=tokenizer,
            is_proximal_given=is_proximal_given,
        )
    if model.device.type == "cuda" and (found := torch.cuda.device_count()) < learner.ranks:
        raise ConfigError(f"learner.ranks = {learner.ranks}, and torch sees {found} GPUs: set learner.ranks = {found}")
    source = ObjectiveSource(function="millstream.algo.recipe:from_json", arguments=msgspec.json.encode(recipe))
    return FsdpLearner(
        model,
        learner,
        source,
        temperature=temperature,
        num_steps=num_steps,
        tokenizer=tokenizer,
        is_proximal_given=is_proximal_given,
    )


def build_store(config: RunConfig, stages: Sequence[Stage] = ()) -> MemoryStore:
    tasks, capacity = store_plan(config, stages)
    return MemoryStore(tasks, capacity_rows=capacity)


def store_plan(config: RunConfig, stages: Sequence[Stage] = ()) -> tuple[Mapping[str, Reads], int]:
    """The tasks of a run's store, and room for every rollout that may be in flight or taken: with less the pipeline would wait
    for itself."""
    tasks = store_tasks(
        stages,
        has_critic=needs_critic(config.algorithm),
        has_proximal=config.proximal is not None,
        is_in_lockstep=config.pipeline.is_in_lockstep,
    )
    return tasks, config.pipeline.most_groups * config.rollout.most_rows


def build_algorithm(
    config: RunConfig, sampling: Sampling, text: Text, rewards: Rewards, launcher: Launcher | None = None
) -> Algorithm:
    advantage, critic = advantage_of(config.algorithm), critic_of(config)
    tokens = config.learner.micro_batch_tokens
    return Algorithm(
        advantage=advantage.of_group,
        over_batch=advantage.over_batch,
        sampling=sampling,
        micro_batch_tokens=tokens * config.learner.ranks,
        mini_batches=config.learner.mini_batches,
        group_reward=_with_overlong(_group_reward(text, rewards, launcher), config),
        credit=credit_for(config.algorithm),
        compares_turns=config.algorithm.advantage == "turns",
        critic_batch_tokens=tokens if critic is None else critic.micro_batch_tokens,
        proximal_batch_tokens=tokens if config.proximal is None else config.proximal.micro_batch_tokens,
    )


def _group_reward(text: Text, rewards: Rewards, launcher: Launcher | None) -> GroupReward | None:
    scorer = group_scorer(rewards, launcher)
    if scorer is None:
        return None

    async def score(task: Task, said: Sequence[Sequence[int]]) -> Sequence[float]:
        return await scorer.score(task, [text.decode(tokens) for tokens in said])

    return score


def _with_overlong(reward: GroupReward | None, config: RunConfig) -> GroupReward | None:
    """The reward of a whole group, less what its members lose for being too long."""
    buffer, max_tokens = config.algorithm.overlong_buffer, config.rollout.max_tokens
    if buffer is None:
        return reward

    async def score(task: Task, said: Sequence[Sequence[int]]) -> Sequence[float]:
        lengths_G = np.array([len(tokens) for tokens in said], dtype=np.float64)
        lost_G = shaping.overlong(lengths_G, max_tokens=max_tokens, buffer=buffer)
        earned_G = np.zeros(len(said)) if reward is None else np.array(await reward(task, said))
        return [float(value) for value in earned_G + lost_G]

    return score
