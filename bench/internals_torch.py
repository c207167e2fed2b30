"""As `internals.py`, for the parts of Millstream that import torch."""

# mypy: implicit-reexport
# ruff: noqa: F401
from __future__ import annotations

import atexit
import copy
import importlib
import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from millstream import EngineConfig
from millstream.algo import kl, losses
from millstream.algo.recipe import Recipe, objective
from millstream.clock import RealClock
from millstream.engine import Engine
from millstream.engine.native import tiles
from millstream.engine.native.batching import Batcher
from millstream.engine.native.build import cache_kind
from millstream.engine.native.check import check_engine, requests
from millstream.engine.native.drafts import DraftHistory
from millstream.engine.native.engine import TorchEngine
from millstream.engine.native.fused import unfuse
from millstream.engine.native.fused_layer import LAYERS
from millstream.engine.native.graphs import CudaRecorder, Graphs
from millstream.engine.native.host import ProcessHost
from millstream.engine.native.paged import PagedRunner
from millstream.engine.native.pages import DecodePass
from millstream.engine.native.plain import Norm, Normed, Projection
from millstream.engine.native.process import ChannelLink
from millstream.engine.native.runner import Chunk, Drawn
from millstream.engine.native.sequence import TokenSequence
from millstream.engine.native.worker import DecodeWorker
from millstream.engine.vllm.config import VllmConfig
from millstream.env.config import EnvironmentConfig
from millstream.env.resolve import find_environment
from millstream.errors import ModelError
from millstream.events.sinks import MemorySink
from millstream.learner import LearnerConfig, RunLearner, messages, processes
from millstream.learner.check import check_learner, packed_rows
from millstream.learner.fsdp import FsdpLearner, PublishingRanks
from millstream.learner.messages import ObjectiveSource, RankMessage, RankSetup, StoreAccess
from millstream.learner.optimizer import AdamSettings
from millstream.learner.packing import Packer
from millstream.learner.store_reader import StoreReader
from millstream.learner.tally import StepTally
from millstream.learner.torch import TorchLearner
from millstream.model.adapters import add_adapters, merged_weights, trained_weights
from millstream.model.compare import Scored, check_itself, library_logprobs, randomize
from millstream.model.load import (
    check_layers,
    load_model,
    load_tokenizer,
    model_weights,
    new_model,
    save_model,
    set_up_cpu,
    strange_layers,
)
from millstream.model.lora import LoraConfig
from millstream.model.shrink import HEADS, WINDOW, shrunk, shrunk_table
from millstream.objective import LossInputs, Objective, TokenLoss
from millstream.rpc.process import LocalLauncher
from millstream.rpc.serve import serve_calls
from millstream.run.build import (
    build_engine,
    build_environment,
    build_model,
    build_sampling,
    gpu_share,
    measure_device,
    measure_shape,
)
from millstream.run.check import check_config
from millstream.run.check_prompts import tokenizer_of
from millstream.run.checkpoint import Checkpoints
from millstream.run.config import ModelConfig, TinyConfig
from millstream.run.evaluate import Evaluator, new_waits
from millstream.run.prepare import Prepared, prepare_run
from millstream.run.rollout_worker import plan_workers
from millstream.run.serve_training import base_of
from millstream.run.sizes import choose_sizes, with_sizes
from millstream.run.text import TokenizerText
from millstream.serve.training.data import DataLimits, read_pass, row_of
from millstream.serve.training.losses import loss_named
from millstream.serve.training.protobuf import write_field
from millstream.weights import TransferWay
from millstream.weights.transfer import Delivery, WeightsRef
from millstream.weights.transfer.broadcast import why_no_nccl
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.publisher import WeightsPublisher, open_publisher
from millstream.weights.transfer.remote_weights import RemoteWeights


def engine_of(config: EngineConfig, model: Any) -> Engine:
    """The engine that a run with this config has."""
    return build_engine(config, model, clock=RealClock(), sink=MemorySink())


def qwen3(*, hidden: int, layers: int, heads: int, dim: int, words: int, context: int) -> Any:
    """The config of a Qwen3 of any shape. Keys have half the heads; the head shares its weights with the embedding."""
    return Qwen3Config(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )


def ranks_of(model: Any, ranks: int, *, is_cluster: bool = False, **options: Any) -> FsdpLearner:
    """A learner of so many ranks, each a process of this machine. `is_cluster`: weights are sent as on a cluster."""
    source = ObjectiveSource(
        function="millstream.algo.recipe:from_json", arguments=msgspec.json.encode(Recipe(algorithm=None))
    )
    publishing = _publishing(model) if is_cluster else None
    return FsdpLearner(model, LearnerConfig(ranks=ranks), source, publishing=publishing, **options)


def store_access(plan: Any) -> StoreAccess:
    """For processes of this machine."""
    return StoreAccess("millstream.store.host:connect_here", plan)


def instant_model() -> Any:
    """The smallest that a learner accepts."""
    return new_model(qwen3(hidden=16, layers=1, heads=2, dim=8, words=64, context=64), seed=0)


def tally_of(units: float) -> StepTally:
    return StepTally(units=units)


def _publishing(model: Any) -> PublishingRanks:
    delivery = Delivery(ways=("shared",))

    def publish(weights: Any) -> WeightsRef:
        publisher = open_publisher(delivery)
        atexit.register(publisher.close)
        return publisher.put(0, weights.items())

    return PublishingRanks(
        launcher=LocalLauncher(is_warm=True),
        host="127.0.0.1",
        node="",
        first=publish(model_weights(model)),
        publish=publish,
        delivery=delivery,
    )


def device_name() -> str:
    """Of the GPU, or of the machine's processor where there is none."""
    return (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, {os.cpu_count()} cores"
    )


def model_of(config: Any, *, device: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """A model with random weights."""
    with torch.device(device):
        return new_model(config, seed=seed, dtype=dtype)


def paged_layers(model: Any) -> list[Any]:
    """The decoder layers of a model that are fused."""
    return [one for one in model.modules() if type(one).__name__ in LAYERS and "forward" in one.__dict__]


def __getattr__(name: str) -> Any:
    """What needs Triton."""
    if name == "layer_kernels":
        return importlib.import_module("millstream.engine.native.layer_kernels")
    if name == "KERNELS":
        return importlib.import_module("millstream.engine.native.kernels").KERNELS
    raise AttributeError(name)


def word_tokenizer(words: Sequence[str]) -> Any:
    """One token a word, and <pad>, <eos>, <unk> before them."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


PASSES: dict[str, list[Callable[..., Any]]] = {
    "slots": [partial(requests, "slots", False)],
    "pages": [partial(requests, "pages", True), partial(requests, "pages", False)],
    "learner": [packed_rows],
}


def refusal(config: Any, name: str) -> str | None:
    """Why a model of this config, with random weights, is refused by a pass. None: it has the numbers of the library."""
    reason = None
    for run in PASSES[name]:
        try:
            model = new_model(copy.deepcopy(config), seed=0)
            check_layers(model)
            randomize(model, torch.Generator().manual_seed(0))
            check_itself(model, f"the {name}", run, "")
            return None
        except ModelError as error:
            reason = str(error).strip()
    return reason
