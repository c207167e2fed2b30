"""The loads of `bench/end_to_end.py`: what is generated in a cell, and the environment that makes it so.

Lengths that are imposed come from the rollout's own seed: a group has the same lengths and latencies in every mode. Rewards are
random, so that every group has a signal, and come from the same seed. Imports no torch: runs load this file by path.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from internals import limit_turns
from millstream.env import Context

HERE = Path(__file__).resolve()
GEOMETRIC, LOG_NORMAL, EQUAL = "geometric", "log-normal", "equal"
NUM_TASKS = 1024
FIRST_WORD = 3
"""The tokens before it are <pad>, <eos> and <unk>."""


class Shape(Struct, frozen=True, kw_only=True):
    """A Qwen3 with random weights. With few words the end token comes by itself: about one in 670."""

    hidden: int
    layers: int
    heads: int
    dim: int
    words: int = 512


SHAPES = {
    "474M": Shape(hidden=1024, layers=28, heads=16, dim=128),
    "1.7B": Shape(hidden=2048, layers=28, heads=16, dim=128),
    "tiny": Shape(hidden=32, layers=2, heads=2, dim=16, words=32),
}


class Workload(Struct, frozen=True, kw_only=True):
    """What a step of a cell generates. `mean_tokens`: of one turn, where lengths are imposed."""

    shape: str
    lengths: str
    rollouts: int
    max_tokens: int
    context: int
    group_size: int = 8
    shortest_prompt: int = 64
    longest_prompt: int = 200
    mean_tokens: float = 0.0
    sigma: float = 0.0
    turns: int = 1
    latency_s: float = 0.0
    """Mean of an environment's step."""
    failures: float = 0.0
    """Share of the rollouts whose environment raises."""
    warm_steps: int = 6
    """Steps before the measured ones, the same in all modes: two more than the largest `max_lag`. The groups of a run's first
    `max_lag + 1` steps have started at once."""
    steps: int = 8
    """That are measured, the same ones in all modes."""
    has_model: bool = True
    """Whether the step model describes it: it knows nothing of environments that take their time."""

    @property
    def groups_per_step(self) -> int:
        return self.rollouts // self.group_size

    def environment(self) -> dict[str, Any]:
        """The keys of its [[environment]] table."""
        args = {
            "lengths": self.lengths,
            "max_tokens": self.max_tokens,
            "mean_tokens": self.mean_tokens,
            "sigma": self.sigma,
            "turns": self.turns,
            "latency_s": self.latency_s,
            "failures": self.failures,
            "words": SHAPES[self.shape].words,
        }
        return {"use": f"{HERE}:RandomRollouts", "args": args, "step_timeout_s": 600.0}


def _single_turn() -> Iterator[tuple[str, Workload]]:
    for shape in ("474M", "1.7B"):
        for rollouts in (64, 512):
            geometric = Workload(
                shape=shape,
                lengths=GEOMETRIC,
                rollouts=rollouts,
                max_tokens=4096,
                context=4608,
                steps=8 if rollouts == 64 else 3,
            )
            yield f"{shape}-geometric-{rollouts}", geometric
            log_normal = Workload(
                shape=shape,
                lengths=LOG_NORMAL,
                rollouts=rollouts,
                max_tokens=8192,
                context=8704,
                mean_tokens=1000.0,
                sigma=1.5,
                steps=8 if rollouts == 64 else 3,
            )
            yield f"{shape}-log-normal-{rollouts}", log_normal


