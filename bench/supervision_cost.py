"""What does it cost that nothing gets lost? Processor time per trained group, of all processes of a run, and rollouts a second:
with the event log, metrics, checkpoints and the watchdog, and without.

On: the defaults, but for a checkpoint every `--every-s` seconds, so that a short run has some (the default is 60). Off: events
and metrics are dropped, no checkpoint, no watchdog. The ledger itself, which group is where, is the pipeline and stays.

Runs alternate, so that a slow minute of the machine hits both, each in a process of its own, beginning with the same warmed-up
model; medians, and the ratios of neighbours. The first fifth of the steps is left out.

    .venv/bin/python bench/supervision_cost.py [--json] [--smoke] [--steps 200] [--repeat 5] [--every-s 20]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from internals import recipe, without_supervision
from millstream import train
from millstream.events import Event, GroupTaken, RolloutEnded, Stepped
from report import Options, cost, publish, rate, say

TICKS = os.sysconf("SC_CLK_TCK")


class Found(NamedTuple):
    ms_per_group: float  # processor milliseconds
    rollouts_per_s: float
    ms_per_rollout: float = 0.0  # processor milliseconds by rollouts that ended, trained or not


def processor_s(pid: int) -> float:
    """Processor seconds of a process, those that it started, and those of them that have ended."""
    ticks, pids = 0, [pid]
    for one in pids:
        with suppress(OSError):
            words = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, words[11:15]))
            for children in Path(f"/proc/{one}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
    return ticks / TICKS


class Meter:
    """A sink that measures from the end of the first fifth of the steps to the last one."""

    def __init__(self, steps: int) -> None:
        self._first = max(1, steps // 5)
        self._last = steps
        self._groups = 0
        self._rollouts = 0
        self._ended = 0
        self._began_at = 0.0
        self._began_cpu_s = 0.0
        self.found: Found | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, GroupTaken):
            self._groups += 1
        elif isinstance(event, RolloutEnded):
            self._ended += 1
        elif isinstance(event, Stepped):
            self._rollouts += event.num_rows
            if event.version == self._first:
                self._groups = 0
                self._rollouts = 0
                self._ended = 0
                self._began_at = event.at
                self._began_cpu_s = processor_s(os.getpid())
            elif event.version == self._last:
                cpu_ms = 1000 * (processor_s(os.getpid()) - self._began_cpu_s)
                per_s = self._rollouts / (event.at - self._began_at)
                self.found = Found(cpu_ms / self._groups, per_s, cpu_ms / max(1, self._ended))


def one_run(which: str, model: str, options: argparse.Namespace) -> Found:
    meter = Meter(options.steps)
    with tempfile.TemporaryDirectory() as folder, without_supervision() if which == "off" else nullcontext():
        changes = [
            f"run_dir={folder}/run",
            f"model.path={model}",
            "model.tiny=",
            "warmup=",
            f"pipeline.steps={options.steps}",
            f"checkpoint.every_s={options.every_s}",
            "data.holdout=0",
            "evaluation.every_steps=",
        ]
        train(recipe("demo", *changes, is_smoke=options.smoke), sinks=[meter])
    assert meter.found is not None
    return meter.found


def in_a_process(which: str, model: str, options: argparse.Namespace) -> Found:
    words = [sys.executable, __file__, "--one", which, "--model", model]
    words += [f"--steps={options.steps}", f"--every-s={options.every_s}"]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return Found(*json.loads(done.stdout.splitlines()[-1]))


def warm_up(folder: Path, *, is_smoke: bool) -> str:
    """The model that all runs begin with: one whose answers differ in their rewards."""
    changes = [f"run_dir={folder}", "pipeline.steps=0", "data.holdout=16", "warmup.max_steps=120"]
    train(recipe("demo", *changes, *(["warmup.max_steps=2"] if is_smoke else []), is_smoke=is_smoke))
    return str(folder / "model")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 200, smoke=3)
    parser.add("--repeat", 5, smoke=1)
    parser.add("--every-s", 20.0)
    parser.add_argument("--one", choices=("on", "off"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse(argv)
    if options.one is not None:
        print(json.dumps(one_run(options.one, options.model, options)))
        return
    measure = one_run if options.smoke else in_a_process
    found: dict[str, list[Found]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        model = warm_up(Path(folder) / "warm", is_smoke=options.smoke)
        for number in range(options.repeat):
            for which in ("on", "off") if number % 2 else ("off", "on"):
                found[which].append(measure(which, model, options))
                last = found[which][-1]
                say(f"{which}: {last.ms_per_group:.3f} ms of processors a group, {last.rollouts_per_s:.1f} rollouts/s")
    ratios = sorted(
        on.ms_per_group / max(off.ms_per_group, 1e-9) for on, off in zip(found["on"], found["off"], strict=True)
    )
    say(f"cost of neighbouring runs: {[round(ratio, 4) for ratio in ratios]}")
    ms, rollouts = (
        {which: statistics.median(one[index] for one in some) for which, some in found.items()} for index in (0, 1)
    )
    workload = f"demo, {options.steps} steps, a checkpoint every {options.every_s:g} s"
    peer = "no event log, metrics, checkpoints, watchdog"
    rows = [
        cost(workload, "processor ms per trained group, all processes", ms["on"], peer, ms["off"]),
        rate(workload, "rollouts trained/s", rollouts["on"], peer, rollouts["off"], digits=1),
    ]
    publish(rows, options)


if __name__ == "__main__":
    main()
