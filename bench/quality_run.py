"""The cells of `bench/quality.py`, so many at a time, each a process with one thread.

What is done stays done: a result is in `results.jsonl`, a warm-up in `warm-SEED.tar`, both whole or not there, and nothing else
is kept, so that a folder of seven files can be carried from one machine to the next. A cell that was cut short begins anew.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from quality_cells import Cell, Result, Settings, cells

RESULTS, ERRORS = "results.jsonl", "errors.log"
POLL_S = 0.1
SPARE = 1.1
"""Cells are expected to take this many times the longest one so far."""


class Results:
    """Every finished cell of a folder. It is written anew for each, under another name first: a kill leaves a whole one."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._path, self._settings = folder / RESULTS, settings
        self.found: dict[Cell, Result] = {}
        if self._path.exists():
            made_with, self.found = read_results(folder)
            if made_with != settings:
                raise SystemExit(
                    f"{self._path} was made with {made_with}, and this run has {settings}: results of the two cannot be "
                    "compared. Choose another folder"
                )

    def add(self, result: Result) -> None:
        self.found[result.cell] = result
        lines = [msgspec.json.encode(record) for record in (self._settings, *self.found.values())]
        new = self._path.with_name(f".{RESULTS}.new")
        new.write_bytes(b"\n".join(lines) + b"\n")
        new.replace(self._path)


def read_results(folder: Path) -> tuple[Settings, dict[Cell, Result]]:
    path = folder / RESULTS
    if not path.exists():
        raise SystemExit(f"{path} is not there. To make it: python bench/quality.py run {folder} --jobs 2 --minutes 60")
    first, *others = path.read_bytes().splitlines()
    results = [msgspec.json.decode(line, type=Result) for line in others]
    return msgspec.json.decode(first, type=Settings), {result.cell: result for result in results}


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
        self._folder, self._command, self._jobs = folder, command, jobs
        self._began, self._deadline = time.monotonic(), time.monotonic() + 60 * minutes
        self._results, self._seeds = Results(folder, settings), seeds
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
                self._say(f"the time is over: {len(self._running)} were cut short, and begin anew next time")
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
        """Of a cell: by those that this run has seen; else by those of an earlier one; else nobody knows, and it is tried."""
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
        """A process has ended: its result is kept, or its last words are."""
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
        print(f"[{time.monotonic() - self._began:5.0f} s] {words}", file=sys.stderr, flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two runs would each write the results that they know of."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise SystemExit(f"another run is at work in {folder}: wait for it, or choose another folder") from error
    finally:
        os.close(descriptor)