WORKLOADS: dict[str, Workload] = {
    **dict(_single_turn()),
    "agents": Workload(
        shape="474M",
        lengths=LOG_NORMAL,
        rollouts=64,
        max_tokens=256,
        context=4608,
        mean_tokens=64.0,
        sigma=0.8,
        turns=8,
        latency_s=1.0,
        failures=0.02,
        steps=3,
        has_model=False,
    ),
    "short": Workload(
        shape="474M",
        lengths=EQUAL,
        rollouts=512,
        max_tokens=256,
        context=4608,
        mean_tokens=256.0,
        steps=4,  # they are alike
    ),
}
_SMOKE: dict[str, Any] = {
    "shape": "tiny",
    "rollouts": 4,
    "group_size": 2,
    "context": 128,
    "shortest_prompt": 4,
    "longest_prompt": 8,
    "warm_steps": 4,
    "steps": 2,
}
SMOKE_WORKLOADS: dict[str, Workload] = {
    "tiny-geometric-4": Workload(lengths=GEOMETRIC, max_tokens=32, **_SMOKE),
    "tiny-log-normal-4": Workload(lengths=LOG_NORMAL, max_tokens=32, mean_tokens=8.0, sigma=1.5, **_SMOKE),
    "tiny-agents": Workload(
        lengths=LOG_NORMAL,
        max_tokens=8,
        mean_tokens=4.0,
        sigma=0.8,
        turns=3,
        latency_s=0.01,
        failures=0.02,
        has_model=False,
        **_SMOKE,
    ),
}

LATENCY_SIGMA = 1.0
MAX_LATENCY_S = 30.0
OBSERVED_TOKENS = 32


class RandomRollouts:
    """Plays episodes whose lengths, latencies, failures and rewards are random numbers by the rollout's seed. With geometric
    lengths the model ends its turn by itself; the other lengths are imposed, and the end token ends nothing."""

    def __init__(
        self,
        lengths: str,
        max_tokens: int,
        mean_tokens: float,
        sigma: float,
        turns: int,
        latency_s: float,
        failures: float,
        words: int,
    ) -> None:
        self._lengths = lengths
        self._max_tokens = max_tokens
        self._mean_tokens = mean_tokens
        self._sigma = sigma
        self._turns = turns
        self._latency_s = latency_s
        self._failures = failures
        self._words = words

    async def rollout(self, context: Context) -> float:
        latencies, rng = random.Random(context.seed), random.Random(context.seed + 1)
        fails_at = rng.randrange(self._turns) if rng.random() < self._failures else None
        assert isinstance(context.task.prompt, str)
        tokens: Sequence[int] = context.text.opening(context.task.prompt)
        for turn in range(self._turns):
            if self._lengths != GEOMETRIC:
                limit_turns(context, self._num_tokens(rng))
            await context.generate(tokens)
            if turn == fails_at:
                raise RuntimeError("the environment failed, as one in fifty does")
            if self._latency_s:
                latency_s = min(log_normal(latencies, self._latency_s, LATENCY_SIGMA), MAX_LATENCY_S)
                await context.waiting("its environment's step", asyncio.sleep(latency_s))
            tokens = [rng.randrange(FIRST_WORD, self._words) for _ in range(OBSERVED_TOKENS)]
        return rng.random()

    def _num_tokens(self, rng: random.Random) -> int:
        if self._lengths == EQUAL:
            return self._max_tokens
        return min(max(4, round(log_normal(rng, self._mean_tokens, self._sigma))), self._max_tokens)


def log_normal(rng: random.Random, mean: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)


def word(number: int) -> str:
    return f"w{number}"


def write_prompts(workload: Workload, folder: Path) -> Path:
    """The tasks as a file, which the peer reads as well; made once."""
    words, shortest, longest = SHAPES[workload.shape].words, workload.shortest_prompt, workload.longest_prompt
    path = folder / f"prompts-{words}-{shortest}-{longest}.jsonl"
    if not path.exists():
        rng, lines = random.Random(0), list[str]()
        for number in range(NUM_TASKS):
            prompt = " ".join(word(rng.randrange(FIRST_WORD, words)) for _ in range(rng.randint(shortest, longest)))
            lines.append(json.dumps({"id": str(number), "prompt": prompt}) + "\n")
        path.write_text("".join(lines))
    return path
