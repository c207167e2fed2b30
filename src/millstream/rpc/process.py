"""Processes that work for a run, each at the other end of a socket: started here, or by a cluster on some node.

A worker is a module with a function `work(line)`. What it has to know comes as the first message on the line, and it ends when
the line closes, however the run ends. Messages are msgpack, nothing is pickled.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, Protocol

logger = logging.getLogger(__name__)
Kind = Literal["engine", "learner", "stage", "environment", "reward"]
"""What a worker does: it says which resources of a cluster it gets."""
MAX_LINES = 20
HEARD_S = 1.0


def engine_names(num: int) -> list[str]:
    """Of the engines that a run begins with."""
    return ["engine"] if num == 1 else [f"engine-{number}" for number in range(num)]


def rank_name(number: int) -> str:
    return f"rank {number}"


class Worker(Protocol):
    """A process, from our side."""

    line: socket.socket
    pid: int
    node: str
    """Where it is; "" on this machine, where no cluster has a name for it."""

    def kill(self) -> None:
        """At once, with everything that it started. A second time it does nothing."""
        ...

    def ended(self, timeout_s: float | None = None) -> str | None:
        """How it ended, in words, or None if it lives after so long. None: waits for ever."""
        ...

    @property
    def has_died(self) -> bool:
        """Of one that has ended: whether not by itself, its work being done or refused."""
        ...


class Launcher(Protocol):
    def launch(self, kind: Kind, module: str, *, name: str, descriptors: Sequence[int] = ()) -> Worker:
        """Returns when the line is there. May take seconds, or as long as a cluster has no room; raises `MillstreamError`.
        `descriptors` are passed on to a process of this machine, under the same numbers; elsewhere they mean nothing."""
        ...


class LocalWorker:
    """A process of this machine, started as `python -m MODULE LINE`: a script of the user's needs no guard around its main
    part."""

    node = ""

    def __init__(self, module: str, name: str, descriptors: Sequence[int] = (), *, is_heard: bool = False) -> None:
        self.line, theirs = socket.socketpair()
        with theirs:
            passed = [theirs.fileno(), *descriptors]
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if is_heard else None,
                process_group=0,
            )
        self.pid = self.process.pid
        self.name = name
        self._said: deque[str] = deque(maxlen=MAX_LINES)
        self._hearing: threading.Thread | None = None
        if is_heard:
            self._hearing = threading.Thread(target=self._hear, name=f"{name} says", daemon=True)
            self._hearing.start()

    def _hear(self) -> None:
        """What it says is said on, and the last of it kept: it may tell why it ended."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said.append(line.decode(errors="replace").rstrip())
            logger.warning("%s: %s", self.name, self._said[-1])

    def kill(self) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def ended(self, timeout_s: float | None = None) -> str | None:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if self._hearing is not None:
            self._hearing.join(HEARD_S)
        last = f"; it said last: {self._said[-1]}" if self._said else ""
        return f"its process ended with exit code {code}{last}"

    @property
    def has_died(self) -> bool:
        return self.process.poll() != 0


class LocalLauncher:
    """Everything on this machine."""

    def launch(self, kind: Kind, module: str, *, name: str, descriptors: Sequence[int] = ()) -> LocalWorker:
        return LocalWorker(module, name, descriptors, is_heard=kind in ("learner", "stage"))


NODE, HOST = "MILLSTREAM_NODE", "MILLSTREAM_HOST"
"""Environment variables that a worker of a cluster has: the name of its node, and the address by which others reach it."""


def own_node() -> str:
    """The name of the node that this process is on; "" where no cluster has a name for it."""
    return os.environ.get(NODE, "")


def own_host() -> str:
    """An address of this node that those who work for the run reach: loopback, unless it has several nodes."""
    return os.environ.get(HOST, "127.0.0.1")
