"""Is asynchronous training as good as synchronous? Eight losses at max_lag 0, 2 and 8, five seeds, the same samples for all.

`run` trains what is missing in FOLDER, several cells at a time, each a process with one thread. It can be stopped and restarted
at any time, here or on another machine: a result is in `results.jsonl`, a warm-up in `warm-SEED.tar`, both whole or not there,
and nothing else is kept. A cell that was cut short starts again. `report` writes the generated part of docs/quality.md and its
two figures; with `--json` it prints rows instead. It refuses results whose real lag is not the one that their cell is named
after. `--smoke` trains one small cell at max_lag 0 and one at 2, in this process.

    .venv/bin/python bench/quality.py run FOLDER --jobs 15 --minutes 9 [--seeds 5]
    .venv/bin/python bench/quality.py report FOLDER [--json]
    .venv/bin/python bench/quality.py --smoke [--json]
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from quality_cells import UNCORRECTED, Cell, Result, Results, Settings, cells, run_cell, warm_up
from quality_report import final_accuracy, json_rows, read_finished, write_report
from report import ROOT, Options, Row, publish, rate, say

ERRORS = "errors.log"
POLL_S = 0.1
SPARE = 1.1
"""Cells are expected to take this many times the longest one so far."""
SMALL = Settings(
    num_tasks=200, held_out=8, hidden=16, warm_up_to=0.0, groups_per_step=2, group_size=2, steps=3, every_steps=3
)


class Job(Struct, frozen=True, kw_only=True):
    """A warm-up, where the cell is None, or a cell."""

    seed: int
    cell: Cell | None = None

    def __str__(self) -> str:
        return f"warm-up, seed {self.seed}" if self.cell is None else str(self.cell)


class Running(NamedTuple):
    process: subprocess.Popen[bytes]
    scratch: Path
    began: float


Command = Callable[[Job, Path, Path], list[str]]
"""From a job, the folder of its seed's warm-up and a scratch folder of its own to the words of a process. That of a cell leaves
`result.json` in the scratch folder, that of a warm-up `warm.tar`."""


class Runner:
    """One `run`: until everything is done, or the time is over."""

    def __init__(
        self, folder: Path, settings: Settings, *, jobs: int, minutes: float, seeds: int, command: Command
    ) -> None:
        self._folder = folder
        self._command = command
        self._jobs = jobs
        self._began = time.monotonic()
        self._deadline = self._began + 60 * minutes
        self._results = Results(folder, settings)
        self._seeds = seeds
        self._running: dict[Job, Running] = {}
        self._took: list[float] = []
        self.failed: list[Job] = []

    def run(self) -> bool:
        """Whether every cell is done."""
        with alone_in(self._folder), tempfile.TemporaryDirectory() as scratch:
            try:
                self._run(Path(scratch))
            finally:
                for running in self._running.values():
                    _end(running.process)
        missing = self._missing()
        if self.failed:
            self._say(f"failed: {'; '.join(map(str, self.failed))}. Why is in {self._folder / ERRORS}")
        self._say(f"{len(missing)} cells are left" if missing else "every cell is done")
        return not missing

    def _run(self, scratch: Path) -> None:
        while True:
            while len(self._running) < self._jobs and (job := self._next()) is not None:
                self._start(job, scratch)
            if not self._running:
                return
            if time.monotonic() > self._deadline:
                self._say(f"the time is over: {len(self._running)} were cut short, and start again next time")
                return
            for job, running in list(self._running.items()):
                if running.process.poll() is not None:
                    del self._running[job]
                    self._settle(job, running)
            time.sleep(POLL_S)

    # ---- what comes next -----------------------------------------------------------------------------------------------

    def _missing(self) -> list[Cell]:
        return [cell for cell in cells(self._seeds) if cell not in self._results.found]

    def _next(self) -> Job | None:
        """The first that can begin: warm-ups before cells. None: nothing, now or in the time that is left."""
        if time.monotonic() + self._expected_s() > self._deadline:
            return None
        missing = [cell for cell in self._missing() if Job(seed=cell.seed) not in self.failed]
        for seed in dict.fromkeys(cell.seed for cell in missing):
            if not self._warm(seed).exists() and self._is_open(job := Job(seed=seed)):
                return job
        ready = (Job(seed=cell.seed, cell=cell) for cell in missing if self._warm(cell.seed).exists())
        return next(filter(self._is_open, ready), None)

    def _is_open(self, job: Job) -> bool:
        return job not in self._running and job not in self.failed

    def _expected_s(self) -> float:
        """Of a cell: by those that this run has seen; else by those of an earlier one; else it is unknown, and 0."""
        return SPARE * max(self._took or [result.seconds for result in self._results.found.values()], default=0.0)

    def _warm(self, seed: int) -> Path:
        return self._folder / f"warm-{seed}.tar"

    # ---- a process -----------------------------------------------------------------------------------------------------

    def _start(self, job: Job, scratch: Path) -> None:
        model, own = scratch / f"warm-{job.seed}", Path(tempfile.mkdtemp(dir=scratch))
        if job.cell is not None and not model.exists():
            with tarfile.open(self._warm(job.seed)) as tar:
                tar.extractall(model, filter="data")
        alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with (own / "output").open("wb") as output:
            process = subprocess.Popen(
                self._command(job, model, own),
                env=os.environ | alone,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[job] = Running(process, own, time.monotonic())

    def _settle(self, job: Job, running: Running) -> None:
        """A process has ended: its result is kept, or the end of its output."""
        seconds = time.monotonic() - running.began
        found = running.scratch / ("warm.tar" if job.cell is None else "result.json")
        if running.process.returncode or not found.exists():
            self._keep_error(job, running)
        elif job.cell is None:
            new = self._warm(job.seed).with_name(f".warm-{job.seed}.new")
            shutil.copyfile(found, new)
            new.replace(self._warm(job.seed))
            self._say(f"{job}: {seconds:.0f} s")
        else:
            result = msgspec.json.decode(found.read_bytes(), type=Result)
            self._took.append(seconds)
            self._results.add(result)
            self._say(f"{job}: {seconds:.0f} s, lag forced {result.forced_share:.1%}; {self._outlook()}")
        shutil.rmtree(running.scratch, ignore_errors=True)

    def _keep_error(self, job: Job, running: Running) -> None:
        self.failed.append(job)
        words = (running.scratch / "output").read_text(errors="replace")[-4000:]
        with (self._folder / ERRORS).open("a") as log:
            log.write(f"==== {job}: exit status {running.process.returncode}\n{words}\n")
        self._say(f"{job}: failed with exit status {running.process.returncode}")

    def _outlook(self) -> str:
        left = len(self._missing())
        seconds = left * statistics.mean(self._took) / self._jobs
        return f"{len(self._results.found)} done, {left} left, about {seconds / 60:.1f} minutes"

    def _say(self, words: str) -> None:
        say(f"[{time.monotonic() - self._began:5.0f} s] {words}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """One run at a time in a folder: two would each write only their own results."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise SystemExit(f"another run is at work in {folder}: wait for it, or choose another folder") from error
    finally:
        os.close(descriptor)


