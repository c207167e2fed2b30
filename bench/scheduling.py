"""The published gains of ROLL Flash's scheduling, on the virtual clock: the production pipeline against plain loops over the
same simulated engines and environments. Virtual time is exact; every figure is the median over seeds, with its range.

The worlds, and what is set where the paper leaves it open: `bench/scheduling_worlds.py`.

    .venv/bin/python bench/scheduling.py [--json] [--seeds 10]
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import NamedTuple

from scheduling_worlds import Case, Run, cases

METRIC = "seconds a step (virtual)"


class Spread(NamedTuple):
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.0f} s [{self.low:.0f}, {self.high:.0f}]"


def spread(numbers: list[float]) -> Spread:
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


class Figures(NamedTuple):
    ours: Spread
    theirs: Spread
    ratio: Spread
    """Seed by seed."""


def measure(case: Case, num_seeds: int, known: dict[Run, list[float]]) -> Figures:
    """`known` keeps what several rows share."""
    for run in (case.ours, case.theirs):
        if run not in known:
            known[run] = [run(seed) for seed in range(num_seeds)]
    ours, theirs = known[case.ours], known[case.theirs]
    return Figures(spread(ours), spread(theirs), spread([t / o for t, o in zip(theirs, ours, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    rows, known = [], dict[Run, list[float]]()
    for case in cases():
        found = measure(case, options.seeds, known)
        rows.append(
            {
                "workload": case.workload,
                "metric": METRIC,
                "ours": round(found.ours.median, 2),
                "peer": case.peer,
                "theirs": round(found.theirs.median, 2),
                "ratio": round(found.theirs.median / found.ours.median, 3),
            }
        )
        if not options.json:
            ratio = f"{rows[-1]['ratio']:.2f}x [{found.ratio.low:.2f}, {found.ratio.high:.2f}]"
            print(
                f"{case.workload:72} {case.peer:22} {found.theirs!s:20} ours {found.ours!s:20} {ratio:20} {case.published}"
            )
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
