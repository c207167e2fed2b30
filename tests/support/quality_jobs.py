"""Made-up processes and results for the runner of bench/quality.py."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from curves import Point
from quality import Job, Runner
from quality_cells import Cell, Result, Settings

SMALL = Settings(
    num_tasks=200, held_out=8, hidden=16, warm_up_to=0.0, groups_per_step=2, group_size=2, steps=4, every_steps=4
)
WARM = "import sys, tarfile; tarfile.open(sys.argv[1] + '/warm.tar', 'w').close()"
CELL = """
import pathlib, sys, time
scratch, slow, kind, result = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), *sys.argv[3:]
if slow.exists():
    slow.rename(slow.with_name("met"))
    time.sleep(60)
if kind == "fails":
    sys.exit("no luck today")
(scratch / "result.json").write_text(result)
"""
"""A cell that has its result at once, but for the first one to meet the file `slow`, and one that fails."""


def made_up(cell: Cell, accuracy: float) -> Result:
    """A cell whose last two points have this mean."""
    heights = (0.25, 0.9, 0.9, accuracy - 0.01, accuracy + 0.01)
    curve = [Point(step=n, samples=4 * n, seconds=1.0 * n, accuracy=a, greedy=a) for n, a in enumerate(heights)]
    return Result(
        loss=cell.loss, max_lag=cell.max_lag, seed=cell.seed, curve=curve, lags={str(cell.max_lag): 100}, oldest_token=cell.max_lag,
        newest_token=cell.max_lag, metrics={"effective_sample_size": 0.9}, seconds=2.0,
    )  # fmt: skip


class Processes:
    """Made-up ones for a `Runner`, and which were started."""

    def __init__(self, slow: Path, fails: Cell | None = None) -> None:
        self._slow, self._fails, self.started = slow, fails, list[str]()

    def __call__(self, job: Job, model: Path, scratch: Path) -> list[str]:
        self.started.append(str(job))
        if job.cell is None:
            return [sys.executable, "-c", WARM, str(scratch)]
        kind = "fails" if job.cell == self._fails else "ends"
        said = msgspec.json.encode(made_up(job.cell, 0.5)).decode()
        return [sys.executable, "-c", CELL, str(scratch), str(self._slow), kind, said]


def runner(folder: Path, processes: Processes, *, minutes: float = 1.0) -> Runner:
    return Runner(folder, SMALL, jobs=2, minutes=minutes, seeds=1, command=processes)
