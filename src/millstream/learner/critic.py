"""The critic of one device: a language model's body with a value head, trained towards the returns.

The value of a token is predicted when the token is about to be sampled: from what comes before it, without the token itself.
All work runs on its own thread, so that the critic trains in parallel to the learner.
Shapes: N tokens to compute, M of them trained; D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millstream.learner import CriticConfig, LearnerConfig
from millstream.learner.check import check_learner
from millstream.learner.optimizer import Optimizer
from millstream.learner.passes import LOCKSTEP, Passes
from millstream.learner.rows import RowTensors, is_finite
from millstream.learner.scorer import spread
from millstream.learner.state import TorchSnapshot, on_host, read_state
from millstream.model.attention import Packed
from millstream.model.policy import hidden_states
from millstream.rpc.threads import DaemonThreads
from millstream.types import Floats, Metrics, TrainRow

T = TypeVar("T")


class ValueModel(nn.Module):
    """The model's body and a linear head. Every value is 0 before training."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.body = model.eval()  # no dropout
        hidden = model.get_output_embeddings().weight
        self.body.set_output_embeddings(nn.Identity())
        self.head = nn.Linear(hidden.shape[1], 1, device=hidden.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens_N: Tensor, packed: Packed, before_M: Tensor) -> Tensor:
        hidden_MD = hidden_states(self.body, tokens_N, packed)[before_M]
        values_M: Tensor = self.head(hidden_MD.float())[:, 0]
        return values_M


def value_loss(values_M: Tensor, old_M: Tensor, returns_M: Tensor, clip: float | None) -> Tensor:
    """(V - R)^2 / 2; with a clip the larger of that and the same with V at most `clip` from the old value. As in PPO, a step
    beyond the clip is not rewarded: https://github.com/openai/baselines (ppo2)."""
    plain_M = (values_M - returns_M).square() / 2
    if clip is None:
        return plain_M
    held_M = old_M + (values_M - old_M).clamp(-clip, clip)
    return torch.maximum(plain_M, (held_M - returns_M).square() / 2)


class TorchCritic:
    """A `Critic` (`learner.base`), on the device of the model, which becomes its body."""

    def __init__(
        self, model: PreTrainedModel, config: CriticConfig, *, num_steps: int | None = None, is_fixed: bool = False
    ) -> None:
        """`is_fixed`: passes are never made smaller."""
        check_learner(model)
        self._passes = Passes("critic", why_fixed=LOCKSTEP if is_fixed else "")
        self._values = ValueModel(model)
        self._clip = config.value_clip
        learner = LearnerConfig(
            learning_rate=config.learning_rate,
            warmup_steps=config.warmup_steps,
            max_grad_norm=config.max_grad_norm,
            max_skipped_steps=config.max_skipped_steps,
        )
        self._optimizer = Optimizer(self._values, learner, num_steps=num_steps, table="critic")
        self._device = next(model.parameters()).device
        self._thread = DaemonThreads("critic", most=1)
        self._start_sums()

    def _start_sums(self) -> None:
        self._num_tokens = 0
        self._suspects: list[str] = []  # labels of the rows whose loss was not finite
        self._sums = torch.zeros(5, dtype=torch.float64)  # loss, error, squared error, returns, squared returns

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return await self._thread.call(lambda: self._score(rows))

    def _score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return [values for some in self._passes.run(rows, self._score_pass) for values in some]

    @torch.no_grad()
    def _score_pass(self, rows: Sequence[TrainRow]) -> list[Floats]:
        batch = RowTensors(rows, self._device)
        if not batch.num_trained:
            return [np.zeros(len(row.tokens), np.float32) for row in rows]
        return spread(batch.per_row(self._values(batch.tokens_N, batch.packed, batch.before_M)), rows)

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await self._thread.call(lambda: self._accumulate(rows))

    def _accumulate(self, rows: Sequence[TrainRow]) -> None:
        sound = [row for row in rows if is_finite(row)]  # the learner reports the others
        self._passes.run(sound, self._add, self._optimizer)

    def _add(self, rows: Sequence[TrainRow]) -> None:
        if not any(row.loss_mask.any() for row in rows):
            return
        batch = RowTensors(rows, self._device)
        returns_M, old_M = batch.column("returns"), batch.column("values")
        values_M = self._values(batch.tokens_N, batch.packed, batch.before_M)
        loss_M = value_loss(values_M, old_M, returns_M, self._clip)
        loss = loss_M.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        bad = sorted(set(batch.row_M[~loss_M.detach().isfinite()].tolist()))
        error_M = returns_M - values_M.detach()
        sums = [loss.detach(), error_M.sum(), error_M.square().sum(), returns_M.sum(), returns_M.square().sum()]
        self._sums += torch.stack(sums).double().cpu()
        self._suspects += [rows[index].label for index in bad]
        self._num_tokens += batch.num_trained

    async def step(self) -> Metrics:
        return await self._thread.call(self._step)

    def _step(self) -> Metrics:
        if not self._num_tokens:
            return {}
        metrics, suspects, num_tokens = self._metrics(), self._suspects, self._num_tokens
        self._start_sums()
        return metrics | self._optimizer.step(num_tokens, suspects).metrics()

    def _metrics(self) -> Metrics:
        """Of the values before the step. `explained`: the share of the returns' variance that the values explain: 1 at best,
        below 0 where the mean of the batch would predict better, 0 where all returns are equal."""
        loss, error, squared_error, mean, square = (self._sums / self._num_tokens).tolist()
        variance = square - mean**2
        unexplained = squared_error - error**2
        explained = 1 - unexplained / variance if variance > 1e-12 else 0.0
        return {"loss": loss, "explained": explained, "value": mean - error, "return": mean}

    async def snapshot(self) -> TorchSnapshot:
        return await self._thread.call(self._snapshot)

    def _snapshot(self) -> TorchSnapshot:
        self._optimizer.check_finite(dict(self._values.named_parameters()))
        return TorchSnapshot(on_host(self._optimizer.state()))

    def restore(self, folder: Path) -> None:
        self._optimizer.restore(read_state(folder))

    async def close(self) -> None:
        """Let the work in hand finish."""
        await self._thread.close()
