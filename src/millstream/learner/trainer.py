"""A trainer: a model, its optimizer and their thread, driven call by call. Forward, backward and the optimizer step are
separate, the loss of every pass and the settings of every step are the caller's.

A run's learner (`learner.torch`) is built from one: it adds rows of one objective that are divided at the step. The training
service gives one to each of its clients. A row predicts any targets from any of its positions, not only the next token of its
own text. Gradients of all passes since the last step are added up; nothing is divided.
Shapes: N tokens to compute (a shared beginning counts once), T tokens of all rows, M targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.errors import ModelError
from millstream.learner.config import LearnerConfig
from millstream.learner.optimizer import AdamSettings, Optimizer, StepResult
from millstream.learner.packing import packed
from millstream.learner.rank import Rank, make_policies
from millstream.learner.rows import share_beginnings
from millstream.learner.state import TorchSnapshot, on_host, read_state
from millstream.model.adapters import lora_of, merged, save_adapters, trained_weights
from millstream.model.attention import Packed, on_device
from millstream.model.finite import names_not_finite
from millstream.model.gpu_share import TURNS, training_stream
from millstream.model.load import model_weights, save_model
from millstream.objective import LossInputs, Objective, TokenLoss
from millstream.rpc.threads import DaemonThreads
from millstream.types import Floats, Tokens, Weights

GRADIENTS = "gradients"  # of a state that was captured before a step


class DirectRow(Struct, frozen=True, kw_only=True, eq=False):
    """One sequence, and what is predicted from it. All arrays but `tokens` have one entry per target."""

    tokens: Tokens
    at: NDArray[np.int64]  # the position that the target is predicted from; never decreases
    targets: NDArray[np.int64]
    advantages: Floats  # for maximum likelihood: the weights
    behaviour: (
        Floats  # log-probabilities under the policy that sampled the targets; 0 where the loss does not read them
    )
    columns: Mapping[str, Floats] = {}  # what the loss reads besides. All rows of a call have the same names.

    @property
    def num_shared(self) -> int:
        """Tokens at its beginning that have no gradient of their own: rows with the same ones share them."""
        (used,) = np.nonzero(self.advantages)
        return int(self.at[used[0]]) + 1 if len(used) else 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def prompt(self) -> bytes:
        return self.tokens[: self.num_shared].tobytes()


DirectLoss = Callable[[LossInputs, Mapping[str, Tensor]], TokenLoss]  # with the rows' `columns`


class RowScore(NamedTuple):
    logprobs: Floats  # of the targets, before any later step
    loss: float  # the sum over the targets


class Trainer:
    """Calls are served one at a time, on a thread of its own, so that training blocks neither the event loop nor the engine.
    On a GPU that thread only fills the device's queue: nothing waits for the device before the step.

    `objective`: of the rows of `TorchLearner`. `is_proximal_given`: rows after a batch's first step have `proximal`, and no
    copy of the policy is kept for it. `is_fixed`: see `Rank`. `gpu_share`: of the multiprocessors that it may use
    (`model.gpu_share`)."""

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

    async def forward(self, rows: Sequence[DirectRow], loss: DirectLoss) -> list[RowScore]:
        return await self._thread.call(lambda: self._score(rows, loss, is_backward=False))

    async def forward_backward(self, rows: Sequence[DirectRow], loss: DirectLoss) -> list[RowScore]:
        """As `forward`; and the gradient of the sum of all losses is added to that of earlier calls. If this raises, nothing
        is added."""
        return await self._thread.call(lambda: self._add_gradient(rows, loss))

    async def step_with(self, adam: AdamSettings) -> StepResult:
        return await self._thread.call(lambda: self.optimizer.step_with(adam))

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

    async def capture(self) -> TorchSnapshot:
        """As `snapshot`, at any moment: with the gradient so far, and whatever its values are."""
        return await self._thread.call(
            lambda: TorchSnapshot(on_host({**self.rank.state(), GRADIENTS: self.optimizer.gradients()}))
        )

    def restore(self, folder: Path) -> None:
        self._settle()
        self.rank.restore(read_state(folder))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.model.device))

    async def restore_from(self, folder: Path, *, has_optimizer: bool) -> None:
        """The state of a snapshot, and the gradient that it was captured with; without the optimizer's, its weights alone. A
        gradient that is there is dropped."""
        await self._thread.call(lambda: self._restore_from(folder, has_optimizer=has_optimizer))

    def _restore_from(self, folder: Path, *, has_optimizer: bool) -> None:
        state = read_state(folder)
        self.rank.restore(state if has_optimizer else {**state, "moments": {}, "num_steps_done": 0})
        self.optimizer.set_gradients(state.get(GRADIENTS, {}) if has_optimizer else {})

    def save(self, path: Path) -> None:
        self._settle()
        self.rank.check_finite()
        save_trained(self.model, self._tokenizer, path)

    async def close(self) -> None:
        """Let the work in hand finish. Another trainer may have the model then."""
        await self._thread.close()
        self._settle()
        self.optimizer.detach()

    def _settle(self) -> None:
        """Wait for the device: the caller uses another stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def _add_gradient(self, rows: Sequence[DirectRow], loss: DirectLoss) -> list[RowScore]:
        before = {name: gradient.clone() for name, gradient in self.optimizer.gradients().items()}
        try:
            return self._score(rows, loss, is_backward=True)
        except BaseException:
            self.optimizer.set_gradients(before)
            raise

    def _score(self, rows: Sequence[DirectRow], loss: DirectLoss, *, is_backward: bool) -> list[RowScore]:
        def one_pass(some: Sequence[DirectRow]) -> list[RowScore]:
            return self._pass(some, loss, is_backward=is_backward)

        return [
            score
            for batch in packed(rows, self._pass_tokens)
            for scores in self.rank.passes.run(batch, one_pass, self.optimizer if is_backward else None)
            for score in scores
        ]

    def _pass(self, rows: Sequence[DirectRow], loss: DirectLoss, *, is_backward: bool) -> list[RowScore]:
        with torch.set_grad_enabled(is_backward):
            inputs, columns = self._inputs(rows)
            loss_M = loss(inputs, columns).loss_N
        if is_backward:
            loss_M.sum().backward()  # type: ignore[no-untyped-call]
        ends = np.cumsum([len(row.targets) for row in rows])[:-1]
        logprobs, losses = (
            np.split(values.detach().float().cpu().numpy(), ends) for values in (inputs.logprobs_N, loss_M)
        )
        return [
            RowScore(of_row, float(some.sum(dtype=np.float64))) for of_row, some in zip(logprobs, losses, strict=True)
        ]

    def _inputs(self, rows: Sequence[DirectRow]) -> tuple[LossInputs, dict[str, Tensor]]:
        device = self.model.device
        indices = share_beginnings([(row.tokens, row.num_shared) for row in rows])
        at_T, tokens_T = np.concatenate(indices), np.concatenate([row.tokens for row in rows])
        tokens_N = np.zeros(at_T.max() + 1, np.int64)
        tokens_N[at_T] = tokens_T
        before_M = np.concatenate([index[row.at] for index, row in zip(indices, rows, strict=True)])
        targets_M = np.concatenate([row.targets for row in rows])
        row_M = np.repeat(np.arange(len(rows)), [len(row.targets) for row in rows])
        logprobs_M, _ = self.rank.policy(
            on_device(tokens_N, device),
            Packed(indices, device),
            on_device(before_M, device),
            on_device(targets_M, device),
        )

        def column(values: Sequence[Floats]) -> Tensor:
            return on_device(np.concatenate(values).astype(np.float32), device)

        inputs = LossInputs(
            logprobs_N=logprobs_M,
            behaviour_N=column([row.behaviour for row in rows]),
            proximal_N=logprobs_M.detach(),
            advantages_N=column([row.advantages for row in rows]),
            row_N=on_device(row_M, device),
        )
        return inputs, {name: column([row.columns[name] for row in rows]) for name in rows[0].columns}


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
