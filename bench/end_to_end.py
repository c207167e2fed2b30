"""Whole runs on one GPU: how many rollouts a second are generated and trained, by how far training may lag behind.

Every cell is a load in a mode, run by `millstream.train`: a barrier (generate all, then train), `max_lag` 0, 0.5, 1, 2, 4. The
model has random weights and 512 words, so that the end token comes by itself. Loads: 64 and 512 rollouts a step with geometric
and log-normal lengths, agents whose environments take their time, and short equal lengths. Before the cells of a shape the
costs of its engine and learner are measured, alone and beside each other: with them the step model (`bench/step_model.py`) says
what a cell should take.

All modes of a load measure the same steps after the same warm-up. Ratios are over the steps that both cells have measured.

Results are appended to FOLDER/results.jsonl as they come. A later call adds cells; the table, the rows and the picture
(FOLDER/timeline.svg) are of all that is there. Cells that were not measured are printed as such.

    .venv/bin/python bench/end_to_end.py [--json] [--smoke] [--cells '474M-geometric-64/*,short/2'] [--steps 8]
    .venv/bin/python bench/end_to_end.py --list             # the cells, and which of them are measured by default
    .venv/bin/python bench/end_to_end.py --set engine.slots=256 --folder runs/fewer-slots
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch
from msgspec import structs

from end_to_end_cells import MODES, Budget, Failed, NotMeasured, Sources, config_of, device_bytes, run_cell
from end_to_end_costs import ON_GPU, SMOKE, free_memory, make_model, measure_costs
from end_to_end_loads import SMOKE_WORKLOADS, WORKLOADS, Workload, write_prompts
from end_to_end_report import CellKey, append_record, draw_timeline, read_records, rows_of, table
from internals_torch import gpu_share
from millstream import MillstreamError
from report import Options, publish, say

REQUIRED = (
    "474M-geometric-64/barrier,474M-geometric-64/0,474M-geometric-64/2,474M-geometric-64/4,"
    "474M-geometric-512/barrier,474M-geometric-512/0,474M-geometric-512/2,474M-geometric-512/4,"
    "474M-log-normal-64/barrier,474M-log-normal-64/2,474M-log-normal-64/4,"
    "agents/barrier,agents/2,agents/redundant,short/barrier,short/2,"
    "1.7B-geometric-64/barrier,1.7B-geometric-64/2"
)
SMOKE_CELLS = "tiny-geometric-4/barrier,tiny-geometric-4/2,tiny-log-normal-4/0.5,tiny-agents/redundant"
SHOWN = (("474M-geometric-64", "barrier"), ("474M-geometric-64", "2"))
"""In the timeline."""


def cells(workloads: dict[str, Workload]) -> list[CellKey]:
    return [
        (name, mode)
        for name, workload in workloads.items()
        for mode in MODES
        if mode != "redundant" or workload.latency_s
    ]


def chosen(patterns: str, workloads: dict[str, Workload]) -> list[CellKey]:
    """Cells in the order of the patterns. Raises `SystemExit` for a pattern that fits none."""
    found: list[CellKey] = []
    for pattern in filter(None, patterns.split(",")):
        fitting = [key for key in cells(workloads) if fnmatch("/".join(key), pattern)]
        if not fitting:
            raise SystemExit(f"--cells {pattern}: no such cell. --list prints them, such as 474M-geometric-64/2")
        found += [key for key in fitting if key not in found]
    return found


def with_steps(workloads: dict[str, Workload], steps: int | None, warm_steps: int | None) -> dict[str, Workload]:
    """With other numbers of steps, where they are given."""
    given = {"steps": steps, "warm_steps": warm_steps}
    changes = {name: number for name, number in given.items() if number is not None}
    return {name: structs.replace(workload, **changes) for name, workload in workloads.items()}


def check_warm_steps(wanted: Sequence[CellKey], workloads: dict[str, Workload]) -> None:
    """Raises `SystemExit` if a mode would be measured before its first groups are gone."""
    for name, mode in wanted:
        if (needed := 2 + math.ceil(MODES[mode].max_lag)) > (found := workloads[name].warm_steps):
            raise SystemExit(f"{name}/{mode}: {found} warm-up steps, expected at least {needed}: --warm-steps {needed}")


def measure(wanted: Sequence[CellKey], workloads: dict[str, Workload], options: argparse.Namespace) -> list[str]:
    """Each result is in the file before the next cell starts. A cell that fails is recorded, and returned with its reason; the
    others are measured."""
    failures = list[str]()
    results = options.folder / "results.jsonl"
    known = dict(read_records(results).costs)
    for name, mode in wanted:
        workload = workloads[name]
        budget = Budget(seconds=0.0, min_steps=workload.steps, limit_s=options.limit)
        model = make_model(workload.shape, workload.context, options.folder)
        sources = Sources(model=model, prompts=write_prompts(workload, options.folder))
        with tempfile.TemporaryDirectory() as scratch:
            config = config_of(workload, MODES[mode], sources, Path(scratch) / "costs", settings=options.set)
            kind = workload.shape, gpu_share(config, config.learner)
            is_known = kind in known and known[kind].settings == options.set
            if workload.shape in options.costs.split(",") and not is_known:
                say(f"costs of {workload.shape}, where the learner has {kind[1]:.0%} of the GPU")
                plan = SMOKE if options.smoke else ON_GPU
                known[kind] = measure_costs(workload.shape, config, model, plan, options.set)
                append_record(results, known[kind])
            if options.only_costs:
                continue
            try:
                result = run_cell(name, workload, mode, sources, Path(scratch), budget, options.set)
            except (NotMeasured, MillstreamError, torch.OutOfMemoryError) as error:
                why = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
                say(f"{name}/{mode}: {why}")
                failures.append(f"{name}/{mode}: {why}")
                append_record(results, Failed(workload=name, mode=mode, why=why))
            else:
                append_record(results, result)
                if options.keep_runs:
                    keep_run(Path(scratch) / "run", options.folder / f"{name}-{mode}")
                say(
                    f"{name}/{mode}: {len(result.steps_s)} steps of {result.step_s:.2f} s, {result.rollouts_per_s:.1f} "
                    f"rollouts/s, {result.tokens_per_s:,.0f} tokens/s generated, lag {result.lag_mean:.2f}, "
                    f"{result.memory_gib:.0f} GiB ({result.seconds:.0f} s in all)"
                )
        free_memory()
        if torch.cuda.is_available():
            say(f"  {device_bytes() / 2**30:.1f} GiB are still in use")
    return failures


def keep_run(run_dir: Path, kept: Path) -> None:
    """What `millstream calibrate` and `report` read of a run: its config, its metrics and its events."""
    kept.mkdir(parents=True, exist_ok=True)
    for path in run_dir.iterdir():
        if path.is_file():
            shutil.copy(path, kept)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--cells", REQUIRED, smoke=SMOKE_CELLS, help="patterns, by comma; empty: print what is there")
    parser.add("--folder", Path("runs/end-to-end"), help="of models, results and the picture")
    parser.add_argument("--steps", type=int, help="measured of every cell; the default is the load's")
    parser.add_argument(
        "--warm-steps", type=int, help="before them: at least two more than max_lag. The default is the load's"
    )
    parser.add("--costs", "474M,1.7B", smoke="tiny", help="shapes whose costs are measured, by comma")
    parser.add_argument("--only-costs", action="store_true", help="of the shapes of the cells; the cells are not run")
    parser.add("--limit", 300.0, smoke=60.0, help="seconds after which a cell ends with what it has")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in the config of every cell")
    parser.add_argument("--keep-runs", action="store_true", help="keep the events of every cell, in FOLDER/CELL")
    parser.add_argument("--list", action="store_true", help="print all cells")
    options = parser.parse(argv)
    workloads = with_steps(SMOKE_WORKLOADS if options.smoke else WORKLOADS, options.steps, options.warm_steps)
    if options.list:
        required = chosen(REQUIRED, WORKLOADS)
        print("\n".join(f"{'/'.join(key)}{'  (default)' if key in required else ''}" for key in cells(WORKLOADS)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        if options.smoke:
            options.folder = Path(scratch)
        wanted = chosen(options.cells, workloads)
        check_warm_steps(wanted, workloads)
        failures = measure(wanted, workloads, options)
        found = read_records(options.folder / "results.jsonl")
        everything = cells(workloads)
        shown = [found.cells[key] for key in (everything if options.smoke else SHOWN) if key in found.cells]
        if shown:
            draw_timeline(shown, options.folder / "timeline.svg")
        if options.json:
            publish(rows_of(found, workloads, everything), options)
        else:
            print("\n".join(table(found, workloads, everything)), flush=True)
        if failures:
            raise SystemExit("\n".join(f"not measured: {failure}" for failure in failures))


if __name__ == "__main__":
    main()
