"""What does it cost that nothing gets lost? Processor seconds per trained group, of all processes of a run: with supervision,
the event log, metrics and checkpoints, and without.

On: as everybody runs it, but for a checkpoint every `--every-s` seconds, so that a short run has some (the default is 60).
Off: events go nowhere, no checkpoint after the first, no watchdog, no status, and no book of what was trained, from which a
learner whose ranks died is told again (`--ranks 2` has one; the demo, with one rank, has none). The ledger itself, which group
is where, is the pipeline and stays.

Runs alternate, each in a process of its own, beginning with the same warmed-up model; medians, and the ratios of neighbours.
The first fifth of the steps is left out.

    .venv/bin/python bench/supervision_cost.py [--json] [--steps 200] [--repeat 5] [--ranks 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bookkeeping import Never, Nothing
from millstream import RunConfig, train
from millstream.config import load
from millstream.events import Event, GroupTaken, Stepped
from millstream.run import log, supervision
from millstream.run import run as running
from millstream.run.backend import LocalBackend

ROOT = Path(__file__).parent.parent
TICKS = os.sysconf("SC_CLK_TCK")


class Asleep:
    """A watchdog that watches nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


def processor_s(pid: int) -> float:
    """Of a process, those that it started, and those of them that have ended."""
    ticks, pids = 0, [pid]
    for one in pids:
        with suppress(OSError):
            words = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, words[11:15]))
            for children in Path(f"/proc/{one}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
    return ticks / TICKS


class Meter:
    """Groups trained and processor seconds, after the first fifth of the steps."""

    def __init__(self, steps: int) -> None:
        self._from, self._last = steps // 5, steps
        self._num_taken = self.groups = 0
        self.seconds = self._began = 0.0

    def emit(self, event: Event) -> None:
        if isinstance(event, GroupTaken):
            self._num_taken += 1
        elif isinstance(event, Stepped) and event.version == self._from:
            self._began, self._num_taken = processor_s(os.getpid()), 0
        elif isinstance(event, Stepped) and event.version == self._last:
            self.seconds, self.groups = processor_s(os.getpid()) - self._began, self._num_taken


async def _no_status(supervision: Any) -> None:
    await asyncio.get_running_loop().create_future()


def without_supervision(stack: ExitStack) -> None:
    for name in ("JsonlSink", "MetricsSink"):
        stack.enter_context(patch.object(log, name, Nothing))
    stack.enter_context(patch.object(supervision, "Watchdog", Asleep))
    stack.enter_context(patch.object(supervision.Supervision, "_report_status", _no_status))
    stack.enter_context(patch.object(running, "build_checkpoints", lambda run: Never()))
    stack.enter_context(patch.object(LocalBackend, "has_learner_processes", lambda backend, learner: False))
    stack.enter_context(patch.object(running.RunFolder, "conclude", lambda folder: None))


def one_run(options: argparse.Namespace) -> None:
    """In a process of its own; prints what it measured."""
    meter = Meter(options.steps)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        changes = [
            f"run_dir={folder}/run",
            f"model.path={options.model}",
            "model.tiny=",
            "warmup=",
            f"pipeline.steps={options.steps}",
            f"learner.ranks={options.ranks}",
            f"checkpoint.every_s={options.every_s}",
            "data.holdout=0",
            "evaluation.every_steps=",
        ]
        if options.one == "off":
            without_supervision(stack)
        train(load(ROOT / "recipes/demo.toml", RunConfig, changes), sinks=[meter])
    print(json.dumps({"seconds": meter.seconds, "groups": meter.groups}))


def warm_up(folder: Path) -> Path:
    """The model that all runs begin with: answers of it differ in what they earn."""
    changes = [f"run_dir={folder}", "pipeline.steps=0", "data.holdout=16", "warmup.max_steps=120"]
    train(load(ROOT / "recipes/demo.toml", RunConfig, changes))
    return folder / "model"


def measure(options: argparse.Namespace, which: str, model: Path) -> float:
    words = [sys.executable, __file__, "--one", which, "--model", str(model)]
    words += [f"--{key}={getattr(options, key.replace('-', '_'))}" for key in ("steps", "ranks", "every-s")]
    found = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    return 1000 * float(found["seconds"]) / int(found["groups"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--every-s", type=float, default=20.0)
    parser.add_argument("--one", choices=("on", "off"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        one_run(options)
        return
    found: dict[str, list[float]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        model = warm_up(Path(folder) / "warm")
        for number in range(options.repeat):
            for which in ("on", "off") if number % 2 else ("off", "on"):
                found[which].append(measure(options, which, model))
                print(which, f"{found[which][-1]:.3f} ms of processors a group", file=sys.stderr)
    ratios = sorted(on / off for on, off in zip(found["on"], found["off"], strict=True))
    ours, theirs = statistics.median(found["on"]), statistics.median(found["off"])
    row = {
        "workload": f"demo, {options.steps} steps, {options.ranks} rank(s), a checkpoint every {options.every_s:g} s",
        "metric": "processor ms per trained group, all processes",
        "ours": round(ours, 3),
        "peer": "no supervision, log, checkpoints",
        "theirs": round(theirs, 3),
        "ratio": round(theirs / ours, 4),
        "costs": [round(ratio, 4) for ratio in ratios],
    }
    if options.json:
        print(json.dumps([row]))
        return
    print(f"{row['metric']}: on {ours:.3f}, off {theirs:.3f}, {ours / theirs:.3f}x; of neighbours {row['costs']}")


if __name__ == "__main__":
    main()
