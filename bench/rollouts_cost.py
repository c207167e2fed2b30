"""What does it cost to keep every rollout? One run keeps rollouts for some steps, then keeps none for as many, and so on:
neighbouring blocks of steps have the same model, the same load and the same minute of the machine. Seconds and processor time
of a row, of all processes, with and without; the ratio of neighbours with its 95% interval (Student's, of logarithms). Also the
share of writing in the processor time of the blocks that keep, and the bytes of a record.

Records that wait at the end of a block are written within it, while the run waits: blocks should be several times as long as
the writer's interval of 5 s. A block without kept rollouts does what a run with `rollout.keep_gb = 0` does, without rollout
workers and without ranks that read the store. There are no checkpoints, at which the files are made durable. The demo
hardly learns (a learning rate of 1e-6), so that the lengths, and the share of groups without signal, stay what they are. The
first fifth of the steps is left out.

With --cell, a cell of `bench/end_to_end.py` instead of the demo: on a GPU 474M parameters with 512 rollouts a step.

    .venv/bin/python bench/rollouts_cost.py [--json] [--smoke] [--steps 1750] [--block 100] [--set a.b=c ...]
    .venv/bin/python bench/rollouts_cost.py --cell short/2 --seconds 200 --block 4 [--folder runs/end-to-end]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from internals import RolloutWriter, mean_estimate, recipe
from millstream import train
from millstream.events import Event, Stepped
from report import Options, Row, alone, cost, publish, rate, say
from supervision_cost import processor_s, warm_up


class Block(NamedTuple):
    """Some steps in which all rollouts were kept, or none."""

    is_kept: bool
    seconds: float
    processor_s: float
    writing_s: float  # of that: of the writer's thread, and of the flush at the end of the block
    num_rows: int


class Alternating:
    """A sink that keeps rollouts in every second block of steps, and measures each. Pairs are on, off and off, on in turn, so
    that a drift of the machine favours neither."""

    def __init__(self, first: int, block: int) -> None:
        self.blocks: list[Block] = []
        self.num_records = 0
        self._began_writing_s = 0.0
        self._first = first
        self._block = block
        self._writer: RolloutWriter | None = None
        self._is_kept = True
        self._rows = 0
        self._began_s = 0.0
        self._began_processor_s = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        add = RolloutWriter.add

        def gated(writer: RolloutWriter, record: object) -> None:
            self._writer = writer
            if self._is_kept:
                self.num_records += 1
                add(writer, record)  # type: ignore[arg-type]

        with patch.object(RolloutWriter, "add", gated):
            yield

    def _writing_s(self) -> float:
        """Of the writer's thread, so far."""
        number = None if self._writer is None else self._writer._thread.ident
        return 0.0 if number is None else time.clock_gettime(time.pthread_getcpuclockid(number))

    def emit(self, event: Event) -> None:
        if not isinstance(event, Stepped):
            return
        self._rows += event.num_rows
        past = event.version - self._first
        if past < 0 or past % self._block:
            return
        began_s = time.thread_time()
        if self._is_kept and self._writer is not None:
            self._writer.flush()
        flush_s, writing_s = time.thread_time() - began_s, self._writing_s()
        now_s, now_processor_s = time.perf_counter(), processor_s(os.getpid())
        if past:
            taken_s, taken_processor_s = now_s - self._began_s, now_processor_s - self._began_processor_s
            own_s = writing_s - self._began_writing_s + flush_s
            self.blocks.append(Block(self._is_kept, taken_s, taken_processor_s, own_s, self._rows))
        self._is_kept = past // self._block % 4 in (0, 3)
        self._rows = 0
        self._began_writing_s = writing_s
        self._began_s = now_s
        self._began_processor_s = now_processor_s

    @property
    def pairs(self) -> list[tuple[Block, Block]]:
        """With kept rollouts and without: neighbours, each with rows that were trained."""
        whole = self.blocks[: len(self.blocks) // 2 * 2]
        return [
            (one, other) if one.is_kept else (other, one)
            for one, other in zip(whole[::2], whole[1::2], strict=True)
            if one.num_rows and other.num_rows
        ]


def bytes_in(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in (run_dir / "rollouts").glob("*.rollouts"))


def run_demo(found: Alternating, folder: Path, options: argparse.Namespace) -> int:
    """Bytes of the kept rollouts."""
    changes = [
        f"run_dir={folder}/run",
        f"model.path={warm_up(folder / 'warm', is_smoke=options.smoke)}",
        "model.tiny=",
        "warmup=",
        f"pipeline.steps={options.steps}",
        "data.holdout=0",
        "evaluation.every_steps=",
        "learner.learning_rate=1e-6",
        *options.change,
        "checkpoint.every_s=100000",
    ]
    with found.watched():
        train(recipe("demo", *changes, is_smoke=options.smoke), sinks=[found])
    return bytes_in(folder / "run")


def run_cell_of(found: Alternating, folder: Path, options: argparse.Namespace) -> int:
    """A cell of `end_to_end`: torch is imported here."""
    from end_to_end_cells import Budget, Sources, run_cell
    from end_to_end_costs import make_model
    from end_to_end_loads import SMOKE_WORKLOADS, WORKLOADS, write_prompts

    name, _, mode = options.cell.partition("/")
    workload = (SMOKE_WORKLOADS if options.smoke else WORKLOADS)[name]
    budget = Budget(seconds=options.seconds, min_steps=2, limit_s=10 * options.seconds + 60)
    sources = Sources(
        model=make_model(workload.shape, workload.context, options.folder),
        prompts=write_prompts(workload, options.folder),
    )
    with found.watched():
        run_cell(name, workload, mode, sources, folder, budget, (), sinks=[found])
    return bytes_in(folder / "run")


def rows_of(found: Alternating, num_bytes: int, options: argparse.Namespace) -> list[Row]:
    workload = options.cell or f"demo, {options.steps} steps"
    peer = "rollout.keep_gb = 0"
    if not found.pairs:
        raise SystemExit(f"no two whole blocks of {options.block} steps: expected more steps, or more seconds")
    kept, dropped = zip(*found.pairs, strict=True)

    def total(blocks: Sequence[Block], name: str) -> float:
        return float(sum(getattr(block, name) for block in blocks))

    for name in ("seconds", "processor_s"):
        logs = [
            math.log((getattr(on, name) / on.num_rows) / (getattr(off, name) / off.num_rows))
            for on, off in found.pairs
            if getattr(off, name) > 0 and getattr(on, name) > 0
        ]
        if len(logs) > 1:
            mean = mean_estimate(logs)
            value, low, high = (f"{math.expm1(each):+.2%}" for each in (mean.value, mean.low, mean.high))
            middle = f"{math.expm1(statistics.median(logs)):+.2%}"
            say(f"{name} a row, kept to not kept: {value} ({low} to {high}), median {middle}, {len(logs)} pairs")
    rows = [total(some, "num_rows") for some in (kept, dropped)]
    seconds = [total(some, "seconds") for some in (kept, dropped)]
    processor = [1000 * total(some, "processor_s") for some in (kept, dropped)]
    per_row = [each / max(1.0, count) for each, count in zip(processor, rows, strict=True)]
    speed = [count / max(1e-9, each) for count, each in zip(rows, seconds, strict=True)]
    share = total(kept, "writing_s") / max(1e-9, total(kept, "processor_s"))
    return [
        cost(workload, "processor ms per trained rollout, all processes", per_row[0], peer, per_row[1]),
        rate(workload, "rollouts trained/s", speed[0], peer, speed[1], digits=1),
        alone(workload, "share of writing in the processor time", share, digits=5),
        alone(workload, "bytes a record", num_bytes / max(1, found.num_records), digits=1),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--steps", 1750, smoke=6)
    parser.add_argument(
        "--set", action="append", default=[], dest="change", metavar="a.b=c", help="of the demo's config"
    )
    parser.add("--block", 100, smoke=1, help="steps")
    parser.add("--cell", "", help="of bench/end_to_end.py, such as short/2; empty: the demo")
    parser.add("--seconds", 200.0, smoke=1.0, help="measured of a cell, after its warm-up")
    parser.add("--folder", Path("runs/end-to-end"), help="of a cell's model and prompts")
    options = parser.parse(argv)
    found = Alternating(6 if options.cell else max(1, options.steps // 5), options.block)
    with tempfile.TemporaryDirectory() as folder:
        run = run_cell_of if options.cell else run_demo
        num_bytes = run(found, Path(folder), options)
    publish(rows_of(found, num_bytes, options), options)


if __name__ == "__main__":
    main()
