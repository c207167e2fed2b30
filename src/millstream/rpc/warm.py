"""The requester's side of the warm process (`rpc.forkserver`): start it on first use, and have it fork workers.

`MILLSTREAM_FORKSERVER` is the path of a warm process that others share (a test session's); "off": none is used. Guarantee: what
the warm process cannot serve is started as an interpreter of its own, so that only the time differs.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from millstream import folders
from millstream.rpc.forkserver import (
    SOCKET_VARIABLE,
    Forked,
    ForkedExit,
    ForkRefused,
    ForkReply,
    ForkRequest,
    own_package,
)
from millstream.rpc.frames import Frames, receive_descriptors, send_descriptors
from millstream.rpc.process import LastLines, child_environment, exit_words, import_path

logger = logging.getLogger(__name__)
START_S = 60.0
FORK_S = 120.0  # the first fork imports the worker's module
STATUS_S = 5.0
RETRY_S = 0.02


class ForkedWorker:
    """A `WorkerProcess` that the warm process has forked."""

    node = ""

    def __init__(
        self, pid: int, exit_descriptor: int, control: socket.socket, connection: socket.socket, lines: LastLines | None
    ) -> None:
        self.pid = pid
        self.connection = connection
        self._exit = exit_descriptor  # readable when it has exited
        self._control = control
        self._last_lines = lines
        self._lock = threading.Lock()
        self._is_read = False
        self._code: int | None = None

    def kill(self) -> None:
        if not self._has_exited(0.0):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def exit_reason(self, timeout_s: float | None = None) -> str | None:
        if not self._has_exited(timeout_s):
            return None
        code = self._exit_code()
        unknown = "its process ended, and the warm process that could say how is gone"
        words = unknown if code is None else exit_words(code)
        return words + ("" if self._last_lines is None else self._last_lines.words())

    def _has_exited(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._exit, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

    def _exit_code(self) -> int | None:
        with self._lock:
            if not self._is_read:
                self._is_read = True
                self._control.settimeout(STATUS_S)
                reply = Frames(self._control).first_as(ForkedExit)
                self._code = None if reply is None else reply.code
                self._control.close()
            return self._code

    @property
    def has_died(self) -> bool:
        return not self._has_exited(0.0) or self._exit_code() != 0

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound here: at exit the module may be gone
        close(self._exit)


class WarmProcess:
    """Of this process, and shared by its launchers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._owner = 0  # the process that has started it: a fork of that one is not its owner

    def fork(
        self,
        target: str,
        name: str,
        descriptors: Sequence[int] = (),
        *,
        keeps_stderr: bool = False,
        environment: Mapping[str, str] = {},
    ) -> ForkedWorker | None:
        """`environment`: variables that it gets on top of this process's. None: it cannot be done this way, for a reason that
        is logged."""
        if os.environ.get(SOCKET_VARIABLE) == "off" or not hasattr(os, "pidfd_open"):
            return None
        try:
            control = self._connected()
        except OSError as error:
            logger.info("no warm process: %s", error)
            return None
        connection, theirs = socket.socketpair()
        with theirs:
            try:
                return _request(control, connection, theirs, target, name, descriptors, keeps_stderr, environment)
            except (OSError, msgspec.MsgspecError) as error:
                logger.info("%s is not forked: %s", name, error)
                control.close()
                connection.close()
                return None

    def _connected(self) -> socket.socket:
        """To the one that is named in the environment, or to this process's own, which is started if it is not there."""
        shared = os.environ.get(SOCKET_VARIABLE)
        if shared:
            with suppress(OSError):
                return _connect(shared)
        with self._lock:
            is_own = self._owner == os.getpid()
            if not is_own or self._process is None or self._process.poll() is not None or self._folder is None:
                self._start()
            assert self._folder is not None and self._process is not None
            deadline = time.monotonic() + START_S
            while True:
                try:
                    return _connect(str(self._folder / "socket"))
                except OSError:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        raise
                    time.sleep(RETRY_S)

    def _start(self) -> None:
        self._remove_folder()
        self._owner = os.getpid()
        self._folder = folders.make("millstream-warm-")
        atexit.register(self.close)
        self._process = start_forkserver(self._folder / "socket")

    def close(self) -> None:
        """It ends, and with it its workers."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                end_forkserver(self._process)
            self._process = None
            self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None and self._owner == os.getpid():
            folders.remove(self._folder)
        self._folder = None


def start_forkserver(path: Path) -> subprocess.Popen[bytes]:
    """It listens there soon, and ends when its standard input closes: with this process at the latest."""
    return subprocess.Popen(
        [sys.executable, "-m", "millstream.rpc.forkserver", str(path)],
        stdin=subprocess.PIPE,
        env=child_environment(),
        process_group=0,
    )


def end_forkserver(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(STATUS_S)
    except subprocess.TimeoutExpired:  # it is importing, say
        process.kill()
        process.wait()


def _connect(path: str) -> socket.socket:
    control = socket.socket(socket.AF_UNIX)
    try:
        control.connect(path)
    except OSError:
        control.close()
        raise
    return control


def _request(
    control: socket.socket,
    connection: socket.socket,
    theirs: socket.socket,
    target: str,
    name: str,
    descriptors: Sequence[int],
    keeps_stderr: bool,
    environment: Mapping[str, str],
) -> ForkedWorker:
    reading, writing = os.pipe() if keeps_stderr else (-1, os.dup(2))
    request = ForkRequest(
        target=target,
        name=name,
        connection=theirs.fileno(),
        numbers=list(descriptors),
        environment={**os.environ, **environment},
        folder=os.getcwd(),  # noqa: PTH109
        path=import_path(),
        package=own_package(),
    )
    control.settimeout(FORK_S)
    lines = LastLines(reading, name) if keeps_stderr else None  # it closes `reading` when no process can write any more
    try:
        send_descriptors(control, request, [theirs.fileno(), writing, *descriptors])
    finally:
        os.close(writing)
    reply, received = receive_descriptors(control, ForkReply)
    if isinstance(reply, Forked):
        return ForkedWorker(reply.pid, received[0], control, connection, lines)
    raise ConnectionRefusedError(reply.reason if isinstance(reply, ForkRefused) else "it answered something else")


WARM = WarmProcess()
