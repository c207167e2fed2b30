"""Fakes with costs: what they do takes virtual time, drawn from seeds, and nothing else.

Every draw comes from the seed of the request or of the call number, so that the same run gives the same trace.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

from millstream.engine import EngineStats
from millstream.env import Context
from millstream.errors import EngineError, EnvironmentFailed
from millstream.seeds import derive_seed
from millstream.types import Completion, Finish, Metrics, Request, RequestKey, TrainRow, Weights

Draw = Callable[[random.Random], float]


def constant(value: float) -> Draw:
    return lambda rng: value


def uniform(low: float, high: float) -> Draw:
    return lambda rng: rng.uniform(low, high)


FREE, UP_TO_100, TENTH = constant(0.0), uniform(1, 100), constant(0.1)


def lognormal(mean: float, sigma: float) -> Draw:
    """A heavy tail: `mean` is the mean itself, `sigma` the deviation of the logarithm."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng: rng.lognormvariate(mu, sigma)


class SimEngine:
    """A number of slots; each token of a request takes `token_s`. Keeps the promises of `millstream.engine.Engine`."""

    def __init__(
        self,
        *,
        name: str = "engine",
        slots: int = 64,
        token_s: float = 0.01,
        num_tokens: Draw = UP_TO_100,
        load_s: Draw = FREE,
        version: int = 0,
        seed: int = 0,
    ) -> None:
        self.name, self.slots = name, slots
        self._slots = asyncio.Semaphore(slots)
        self._token_s, self._num_tokens, self._load_s = token_s, num_tokens, load_s
        self._rng = random.Random(derive_seed(seed, name))
        self._loaded_at: list[float] = [float("-inf")]
        self._versions: list[int] = [version]
        self._running: dict[RequestKey, asyncio.Event] = {}
        self._waiting = self._finished = self._tokens = 0
        self._awake = asyncio.Event()
        self._awake.set()

    @property
    def version(self) -> int:
        return self._versions[-1]

    async def generate(self, request: Request) -> Completion:
        if request.key in self._running:
            raise EngineError(f"{request.key} is in flight already")
        aborted = self._running[request.key] = asyncio.Event()
        self._waiting += 1
        try:
            async with self._slots:
                self._waiting -= 1
                await self._awake.wait()
                return await self._decode(request, aborted)
        finally:
            del self._running[request.key]
            self._finished += 1

    async def _decode(self, request: Request, aborted: asyncio.Event) -> Completion:
        rng = random.Random(request.seed)
        wanted = max(1, round(self._num_tokens(rng)))
        length = min(wanted, request.sampling.max_tokens)
        began = asyncio.get_running_loop().time()
        finish = Finish.STOP if wanted <= request.sampling.max_tokens else Finish.LENGTH
        try:
            async with asyncio.timeout(length * self._token_s):
                await aborted.wait()
            finish = Finish.ABORT
            length = min(length, int((asyncio.get_running_loop().time() - began) / self._token_s))
        except TimeoutError:
            pass
        self._tokens += length
        return Completion(
            tokens=tuple(rng.randrange(2, 100) for _ in range(length)),
            logprobs=tuple(-rng.random() for _ in range(length)),
            versions=tuple(self._version_at(began + i * self._token_s) for i in range(length)),
            finish=finish,
        )

    def _version_at(self, time: float) -> int:
        return self._versions[bisect_right(self._loaded_at, time) - 1]

    async def abort(self, key: RequestKey) -> None:
        if key in self._running:
            self._running[key].set()

    async def pause(self) -> None:
        """Requests that have not begun wait; those that have are not slowed down (their cost is already drawn)."""
        self._awake.clear()

    async def resume(self) -> None:
        self._awake.set()

    async def load(self, version: int, weights: Weights) -> None:
        await asyncio.sleep(self._load_s(self._rng))
        if version < self.version:
            raise EngineError(f"version {version} after {self.version}")
        self._loaded_at.append(asyncio.get_running_loop().time())
        self._versions.append(version)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running) - self._waiting,
            waiting=self._waiting,
            tokens_generated=self._tokens,
            requests_finished=self._finished,
        )

    async def close(self) -> None:
        for aborted in self._running.values():
            aborted.set()


class SimEnvironment:
    """Some turns, each followed by a step of some latency, which fails with some probability; a coin for a reward."""

    def __init__(
        self,
        *,
        num_turns: int = 1,
        latency_s: Draw = FREE,
        failure: float = 0.0,
        success: float = 0.5,
        prompt_tokens: int = 4,
    ) -> None:
        self._num_turns, self._latency_s = num_turns, latency_s
        self._failure, self._success, self._prompt_tokens = failure, success, prompt_tokens

    async def rollout(self, context: Context) -> float:
        rng = random.Random(context.seed)
        for _ in range(self._num_turns):
            await context.generate([1] * self._prompt_tokens)
            await asyncio.sleep(self._latency_s(rng))
            if rng.random() < self._failure:
                raise EnvironmentFailed("a simulated failure")
        return float(rng.random() < self._success)


class SimSnapshot:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def write(self, folder: Path) -> None:
        (folder / "sim.txt").write_text(f"{self.num_rows}\n")


class SimLearner:
    """Takes time in proportion to tokens. Its weights are a number: how many rows they have seen."""

    def __init__(self, *, token_s: float = 1e-4, step_s: Draw = TENTH, seed: int = 0) -> None:
        self._token_s, self._step_s = token_s, step_s
        self._rng = random.Random(derive_seed(seed, "learner"))
        self.num_rows = 0

    async def begin_batch(self) -> None: ...

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await asyncio.sleep(self._token_s * sum(len(row.tokens) for row in rows))
        self.num_rows += len(rows)

    async def step(self) -> Metrics:
        await asyncio.sleep(self._step_s(self._rng))
        return {}

    async def weights(self) -> Weights:
        return {"num_rows": self.num_rows}

    async def snapshot(self) -> SimSnapshot:
        return SimSnapshot(self.num_rows)

    def restore(self, folder: Path) -> None:
        self.num_rows = int((folder / "sim.txt").read_text())

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "sim.txt").write_text(f"{self.num_rows}\n")
