"""Held-out accuracy over seconds and over samples: a barrier, max_lag 0, 1, 2, 4 and TRL, each with the same time.

A cell is a mode and a seed: it trains for `--seconds`, and then the weights that it had every few seconds are measured on the
held-out tasks, sampled and greedy. The evaluations are outside the clock of training; what keeping the weights costs is memory
alone. All modes see the same tasks in the same order; no group is replaced, so that every step trains the same number of
rollouts. `run` adds a line to FILE for each cell that is not in it: it can be stopped, and continued on another day.

    .venv/bin/python bench/time_to_quality.py run FILE [--modes barrier,0,2,4] [--seeds 0-2] [--seconds 300] [--runs FOLDER]
        [--set model.path=FOLDER ...] [--minutes 9] [--together 5] [--trl-python PYTHON] [--trl-seconds 600]
        [--trl-set vllm_gpu_memory_utilization=0.4 ...] [--trl-search-s 300]
    .venv/bin/python bench/time_to_quality.py report FILE [--target 0.5] [--json] [--docs FOLDER]
    .venv/bin/python bench/time_to_quality.py --smoke [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from internals import recipe
from millstream import RunConfig
from modes import MODES
from report import Options, publish, say
from time_to_quality_cells import TimedCell, TimedSettings, add_result, read_results, run_cell
from time_to_quality_report import json_rows, write_report
from time_to_quality_trl import TRL, fastest, run_trl, seconds_of_trl
from trl_search import best, table

OTHER_S = 90.0
"""What a cell is expected to take besides its seconds of training: a start, and the evaluations."""
OTHER_S_OF_TRL = 180.0
"""With the start of vLLM."""
EVALUATION_S = 45.0
"""That are left for the evaluations, where TRL is ended by the limit of the call."""
SMOKE = (
    "data.size=64",
    "data.holdout=8",
    "warmup=",
    "model.tiny.hidden=16",
    "model.device=cpu",
    "engine.process=false",
    "engine.slots=32",
    "pipeline.groups_per_step=2",
    "rollout.group_size=2",
    "evaluation.every_steps=",
)


def missing(file: Path, settings: TimedSettings, modes: Iterable[str], seeds: Iterable[int]) -> list[TimedCell]:
    """Seed by seed, so that what is there after any while is balanced."""
    found = read_results(file, settings)
    return [cell for seed in seeds for mode in modes if (cell := TimedCell(mode, seed)) not in found]


def run(
    file: Path,
    settings: TimedSettings,
    cells: Sequence[TimedCell],
    *,
    minutes: float = math.inf,
    runs: Path | None = None,
    trl_python: Path = Path(sys.executable),
    trl_changes: Sequence[str] = (),
) -> None:
    """No cell begins that would not end in time. Millstream's run folders are kept in `runs`, if it is given; TRL has none."""
    began = time.monotonic()
    for number, cell in enumerate(cells):
        if time.monotonic() - began + expected_s(settings, cell) > 60 * minutes:
            say(f"the time is over: {len(cells) - number} cells are left")
            return
        config = config_of(settings, cell.seed)
        with tempfile.TemporaryDirectory() as folder:
            if cell.mode == TRL:
                own = Path(folder)
                left_s = 60 * minutes - (time.monotonic() - began) - EVALUATION_S
                result = run_trl(settings, config, cell, own, python=trl_python, changes=trl_changes, limit_s=left_s)
            else:
                result = run_cell(settings, config, cell, Path(folder))
                if runs is not None:
                    keep_run(Path(folder), runs, cell)
        add_result(file, result)
        say(f"{cell}: {result}")
    say("every cell is done")


def run_together(
    file: Path, settings: TimedSettings, cells: Sequence[TimedCell], num: int, *, minutes: float = math.inf
) -> None:
    """`num` at a time, each in a process of its own whose output goes to a file of its own. They share the GPU: their
    seconds are those of a part of it. A cell that fails is left out, and the end of its output is shown. No cell begins that
    would not end in time."""
    began = time.monotonic()

    def run_one(cell: TimedCell) -> bool | None:
        """None: it was left."""
        if time.monotonic() - began + expected_s(settings, cell) > 60 * minutes:
            say(f"{cell}: left, the time is over")
            return None
        own = [f"--modes={cell.mode}", f"--seeds={cell.seed}", f"--recipe={settings.recipe}"]
        own += [f"--seconds={settings.seconds}", f"--points={settings.points}"]
        own += [f"--trl-seconds={settings.trl_seconds}"] if settings.trl_seconds is not None else []
        own += [f"--set={change}" for change in settings.changes]
        log = file.with_suffix(f".{cell.mode}-{cell.seed}.log")
        with log.open("w") as words:
            status = subprocess.run(
                [sys.executable, __file__, "run", str(file), *own], stdout=words, stderr=words
            ).returncode
        say(f"{cell}: {'done' if status == 0 else log.read_text()[-2000:]}")
        return status == 0

    file.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(num) as lanes:
        found = list(lanes.map(run_one, cells))
    if False in found or (cells and True not in found):
        raise SystemExit(f"{found.count(False)} cells failed, and {found.count(None)} were left")


