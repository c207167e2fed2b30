"""The seam to whatever trains: rows in, gradients accumulated as they come, one division at the step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from millstream.model.lora import LoraConfig
from millstream.types import Floats, Metrics, TrainRow, Weights


class LearnerConfig(Struct, frozen=True, kw_only=True):
    learning_rate: float = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: hold the rate, or let it fall towards 0, which it would reach one step after the last."""
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 8192
    """Tokens computed in one forward and backward pass, on each rank; bounds the memory."""
    ranks: int = 1
    """Processes that the model is sharded over, each with a GPU of its own; on a CPU, each with a thread."""
    mini_batches: int = 1
    """Optimizer steps a batch. Above 1 the proximal policy stays that of the batch's start, and clips begin to act."""
    recompute: bool = False
    """Whether layers compute their activations again in the backward pass: a third more work, a fraction of the memory."""
    compile: bool = False
    """Whether layers are compiled. On a GPU: a minute at the beginning, and faster from then on."""
    lora: LoraConfig | None = None
    """Train adapters on a frozen model. None: the whole model is trained."""
    max_skipped_steps: int = 3
    """Optimizer steps in a row whose gradient is not finite: they are left out, by name. One more ends the run."""

    def __post_init__(self) -> None:
        if self.learning_rate <= 0 or self.max_grad_norm <= 0:
            raise ValueError("learning_rate and max_grad_norm must be above 0")
        if self.mini_batches < 1 or self.micro_batch_tokens < 1 or self.ranks < 1:
            raise ValueError("mini_batches, micro_batch_tokens and ranks must be at least 1")
        if self.warmup_steps < 0 or self.weight_decay < 0 or self.max_skipped_steps < 0:
            raise ValueError("warmup_steps, weight_decay and max_skipped_steps must be at least 0")


class ReferenceConfig(Struct, frozen=True, kw_only=True):
    """Whom the policy is compared with: to stay near it, to learn from it, or only to measure how far it is."""

    path: str | None = None
    """A Hugging Face checkpoint with the same tokenizer. None: the model that reinforcement learning starts from."""
    device: str | None = None
    """cpu, cuda or cuda:1. None: where the model is."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """None: that of the model."""
    micro_batch_tokens: int = 8192
    """Tokens computed in one forward pass."""

    def __post_init__(self) -> None:
        _check_device(self.device)
        if self.micro_batch_tokens < 1:
            raise ValueError("micro_batch_tokens must be at least 1")


class ProximalConfig(Struct, frozen=True, kw_only=True):
    """Who computes the proximal log-probabilities beside the learner, where a batch has several steps. Without the table the
    learner does, between its own passes."""

    device: str | None = None
    """cpu, cuda or cuda:1. None: where the model is."""
    micro_batch_tokens: int = 8192
    """Tokens computed in one forward pass."""

    def __post_init__(self) -> None:
        _check_device(self.device)
        if self.micro_batch_tokens < 1:
            raise ValueError("micro_batch_tokens must be at least 1")


class CriticConfig(Struct, frozen=True, kw_only=True):
    """A model of its own with a head that says what it expects, and says 0 in the beginning. It makes one step a batch."""

    path: str | None = None
    """A Hugging Face checkpoint to begin with. None: the model that reinforcement learning starts from."""
    device: str | None = None
    """cpu, cuda or cuda:1. None: where the model is."""
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    """Steps over which the learning rate rises."""
    max_grad_norm: float = 1.0
    value_clip: float | None = 0.2
    """How far from what it said of a rollout a value is still pulled. None: as far as it takes."""
    micro_batch_tokens: int = 8192
    """Tokens computed in one forward and backward pass."""
    max_skipped_steps: int = 3
    """As the learner's: steps in a row whose gradient is not finite."""

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


class Snapshot(Protocol):
    """A learner's whole state at one moment: weights, optimizer, schedule. Later steps do not change it."""

    def write(self, folder: Path) -> None:
        """Files in this folder that `Learner.restore` reads. May be slow; called on a thread beside training."""
        ...


class Learner(Protocol):
    """Promises: any split and order of a batch's rows into calls of `accumulate` gives the same gradient, to float
    tolerance, and the same order gives the same bits. Methods are called one at a time. May raise `LearnerError`, and
    `LearnerGone` if another one like it could go on from its last snapshot."""

    async def begin_batch(self) -> None:
        """From here on the proximal policy is the weights as they are now."""
        ...

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        """Add the unnormalised gradient of these rows. What they have of the proximal policy (`proximal`) is used after the
        batch's first step."""
        ...

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        """The policy's log-probabilities of each row's trained tokens, as it is now, at the sampling temperature."""
        ...

    async def step(self) -> Metrics:
        """Divide by the whole batch, clip, update, forget the gradient. Without rows the weights stay as they are."""
        ...

    async def weights(self) -> Weights:
        """All that training may change, and nothing else: with adapters, these alone. A copy that later steps do not
        change, and whole when this returns: it may be read from another thread or stream."""
        ...

    async def snapshot(self) -> Snapshot:
        """Taken between two batches."""
        ...

    def restore(self, folder: Path) -> None:
        """Go on as if nothing had happened since the snapshot that was written there."""
        ...

    def save(self, path: Path) -> None:
        """Write the model so that others can load it."""
        ...


class RunLearner(Learner, Protocol):
    """One that a run begins and ends."""

    async def ready(self) -> None:
        """Returns when it can begin, which may take as long as processes take to start."""
        ...

    async def close(self) -> None:
        """Let the work in hand come to its end. Nothing of it is left. May be called twice."""
        ...


class Scorer(Protocol):
    """Whatever has something to say of every token: a reference its log-probability, a critic what it expects. Calls may come
    at any time and are served one after the other. May raise `LearnerError`."""

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        """For each row one number a token, 0 where it is not trained. Rows that are given together are computed together; each
        gets the number that it would get alone, to float tolerance."""
        ...


class Follower(Scorer, Protocol):
    """Has what a learner's policy says at one moment, while the learner goes on."""

    async def load(self, weights: Weights) -> None:
        """Of calls that come later, `score` is under these weights, which are a learner's `weights()`. They are copied."""
        ...


class Critic(Scorer, Protocol):
    """Expects, at every trained token, what is still to come when it is about to be sampled. It learns as a learner does:
    `accumulate` and `step` are called one at a time, and change what `score` says only at the step."""

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        """Add the unnormalised gradient of these rows, which have `values` and `returns`."""
        ...

    async def step(self) -> Metrics:
        """Divide by the whole batch, clip, update, forget the gradient. Without rows the weights stay as they are."""
        ...

    async def snapshot(self) -> Snapshot:
        """Taken between two batches."""
        ...

    def restore(self, folder: Path) -> None:
        """Go on as if nothing had happened since the snapshot that was written there."""
        ...


class RunCritic(Critic, Protocol):
    """One that a run begins and ends, in a process that may die: then it raises `LearnerGone`."""

    async def ready(self) -> None:
        """Returns when it can begin, which may take as long as processes take to start."""
        ...

    async def close(self) -> None:
        """Let the work in hand come to its end. Nothing of it is left. May be called twice."""
        ...
