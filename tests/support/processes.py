"""Processes that tests start and look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from millstream.rpc.process import Kind, LocalLauncher, LocalWorker


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def eventually(holds: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def launch_worker(kind: Kind = "learner") -> LocalWorker:
    return LocalLauncher().launch(kind, "support.rpc_worker", name="a worker")
