"""What a reward costs beside itself: in a worker process against a thread, and code in each kind of sandbox.

.venv/bin/python bench/rewards.py [--json] [--smoke]
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from internals import (
    WALLS,
    CompletionScorer,
    ProgramSandbox,
    RewardConfig,
    SandboxBroken,
    prepare_rewards,
    what_is_contained,
)
from millstream.types import Task
from report import Options, Row, alone, cost, not_measured, publish, say

TASK = Task(id="1", prompt="2+2=", answer="4")
PROGRAM = "def f(x): return x + 1"
TESTS = ["assert f(1) == 2", "assert f(2) == 3"]
Work = Callable[[], Awaitable[object]]


class Milliseconds(NamedTuple):
    first: float
    alone: float  # the median of calls one after the other
    at_once: float  # of each of many calls at once


METRICS = ("first call, ms", "one call, ms", "each of many calls at once, ms")


async def measure(work: Work, num_alone: int, num_at_once: int) -> Milliseconds:
    async def timed(run: Awaitable[object]) -> float:
        began = time.perf_counter()
        await run
        return 1e3 * (time.perf_counter() - began)

    async def gathered(number: int) -> None:
        await asyncio.gather(*(work() for _ in range(number)))

    first = await timed(work())
    await gathered(min(num_at_once, 100))
    one = statistics.median([await timed(work()) for _ in range(num_alone)])
    return Milliseconds(first, one, await timed(gathered(num_at_once)) / num_at_once)


def scoring(config: RewardConfig, task: Task, completion: str) -> Work:
    scorer = CompletionScorer(prepare_rewards([config]))
    return lambda: scorer.score(task, completion)


async def processes(folder: Path, num: int) -> list[Row]:
    (folder / "mine.py").write_text("def reward(task, completion):\n    return float(completion == task.answer)\n")
    config = RewardConfig(function=f"{folder}/mine.py:reward")
    thread = await measure(scoring(config, TASK, "4"), num, 2 * num)
    process = await measure(
        scoring(RewardConfig(function=f"{folder}/mine.py:reward", process=True), TASK, "4"), num, 2 * num
    )
    rows = zip(METRICS, process, thread, strict=True)
    return [cost("a reward in a worker process", metric, ours, "on a thread", theirs) for metric, ours, theirs in rows]


async def mathematics(num: int) -> list[Row]:
    task = Task(id="1", prompt="", answer="\\frac{1}{2}")
    found = await measure(scoring(RewardConfig(function="math_answer"), task, "\\boxed{0.5}"), num, num)
    return [alone("math_answer", metric, value) for metric, value in zip(METRICS, found, strict=True)]


async def sandboxes(num: int) -> list[Row]:
    rows: list[Row] = []
    for walls in WALLS:
        try:
            say(what_is_contained(walls).words())
        except SandboxBroken as error:
            rows.append(not_measured(f"sandbox with walls {walls!r}", str(error)))
            continue
        box = ProgramSandbox(walls=walls)

        async def run(box: ProgramSandbox = box) -> object:
            return await box.run("print(1)")

        async def examine(box: ProgramSandbox = box) -> object:
            return await box.examine(PROGRAM, TESTS)

        works: dict[str, Work] = {"a program": run, "two tests": examine}
        for name, work in works.items():
            found = await measure(work, num, 2 * num)
            workload = f"{name} in a sandbox with walls {walls!r}"
            rows += [alone(workload, metric, value) for metric, value in zip(METRICS, found, strict=True)]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--calls", 500, smoke=5, help="of a reward")
    parser.add("--programs", 50, smoke=2, help="in a sandbox")
    options = parser.parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(processes(Path(folder), options.calls))
    rows += asyncio.run(mathematics(min(options.calls, 100)))
    rows += asyncio.run(sandboxes(options.programs))
    publish(rows, options)


if __name__ == "__main__":
    main()
