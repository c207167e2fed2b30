"""The learner of one device: a `Trainer` whose rows have one objective, with what a run needs besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from millstream.learner.config import LearnerConfig
from millstream.learner.tally import FiniteGuard
from millstream.learner.trainer import Trainer
from millstream.objective import Objective
from millstream.types import Floats, HalfFloats, Metrics, TrainRow


class TorchLearner(Trainer):
    """A `RunLearner` (`learner.base`). `more`: see `Trainer`."""

    def __init__(self, model: PreTrainedModel, config: LearnerConfig, objective: Objective, **more: Any) -> None:
        super().__init__(model, config, objective, **more)
        self._guard = FiniteGuard(config.max_skipped_steps)
        self._log_ratios: HalfFloats = np.zeros(0, np.float16)

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
