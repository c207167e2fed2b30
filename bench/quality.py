"""Is asynchronous training as good as synchronous? Eight losses at max_lag 0, 2 and 8, five seeds, the same samples for all.

`run` trains what is missing in FOLDER and can be stopped and started as one likes, here or on another machine: all it knows is
in seven small files there. `report` writes the generated part of docs/quality.md and its two figures; with `--json` it prints
rows instead. It refuses results whose real lag is not the one that their cell is named after.

    .venv/bin/python bench/quality.py run FOLDER --jobs 15 --minutes 9 [--seeds 5]
    .venv/bin/python bench/quality.py report FOLDER [--json]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from functools import partial
from pathlib import Path

import msgspec

from quality_cells import Settings, run_cell, warm_up
from quality_report import json_rows, read_finished, write_report
from quality_run import Job, Runner

ROOT = Path(__file__).parent.parent


def words_of(settings: Settings, job: Job, model: Path, scratch: Path) -> list[str]:
    """The process of a job: this script again."""
    said = msgspec.json.encode((settings, job)).decode()
    return [sys.executable, str(Path(__file__).resolve()), "job", said, str(model), str(scratch)]


def do_job(said: str, model: Path, scratch: Path) -> None:
    settings, job = msgspec.json.decode(said, type=tuple[Settings, Job])
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


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
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
    job.add_argument("said")
    job.add_argument("model", type=Path)
    job.add_argument("scratch", type=Path)
    return parser.parse_args(words)


def main() -> None:
    options = options_of()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no process is left behind
    match options.command:
        case "run":
            sizes = {"jobs": options.jobs, "minutes": options.minutes, "seeds": options.seeds}
            sys.exit(run(options.folder, **sizes, settings=Settings()))
        case "report" if options.json:
            print(json.dumps(json_rows(read_finished(options.folder))))
        case "report":
            write_report(read_finished(options.folder), options.docs)
        case "job":
            do_job(options.said, options.model, options.scratch)


if __name__ == "__main__":
    main()
