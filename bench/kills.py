"""SIGKILL to a real training process at random moments, a resume and an audit after each: is anything lost, or done twice?

Three runs, each beside an undisturbed one of the same config: asynchronous (max_lag 2), synchronous (max_lag 0, where the
weights must be the same, bit for bit), and with the engine in a process of its own, through the command line. A third of the
kills wait until a checkpoint is being written. Processes of the first two are forked from one that has torch imported.

    .venv/bin/python bench/kills.py [--json] [--smoke] [--kills 200] [--out FOLDER] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import internals_torch  # noqa: F401  imported once, here, and not in every process that is forked
from internals import audit, must_be_clean, recipe
from millstream import resume, train
from report import ROOT, Options, Row, publish, rate, say

COMMON = {
    "data.size": 4000,
    "data.holdout": 256,
    "pipeline.groups_per_step": 8,
    "rollout.group_size": 4,
    "evaluation.every_steps": 100000,
    "checkpoint.every_steps": 1,
}
RUNS: dict[str, dict[str, Any]] = {
    "asynchronous": {"pipeline.steps": 400, "engine.process": "false"},
    "synchronous": {"pipeline.steps": 80, "engine.process": "false", "pipeline.max_lag": 0},
    "engine in a process": {"pipeline.steps": 300, "engine.process": "true"},
}
SHARES = {"asynchronous": 0.65, "synchronous": 0.2, "engine in a process": 0.15}
SMOKE = {"synchronous": 1.0}
"""The runs of `--smoke`, and their shares of the kills."""
MAX_LIFE_S = 3.0
"""Of a process, from when it has begun to train."""


def settings(name: str, run_dir: Path, steps: int | None) -> list[str]:
    changes: dict[str, Any] = {**COMMON, **RUNS[name], "run_dir": run_dir}
    if steps is not None:
        changes |= {"pipeline.steps": steps, "data.holdout": 8, "warmup.max_steps": 2, "pipeline.groups_per_step": 2}
        changes |= {"pipeline.filter_zero_signal": "false"}
    return [f"{key}={value}" for key, value in changes.items()]


Start = Callable[[Path], int]
"""Starts the process of a run, from the beginning or from the newest checkpoint: its process id."""


def forked(changes: Sequence[str], run_dir: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(run_dir.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if (run_dir / "events.jsonl").exists():
            resume(run_dir)
        else:
            train(recipe("demo", *changes))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def started(changes: Sequence[str], run_dir: Path) -> int:
    """The same through the command line."""
    words = [sys.executable, "-m", "millstream.cli.main", "train", "--quiet"]
    if (run_dir / "events.jsonl").exists():
        words += ["--resume", str(run_dir)]
    else:
        words += [str(ROOT / "recipes/demo.toml"), *(word for change in changes for word in ("--set", change))]
    with run_dir.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log).pid


def is_writing(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob(".step-*.tmp"))


def size_of(run_dir: Path) -> int:
    path = run_dir / "events.jsonl"
    return path.stat().st_size if path.exists() else 0


def has_checkpoint(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("step-*"))


def has_ended(pid: int) -> int | None:
    """The exit code of a process that ended by itself; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def kill_at_random(pid: int, run_dir: Path, rng: random.Random, seconds: float) -> str | None:
    """Kill it at a random moment; the moment, in a word. None if the run was finished before."""
    at_checkpoint, at_once = rng.random() < 1 / 3, rng.random() < 0.1
    before, end = size_of(run_dir), math.inf
    while True:
        if end == math.inf and (at_once or (has_checkpoint(run_dir) and size_of(run_dir) > before)):
            end = time.monotonic() + rng.uniform(
                0, seconds
            )  # it has begun: the first checkpoint is there, or it is resumed
        code = has_ended(pid)
        if code is not None:
            assert code == 0, run_dir.with_suffix(".log").read_text()[-3000:]
            return None
        if time.monotonic() >= end and (not at_checkpoint or is_writing(run_dir)):
            break
        time.sleep(0.0005 if at_checkpoint else 0.005)
    if at_checkpoint:
        time.sleep(rng.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if is_writing(run_dir):
        return "while a checkpoint was written"
    return "while it started" if size_of(run_dir) == before or not has_checkpoint(run_dir) else "elsewhere"


def run_killed(
    name: str, run_dir: Path, kills: int, start: Start, rng: random.Random, max_life_s: float = MAX_LIFE_S
) -> Counter[str]:
    """Kill the run this many times, then let it finish. A run that finishes before is replaced by another one."""
    moments: Counter[str] = Counter()
    num_finished = 0
    while moments.total() < kills:
        moment = kill_at_random(start(run_dir), run_dir, rng, max_life_s)
        if moment is None:
            say(f"{name}: finished after {moments.total()} kills; another one begins")
            num_finished += 1
            run_dir.rename(run_dir.with_name(f"{run_dir.name}-finished-{num_finished}"))
            continue
        moments[moment] += 1
        if (run_dir / "events.jsonl").exists():
            report = audit(run_dir)
            must_be_clean(report)
            if moments.total() % 10 == 0:
                say(f"{name}: {moments.total()} kills, step {report.steps}, clean")
    pid = start(run_dir)
    while (code := has_ended(pid)) is None:
        time.sleep(0.1)
    assert code == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    return moments


def weights_of(run_dir: Path) -> bytes:
    return (run_dir / "model/model.safetensors").read_bytes()


def compare(name: str, kills: int, out: Path, rng: random.Random, steps: int | None) -> list[Row]:
    """One run with kills beside the same one without. Raises `SystemExit` if an audit is not clean."""

    def start(run_dir: Path) -> int:
        begin = started if name == "engine in a process" else forked
        return begin(settings(name, run_dir, steps), run_dir)

    calm, killed = (out / f"{name.replace(' ', '-')}-{kind}" for kind in ("calm", "killed"))
    run_killed(name, calm, 0, start, rng)
    max_life_s = MAX_LIFE_S if steps is None else 0.3  # a run of few steps is over soon
    moments = run_killed(name, killed, kills, start, rng, max_life_s)
    report = audit(killed)
    must_be_clean(report)
    found, expected = (json.loads((path / "summary.json").read_text()) for path in (killed, calm))
    same = "yes" if weights_of(killed) == weights_of(calm) else "no"
    assert name != "synchronous" or same == "yes", "max_lag = 0 must give the same weights"
    say(
        f"{name}: {moments.total()} kills {dict(moments)}, {report.processes} processes, "
        f"{report.void_events} of {report.events} "
        f"events undone, {report.checks} checks clean; same weights: {same}; accuracy {found['accuracy_after']:.3f} "
        f"(undisturbed {expected['accuracy_after']:.3f}), before {found['accuracy_before']:.3f}"
    )
    workload = f"{name}, {moments.total()} SIGKILLs, {moments['while a checkpoint was written']} in a checkpoint"
    metrics = ("accuracy_after", "greedy_after", "rollouts_trained")
    return [rate(workload, metric, found[metric], "the same run undisturbed", expected[metric]) for metric in metrics]


def run_all(options: argparse.Namespace, out: Path) -> list[Row]:
    out.mkdir(parents=True, exist_ok=True)
    rng, rows = random.Random(options.seed), list[Row]()
    for name, share in (SMOKE if options.smoke else SHARES).items():
        steps = 30 if options.smoke else None
        rows += compare(name, round(options.kills * share), out, rng, steps)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--kills", 200, smoke=1)
    parser.add("--out", None, kind=Path, help="where runs are kept")
    parser.add("--seed", 0)
    options = parser.parse(argv)
    with tempfile.TemporaryDirectory() if options.smoke else nullcontext() as scratch:
        out = Path(scratch) if scratch else options.out or Path(tempfile.mkdtemp(prefix="millstream-kills-"))
        publish(run_all(options, out), options)


if __name__ == "__main__":
    main()
