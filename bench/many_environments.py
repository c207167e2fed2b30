"""Ten thousand environments at once in one process: what the scheduler costs per turn, and whether memory stays flat.

Everything but the engine, the environments' waiting and the learner is real: pipeline, admission, router, episodes, store. The
engine answers after a virtual second. The same environments are then played against the same engine by bare coroutines, without
a scheduler: what the event loop, its timers, the engine and the environments cost by themselves. The difference is ours: the
median of `--repeat` runs. Memory is that of the first run, before there is any that could be used again.

    .venv/bin/python bench/many_environments.py [--json] [--smoke] [--environments 10000] [--turns 8] [--steps 12] [--repeat 3]
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import cast

from internals import SimLearner, run_pipeline, seldom_collected
from millstream import PipelineConfig, RolloutConfig
from millstream.clock import run_virtual
from millstream.engine import EngineStats, OnSampled
from millstream.env import Context
from millstream.events import Event, Stepped
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, Weights
from report import Options, cost, publish, say

GROUP_SIZE = 8
AIM_US = 100.0


class FakeEngine:
    """Answers every request with the same eight tokens after a second."""

    name = "fake"
    slots = 1_000_000

    def __init__(self) -> None:
        self.version = 0
        self.num_turns = 0
        self.most_running = 0
        self._running = 0

    async def generate(self, request: Request, on_sampled: OnSampled | None = None) -> Completion:
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        await asyncio.sleep(1.0)
        self._running -= 1
        self.num_turns += 1
        return Completion(tokens=(5,) * 8, logprobs=(-1.0,) * 8, versions=(self.version,) * 8, finish=Finish.STOP)

    async def abort(self, key: RequestKey) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def load(self, version: int, weights: Weights) -> None:
        self.version = version

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._running, waiting=0, tokens_generated=8 * self.num_turns, requests_finished=self.num_turns
        )

    async def close(self) -> None: ...


class Waiting:
    """Some turns, each followed by a step of one second on average, with a heavy tail."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns

    async def rollout(self, context: Context) -> float:
        rng = random.Random(context.seed)
        for _ in range(self._num_turns):
            await context.generate([1, 2, 3, 4])
            await asyncio.sleep(rng.lognormvariate(-0.5, 1.0))
        return float(rng.random() < 0.5)


class Memory:
    """A sink that keeps nothing but the memory of the process at every step."""

    def __init__(self) -> None:
        self.mib: list[float] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.mib.append(_resident_mib())


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def play(num_environments: int, num_turns: int, num_steps: int) -> tuple[FakeEngine, Memory, float]:
    groups = num_environments // GROUP_SIZE // 2
    config = PipelineConfig(steps=num_steps, groups_per_step=groups, max_lag=1, filter_zero_signal=False)
    rollout = RolloutConfig(group_size=GROUP_SIZE, max_tokens=8, timeout_s=1e6)
    engine, memory = FakeEngine(), Memory()
    with seldom_collected():
        began = time.process_time()
        await run_pipeline(
            [engine],
            Waiting(num_turns),
            SimLearner(),
            config=config,
            rollout=rollout,
            sink=memory,
            micro_batch_tokens=1 << 16,
        )
        return engine, memory, time.process_time() - began


class Bare:
    """The context of an environment without a scheduler."""

    def __init__(self, engine: FakeEngine, number: int) -> None:
        self.seed = number
        self._engine = engine
        self._request = Request(
            key=RequestKey(group_id=number, member=0), tokens=(1, 2, 3, 4), sampling=Sampling(max_tokens=8), seed=0
        )

    async def generate(self, tokens: list[int]) -> Completion:
        return await self._engine.generate(self._request)


async def play_bare(num_environments: int, num_turns: int, num_rollouts: int) -> tuple[FakeEngine, float]:
    """As many rollouts, as many at once."""
    engine, environment, numbers = FakeEngine(), Waiting(num_turns), iter(range(num_rollouts))

    async def one_after_another() -> None:
        for number in numbers:
            await environment.rollout(cast("Context", Bare(engine, number)))  # all of a context that it uses

    with seldom_collected():
        began = time.process_time()
        await asyncio.gather(*(one_after_another() for _ in range(num_environments)))
        return engine, time.process_time() - began


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--environments", 10_000, smoke=160)
    parser.add("--turns", 8, smoke=2)
    parser.add("--steps", 12, smoke=3)
    parser.add("--repeat", 3, smoke=1)
    options = parser.parse(argv)
    ours, mib = list[float](), list[float]()
    for _ in range(options.repeat):
        engine, memory, seconds = run_virtual(play(options.environments, options.turns, options.steps))
        num_rollouts = engine.num_turns // options.turns
        bare, bare_seconds = run_virtual(play_bare(options.environments, options.turns, num_rollouts))
        total, plain = 1e6 * seconds / engine.num_turns, 1e6 * bare_seconds / bare.num_turns
        ours.append(total - plain)
        mib = mib or memory.mib
        say(f"CPU per turn: {total:.1f} microseconds, of which event loop, engine and environments {plain:.1f}")
    say(f"{engine.num_turns:,} turns of {options.environments:,} environments, {engine.most_running:,} at once")
    say("memory in MiB at each step: " + " ".join(f"{each:.0f}" for each in mib))
    workload = f"{options.environments} environments, {options.turns} turns"
    metric = "scheduler CPU per turn, microseconds"
    rows = [
        cost(workload, metric, median(ours), "the aim", AIM_US, digits=1),
        cost(workload, "memory at the end over memory half-way", mib[-1] / mib[len(mib) // 2], "flat", 1.0),
    ]
    publish(rows, options)


if __name__ == "__main__":
    main()