# ---- the command line ----------------------------------------------------------------------------------------------------


def words_of(settings: Settings, job: Job, model: Path, scratch: Path) -> list[str]:
    """The process of a job: this script again."""
    encoded = msgspec.json.encode((settings, job)).decode()
    return [sys.executable, str(Path(__file__).resolve()), "job", encoded, str(model), str(scratch)]


def do_job(encoded: str, model: Path, scratch: Path) -> None:
    settings, job = msgspec.json.decode(encoded, type=tuple[Settings, Job])
    if job.cell is None:
        warm_up(settings, job.seed, scratch / "run", scratch / "warm.tar")
        return
    result = run_cell(settings, job.cell, model, scratch)
    new = scratch / ".result.json.new"
    new.write_bytes(msgspec.json.encode(result))
    new.replace(scratch / "result.json")


def run(folder: Path, *, jobs: int, minutes: float, seeds: int, settings: Settings) -> int:
    """The exit status: 1 if a process failed. That the time was over before the cells is no failure."""
    folder.mkdir(parents=True, exist_ok=True)
    command = partial(words_of, settings)
    runner = Runner(folder, settings, jobs=jobs, minutes=minutes, seeds=seeds, command=command)
    runner.run()
    return int(bool(runner.failed))


def smoke() -> list[Row]:
    """Two small cells of one loss, in this process."""
    found: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        warm_up(SMALL, 0, Path(folder) / "warm", Path(folder) / "warm.tar")
        with tarfile.open(Path(folder) / "warm.tar") as tar:
            tar.extractall(model, filter="data")
        for lag in (0, 2):
            scratch = Path(folder) / f"lag-{lag}"
            scratch.mkdir()
            found[lag] = final_accuracy(run_cell(SMALL, Cell(UNCORRECTED, lag, 0), model, scratch))
    workload = f"{SMALL.toy}, {UNCORRECTED}, max_lag 2"
    return [rate(workload, "held-out accuracy, sampled", found[2], "synchronous", found[0])]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    commands = parser.add_subparsers(dest="command", parser_class=argparse.ArgumentParser)
    running = commands.add_parser("run", help="train what is missing")
    running.add_argument("folder", type=Path)
    running.add_argument("--jobs", type=int, default=1, help="cells at a time; each has one thread")
    running.add_argument("--minutes", type=float, default=60.0, help="no cell begins that would not end by then")
    running.add_argument("--seeds", type=int, default=5)
    reporting = commands.add_parser("report", help="write docs/quality.md")
    reporting.add_argument("folder", type=Path)
    reporting.add_argument("--json", action="store_true", help="print rows, and write nothing")
    reporting.add_argument("--docs", type=Path, default=ROOT / "docs", help="where quality.md is")
    job = commands.add_parser("job", help="of `run`: one process of it")
    job.add_argument("encoded")
    job.add_argument("model", type=Path)
    job.add_argument("scratch", type=Path)
    options = parser.parse(argv)
    match options.command:
        case "run":
            signal.signal(
                signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
            )  # so that no process is left behind
            sizes = {"jobs": options.jobs, "minutes": options.minutes, "seeds": options.seeds}
            sys.exit(run(options.folder, **sizes, settings=Settings()))
        case "report" if options.json:
            publish(json_rows(read_finished(options.folder)), options)
        case "report":
            write_report(read_finished(options.folder), options.docs)
        case "job":
            do_job(options.encoded, options.model, options.scratch)
        case _ if options.smoke:
            publish(smoke(), options)
        case _:
            parser.error("choose one of run, report, --smoke")


if __name__ == "__main__":
    main()
