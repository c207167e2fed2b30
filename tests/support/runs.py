"""Runs of the real program in processes of their own: small, started, watched, killed, resumed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millstream.audit import audit
from millstream.events.metrics import is_step
from support.commands import Command, run_command, start_command

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "model.tiny.layers": 1,
    "data.size": 300,
    "data.holdout": 16,
    "pipeline.steps": 60,
    "pipeline.groups_per_step": 4,
    "rollout.group_size": 4,
    "evaluation.every_steps": 1000,
    "pipeline.filter_zero_signal": "false",
    "checkpoint.every_steps": 2,
    "engine.process": "false",
}


def recipe_in(folder: Path) -> Path:
    """The demo without its warm-up, which takes longer than all the rest."""
    text = (ROOT / "recipes/demo.toml").read_text()
    begin, end = text.index("[warmup]"), text.index("[rollout]")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(text[:begin] + text[end:])
    return folder / "recipe.toml"


def command(run_dir: Path, changes: dict[str, object] | None = None) -> list[str]:
    keys = SETTINGS | {"run_dir": run_dir} | (changes or {})
    overrides = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "millstream.cli.main", "train", str(recipe_in(run_dir.parent)), *overrides]


def resume_command(run_dir: Path) -> list[str]:
    return [sys.executable, "-m", "millstream.cli.main", "train", "--resume", str(run_dir)]


def resume(run_dir: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    words = [word for change in changes for word in ("--set", change)]
    return run_command([*resume_command(run_dir), *words])


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """All rows of `metrics.jsonl`: of steps and of evaluations."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def step_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in metric_rows(run_dir) if is_step(row)]


def steps_of(run_dir: Path) -> int:
    """By the file of metrics, whose last line may be incomplete."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b'"reward":') if path.exists() else 0


def until(condition: Callable[[], bool], process: Command | subprocess.Popen[bytes], seconds: float = 120) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < limit, "it did not come to that in time"
        time.sleep(0.01)


def sealed_checkpoints(run_dir: Path) -> int:
    """Checkpoints that are complete, by the log. The last one counts when it has its name, which it gets after its event."""
    path = run_dir / "events.jsonl"
    log = path.read_bytes() if path.exists() else b""
    versions = re.findall(rb'"kind":"checkpoint_sealed".*?"version":(\d+)', log)
    if versions and not (run_dir / f"checkpoints/step-{int(versions[-1]):06d}").exists():
        versions.pop()
    return len(versions)


def kill_at(run_dir: Path, step: int, changes: dict[str, object] | None = None, *, num_sealed: int = 2) -> None:
    """After this step, and with so many checkpoints: the first is that of the start."""
    process = start_command(command(run_dir, changes))
    until(lambda: steps_of(run_dir) >= step and sealed_checkpoints(run_dir) >= num_sealed, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def assert_clean(run_dir: Path) -> None:
    report = audit(run_dir)
    assert report.is_clean, "\n".join(map(str, report.findings))
    assert report.checks > 100, "nothing was checked"
