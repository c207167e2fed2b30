"""Log-probabilities of a model that does not learn by itself: a reference, a teacher, or the policy as it was when the batch
began. Forward passes alone, on a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from millstream.learner.rows import Rows
from millstream.model.load import check_layers, load_weights
from millstream.model.policy import Policy
from millstream.rpc.threads import DaemonThreads
from millstream.types import Floats, TrainRow, Weights


class TorchScorer:
    """See `millstream.learner.Scorer` and `Follower` for the promises. On the device where the model is."""

    def __init__(self, model: PreTrainedModel, *, temperature: float = 1.0, name: str = "reference") -> None:
        check_layers(model)
        self._policy = Policy(model.requires_grad_(False), temperature=temperature)
        self._device = next(model.parameters()).device
        self._thread = DaemonThreads(name, most=1)

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        scores: list[Floats] = await self._thread.call(lambda: self._score(rows))
        return scores

    @torch.no_grad()
    def _score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        batch = Rows(rows, self._device)
        if not batch.num_trained:
            return [np.zeros(len(row.tokens), np.float32) for row in rows]
        found = self._policy(batch.tokens_N, batch.packed, batch.before_M, batch.targets_M)
        return spread(batch.per_row(found.logprobs_M), rows)

    async def load(self, weights: Weights) -> None:
        await self._thread.call(lambda: load_weights(self._policy.model, weights))

    async def close(self) -> None:
        """Let the work in hand come to its end."""
        await self._thread.close()


def spread(of_trained: Sequence[Floats], rows: Sequence[TrainRow]) -> list[Floats]:
    """Numbers of the trained tokens of each row -> of all its tokens, 0 elsewhere."""
    found = []
    for row, values in zip(rows, of_trained, strict=True):
        values_T = np.zeros(len(row.tokens), np.float32)
        values_T[row.loss_mask] = values
        found.append(values_T)
    return found
