"""The training service of a checkpoint: the base in memory once, and the parts that are made of it. Imports torch."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

from msgspec import Struct, structs
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.algo.recipe import supervised
from millstream.clock import RealClock
from millstream.engine import Engine, EngineConfig
from millstream.learner import LearnerConfig
from millstream.learner.scorer import TorchScorer
from millstream.learner.trainer import Trainer
from millstream.model.adapter_rows import add_adapter_rows
from millstream.model.adapters import add_adapters, trained_weights
from millstream.model.load import context_length, set_up_cpu
from millstream.model.locate import check_path
from millstream.model.lora import LoraConfig
from millstream.model.policy import layers_of
from millstream.paths import program
from millstream.run.build import build_engine, build_model, end_tokens
from millstream.run.config import ModelConfig
from millstream.run.serve_model import DEFAULT_CONTEXT, PathSink
from millstream.serve.auth import check_token
from millstream.serve.training.base import BaseModel, Shape
from millstream.serve.training.service import TrainingServiceConfig, host_training
from millstream.types import Weights

SKIPPED_STEPS = 1 << 30  # a client sees a skipped step in its metrics, and decides itself


class BaseParts:
    """Makes trainers, engines and scorers of one base. Adapters are put onto copies that share its weights."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, engine: EngineConfig, learner: LearnerConfig
    ) -> None:
        self._model = model.requires_grad_(False)
        self._tokenizer = tokenizer
        self._engine = engine
        self._learner = structs.replace(learner, max_skipped_steps=SKIPPED_STEPS)

    def copy(self, shape: Shape, seed: int = 0) -> PreTrainedModel:
        if shape is None:
            return copy.deepcopy(self._model).requires_grad_(True)
        made = copy.deepcopy(self._model, {id(parameter): parameter for parameter in self._model.parameters()})
        add_adapters(made, shape, seed=seed)
        return made

    def trainer(self, shape: Shape, seed: int) -> Trainer:
        return Trainer(self.copy(shape, seed), self._learner, supervised(), tokenizer=self._tokenizer)

    def engine(self, shape: Shape, num_adapters: int) -> Engine:
        model = self.copy(shape)
        if num_adapters > 1:
            add_adapter_rows(model, num_adapters)
        return build_engine(self._engine, model, clock=RealClock(), sink=PathSink(), tokenizer=self._tokenizer)

    def scorer(self, shape: Shape) -> TorchScorer:
        return TorchScorer(self.copy(shape), name="scorer")

    def initial_weights(self, shape: LoraConfig) -> Weights:
        return {name: weight.detach() for name, weight in trained_weights(self.copy(shape)).items()}


def base_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    path: str,
    engine: EngineConfig,
    learner: LearnerConfig,
    max_length: int | None = None,
) -> BaseModel:
    """`path`: from which clients load the tokenizer."""
    parts = BaseParts(model, tokenizer, engine, learner)
    limits = [length for length in (context_length(model), max_length) if length is not None]
    attention, mlp = _linear_layers(model)
    return BaseModel(
        name=name,
        tokenizer=path,
        architecture=type(model).__name__,
        vocabulary=int(model.get_input_embeddings().num_embeddings),
        context=min(limits, default=DEFAULT_CONTEXT),
        end_tokens=end_tokens(model, tokenizer),
        attention_layers=attention,
        mlp_layers=mlp,
        make_trainer=parts.trainer,
        make_engine=parts.engine,
        make_scorer=parts.scorer,
        initial_weights=parts.initial_weights,
    )


def _linear_layers(model: PreTrainedModel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names within the decoder's layers: those of the attention, and all others."""
    names = {
        name for layer in layers_of(model) for name, module in layer.named_modules() if isinstance(module, nn.Linear)
    }
    attention = {name.rpartition(".")[2] for name in names if "attn" in name or "attention" in name}
    return tuple(sorted(attention)), tuple(sorted({name.rpartition(".")[2] for name in names} - attention))


class TrainingBaseConfig(Struct, frozen=True, kw_only=True):
    """The model that a service trains adapters on."""

    model: ModelConfig
    name: str | None = None  # for clients. None: its path
    max_length: int | None = None  # tokens of a sequence. None: the model's context
    engine: EngineConfig
    learner: LearnerConfig = LearnerConfig()


def run_training_service(
    config: TrainingBaseConfig,
    service: TrainingServiceConfig,
    *,
    tokens: list[str] | None,
    on_ready: Callable[[str, str], None],
) -> None:
    """Until a signal comes. `tokens`: the keys of clients. `on_ready` is called with the URL and the model's name."""
    check_token(service.host, None if tokens is None else tokens[0])
    for token in (tokens or [])[1:]:
        check_token(service.host, token)
    path = config.model.path or "tiny"
    if config.model.path is not None:
        check_path(path, "MODEL", f"{program()} serve-training ")
    set_up_cpu()
    model, tokenizer = build_model(config.model, seed=0)
    base = base_of(
        model,
        tokenizer,
        name=config.name or path,
        path=path,
        engine=config.engine,
        learner=config.learner,
        max_length=config.max_length,
    )
    asyncio.run(host_training(base, service, tokens=tokens, on_ready=lambda url: on_ready(url, base.name)))