def expected_s(settings: TimedSettings, cell: TimedCell) -> float:
    if cell.mode == TRL:
        return seconds_of_trl(settings) + OTHER_S_OF_TRL
    return settings.seconds + OTHER_S


def keep_run(folder: Path, runs: Path, cell: TimedCell) -> None:
    """In a new folder with the cell in its name."""
    runs.mkdir(parents=True, exist_ok=True)
    shutil.move(folder / "run", tempfile.mkdtemp(prefix=f"{cell.mode}-{cell.seed}-", dir=runs))


def config_of(settings: TimedSettings, seed: int) -> RunConfig:
    return recipe(settings.recipe, *settings.changes, f"seed={seed}")


def fastest_of_trl(options: argparse.Namespace, settings: TimedSettings) -> list[str]:
    """As KEY=JSON, from the file that an earlier search has written, or by a search now."""
    known = options.file.with_suffix(".trl.json")
    if not known.exists():
        with tempfile.TemporaryDirectory() as folder:
            config, limit_s = config_of(settings, options.seeds[0]), options.trl_search_s
            tried = fastest(settings, config, Path(folder), python=options.trl_python, limit_s=limit_s)
        say("\n".join(table(tried)))
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(json.dumps([f"{key}={value}" for key, value in best(tried).settings.items()]))
    found: list[str] = json.loads(known.read_text())
    return found


def seeds_of(words: str) -> list[int]:
    """0-2 or 0,1,2."""
    first, _, last = words.partition("-")
    return list(range(int(first), int(last) + 1)) if last else [int(word) for word in words.split(",")]


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    commands = parser.add_subparsers(dest="command", parser_class=argparse.ArgumentParser)
    running = commands.add_parser("run", help="train and measure what is missing")
    running.add_argument("file", type=Path)
    running.add_argument("--recipe", default="smollm2", help="of recipes/, without .toml")
    running.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join((*MODES, TRL))}")
    running.add_argument("--seeds", type=seeds_of, default=[0, 1, 2])
    running.add_argument("--seconds", type=float, default=300.0, help="of training, for each cell")
    running.add_argument("--points", type=int, default=20, help="of a curve")
    running.add_argument("--set", action="append", default=[], dest="changes", metavar="a.b=c")
    running.add_argument("--minutes", type=float, default=600.0)
    running.add_argument("--together", type=int, default=1, help="cells at the same time, which share the GPU")
    running.add_argument("--runs", type=Path, help="keep Millstream's run folders here")
    running.add_argument(
        "--trl-seconds",
        type=float,
        help="of TRL's training, if not as long as the others; a setting of the file, so it is given for all of its cells",
    )
    running.add_argument("--trl-python", type=Path, default=Path(sys.executable), help="a Python that has TRL and vLLM")
    running.add_argument(
        "--trl-search-s",
        type=float,
        default=0.0,
        help="try settings of TRL for so long, print a table, and use the fastest; they are kept beside FILE",
    )
    running.add_argument("--trl-set", action="append", default=[], metavar="KEY=JSON", help="of its GRPOConfig")
    reporting = commands.add_parser("report", help="tables and figures")
    reporting.add_argument("file", type=Path)
    reporting.add_argument("--target", type=float, help="an accuracy. By default the highest that all modes reach")
    reporting.add_argument("--json", action="store_true", help="print rows, and write nothing")
    reporting.add_argument("--docs", type=Path, help="draw the figures, into this folder")
    options = parser.parse(argv)
    match options.command:
        case "run":
            settings = TimedSettings(
                recipe=options.recipe,
                changes=tuple(options.changes),
                seconds=options.seconds,
                points=options.points,
                trl_seconds=options.trl_seconds,
                is_split_by_prompt=True,
            )
            cells = missing(options.file, settings, options.modes.split(","), options.seeds)
            if options.together > 1 and any(cell.mode == TRL for cell in cells):
                parser.error("--together with TRL, which has the GPU to itself: call it for --modes trl alone")
            if options.trl_search_s and any(cell.mode == TRL for cell in cells):
                options.trl_set = [*fastest_of_trl(options, settings), *options.trl_set]
            trl: dict[str, Any] = {"trl_python": options.trl_python, "trl_changes": options.trl_set}
            if options.together > 1:
                run_together(options.file, settings, cells, options.together, minutes=options.minutes)
            else:
                run(options.file, settings, cells, minutes=options.minutes, runs=options.runs, **trl)
        case "report" if options.json:
            publish(json_rows(read_results(options.file), options.target), options)
        case "report":
            write_report(read_results(options.file), options.target, options.docs)
        case _ if options.smoke:
            with tempfile.TemporaryDirectory() as folder:
                settings, file = (
                    TimedSettings(recipe="demo", changes=SMOKE, seconds=0.5, points=2, is_split_by_prompt=True),
                    Path(folder) / "cells",
                )
                cells = missing(file, settings, ("barrier", "2"), [0])
                run(file, settings, cells)
                publish(json_rows(read_results(file), None), options)
        case _:
            parser.error("choose one of run, report, --smoke")


if __name__ == "__main__":
    main()
