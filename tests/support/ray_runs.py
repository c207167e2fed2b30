"""Small real runs on Ray in processes of their own: started, looked at from outside, stopped, and nothing of them left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from millstream.events import Event
from millstream.events.sinks import read_events
from support.commands import Command, start_command
from support.runs import SETTINGS, recipe_in

PARTS = {"runtime": "ray", "engine.replicas": 1, "learner.ranks": 2, "data.holdout": 0, "engine.slots": 64}
REWARD = """import asyncio

async def reward(task, completion):
    await asyncio.sleep(0.3)
    return float(len(completion) % 2)
"""
START_S = 200
"""Ray, engines and ranks on two cores that others use, too."""


def command(run_dir: Path, changes: dict[str, object] | None = None) -> list[str]:
    """The reward takes a moment, so that a run of few steps can be met at work, and differs, so that something is learned."""
    keys = {**SETTINGS, **PARTS, "run_dir": run_dir, "engine.process": "", **(changes or {})}
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    (run_dir.parent / "mine.py").write_text(REWARD)
    keys |= {"reward.0.function": f"{run_dir.parent / 'mine.py'}:reward"}
    overrides = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "millstream.cli.main", "train", str(recipe_in(run_dir.parent)), *overrides]


Started = Command | subprocess.Popen[str]


@contextmanager
def running(words: list[str]) -> Iterator[Started]:
    """Whatever becomes of the test, the run does not outlive it. Words that do not begin with this Python start cold."""
    process: Started
    if words[0] == sys.executable:
        process = start_command(words)
    else:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        pids = tree_of(process.pid) if process.poll() is None else []
        for pid in pids:
            with suppress(ProcessLookupError):
                subprocess.run(["kill", "-KILL", str(pid)], stderr=subprocess.DEVNULL)
        process.wait()


def stop(process: Started, seconds: float = 60) -> str:
    process.send_signal(signal.SIGTERM)
    output: str = process.communicate(timeout=seconds)[0]
    return output


def events_of(run_dir: Path) -> list[Event]:
    return list(read_events(run_dir / "events.jsonl"))


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += [int(word) for word in children.read_text().split()]
    return found


def memory_of(pids: Sequence[int]) -> set[Path]:
    """Our files in shared memory that these processes have mapped or open, and the folders that they are in."""
    found = set[Path]()
    for pid in pids:
        with suppress(OSError):
            words = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            words += [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
            found |= {Path(word) for word in words if word.startswith("/dev/shm/millstream")}
    return {path for path in found if not path.name.endswith("(deleted)")}


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids: Sequence[int], seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while left := [pid for pid in pids if not is_gone(pid)]:
        assert time.monotonic() < limit, f"processes {left} outlived the run"
        time.sleep(0.1)
