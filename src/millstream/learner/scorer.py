"""Scorers: log-probabilities under a model that is not trained (a reference, a teacher) or that follows the policy (the
proximal policy). Forward passes only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from millstream.learner.check import check_learner
from millstream.learner.passes import Passes, why_fixed
from millstream.learner.rank import load_slices
from millstream.learner.rows import EMPTY_ROW, RowTensors
from millstream.model.concurrent import shield_from_tracers
from millstream.model.policy import Policy
from millstream.rpc.threads import DaemonThreads
from millstream.types import Floats, TrainRow, Weights
from millstream.weights.transfer.remote_weights import RemoteWeights


class ScorerRank:
    """A scorer without a thread of its own, of the whole model or of one shard of it. `is_fixed`: passes are never made
    smaller. `is_sharded`: one of several ranks, which all make the same number of passes."""

    def __init__(self, policy: Policy, name: str, *, is_sharded: bool = False, is_fixed: bool = False) -> None:
        self._passes = Passes(name, why_fixed=why_fixed(is_sharded=is_sharded, is_fixed=is_fixed))
        self._policy = policy
        self._is_sharded = is_sharded
        self._device = next(policy.parameters()).device

    def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        if self._is_sharded and not any(row.loss_mask.any() for row in rows):
            self._score_pass([EMPTY_ROW])
        found = [scores for some in self._passes.run(rows, self._score_pass) for scores in some]
        if isinstance(self._policy, FSDPModule) and hasattr(
            self._policy, "reset_iter_state"
        ):  # not in each version of torch
            self._policy.reset_iter_state()  # its list of passes grows until a backward pass, and there is none
        return found

    @torch.no_grad()
    def _score_pass(self, rows: Sequence[TrainRow]) -> list[Floats]:
        if not any(row.loss_mask.any() for row in rows):
            return [np.zeros(len(row.tokens), np.float32) for row in rows]
        batch = RowTensors(rows, self._device)
        found = self._policy(batch.tokens_N, batch.packed, batch.before_M, batch.targets_M)
        return spread(batch.per_row(found.logprobs_M), rows)

    def load(self, weights: Weights) -> None:
        load_slices(self._policy.model, weights)


class TorchScorer:
    """A `Scorer` and a `Follower` (`learner.base`) on a thread of this process, on the device of the model."""

    def __init__(
        self, model: PreTrainedModel, *, temperature: float = 1.0, name: str = "reference", is_fixed: bool = False
    ) -> None:
        """`is_fixed`: passes are never made smaller."""
        self.rank = whole_scorer(model, temperature=temperature, name=name, is_fixed=is_fixed)
        self._thread = DaemonThreads(name, most=1)

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        scores: list[Floats] = await self._thread.call(lambda: self.rank.score(rows))
        return scores

    async def load(self, weights: Weights) -> None:
        await self._thread.call(lambda: self._load(weights))

    def _load(self, weights: Weights) -> None:
        try:
            self.rank.load(weights)
        finally:
            if isinstance(weights, RemoteWeights):  # the process that has staged them uses the slot again
                weights.release()

    async def close(self) -> None:
        """Let the work in hand finish."""
        await self._thread.close()


def whole_scorer(model: PreTrainedModel, *, temperature: float, name: str, is_fixed: bool) -> ScorerRank:
    check_learner(model)
    shield_from_tracers(model)
    return ScorerRank(Policy(model.requires_grad_(False), temperature=temperature), name, is_fixed=is_fixed)


def spread(of_trained: Sequence[Floats], rows: Sequence[TrainRow]) -> list[Floats]:
    """From values of each row's trained tokens to values of all its tokens: 0 where a token is not trained."""
    found = []
    for row, values in zip(rows, of_trained, strict=True):
        values_T = np.zeros(row.num_tokens, np.float32)
        values_T[row.loss_mask] = values
        found.append(values_T)
    return found
