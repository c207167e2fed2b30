"""The config tables of what trains and scores: `[learner]`, `[reference]`, `[proximal]`, `[critic]`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

from millstream import imports
from millstream.model.lora import LoraConfig

SCHEDULES = ("constant", "linear", "cosine")
LEARNER_KINDS = ("torch", "outside")
OwnSchedule = Callable[[int, int | None], float]  # the share of the learning rate, of a step and the number of steps
MAX_RANKS = 65_536
PASS_TOKENS = 8192


class LearnerConfig(Struct, frozen=True, kw_only=True):
    kind: str = "torch"
    """torch: the native one, over any causal LM of transformers. outside: a program that connects to the run, claims batches
    and publishes weights (docs/outside.md); of this table, such a run reads `micro_batch_tokens` alone. Or one of your own:
    file.py:Name (docs/parts.md)."""
    args: dict[str, Any] = {}
    """Keyword arguments of a learner of your own."""
    learning_rate: float = 1e-5  # of AdamW, after the steps in which it rises
    schedule: str = "constant"
    """After the warm-up: keep the rate (constant), or decay it towards 0 (linear, cosine), which it would reach one step after
    the last. Or a function of your own: file.py:name (docs/parts.md)."""
    schedule_args: dict[str, Any] = {}
    """Keyword arguments of a schedule of your own."""
    warmup_steps: int = 0  # the first steps, in which the learning rate rises from 0
    weight_decay: float = 0.0  # of AdamW
    max_grad_norm: float = 1.0  # a larger gradient is scaled down to this norm
    micro_batch_tokens: int | Literal["auto"] = "auto"
    """Tokens of one forward and backward pass, on each rank; bounds the memory. A prompt that rows share counts once.
    auto: what fits on the GPU, at most 16,384; on a CPU 8,192."""
    ranks: int = 1
    """Processes that the model is sharded over, each with its own GPU; on a CPU, each with one thread."""
    mini_batches: int = 1
    """Optimizer steps per batch. Above 1 the proximal policy stays that of the batch's start, and clipping takes effect."""
    recompute: bool = False
    """Whether layers recompute their activations in the backward pass: a third more compute, a fraction of the memory."""
    offload: bool = False
    """Whether activations are in the host's memory until the backward pass needs them; with recompute, only what comes into
    each layer. Layers are then not compiled."""
    compile: bool | Literal["auto"] = "auto"
    """Whether layers are compiled. On a GPU: a minute at the start, faster steps afterwards. auto: on a GPU, if the run is long
    enough for that."""
    gpu_share: float | None = None
    """The share of the GPU's multiprocessors that training uses, where an engine decodes on the same GPU: the rest is always
    free for decoding. None: 0.61 where the engine is in the same process, at most 384 rollouts can be in flight and max_lag is
    above 0, else 1."""
    lora: LoraConfig | None = None
    """Train adapters on a frozen model. None: the whole model is trained."""
    max_skipped_steps: int = 3
    """Optimizer steps in a row whose gradient is not finite: they are skipped and reported. One more ends the run."""

    def __post_init__(self) -> None:
        if self.is_own and not imports.is_part("learner", self.kind):
            raise ValueError(imports.unknown_part("learner", self.kind, LEARNER_KINDS))
        if self.args and not self.is_own:
            raise ValueError(f'args are of a learner of your own, and kind = "{self.kind}": leave them out')
        check_schedule(self.schedule, self.schedule_args)
        if self.learning_rate <= 0 or self.max_grad_norm <= 0:
            raise ValueError("learning_rate and max_grad_norm must be above 0")
        if self.mini_batches < 1 or self.pass_tokens < 1 or self.ranks < 1:
            raise ValueError("mini_batches, micro_batch_tokens and ranks must be at least 1")
        if self.ranks > MAX_RANKS:
            raise ValueError(f"ranks = {self.ranks}: expected at most {MAX_RANKS:,}")
        if self.offload and self.compile is True:
            raise ValueError("offload and compile exclude each other: leave compile out")
        if self.gpu_share is not None and not 0 < self.gpu_share <= 1:
            raise ValueError(f"gpu_share = {self.gpu_share}: expected a number above 0, at most 1")
        if self.warmup_steps < 0 or self.weight_decay < 0 or self.max_skipped_steps < 0:
            raise ValueError("warmup_steps, weight_decay and max_skipped_steps must be at least 0")

    @property
    def is_own(self) -> bool:
        """Whether the learner is the user's."""
        return self.kind not in LEARNER_KINDS

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
    """cpu, cuda or cuda:1. None: where the learner is."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """None: the dtype of the model."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward pass, of each rank."""
    ranks: int = 1
    """Processes that the model is sharded over, each with its own GPU; on a CPU, each with one thread."""
    replicas: int = 1
    """Copies of the model, each with its ranks: rows are dealt to them by tokens."""

    def __post_init__(self) -> None:
        _check_device(self.device)
        _check_processes(self)
        if self.micro_batch_tokens < 1:
            raise ValueError("micro_batch_tokens must be at least 1")


