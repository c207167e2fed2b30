"""A learner that a client drives call by call: forward, backward and the optimizer step are separate, the loss of every pass
and the settings of every step are the caller's.

A row predicts any targets from any of its positions, not only the next token of its own text. Gradients of all passes since
the last step are added up; nothing is divided. The passes, the optimizer and the snapshots are those of `learner.torch`.
Shapes: N tokens to compute (a shared beginning counts once), T tokens of all rows, M targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from millstream.learner.optimizer import AdamSettings, StepResult
from millstream.learner.packing import packed
from millstream.learner.rows import share_beginnings
from millstream.learner.state import read_state
from millstream.learner.torch import TorchLearner
from millstream.model.attention import Packed, on_device
from millstream.objective import LossInputs, TokenLoss
from millstream.types import Floats, Tokens


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
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_shared(self) -> int:
        """Tokens at its beginning that have no gradient of their own: rows with the same ones share them."""
        (used,) = np.nonzero(self.advantages)
        return int(self.at[used[0]]) + 1 if len(used) else 0


DirectLoss = Callable[[LossInputs, Mapping[str, Tensor]], TokenLoss]  # with the rows' `columns`


class RowScore(NamedTuple):
    logprobs: Floats  # of the targets, before any later step
    loss: float  # the sum over the targets


class DirectLearner(TorchLearner):
    """A `TorchLearner` with the calls of a client besides. As there, calls are served one at a time."""

    async def forward(self, rows: Sequence[DirectRow], loss: DirectLoss) -> list[RowScore]:
        return await self._thread.call(lambda: self._score(rows, loss, is_backward=False))

    async def forward_backward(self, rows: Sequence[DirectRow], loss: DirectLoss) -> list[RowScore]:
        """As `forward`; and the gradient of the sum of all losses is added to that of earlier calls."""
        return await self._thread.call(lambda: self._score(rows, loss, is_backward=True))

    async def step_with(self, adam: AdamSettings) -> StepResult:
        return await self._thread.call(lambda: self.optimizer.step_with(adam))

    async def restore_from(self, folder: Path, *, has_optimizer: bool) -> None:
        """The state of a snapshot; without the optimizer's, its weights alone. A gradient that is there is dropped."""
        await self._thread.call(lambda: self._restore_from(folder, has_optimizer=has_optimizer))

    def _restore_from(self, folder: Path, *, has_optimizer: bool) -> None:
        state = read_state(folder)
        self.rank.restore(state if has_optimizer else {**state, "moments": {}, "num_steps_done": 0})
        self.optimizer.zero_grad()

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
