"""The config tables of what trains and scores: `[learner]`, `[reference]`, `[proximal]`, `[critic]`."""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from millstream.model.lora import LoraConfig

MAX_RANKS = 65_536
PASS_TOKENS = 8192


class LearnerConfig(Struct, frozen=True, kw_only=True):
    kind: Literal["torch", "outside"] = "torch"
    """torch: our own. outside: a program that connects to the run, claims batches and publishes weights (docs/outside.md). Of
    this table, such a run reads `micro_batch_tokens` alone."""
    learning_rate: float = 1e-5  # of AdamW, after the steps in which it rises
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: keep the rate, or decay it towards 0, which it would reach one step after the last."""
    warmup_steps: int = 0  # the first steps, in which the learning rate rises from 0
    weight_decay: float = 0.0  # of AdamW
    max_grad_norm: float = 1.0  # a larger gradient is scaled down to this norm
    micro_batch_tokens: int | Literal["auto"] = "auto"
    """Tokens of one forward and backward pass, on each rank; bounds the memory. auto: what fits on the GPU, at most 16,384; on
    a CPU 8,192."""
    ranks: int = 1
    """Processes that the model is sharded over, each with its own GPU; on a CPU, each with one thread."""
    mini_batches: int = 1
    """Optimizer steps per batch. Above 1 the proximal policy stays that of the batch's start, and clipping takes effect."""
    recompute: bool = False
    """Whether layers recompute their activations in the backward pass: a third more compute, a fraction of the memory."""
    compile: bool | Literal["auto"] = "auto"
    """Whether layers are compiled. On a GPU: a minute at the start, faster steps afterwards. auto: on a GPU, if the run is long
    enough for that."""
    gpu_share: float | None = None
    """The share of the GPU's multiprocessors that training uses, where an engine decodes on the same GPU: the rest is always
    free for decoding. None: 0.61 where at most 384 rollouts can be in flight and max_lag is above 0, else 1."""
    lora: LoraConfig | None = None
    """Train adapters on a frozen model. None: the whole model is trained."""
    max_skipped_steps: int = 3
    """Optimizer steps in a row whose gradient is not finite: they are skipped and reported. One more ends the run."""

    def __post_init__(self) -> None:
        if self.learning_rate <= 0 or self.max_grad_norm <= 0:
            raise ValueError("learning_rate and max_grad_norm must be above 0")
        if self.mini_batches < 1 or self.pass_tokens < 1 or self.ranks < 1:
            raise ValueError("mini_batches, micro_batch_tokens and ranks must be at least 1")
        if self.ranks > MAX_RANKS:
            raise ValueError(f"ranks = {self.ranks}: expected at most {MAX_RANKS:,}")
        if self.gpu_share is not None and not 0 < self.gpu_share <= 1:
            raise ValueError(f"gpu_share = {self.gpu_share}: expected a number above 0, at most 1")
        if self.warmup_steps < 0 or self.weight_decay < 0 or self.max_skipped_steps < 0:
            raise ValueError("warmup_steps, weight_decay and max_skipped_steps must be at least 0")

    @property
    def pass_tokens(self) -> int:
        """Tokens of one pass. A run decides before what `auto` is (`run.sizes`); a learner alone has 8,192."""
        return self.micro_batch_tokens if isinstance(self.micro_batch_tokens, int) else PASS_TOKENS

    @property
    def is_compiled(self) -> bool:
        return self.compile is True


class ReferenceConfig(Struct, frozen=True, kw_only=True):
    """The reference model: the policy is kept near it, learns from it (distillation), or only measures its distance to it."""

    path: str | None = None
    """A Hugging Face checkpoint with the same tokenizer. None: the model that reinforcement learning starts from."""
    device: str | None = None
    """cpu, cuda or cuda:1. None: where the model is."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """None: the dtype of the model."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward pass."""

    def __post_init__(self) -> None:
        _check_device(self.device)
        if self.micro_batch_tokens < 1:
            raise ValueError("micro_batch_tokens must be at least 1")


class ProximalConfig(Struct, frozen=True, kw_only=True):
    """A scorer that computes the proximal log-probabilities in parallel to the learner, where a batch has several optimizer
    steps. Without the table the learner computes them between its own passes."""

    device: str | None = None
    """cpu, cuda or cuda:1. None: where the model is."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward pass."""

    def __post_init__(self) -> None:
        _check_device(self.device)
        if self.micro_batch_tokens < 1:
            raise ValueError("micro_batch_tokens must be at least 1")


class CriticConfig(Struct, frozen=True, kw_only=True):
    """The critic: a separate model with a value head, which starts at 0. It makes one optimizer step per batch."""

    path: str | None = None
    """A Hugging Face checkpoint to start from. None: the model that reinforcement learning starts from."""
    device: str | None = None
    """cpu, cuda or cuda:1. None: where the model is."""
    learning_rate: float = 1e-5  # of AdamW
    warmup_steps: int = 0
    """Steps over which the learning rate rises to its value."""
    max_grad_norm: float = 1.0  # a larger gradient is scaled down to this norm
    value_clip: float | None = 0.2
    """How far from the value that was computed for the rollout a step still pulls a value. None: no bound."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward and backward pass."""
    max_skipped_steps: int = 3
    """As `learner.max_skipped_steps`: steps in a row whose gradient is not finite."""

    def __post_init__(self) -> None:
        _check_device(self.device)
        above = (self.learning_rate, self.max_grad_norm, *(() if self.value_clip is None else (self.value_clip,)))
        if not all(value > 0 for value in above):
            raise ValueError("learning_rate, max_grad_norm and value_clip must be above 0")
        if self.micro_batch_tokens < 1 or self.warmup_steps < 0 or self.max_skipped_steps < 0:
            raise ValueError("micro_batch_tokens must be at least 1, warmup_steps and max_skipped_steps at least 0")


def _check_device(device: str | None) -> None:
    if device is not None and re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise ValueError(f"device = {device!r}: expected cpu, cuda or cuda:NUMBER")
