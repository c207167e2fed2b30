"""What a reward costs beside itself: in a worker process, and in the sandbox. `python bench/rewards.py`."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from millstream.env.rewards import RewardConfig, Scorer, prepare_rewards
from millstream.env.sandbox.sandbox import WALLS, Sandbox, SandboxBroken, what_is_contained
from millstream.types import Task

TASK = Task(id="1", prompt="2+2=", answer="4")
PROGRAM, TESTS = "def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 3"]


async def one_by_one(work: Callable[[], Awaitable[object]], number: int) -> float:
    """The median, in milliseconds."""
    times = []
    for _ in range(number):
        began = time.perf_counter()
        await work()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


async def at_once(work: Callable[[], Awaitable[object]], number: int) -> float:
    """Milliseconds for each of so many at once."""
    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(number)))
    return (time.perf_counter() - began) / number * 1e3


async def processes(folder: Path) -> None:
    (folder / "mine.py").write_text("def reward(task, completion):\n    return float(completion == task.answer)\n")
    for process in (False, True):
        scorer = Scorer(prepare_rewards([RewardConfig(function=f"{folder}/mine.py:reward", process=process)]))

        async def work(scorer: Scorer = scorer) -> object:
            return await scorer.score(TASK, "4")

        began = time.perf_counter()
        await work()
        first = (time.perf_counter() - began) * 1e3
        await at_once(work, 100)
        where = "in a worker process" if process else "on a thread"
        print(f"reward {where}: first {first:.0f} ms, then {await one_by_one(work, 500):.3f} ms, ", end="")
        print(f"{await at_once(work, 1000):.3f} ms each of 1000 at once")


async def mathematics() -> None:
    scorer = Scorer(prepare_rewards([RewardConfig(function="math_answer")]))

    async def work() -> object:
        return await scorer.score(Task(id="1", prompt="", answer="\\frac{1}{2}"), "\\boxed{0.5}")

    began = time.perf_counter()
    await work()
    print(f"math_answer: first {(time.perf_counter() - began) * 1e3:.0f} ms, then {await one_by_one(work, 100):.1f} ms")


async def sandboxes() -> None:
    for walls in WALLS:
        try:
            print(what_is_contained(walls).words())
        except SandboxBroken as error:
            print(f"walls {walls!r}: {error}")
            continue
        box = Sandbox(walls=walls)

        async def run(box: Sandbox = box) -> object:
            return await box.run("print(1)")

        async def examine(box: Sandbox = box) -> object:
            return await box.examine(PROGRAM, TESTS)

        began = time.perf_counter()
        await run()
        first = (time.perf_counter() - began) * 1e3
        print(f"  a program: first {first:.0f} ms, then {await one_by_one(run, 50):.1f} ms, ", end="")
        print(f"{await at_once(run, 100):.1f} ms each of 100 at once")
        print(
            f"  two tests: {await one_by_one(examine, 50):.1f} ms, {await at_once(examine, 100):.1f} ms each of 100 at once"
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(processes(Path(name)))
    asyncio.run(mathematics())
    asyncio.run(sandboxes())
