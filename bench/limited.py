"""A command with a time limit, ended with all processes that it has started, also those with a session of their own.

They are found by a variable of their environment, which children inherit. Needs nothing but the standard library: TRL's Python
imports it, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

MARK = "BENCH_LIMITED"
GRACE_S = 10.0
"""For what a command does after SIGTERM."""


def run_limited(
    command: Sequence[str | Path],
    limit_s: float,
    *,
    env: Mapping[str, str] | None = None,
    out: IO[str] | None = None,
    log: IO[str] | None = None,
    grace_s: float = GRACE_S,
) -> int | None:
    """The exit status; None if its time was over. Nothing that it has started runs any more when this returns or raises."""
    mark = f"{os.environ.get(MARK, '')}/{uuid.uuid4()}"  # a limit within a limit: the outer one finds both
    marked = {**(os.environ if env is None else env), MARK: mark}
    process = subprocess.Popen(
        [str(word) for word in command], env=marked, stdout=out, stderr=log, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        return None
    finally:
        while left := list(processes_with(mark)):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)


def processes_with(mark: str) -> Iterator[int]:
    """Those that have the mark and are not over. Linux."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                    yield int(folder.name)
