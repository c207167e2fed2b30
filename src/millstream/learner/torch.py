"""The learner of one device: a `Rank` on its own thread, so that training blocks neither the event loop nor the engine.

On a GPU that thread only fills the device's queue: nothing waits for the device before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.errors import ModelError
from millstream.learner.config import LearnerConfig
from millstream.learner.optimizer import Optimizer, OptimizerState
from millstream.learner.rank import Rank, make_policies
from millstream.learner.state import on_host, read_state, write_state
from millstream.learner.tally import FiniteGuard
from millstream.model.adapters import lora_of, merged, save_adapters, trained_weights
from millstream.model.finite import names_not_finite
from millstream.model.gpu_share import TURNS, training_stream
from millstream.model.load import model_weights, save_model
from millstream.objective import Objective
from millstream.rpc.threads import DaemonThreads
from millstream.types import Floats, HalfFloats, Metrics, TrainRow, Weights


class TorchLearner:
    """A `RunLearner` (`learner.base`). `is_proximal_given`: rows after a batch's first step have `proximal`, and no copy of the
    policy is kept for it. `is_fixed`: see `Rank`. `gpu_share`: of the multiprocessors that it may use (`model.gpu_share`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        objective: Objective,
        *,
        temperature: float = 1.0,
        num_steps: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        is_proximal_given: bool = False,
        gpu_share: float = 1.0,
        is_fixed: bool = False,
    ) -> None:
        self.model = model
        self._tokenizer = tokenizer
        own = make_policies(model, config, temperature, is_proximal_given=is_proximal_given)
        self.rank = Rank(*own, config, objective, num_steps=num_steps, is_fixed=is_fixed)
        self._guard = FiniteGuard(config.max_skipped_steps)
        self._log_ratios: HalfFloats = np.zeros(0, np.float16)
        self._pass_tokens = config.pass_tokens
        self._thread = DaemonThreads("learner", most=1, within=self._working)
        self._stream = training_stream(model.device, gpu_share) if model.device.type == "cuda" else None
        if self._stream is not None:  # the model may still be in another stream
            self._stream.wait_stream(torch.cuda.current_stream(model.device))

    @property
    def optimizer(self) -> Optimizer:
        return self.rank.optimizer

    @contextmanager
    def _working(self) -> Iterator[None]:
        """On a GPU: its turn, and its stream."""
        if self._stream is None:
            yield
            return
        with TURNS.training(), torch.cuda.stream(self._stream):
            yield

    async def ready(self) -> None:
        """It is ready when it is made."""

    async def begin_batch(self) -> None:
        await self._thread.call(self.rank.begin_batch)

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await self._thread.call(lambda: self.rank.accumulate(rows))

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return await self._thread.call(lambda: self.rank.logprobs(rows))

    async def step(self) -> Metrics:
        return await self._thread.call(self._step)

    def _step(self) -> Metrics:
        counted = self.rank.tally()
        self._log_ratios = np.frombuffer(counted.log_ratios, np.float16)
        self._guard.check(counted)
        return counted.metrics(self.rank.step(counted)) if counted.units else counted.skipped_rows()

    def log_ratios(self) -> HalfFloats:
        return self._log_ratios

    def rank_seconds(self) -> list[float]:
        return []

    async def weights(self) -> Weights:
        return await self._thread.call(self._weights)

    def _weights(self) -> Weights:
        found = trained_weights(self.model)
        self.optimizer.check_finite(found)
        weights = {name: tensor.detach().clone() for name, tensor in found.items()}
        if next(iter(weights.values())).is_cuda:
            torch.cuda.current_stream().synchronize()  # they may be read on another stream
        return weights

    async def snapshot(self) -> TorchSnapshot:
        return await self._thread.call(self._snapshot)

    def _snapshot(self) -> TorchSnapshot:
        self.rank.check_finite()
        return TorchSnapshot(on_host(self.rank.state()))

    def restore(self, folder: Path) -> None:
        self._settle()
        self.rank.restore(read_state(folder))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.model.device))

    def save(self, path: Path) -> None:
        self._settle()
        self.rank.check_finite()
        save_trained(self.model, self._tokenizer, path)

    async def close(self) -> None:
        """Let the work in hand finish. Another learner may have the model then."""
        await self._thread.close()
        self._settle()
        self.optimizer.detach()

    def _settle(self) -> None:
        """Wait for the device: the caller uses another stream."""
        if self._stream is not None:
            self._stream.synchronize()


def save_trained(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, path: Path) -> None:
    """As a Hugging Face checkpoint. With adapters: the merged model, and in `adapter/` the adapters in peft's format. Raises
    `ModelError` for a model with a value that is not finite."""
    has_adapters = lora_of(model) is not None
    ordinary = merged(model) if has_adapters else model
    if names := names_not_finite(model_weights(ordinary)):
        raise ModelError(f"the model is not saved to {path}: {names[0]} has a value that is not finite")
    save_model(ordinary, tokenizer, path)
    if has_adapters:
        save_adapters(model, path / "adapter")


class TorchSnapshot:
    """A `Snapshot` (`learner.base`): a copy of the state in the host's memory."""

    def __init__(self, state: OptimizerState) -> None:
        self._state = state

    def write(self, folder: Path) -> None:
        write_state(self._state, folder)
