"""What does it cost to keep every rollout? Processor time per rollout, of all processes of a run, and rollouts a second (of a
cell: sampled tokens, since its lengths are random): with `rollout.keep_gb` at its default, and with 0. Processor time is by all
rollouts that ended: how many of them are filtered is not the same in two runs. Also the share of the processor time that the
writer's thread takes, which no noise of the machine hides, and the bytes that a rollout takes.

The demo: runs alternate, each in a process of its own, beginning with the same warmed-up model; medians, and the ratios of
neighbours with their medians. The first fifth of the steps is left out.

With --cell, a cell of `bench/end_to_end.py` instead: on a GPU the shape of 474M parameters with 512 rollouts a step.

    .venv/bin/python bench/rollouts_cost.py [--json] [--smoke] [--steps 200] [--repeat 5]
    .venv/bin/python bench/rollouts_cost.py --cell 474M-geometric-512/2 --repeat 3 --seconds 40 [--folder runs/end-to-end]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from internals import RolloutWriter, recipe
from millstream import train
from report import Options, Row, alone, cost, publish, rate, say
from supervision_cost import Meter, processor_s, warm_up

KEEP_GB = {"on": 10, "off": 0}


class Measured(NamedTuple):
    processor: float  # milliseconds a rollout; of a cell, seconds in all
    rate: float  # rollouts trained a second; of a cell, tokens sampled
    writer_share: float  # of the processor time
    bytes_per_rollout: float


class WriterTime:
    """Processor seconds of the writer's thread, and of others that make it write."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        flush = RolloutWriter.flush

        def timed(writer: RolloutWriter, *arguments: Callable[[], None]) -> None:
            began = time.thread_time()
            flush(writer, *arguments)
            self.seconds += time.thread_time() - began

        with patch.object(RolloutWriter, "flush", timed):
            yield


def bytes_in(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in (run_dir / "rollouts").glob("*.rollouts"))


def per_rollout(run_dir: Path) -> float:
    """Bytes of the files, by rollouts that ended."""
    ended = (run_dir / "events.jsonl").read_bytes().count(b'"kind":"rollout_ended"')
    return bytes_in(run_dir) / max(1, ended)


def one_run(which: str, model: str, options: argparse.Namespace) -> Measured:
    meter, writer, began = Meter(options.steps), WriterTime(), processor_s(os.getpid())
    with tempfile.TemporaryDirectory() as folder, writer.watched():
        changes = [
            f"run_dir={folder}/run",
            f"model.path={model}",
            "model.tiny=",
            "warmup=",
            f"pipeline.steps={options.steps}",
            "data.holdout=0",
            "evaluation.every_steps=",
            f"rollout.keep_gb={KEEP_GB[which]}",
        ]
        train(recipe("demo", *changes, is_smoke=options.smoke), sinks=[meter])
        share = writer.seconds / max(1e-9, processor_s(os.getpid()) - began)
        assert meter.found is not None
        return Measured(
            meter.found.ms_per_rollout, meter.found.rollouts_per_s, share, per_rollout(Path(folder) / "run")
        )


def measure_here(which: str, model: str, options: argparse.Namespace) -> Measured:
    return one_cell(which, options) if options.cell else one_run(which, model, options)


def in_a_process(which: str, model: str, options: argparse.Namespace) -> Measured:
    words = [sys.executable, __file__, "--one", which, "--model", model, f"--steps={options.steps}"]
    words += [f"--cell={options.cell}", f"--seconds={options.seconds}", f"--folder={options.folder}"]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return Measured(*json.loads(done.stdout.splitlines()[-1]))


def one_cell(which: str, options: argparse.Namespace) -> Measured:
    """A cell of `end_to_end`: torch is imported here."""
    from end_to_end_cells import Budget, Sources, run_cell
    from end_to_end_costs import free_memory, make_model
    from end_to_end_loads import SMOKE_WORKLOADS, WORKLOADS, write_prompts

    name, _, mode = options.cell.partition("/")
    workload = (SMOKE_WORKLOADS if options.smoke else WORKLOADS)[name]
    budget = Budget(seconds=options.seconds, min_steps=2, limit_s=10 * options.seconds + 60)
    sources = Sources(
        model=make_model(workload.shape, workload.context, options.folder),
        prompts=write_prompts(workload, options.folder),
    )
    writer, began = WriterTime(), processor_s(os.getpid())
    with tempfile.TemporaryDirectory() as scratch, writer.watched():
        settings = [f"rollout.keep_gb={KEEP_GB[which]}"]
        result = run_cell(name, workload, mode, sources, Path(scratch), budget, settings)
        taken = processor_s(os.getpid()) - began
        found = Measured(taken, result.tokens_per_s, writer.seconds / taken, per_rollout(Path(scratch) / "run"))
    free_memory()
    return found


def alternate(options: argparse.Namespace) -> dict[str, list[Measured]]:
    measure = measure_here if options.smoke else in_a_process
    found: dict[str, list[Measured]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        model = "" if options.cell else warm_up(Path(folder) / "warm", is_smoke=options.smoke)
        for number in range(options.repeat):
            for which in ("on", "off") if number % 2 else ("off", "on"):
                last = measure(which, model, options)
                found[which].append(last)
                say(
                    f"{which}: processors {last.processor:.3f}, {last.rate:.1f}/s, the writer "
                    f"{last.writer_share:.2%}, {last.bytes_per_rollout:.0f} bytes a rollout"
                )
    return found


def rows_of(found: dict[str, list[Measured]], options: argparse.Namespace) -> list[Row]:
    workload = options.cell or f"demo, {options.steps} steps"
    peer = "rollout.keep_gb = 0"
    metric = "processor seconds of the cell" if options.cell else "processor ms per rollout, all processes"
    middle = {
        which: Measured(*(statistics.median(values) for values in zip(*some, strict=True)))
        for which, some in found.items()
    }
    on, off = middle["on"], middle["off"]
    neighbours = list(zip(found["on"], found["off"], strict=True))
    by_processor = sorted(one.processor / max(other.processor, 1e-9) for one, other in neighbours)
    by_clock = sorted(other.rate / max(one.rate, 1e-9) for one, other in neighbours)
    for name, ratios in (("processor time", by_processor), ("wall clock", by_clock)):
        shown = [round(ratio, 4) for ratio in ratios]
        say(f"{name} of neighbouring runs, kept to not kept: median {statistics.median(ratios):.4f} of {shown}")
    return [
        cost(workload, metric, on.processor, peer, off.processor),
        rate(workload, "tokens sampled/s" if options.cell else "rollouts trained/s", on.rate, peer, off.rate, digits=1),
        alone(workload, "share of the writer's thread in the processor time", on.writer_share, digits=5),
        alone(workload, "bytes a rollout", on.bytes_per_rollout, digits=1),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 200, smoke=3)
    parser.add("--repeat", 5, smoke=1)
    parser.add("--cell", "", help="of bench/end_to_end.py, such as 474M-geometric-512/2; empty: the demo")
    parser.add("--seconds", 40.0, smoke=1.0, help="measured of a cell, after its warm-up")
    parser.add("--folder", Path("runs/end-to-end"), help="of a cell's model and prompts")
    parser.add_argument("--one", choices=("on", "off"), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse(argv)
    if options.one is not None:
        print(json.dumps(measure_here(options.one, options.model, options)))
        return
    publish(rows_of(alternate(options), options), options)


if __name__ == "__main__":
    main()
