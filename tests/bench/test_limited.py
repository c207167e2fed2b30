"""bench/limited.py: a command with a time limit leaves nothing behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from limited import MARK, processes_with, run_limited

STARTS = """
import subprocess, sys, time
from pathlib import Path
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
started = [subprocess.Popen([sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE) for _ in range(2)]
for one in started:
    one.stdout.readline()
Path(sys.argv[1]).write_text(" ".join(str(one.pid) for one in started))
time.sleep(float(sys.argv[2]))
"""


def is_running(pid: int) -> bool:
    return any(found == pid for found in processes_with(""))


@pytest.mark.parametrize(("lasts_s", "status"), [("0", 0), ("600", None)])
def test_nothing_that_a_command_has_started_outlives_it(tmp_path: Path, lasts_s: str, status: int | None) -> None:
    pids = tmp_path / "pids"
    assert run_limited([sys.executable, "-c", STARTS, pids, lasts_s], 5.0, grace_s=0.2) == status
    assert len(found := list(map(int, pids.read_text().split()))) == 2
    assert not any(map(is_running, found))


def test_a_limit_within_a_limit_ends_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    inner = f"from limited import run_limited; run_limited([{sys.executable!r}, '-c', {STARTS!r}, {str(pids)!r}, '600'], 600)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "bench")}
    assert run_limited([sys.executable, "-c", inner], 5.0, env=env, grace_s=0.2) is None
    assert len(found := list(map(int, pids.read_text().split()))) == 2
    assert not any(map(is_running, found)) and MARK not in os.environ


def test_a_command_that_ends_in_time_has_its_status() -> None:
    began = time.monotonic()
    assert run_limited([sys.executable, "-c", "raise SystemExit(3)"], 60.0) == 3
    assert time.monotonic() - began < 60