class ProximalConfig(Struct, frozen=True, kw_only=True):
    """A scorer that computes the proximal log-probabilities in parallel to the learner, where a batch has several optimizer
    steps. Without the table the learner computes them between its own passes."""

    device: str | None = None
    """cpu, cuda or cuda:1. None: where the learner is."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward pass, of each rank."""
    ranks: int = 1
    """Processes that the model is sharded over, each with its own GPU; on a CPU, each with one thread."""
    replicas: int = 1
    """Copies of the model, each with its ranks: rows are dealt to them by tokens."""

    def __post_init__(self) -> None:
        _check_device(self.device)
        _check_processes(self)
        if self.micro_batch_tokens < 1:
            raise ValueError("micro_batch_tokens must be at least 1")


class CriticConfig(Struct, frozen=True, kw_only=True):
    """The critic: a separate model with a value head, which starts at 0. It makes one optimizer step per batch."""

    path: str | None = None
    """A Hugging Face checkpoint to start from. None: the model that reinforcement learning starts from."""
    device: str | None = None
    """cpu, cuda or cuda:1. None: where the learner is."""
    learning_rate: float = 1e-5  # of AdamW
    warmup_steps: int = 0
    """Steps over which the learning rate rises to its value."""
    max_grad_norm: float = 1.0  # a larger gradient is scaled down to this norm
    value_clip: float | None = 0.2
    """How far from the value that was computed for the rollout a step still pulls a value. None: no bound."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward and backward pass, of each rank."""
    ranks: int = 1
    """Processes that the critic is sharded over, each with its own GPU; on a CPU, each with one thread. It has no replicas:
    copies that train would have to agree on every step."""
    max_skipped_steps: int = 3
    """As `learner.max_skipped_steps`: steps in a row whose gradient is not finite."""

    def __post_init__(self) -> None:
        _check_device(self.device)
        above = (self.learning_rate, self.max_grad_norm, *(() if self.value_clip is None else (self.value_clip,)))
        if not all(value > 0 for value in above):
            raise ValueError("learning_rate, max_grad_norm and value_clip must be above 0")
        if self.micro_batch_tokens < 1 or self.warmup_steps < 0 or self.max_skipped_steps < 0:
            raise ValueError("micro_batch_tokens must be at least 1, warmup_steps and max_skipped_steps at least 0")
        _check_processes(self)


StageConfig = ReferenceConfig | ProximalConfig | CriticConfig


def replicas_of(table: StageConfig) -> int:
    """A critic has a state, and is there once."""
    return 1 if isinstance(table, CriticConfig) else table.replicas


def num_processes(table: StageConfig) -> int:
    """Above 1 they are processes of their own, also without Ray."""
    return table.ranks * replicas_of(table)


def call_tokens(table: StageConfig) -> int:
    """Tokens that all of its processes compute at a time."""
    return table.micro_batch_tokens * num_processes(table)


def check_schedule(name: str, args: dict[str, Any]) -> None:
    """Raises `ValueError` for a schedule of no such name."""
    if name not in SCHEDULES and not imports.is_part("schedule", name):
        raise ValueError(imports.unknown_part("schedule", name, SCHEDULES))
    if args and name in SCHEDULES:
        raise ValueError(f'schedule_args are of a schedule of your own, and schedule = "{name}": leave them out')


def own_schedule(config: LearnerConfig) -> OwnSchedule | None:
    """A schedule of the user's own, with its arguments; None: it is built in. Raises `ConfigError`."""
    if config.schedule in SCHEDULES:
        return None
    return imports.bound(
        imports.load_part("schedule", config.schedule, SCHEDULES),
        config.schedule_args,
        "learner.schedule_args",
        ("step", "num_steps"),
    )


def _check_processes(table: StageConfig) -> None:
    if table.ranks < 1:
        raise ValueError(f"ranks = {table.ranks}: expected at least 1")
    if replicas_of(table) < 1:
        raise ValueError(f"replicas = {replicas_of(table)}: expected at least 1")
    if num_processes(table) > MAX_RANKS:
        raise ValueError(f"ranks x replicas = {num_processes(table):,}: expected at most {MAX_RANKS:,}")
    if num_processes(table) > 1 and table.device is not None:
        raise ValueError(
            f'device = "{table.device}" with {num_processes(table)} processes, which have GPUs of their own: leave device '
            f"out, or {'ranks' if isinstance(table, CriticConfig) else 'ranks and replicas'}"
        )


def _check_device(device: str | None) -> None:
    if device is not None and re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise ValueError(f"device = {device!r}: expected cpu, cuda or cuda:NUMBER")
