"""Processes that tests start and look at."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from millstream.rpc.process import Kind, LocalLauncher, WorkerProcess


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def children(pid: int) -> list[int]:
    """The processes that this one has started and not yet reaped."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def workers(pid: int) -> list[int]:
    """The worker processes of a command, in the order in which they were started, in a test with `own_warm_process`."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [child for child in children(parent) if child != pid]


def eventually(holds: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def launch_worker(kind: Kind = "learner") -> WorkerProcess:
    return LocalLauncher().launch(kind, "support.rpc_worker:serve_test", name="a worker")
