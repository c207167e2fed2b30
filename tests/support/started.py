"""Processes that are not started: what each would have been given is recorded. It ends when it has its setup, and when all that
are started together have theirs."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from millstream.rpc.call import Channel
from millstream.rpc.warm import WARM


class Started(NamedTuple):
    """A process, as its starter made it."""

    words: list[str]  # the command line, without the descriptor of the connection
    sees: str | None  # CUDA_VISIBLE_DEVICES; None: it has none
    is_warm: bool  # whether the warm process was asked first
    setup: dict[str, Any]  # its first message

    @property
    def target(self) -> str:
        return self.words[3]


class Recorder:
    """What was started, in the order in which setups arrived."""

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.together = 1
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._asked = threading.local()

    def fork(self, target: str, *_: Any, **__: Any) -> None:
        """In the place of the warm process, which cannot."""
        self._asked.target = target

    def end_all(self) -> None:
        while self._open:
            self._open.pop().close()

    def popen(
        self, words: list[str], *, env: Mapping[str, str], pass_fds: Sequence[int] = (), **_: Any
    ) -> EndedProcess:
        """In the place of `subprocess.Popen`."""
        is_warm = getattr(self._asked, "target", None) == words[3]
        self._asked.target = None
        seen, connection = env.get("CUDA_VISIBLE_DEVICES"), socket.socket(fileno=os.dup(pass_fds[0]))
        process = EndedProcess()

        def read() -> None:
            packets = Channel(connection).receive(block=True)
            with self._lock:
                self._open.append(connection)
                if packets:
                    setup = msgspec.msgpack.decode(packets[0].body)
                    self.started.append(Started(words[:-1], seen, is_warm, setup))
                if len(self._open) == self.together:
                    self.end_all()
            process.has_setup.set()

        threading.Thread(target=read, daemon=True).start()
        return process


class EndedProcess:
    pid = os.getpid()  # for its pidfd: it is never killed, since it has ended
    returncode = 1
    stderr = None

    def __init__(self) -> None:
        self.has_setup = threading.Event()  # or its starter is gone

    def wait(self, timeout: float | None = None) -> int:
        """A starter that saw it end at once might not send the setup."""
        if not self.has_setup.wait(timeout):
            raise subprocess.TimeoutExpired("a faked process", timeout or 0.0)
        return self.returncode


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(subprocess, "Popen", found.popen)
    monkeypatch.setattr(WARM, "fork", found.fork)
    monkeypatch.setattr("millstream.engine.vllm.config.is_installed", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found
