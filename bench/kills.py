"""SIGKILL to a real training process at random moments, a resume and an audit after each: is anything lost, or done twice?

Three runs, each beside an undisturbed one of the same config: asynchronous (max_lag 2), synchronous (max_lag 0, where the
weights must be the same, bit for bit), and with the engine in a process of its own, through the command line. A third of the
kills wait until a checkpoint is being written. Lives of the first two are forked from a process that has torch imported.

    .venv/bin/python bench/kills.py [--json] [--kills 200] [--out FOLDER] [--seed 0]
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import millstream.run.run  # noqa: F401  imported once, here, and not in every life
from millstream import RunConfig, resume, train
from millstream.audit import Report, audit, report_lines
from millstream.config import load

ROOT = Path(__file__).parent.parent
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
LONGEST_LIFE_S = 3.0
"""From the moment that it has begun."""


def settings(name: str, run_dir: Path) -> list[str]:
    return [f"{key}={value}" for key, value in {**COMMON, **RUNS[name], "run_dir": run_dir}.items()]


def forked(name: str, run_dir: Path) -> int:
    """A life: a process of its own, from the beginning or from the newest checkpoint."""
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
            train(load(ROOT / "recipes/demo.toml", RunConfig, settings(name, run_dir)))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def started(name: str, run_dir: Path) -> int:
    """The same through the command line."""
    words = [sys.executable, "-m", "millstream.cli.main", "train", "--quiet"]
    if (run_dir / "events.jsonl").exists():
        words += ["--resume", str(run_dir)]
    else:
        words += [str(ROOT / "recipes/demo.toml"), *(w for s in settings(name, run_dir) for w in ("--set", s))]
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
    """The exit code of a life that came to its own end."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def live_and_die(pid: int, run_dir: Path, rng: random.Random, seconds: float) -> str | None:
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


def must_be_clean(report: Report) -> None:
    if not report.is_clean:
        sys.exit("\n".join(report_lines(report)))


def tormented(name: str, run_dir: Path, kills: int, rng: random.Random) -> Counter[str]:
    """So many kills; then the run may finish. If it does so before, another one takes its place."""
    begin: Callable[[str, Path], int] = started if name == "engine in a process" else forked
    moments: Counter[str] = Counter()
    while moments.total() < kills:
        moment = live_and_die(begin(name, run_dir), run_dir, rng, LONGEST_LIFE_S)
        if moment is None:
            print(f"{name}: finished after {moments.total()} kills; another one begins", file=sys.stderr)
            run_dir.rename(run_dir.with_name(f"{run_dir.name}-{moments.total()}"))
            continue
        moments[moment] += 1
        if (run_dir / "events.jsonl").exists():
            report = audit(run_dir)
            must_be_clean(report)
            if moments.total() % 10 == 0:
                print(f"{name}: {moments.total()} kills, step {report.steps}, clean", file=sys.stderr, flush=True)
    pid = begin(name, run_dir)
    while (code := has_ended(pid)) is None:
        time.sleep(0.1)
    assert code == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    return moments


def weights_of(run_dir: Path) -> bytes:
    return (run_dir / "model/model.safetensors").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="millstream-kills-"))
    out.mkdir(parents=True, exist_ok=True)
    rng, rows = random.Random(options.seed), list[dict[str, Any]]()
    for name in RUNS:
        calm, wild = (out / f"{name.replace(' ', '-')}-{kind}" for kind in ("calm", "killed"))
        tormented(name, calm, 0, rng)
        moments = tormented(name, wild, round(options.kills * SHARES[name]), rng)
        report = audit(wild)
        must_be_clean(report)
        found, expected = (json.loads((path / "summary.json").read_text()) for path in (wild, calm))
        same = "yes" if weights_of(wild) == weights_of(calm) else "no"
        assert name != "synchronous" or same == "yes", "max_lag = 0 must give the same weights"
        print(
            f"{name}: {moments.total()} kills {dict(moments)}, {report.processes} processes, "
            f"{report.void_events} of {report.events} events undone, {report.checks} checks clean; "
            f"same weights: {same}; accuracy {found['accuracy_after']:.3f} "
            f"(undisturbed {expected['accuracy_after']:.3f}), before {found['accuracy_before']:.3f}",
            file=sys.stderr,
            flush=True,
        )
        workload = f"{name}, {moments.total()} SIGKILLs, {moments['while a checkpoint was written']} in a checkpoint"
        for metric in ("accuracy_after", "greedy_after", "rollouts_trained"):
            row = {"workload": workload, "metric": metric, "peer": "the same run undisturbed"}
            ratio = round(found[metric] / max(expected[metric], 1e-9), 3)
            rows.append({**row, "ours": found[metric], "theirs": expected[metric], "ratio": ratio})
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
