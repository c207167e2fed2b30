"""A worker without a process, for tests of what talks to one."""

from __future__ import annotations

import socket
import threading


class NearWorker:
    """A worker without a process: the test has the other end of its connection."""

    pid = 0
    node = ""

    def __init__(self) -> None:
        self.connection, self.theirs = socket.socketpair()
        self.is_killed = threading.Event()

    def kill(self) -> None:
        self.is_killed.set()
        self.theirs.close()

    def exit_reason(self, timeout_s: float | None = None) -> str | None:
        return "it was killed" if self.is_killed.wait(timeout_s) else None

    @property
    def has_died(self) -> bool:
        return self.is_killed.is_set()


def no_more_processes() -> NearWorker:
    raise OSError(11, "Resource temporarily unavailable")
