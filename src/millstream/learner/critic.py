"""The critic: a language model's body with a value head, trained towards the returns.

The value of a token is predicted when the token is about to be sampled: from what comes before it, without the token itself.
It has a thread or processes of its own, so that it trains in parallel to the learner.
Shapes: N tokens to compute, M of them trained; D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millstream.learner import CriticConfig, LearnerConfig
from millstream.learner.check import check_learner
from millstream.learner.optimizer import Optimizer, OptimizerState, StepResult
from millstream.learner.passes import Passes, why_fixed
from millstream.learner.rows import EMPTY_ROW, RowTensors, is_finite
from millstream.learner.scorer import spread
from millstream.learner.state import TorchSnapshot, on_host, read_state
from millstream.learner.tally import StepTally
from millstream.model.attention import Packed
from millstream.model.policy import hidden_states
from millstream.rpc.threads import DaemonThreads
from millstream.types import Floats, Metrics, TrainRow

TABLE = "critic"  # of the config
SUMS = (
    "loss",
    "error",
    "squared_error",
    "return",
    "squared_return",
)  # over trained tokens, of the values before the step


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


class CriticRank:
    """The mathematics of a critic, of all of it or of one shard of it. As in `learner.rank`: gradients are unnormalised sums,
    the caller adds up the tallies of all ranks, and each of them makes its step with the total."""

    def __init__(
        self,
        values: ValueModel,
        config: CriticConfig,
        *,
        num_steps: int | None = None,
        is_sharded: bool = False,
        is_fixed: bool = False,
    ) -> None:
        """`is_fixed`: passes are never made smaller."""
        self._passes = Passes(TABLE, why_fixed=why_fixed(is_sharded=is_sharded, is_fixed=is_fixed))
        self.values = values
        self._clip = config.value_clip
        self._is_sharded = is_sharded
        learner = LearnerConfig(
            learning_rate=config.learning_rate,
            warmup_steps=config.warmup_steps,
            max_grad_norm=config.max_grad_norm,
            max_skipped_steps=config.max_skipped_steps,
        )
        self.optimizer = Optimizer(values, learner, num_steps=num_steps, table=TABLE)
        self._device = next(values.parameters()).device
        self._start_sums()

    def _start_sums(self) -> None:
        self._num_tokens = 0
        self._suspects: list[str] = []  # labels of the rows whose loss was not finite
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64)

    def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        if self._is_sharded and not any(row.loss_mask.any() for row in rows):
            self._score_pass([EMPTY_ROW])
        return [values for some in self._passes.run(rows, self._score_pass) for values in some]

    @torch.no_grad()
    def _score_pass(self, rows: Sequence[TrainRow]) -> list[Floats]:
        if not any(row.loss_mask.any() for row in rows):
            return [np.zeros(len(row.tokens), np.float32) for row in rows]
        batch = RowTensors(rows, self._device)
        found = batch.per_row(self.values(batch.tokens_N, batch.packed, batch.before_M))
        if self._is_sharded:  # no backward pass follows: gathered parameters would be stale after a step or a restore
            self.values.reshard()  # type: ignore[operator]
        return spread(found, rows)

    def accumulate(self, rows: Sequence[TrainRow]) -> None:
        """Add the unnormalised gradient of these rows, and of the rows that other ranks are given in the same call."""
        sound = [row for row in rows if is_finite(row)]  # the learner reports the others
        if any(row.loss_mask.any() for row in sound):
            self._passes.run(sound, self._add, self.optimizer)
        elif self._is_sharded:
            batch = RowTensors([EMPTY_ROW], self._device)
            nothing_M = self.values(batch.tokens_N, batch.packed, batch.before_M) * 0
            nothing_M.sum().backward()

    def _add(self, rows: Sequence[TrainRow]) -> None:
        if not any(row.loss_mask.any() for row in rows):
            return
        batch = RowTensors(rows, self._device)
        returns_M, old_M = batch.column("returns"), batch.column("values")
        values_M = self.values(batch.tokens_N, batch.packed, batch.before_M)
        loss_M = value_loss(values_M, old_M, returns_M, self._clip)
        loss = loss_M.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        bad = sorted(set(batch.row_M[~loss_M.detach().isfinite()].tolist()))
        error_M = returns_M - values_M.detach()
        sums = [loss.detach(), error_M.sum(), error_M.square().sum(), returns_M.sum(), returns_M.square().sum()]
        self._sums += torch.stack(sums).double().cpu()
        self._suspects += [rows[index].label for index in bad]
        self._num_tokens += batch.num_trained

    def tally(self) -> StepTally:
        """This rank's counts since the last call."""
        sums, suspects, num = dict(zip(SUMS, self._sums.tolist(), strict=True)), self._suspects, self._num_tokens
        self._start_sums()
        return StepTally(units=num, num_tokens=num, sums=sums, suspects=suspects)

    def step(self, counted: StepTally) -> StepResult:
        """Divide by the total of all ranks, clip, update, clear the gradient. Raises `LearnerError`."""
        return self.optimizer.step(counted.units, counted.suspects)

    def check_finite(self) -> None:
        """See `Optimizer.check_finite`. Of several ranks, a collective."""
        self.optimizer.check_finite(dict(self.values.named_parameters()))

    def state(self) -> OptimizerState:
        """By reference; of several ranks, this rank's shards."""
        return {"buffers": {}, **self.optimizer.state()}


def step_metrics(counted: StepTally, stepped: StepResult) -> Metrics:
    """Of the values before the step. `explained`: the share of the returns' variance that the values explain: 1 at best,
    below 0 where the mean of the batch would predict better, 0 where all returns are equal."""
    loss, error, squared_error, mean, square = (counted.sums[name] / counted.num_tokens for name in SUMS)
    variance = square - mean**2
    unexplained = squared_error - error**2
    explained = 1 - unexplained / variance if variance > 1e-12 else 0.0
    return {"loss": loss, "explained": explained, "value": mean - error, "return": mean} | stepped.metrics()


class TorchCritic:
    """A `Critic` (`learner.base`) on a thread of this process, on the device of the model, which becomes its body."""

    def __init__(
        self, model: PreTrainedModel, config: CriticConfig, *, num_steps: int | None = None, is_fixed: bool = False
    ) -> None:
        """`is_fixed`: passes are never made smaller."""
        self.rank = whole_critic(model, config, num_steps=num_steps, is_fixed=is_fixed)
        self._thread = DaemonThreads(TABLE, most=1)

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return await self._thread.call(lambda: self.rank.score(rows))

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await self._thread.call(lambda: self.rank.accumulate(rows))

    async def step(self) -> Metrics:
        return await self._thread.call(self._step)

    def _step(self) -> Metrics:
        counted = self.rank.tally()
        return step_metrics(counted, self.rank.step(counted)) if counted.num_tokens else {}

    async def snapshot(self) -> TorchSnapshot:
        return await self._thread.call(self._snapshot)

    def _snapshot(self) -> TorchSnapshot:
        self.rank.check_finite()
        return TorchSnapshot(on_host(self.rank.state()))

    def restore(self, folder: Path) -> None:
        self.rank.optimizer.restore(read_state(folder))

    async def close(self) -> None:
        """Let the work in hand finish."""
        await self._thread.close()


def whole_critic(model: PreTrainedModel, config: CriticConfig, *, num_steps: int | None, is_fixed: bool) -> CriticRank:
    check_learner(model)
    return CriticRank(ValueModel(model), config, num_steps=num_steps, is_fixed=is_fixed)
