"""The scorer of one device: log-probabilities under a model that is not trained (a reference, a teacher) or that follows the
policy (the proximal policy). Forward passes only, on its own thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from millstream.learner.check import check_learner
from millstream.learner.passes import LOCKSTEP, Passes
from millstream.learner.rows import RowTensors
from millstream.model.concurrent import shield_from_tracers
from millstream.model.load import load_weights
from millstream.model.policy import Policy
from millstream.rpc.threads import DaemonThreads
from millstream.types import Floats, TrainRow, Weights


class TorchScorer:
    """A `Scorer` and a `Follower` (`learner.base`), on the device of the model."""

    def __init__(
        self, model: PreTrainedModel, *, temperature: float = 1.0, name: str = "reference", is_fixed: bool = False
    ) -> None:
        """`is_fixed`: passes are never made smaller."""
        check_learner(model)
        shield_from_tracers(model)
        self._passes = Passes(name, why_fixed=LOCKSTEP if is_fixed else "")
        self._policy = Policy(model.requires_grad_(False), temperature=temperature)
        self._device = next(model.parameters()).device
        self._thread = DaemonThreads(name, most=1)

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        scores: list[Floats] = await self._thread.call(lambda: self._score(rows))
        return scores

    def _score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return [scores for some in self._passes.run(rows, self._score_pass) for scores in some]

    @torch.no_grad()
    def _score_pass(self, rows: Sequence[TrainRow]) -> list[Floats]:
        batch = RowTensors(rows, self._device)
        if not batch.num_trained:
            return [np.zeros(len(row.tokens), np.float32) for row in rows]
        found = self._policy(batch.tokens_N, batch.packed, batch.before_M, batch.targets_M)
        return spread(batch.per_row(found.logprobs_M), rows)

    async def load(self, weights: Weights) -> None:
        await self._thread.call(lambda: load_weights(self._policy.model, weights))

    async def close(self) -> None:
        """Let the work in hand finish."""
        await self._thread.close()


def spread(of_trained: Sequence[Floats], rows: Sequence[TrainRow]) -> list[Floats]:
    """From values of each row's trained tokens to values of all its tokens: 0 where a token is not trained."""
    found = []
    for row, values in zip(rows, of_trained, strict=True):
        values_T = np.zeros(len(row.tokens), np.float32)
        values_T[row.loss_mask] = values
        found.append(values_T)
    return found
