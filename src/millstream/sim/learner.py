"""A learner, a reference, a critic and a proximal policy that take time and learn nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from millstream.seeds import derive_seed
from millstream.sim.draws import Draw, constant
from millstream.sim.sharing import Sharing
from millstream.types import Floats, HalfFloats, Metrics, TrainRow, Weights

TENTH = constant(0.1)


class SimSnapshot:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def write(self, folder: Path) -> None:
        (folder / "sim.txt").write_text(f"{self.num_rows}\n")


class SimLearner:
    """Takes time in proportion to tokens. Its weights are a number: how many rows they have seen. `sharing`: GPUs that it
    shares with engines."""

    def __init__(
        self,
        *,
        token_s: float = 1e-4,
        step_s: Draw = TENTH,
        publish_s: float = 0.0,
        seed: int = 0,
        sharing: Sharing | None = None,
    ) -> None:
        self._token_s = token_s
        self._step_s = step_s
        self._publish_s = publish_s
        self._sharing = Sharing() if sharing is None else sharing
        self._rng = random.Random(derive_seed(seed, "learner"))
        self.num_rows = 0

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def begin_batch(self) -> None: ...

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await self._sharing.train(self._token_s * sum(row.num_tokens for row in rows))
        self.num_rows += len(rows)

    async def step(self) -> Metrics:
        await self._sharing.train(self._step_s(self._rng))
        return {}

    def log_ratios(self) -> HalfFloats:
        return np.zeros(0, np.float16)

    def rank_seconds(self) -> list[float]:
        return []

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        await asyncio.sleep(self._token_s * sum(row.num_tokens for row in rows))
        return [np.zeros(int(row.loss_mask.sum()), dtype=np.float32) for row in rows]

    async def weights(self) -> Weights:
        if self._publish_s:
            await asyncio.sleep(self._publish_s)
        return {"num_rows": self.num_rows}

    async def snapshot(self) -> SimSnapshot:
        return SimSnapshot(self.num_rows)

    def restore(self, folder: Path) -> None:
        self.num_rows = int((folder / "sim.txt").read_text())

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "sim.txt").write_text(f"{self.num_rows}\n")


class SimScorer:
    """Takes time in proportion to tokens, one call after the other. The score of a token is a function of the token."""

    def __init__(self, *, token_s: float = 1e-5, seed: int = 0) -> None:
        self._token_s = token_s
        self._seed = seed
        self._is_free = asyncio.Lock()
        self.num_scored = 0

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        async with self._is_free:
            await asyncio.sleep(self._token_s * sum(row.num_tokens for row in rows))
        self.num_scored += len(rows)
        return [(row.loss_mask * (1 + (row.tokens + self._seed) % 7) / -4).astype(np.float32) for row in rows]


class SimFollower(SimScorer):
    """The score of a token is a function of the token and of the weights."""

    def __init__(self, *, token_s: float = 1e-5, seed: int = 0, load_s: float = 0.05) -> None:
        super().__init__(token_s=token_s, seed=seed)
        self._load_s = load_s
        self._num_rows = 0
        self.num_loaded = 0

    async def load(self, weights: Weights) -> None:
        async with self._is_free:
            await asyncio.sleep(self._load_s)
            self._num_rows = weights["num_rows"]
        self.num_loaded += 1

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        scores = await super().score(rows)
        return [score - self._num_rows * row.loss_mask for score, row in zip(scores, rows, strict=True)]


class SimCritic(SimScorer):
    """Its weights are a number: how many rows they have seen."""

    def __init__(self, *, token_s: float = 1e-5, seed: int = 0) -> None:
        super().__init__(token_s=token_s, seed=seed)
        self.num_rows = 0

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        async with self._is_free:
            await asyncio.sleep(3 * self._token_s * sum(row.num_tokens for row in rows))
        self.num_rows += len(rows)

    async def step(self) -> Metrics:
        return {"num_rows": float(self.num_rows)}

    async def snapshot(self) -> SimSnapshot:
        return SimSnapshot(self.num_rows)

    def restore(self, folder: Path) -> None:
        self.num_rows = int((folder / "sim.txt").read_text())
