"""What do the ledger, the event log, the metrics and the checkpoints cost? The demo's recipe with all of it, and with none.

Runs alternate, so that a slow minute of the machine hits both; medians. "None" drops every event and writes no checkpoint. A
checkpoint every 10 seconds, six times as often as by default. Rates leave out the first fifth of the steps.

    .venv/bin/python bench/bookkeeping.py [--json] [--steps 100] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from millstream import RunConfig, train
from millstream.config import load
from millstream.events import Event, Stepped
from millstream.run import log
from millstream.run import run as running

ROOT = Path(__file__).parent.parent


class Nothing:
    """A file that forgets."""

    last_seq = 0

    def __init__(self, path: Path, **options: Any) -> None: ...

    def emit(self, event: Event) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Never:
    """A keeper that keeps nothing."""

    version = None

    def is_due(self, version: int, *, is_last: bool) -> bool:
        return False

    async def close(self) -> None: ...


class Meter:
    """Rollouts trained, seconds and processor seconds of this process, after the first fifth of the steps."""

    def __init__(self, steps: int) -> None:
        self._from = steps // 5
        self._rows = 0
        self._begin = self._end = (0.0, 0.0)

    def emit(self, event: Event) -> None:
        if not isinstance(event, Stepped) or event.version < self._from:
            return
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._end = (event.at, usage.ru_utime + usage.ru_stime)
        if event.version == self._from:
            self._begin = self._end
        else:
            self._rows += event.num_rows

    def rates(self) -> tuple[float, float]:
        wall, processor = (end - begin for begin, end in zip(self._begin, self._end, strict=True))
        return self._rows / wall, self._rows / processor


def run(steps: int, *, is_kept: bool, seed: int) -> tuple[float, float]:
    meter = Meter(steps)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        changes = [
            f"seed={seed}",
            f"run_dir={folder}",
            f"pipeline.steps={steps}",
            "checkpoint.every_s=10",
            "data.holdout=16",
            "evaluation.every_steps=100000",
        ]
        if not is_kept:
            for name in ("JsonlSink", "MetricsSink"):
                stack.enter_context(patch.object(log, name, Nothing))
            stack.enter_context(patch.object(running, "build_checkpoints", lambda run: Never()))
            stack.enter_context(patch.object(running.RunFolder, "conclude", lambda self: None))
        train(load(ROOT / "recipes/demo.toml", RunConfig, changes), sinks=[meter])
    return meter.rates()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(options.repeat):
        for is_kept in (True, False) if number % 2 else (False, True):
            found[is_kept].append(run(options.steps, is_kept=is_kept, seed=0))
            print("with" if is_kept else "without", *(f"{rate:.1f}" for rate in found[is_kept][-1]), file=sys.stderr)
    rows = []
    for index, metric in enumerate(("rollouts trained/s", "rollouts trained per processor second")):
        ours, theirs = (statistics.median(rates[index] for rates in found[is_kept]) for is_kept in (True, False))
        row = {"workload": f"demo, {options.steps} steps, all books kept", "metric": metric, "ours": round(ours, 1)}
        rows.append({**row, "peer": "none kept", "theirs": round(theirs, 1), "ratio": round(ours / theirs, 4)})
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['metric']:40} kept: {row['ours']:8}   none: {row['theirs']:8}   {row['ratio']:.3f}x")


if __name__ == "__main__":
    main()
