"""All figures that one GPU is needed for, in the order of their importance, within a time limit.

Each part is a command of another benchmark in a process of its own, with a limit; one that is over it is ended with all that
it has started. A part begins only if it is expected to end in what is left of `--limit-s`; otherwise a smaller one is started.
What is measured is in a few small files of FOLDER: a later call continues with what is missing, also on another machine. Parts
that failed, or were over their limit, are tried again with `--retry`. The table says what a part needs that is not given
(`--model` and others). Models and what parts print are in WORK.

    .venv/bin/python bench/one_gpu.py --limit-s 540 --model FOLDER [--gsm8k FILE] [--trl PYTHON] [--vllm PYTHON] [--only a,b]
    .venv/bin/python bench/one_gpu.py --list
    .venv/bin/python bench/one_gpu.py --limit-s 0 --json        # nothing is measured: all rows so far
    .venv/bin/python bench/one_gpu.py --smoke [--limit-s 300]
"""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, structs

from limited import GRACE_S, run_limited
from one_gpu_parts import FOLDERS, PYTHONS, Part, plan, smoke_plan
from report import Options, Row, alone, not_measured, publish, say

Status = Literal["measured", "failed", "over its limit", "ended by the call's limit"]
LOG_CHARACTERS = 2000
TARGET = 0.65
"""An accuracy that the runs of time to quality are compared at."""


class Outcome(Struct, frozen=True, kw_only=True):
    """Of a part that has been started."""

    part: str
    status: Status
    seconds: float
    at: str
    why: str = ""
    rows: list[Row] = []
    log: str = ""
    """The last words of a part that was not measured."""


def read_outcomes(folder: Path) -> dict[str, Outcome]:
    """The last of each part."""
    path = folder / "parts.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = [msgspec.json.decode(line, type=Outcome) for line in lines]
    return {outcome.part: outcome for outcome in found}


def is_one_of(part: Part, only: Sequence[str]) -> bool:
    return any(word == part.letter if len(word) == 1 else word in part.name for word in only)


def is_missing(outcome: Outcome | None, *, is_retried: bool) -> bool:
    if outcome is None or outcome.status == "ended by the call's limit":
        return True
    return is_retried and outcome.status != "measured"


def run_part(part: Part, given: Mapping[str, str], work: Path, left_s: float) -> Outcome:
    began, limit_s = time.monotonic(), min(part.limit_s, left_s)
    stem = re.sub(r"[^A-Za-z0-9.]+", "-", part.name)
    out, log = work / f"{stem}.json", work / f"{stem}.log"
    with out.open("w") as rows, log.open("w") as words:
        status = run_limited(part.words(given, limit_s), limit_s, out=rows, log=words)
    outcome: Status = "measured" if status == 0 else "failed"
    if status is None:
        outcome = "over its limit" if limit_s == part.limit_s else "ended by the call's limit"
    said = log.read_text(errors="replace").strip()
    return Outcome(
        part=part.name,
        status=outcome,
        seconds=time.monotonic() - began,
        at=datetime.now(UTC).isoformat(timespec="minutes"),
        why="" if status == 0 else said.rpartition("\n")[2][:160],
        rows=rows_in(out),
        log="" if status == 0 else said[-LOG_CHARACTERS:],
    )


def run_parts(
    parts: Sequence[Part], given: Mapping[str, str], folder: Path, limit_s: float, *, is_retried: bool = False
) -> None:
    """Those that are missing and fit into the time."""
    ends_at, outcomes, work = time.monotonic() + limit_s, read_outcomes(folder), Path(given["work"])
    kept, written = folder / "end-to-end.jsonl", work / "end-to-end/results.jsonl"
    written.parent.mkdir(parents=True, exist_ok=True)
    if kept.exists() and (not written.exists() or written.stat().st_size < kept.stat().st_size):
        shutil.copy(kept, written)
    for part in parts:
        left_s = ends_at - time.monotonic() - GRACE_S
        if not is_missing(outcomes.get(part.name), is_retried=is_retried) or left_s < part.expected_s:
            continue
        if not all(given.get(name) for name in part.needs):
            continue
        say(f"{part.name}: about {part.expected_s:.0f} s, {left_s:.0f} s are left")
        outcome = run_part(part, given, work, left_s)
        if written.exists():
            shutil.copy(written, kept)
        with (folder / "parts.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")
        say(f"{part.name}: {outcome.status} after {outcome.seconds:.0f} s {outcome.why}")


