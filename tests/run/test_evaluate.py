"""Evaluations: what their rollouts count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from millstream.clock import VirtualClock, run_virtual
from millstream.env import Context
from millstream.errors import StallError
from millstream.events import Evaluated
from millstream.events.sinks import MemorySink
from millstream.pipeline.waits import Waits
from millstream.run.evaluate import Evaluator
from millstream.serving.router import Router
from millstream.sim.engine import SimEngine
from millstream.types import Sampling, Task


class StallsOnce:
    async def rollout(self, context: Context) -> float:
        await context.generate([1, 2])
        if context.task.id == "1":
            raise StallError("the judge has been waited for too long")
        return 1.0


def test_a_rollout_of_an_evaluation_whose_wait_ran_past_its_deadline_counts_0_and_the_others_count() -> None:
    clock, sink = VirtualClock(), MemorySink()
    rollout = SimpleNamespace(max_parts=1, timeout_s=100.0)
    prepared: Any = SimpleNamespace(
        environment=StallsOnce(),
        config=SimpleNamespace(seed=0, rollout=rollout),
        text=SimpleNamespace(decode=str),
    )

    async def play() -> Evaluated:
        waits = Waits(clock=clock, sink=sink, stall_s=30.0, deadline_s=60.0)
        evaluator = Evaluator(prepared, Router([SimEngine()]), clock, sink, waits)
        tasks = [Task(id=str(number), prompt="?") for number in range(4)]
        return (await evaluator.measure("now", tasks, Sampling(max_tokens=8)))[0]

    found = run_virtual(play())
    assert (found.num_failed, found.num_tasks, found.accuracy) == (1, 4, 0.75)
    assert found.failure == "StallError: the judge has been waited for too long"


class TwoTurns:
    async def rollout(self, context: Context) -> float:
        await context.generate([1, 2])
        await context.generate([7, 8])
        return 1.0


def test_a_sample_of_several_turns_shows_what_the_environment_said() -> None:
    clock, sink = VirtualClock(), MemorySink()
    rollout = SimpleNamespace(max_parts=1, timeout_s=100.0)
    prepared: Any = SimpleNamespace(
        environment=TwoTurns(),
        config=SimpleNamespace(seed=0, rollout=rollout),
        text=SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens))),
    )

    async def play() -> Evaluated:
        waits = Waits(clock=clock, sink=sink, stall_s=30.0, deadline_s=60.0)
        evaluator = Evaluator(prepared, Router([SimEngine()]), clock, sink, waits)
        return (await evaluator.measure("now", [Task(id="1", prompt="?")], Sampling(max_tokens=2)))[0]

    sample = run_virtual(play()).sample
    assert sample is not None
    first, environment, second = sample.completion.split("\n")
    assert environment == "[environment] 7 8" and first and second
