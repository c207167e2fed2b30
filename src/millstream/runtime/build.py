"""From a config to parts: the one place where implementations are chosen. Imports torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from msgspec import Struct, field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.algo import recipe
from millstream.clock import Clock
from millstream.engine import EngineConfig
from millstream.engine.process import ProcessHost
from millstream.engine.torch import Host, ThreadHost, TorchEngine
from millstream.env import toy
from millstream.env.data import DataSet
from millstream.env.rewards import Reward, Scorer, prepare
from millstream.env.single_turn import SingleTurn
from millstream.errors import ConfigError, DataError, ModelError
from millstream.events import EventSink
from millstream.learner import LearnerConfig
from millstream.learner.torch import TorchLearner
from millstream.model.load import context_length, load_model, load_tokenizer, num_cores
from millstream.model.objective import Objective
from millstream.model.tiny import TinyShape, character_tokenizer, tiny_model
from millstream.model.where import check_path
from millstream.runtime.admission import full_budget
from millstream.runtime.config import ModelConfig, RunConfig
from millstream.runtime.pipeline import STORE_TASKS, Algorithm
from millstream.store.memory import MemoryStore
from millstream.types import Message, Sampling, Task

MOST_PROMPTS_CHECKED = 10_000
MOST_PIECES = 5
MOST_PROMPTS_KEPT = 32_768


class Text(Struct, frozen=True, kw_only=True, eq=False):
    """Between text and tokens, for one tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    _encoded: dict[str | tuple[Message, ...], list[int]] = field(default_factory=dict)

    def encode(self, task: Task) -> list[int]:
        """The prompt as the model expects it. Encoded once: by the check before the run, or by the first member of a group."""
        if task.prompt not in self._encoded:
            if len(self._encoded) >= MOST_PROMPTS_KEPT:
                self._encoded.clear()
            self._encoded[task.prompt] = self._encode(task)
        return self._encoded[task.prompt]

    def _encode(self, task: Task) -> list[int]:
        """A chat goes through the model's template, a string as it is."""
        if isinstance(task.prompt, str):
            return list(self.tokenizer(task.prompt).input_ids)
        if not self.tokenizer.chat_template:
            raise DataError(
                f"task {task.id}: its prompt is a list of messages, and the model's tokenizer has no chat template: "
                "use string prompts, or a model that has one"
            )
        messages = [{"role": message.role, "content": message.content} for message in task.prompt]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def unknown_pieces(self, task: Task) -> list[str]:
        """Of a prompt that is a string, what the tokenizer does not know, each once."""
        if not isinstance(task.prompt, str) or not self.tokenizer.is_fast:
            return []
        found = self.tokenizer(task.prompt, return_offsets_mapping=True)
        spans = zip(found.input_ids, found.offset_mapping, strict=True)
        pieces = (task.prompt[begin:end] for token, (begin, end) in spans if token == self.tokenizer.unk_token_id)
        return list(dict.fromkeys(pieces))

    def encode_answer(self, task: Task) -> list[int]:
        """The gold answer, ended."""
        ids = self.tokenizer(task.answer or "", add_special_tokens=False).input_ids
        return [*ids, self.tokenizer.eos_token_id]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def build_model(config: ModelConfig, *, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    device, dtype = choose_device(config.device), getattr(torch, config.dtype)
    if config.tiny is not None:
        tiny = config.tiny
        tokenizer = character_tokenizer(toy.ALPHABET)
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
    """A turn ends with the tokenizer's end token, or with one of those that the checkpoint generates with."""
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = ends if isinstance(ends, list) else [ends]
    stop = sorted({token for token in (tokenizer.eos_token_id, *ends) if token is not None})
    return Sampling(max_tokens=config.rollout.max_tokens, temperature=config.rollout.temperature, stop=tuple(stop))


def check_lengths(config: RunConfig, model: PreTrainedModel, text: Text, data: DataSet) -> None:
    """Prompts that leave no room for an answer are found before the run, not in it."""
    limit, max_tokens = context_length(model), config.rollout.max_tokens
    if limit is None:
        return
    for task in data.tasks[:MOST_PROMPTS_CHECKED]:
        length = len(text.encode(task))
        if length + max_tokens > limit:
            raise DataError(
                f"{data.place_of(task)}: the prompt has {length} tokens, which with rollout.max_tokens = {max_tokens} exceeds "
                f"the model's context of {limit}: set rollout.max_tokens lower, or drop the task"
            )


def unknown_text(text: Text, data: DataSet) -> str:
    """What to say of prompts with something in them that the tokenizer does not know; nothing if there are none."""
    tokenizer = text.tokenizer
    unknown = tokenizer.unk_token_id
    if unknown in (None, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        return ""  # a tokenizer of bytes knows everything
    tasks = data.tasks[:MOST_PROMPTS_CHECKED]
    strange = [task for task in tasks if unknown in text.encode(task)]
    if not strange:
        return ""
    pieces = ", ".join(map(repr, text.unknown_pieces(strange[0])[:MOST_PIECES]))
    return (
        f"{len(strange)} of {len(tasks)} prompts have something in them that the tokenizer does not know, and the model sees "
        f"{tokenizer.unk_token} instead. The first is {data.place_of(strange[0])}: {pieces or 'its text'}"
    )


def build_environment(config: RunConfig, text: Text, reward: Reward | None) -> SingleTurn:
    """With the rewards that the config names, or the one that was passed from Python."""
    scorer = Scorer(prepare(config.reward, reward))
    return SingleTurn(encode=text.encode, decode=text.decode, scorer=scorer)


def build_engine(config: EngineConfig, model: PreTrainedModel, *, clock: Clock, sink: EventSink) -> TorchEngine:
    """The engine has a copy of the model of its own: it is changed by `load` alone."""
    is_process = config.process
    is_cpu = model.device.type == "cpu"
    if is_process is None:
        is_process = is_cpu and num_cores() > 1
    if is_process and not is_cpu:
        raise ConfigError("engine.process = true works on a CPU only: leave it out where the model is on a GPU")
    host: Host = ProcessHost(model, config) if is_process else ThreadHost(copy.deepcopy(model), config)
    return TorchEngine(host, max_length=context_length(model), clock=clock, sink=sink, answer_s=config.answer_s)


def build_learner(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    learner: LearnerConfig,
    objective: Objective,
    num_steps: int | None,
) -> TorchLearner:
    return TorchLearner(
        model,
        learner,
        objective,
        temperature=config.rollout.temperature,
        num_steps=num_steps,
        tokenizer=tokenizer,
    )


def build_store(config: RunConfig) -> MemoryStore:
    """Room for every rollout that may be in flight or taken: with less the pipeline would wait for itself."""
    budget = config.pipeline.budget or full_budget(config.pipeline.groups_per_step, config.pipeline.max_lag)
    return MemoryStore(STORE_TASKS, capacity_rows=budget * config.rollout.group_size)


def build_algorithm(config: RunConfig, sampling: Sampling) -> Algorithm:
    return Algorithm(
        advantage=recipe.advantage_function(config.algorithm),
        sampling=sampling,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        mini_batches=config.learner.mini_batches,
    )
