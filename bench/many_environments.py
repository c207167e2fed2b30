"""Ten thousand environments at once in one process: what the scheduler costs per turn, and whether memory stays flat.

Everything but the engine, the environments' waiting and the learner is real: pipeline, admission, router, episodes, store. The
engine answers after a virtual moment. The same environments are then played against the same engine by bare coroutines, without
a scheduler: what the event loop, its timers, the engine and the environments cost by themselves. The difference is ours.

    python bench/many_environments.py [--environments 10000] [--turns 8] [--steps 12] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import resource
import time
from pathlib import Path

from millstream.algo.advantages import grpo
from millstream.clock import VirtualClock, run_virtual
from millstream.engine import EngineStats, OnSampled
from millstream.env import Context
from millstream.events import Event, Stepped
from millstream.pipeline.pipeline import (
    Algorithm,
    Parts,
    Pipeline,
)
from millstream.pipeline.rollouts import RolloutConfig
from millstream.pipeline.schedule import PipelineConfig
from millstream.pipeline.schema import store_tasks
from millstream.pipeline.waits import Waits
from millstream.run.garbage import seldom_collected
from millstream.sim.learner import SimLearner
from millstream.store.memory import MemoryStore
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, Task, Weights
from millstream.weights.local import LocalChannel

GROUP_SIZE = 8
AIM_US = 100.0


class FakeEngine:
    """Answers every request with the same eight tokens after a second."""

    name, slots = "fake", 1_000_000

    def __init__(self) -> None:
        self.version, self.num_turns, self.most_running, self._running = 0, 0, 0, 0

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
    rollout = RolloutConfig(group_size=GROUP_SIZE, timeout_s=1e6)
    engine, memory, clock = FakeEngine(), Memory(), VirtualClock()
    channel = LocalChannel()
    await channel.publish(0, {})
    parts = Parts(
        engines=(engine,),
        environment=Waiting(num_turns),
        learner=SimLearner(),
        store=MemoryStore(store_tasks(), capacity_rows=config.most_groups * rollout.most_rows),
        channel=channel,
        clock=clock,
        sink=memory,
        waits=Waits(clock=clock, sink=memory, stall_s=1e6, deadline_s=1e9),
    )
    algorithm = Algorithm(advantage=grpo, sampling=Sampling(max_tokens=8), micro_batch_tokens=1 << 16)
    tasks = ((0, Task(id=str(number), prompt="?")) for number in itertools.count())
    pipeline = Pipeline(parts, tasks, algorithm, config=config, rollout=rollout, seed=0)
    with seldom_collected():
        began = time.process_time()
        await pipeline.run()
        return engine, memory, time.process_time() - began


class Bare:
    """The context of an environment that nobody schedules."""

    def __init__(self, engine: FakeEngine, number: int) -> None:
        self.seed, self._engine = number, engine
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
            await environment.rollout(Bare(engine, number))  # type: ignore[arg-type]

    with seldom_collected():
        began = time.process_time()
        await asyncio.gather(*(one_after_another() for _ in range(num_environments)))
        return engine, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    engine, memory, seconds = run_virtual(play(args.environments, args.turns, args.steps))
    bare, bare_seconds = run_virtual(play_bare(args.environments, args.turns, engine.num_turns // args.turns))
    total, plain = 1e6 * seconds / engine.num_turns, 1e6 * bare_seconds / bare.num_turns
    microseconds = total - plain
    half = memory.mib[len(memory.mib) // 2]
    workload = f"{args.environments} environments, {args.turns} turns"
    rows = [
        {
            "workload": workload,
            "metric": "scheduler CPU per turn, microseconds",
            "ours": round(microseconds, 1),
            "peer": "the aim",
            "theirs": AIM_US,
            "ratio": round(AIM_US / microseconds, 2),
        },
        {
            "workload": workload,
            "metric": "memory at the end over memory half-way",
            "ours": round(memory.mib[-1] / half, 3),
            "peer": "flat",
            "theirs": 1.0,
            "ratio": round(half / memory.mib[-1], 3),
        },
    ]
    if args.json:
        print(json.dumps(rows))
        return
    print(
        f"{engine.num_turns:,} turns of {args.environments:,} environments, {engine.most_running:,} in the engine at once"
    )
    print(
        f"CPU per turn: {total:.1f} microseconds, of which event loop, engine and environments {plain:.1f}, "
        f"scheduler {microseconds:.1f} (aim: under {AIM_US:g})"
    )
    print("memory in MiB at each step: " + " ".join(f"{mib:.0f}" for mib in memory.mib))


if __name__ == "__main__":
    main()