# ---- what is shown -------------------------------------------------------------------------------------------------------


def table(parts: Sequence[Part], given: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Markdown."""
    outcomes = read_outcomes(folder)
    yield "| | part | expected, s | took, s | |"
    yield "|---|---|---|---|---|"
    for part in parts:
        outcome, missing = outcomes.get(part.name), [name for name in part.needs if not given.get(name)]
        took = "" if outcome is None else f"{outcome.seconds:.0f}"
        said = "not reached" if outcome is None else f"{outcome.status} {outcome.why}".strip()
        if outcome is None and missing:
            said = f"needs {', '.join(f'--{name}' for name in missing)}"
        yield f"| {part.letter} | {part.name} | {part.expected_s:.0f} | {took} | {said} |"


def rows_of(parts: Sequence[Part], folder: Path) -> list[Row]:
    """Figures, then how each part ended. Of benchmarks that keep results of their own, all that is in their files."""
    outcomes, found, missing = read_outcomes(folder), [*end_to_end_rows(folder), *quality_rows(folder)], list[Row]()
    for part in parts:
        if part.name in outcomes and part.script != "end_to_end":
            found += outcomes[part.name].rows
    for part in parts:
        outcome = outcomes.get(part.name)
        if outcome is None or outcome.status != "measured":
            missing.append(
                not_measured(part.name, "not reached" if outcome is None else f"{outcome.status} {outcome.why}")
            )
        else:
            missing.append(alone(part.name, "seconds that it took", outcome.seconds, digits=0))
    return [*figures(found), *missing]


def rows_in(path: Path) -> list[Row]:
    """Empty if the part was ended before it printed them."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Row])
    except (OSError, msgspec.DecodeError):
        return []


def figures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row.metric.startswith("not measured")]


def end_to_end_rows(folder: Path) -> list[Row]:
    if not (path := folder / "end-to-end.jsonl").exists():
        return []
    from end_to_end_loads import WORKLOADS
    from end_to_end_report import read_records, rows_of

    return rows_of(read_records(path), WORKLOADS, [])


def quality_rows(folder: Path) -> list[Row]:
    if not (paths := sorted(folder.glob("quality-*.jsonl"))):
        return []
    from time_to_quality_cells import read_results
    from time_to_quality_report import json_rows

    rows = {path.stem.removeprefix("quality-"): json_rows(read_results(path), TARGET) for path in paths}
    return [structs.replace(row, workload=f"{row.workload}, {name}") for name, some in rows.items() for row in some]


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """As by Ctrl-C: the part that runs is ended, too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--limit-s", 540.0, smoke=30.0, help="of this call")
    parser.add("--folder", Path("runs/one-gpu"), help="of results; a later call continues there")
    parser.add("--work", Path("runs/one-gpu-work"), help="models, logs")
    parser.add("--only", "", help="letters of parts, or words in their names, by comma")
    parser.add("--quality-seconds", 300.0, help="of training, for the runs of time to quality that share the GPU")
    for name, what in {**FOLDERS, **PYTHONS}.items():
        parser.add(f"--{name}", "", help=what)
    parser.add_argument("--retry", action="store_true", help="parts that failed or were over their limit")
    parser.add_argument("--list", action="store_true", help="print the parts and what is known of them")
    options = parser.parse(argv)
    with tempfile.TemporaryDirectory() as scratch, ended_by_sigterm():
        folder, work = (Path(scratch), Path(scratch) / "work") if options.smoke else (options.folder, options.work)
        folder.mkdir(parents=True, exist_ok=True)
        given = {name: getattr(options, name) for name in (*FOLDERS, *PYTHONS)}
        given |= {"folder": str(folder), "work": str(work)}
        only = [word for word in options.only.split(",") if word]
        parts = smoke_plan() if options.smoke else plan(options.quality_seconds)
        parts = [part for part in parts if not only or is_one_of(part, only)]
        if not options.list:
            run_parts(parts, given, folder, options.limit_s, is_retried=options.retry)
        if not options.list:
            publish(rows_of(parts, folder), options)
        if options.list or not options.json:
            print("\n".join(table(parts, given, folder)))


if __name__ == "__main__":
    main()
