"""Commands that tests run: `python -m millstream.cli.main train ...` as a process of its own, without the 6 s of CPU in which an
interpreter imports torch and transformers. It is forked from the tests' warm process (`support.command_worker`).

A command is what `subprocess` would have started, with these differences: it is the leader of its own process group, its standard
input is /dev/null unless it is given one, and libraries are imported already. Tests of what is imported, and of interpreters, use `subprocess`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Self, TextIO

from msgspec import Struct

from millstream.rpc.frames import frame
from millstream.rpc.process import LocalLauncher

TARGET = "support.command_worker:serve_command"


class CommandSetup(Struct, frozen=True, kw_only=True):
    words: list[str]  # -m MODULE, -c PROGRAM or SCRIPT, and arguments
    stdin: int | None  # None: /dev/null
    stdout: int
    stderr: int
    max_file_bytes: int | None


class Command:
    """A started command, as a `subprocess.Popen` with text streams."""

    def __init__(
        self,
        words: Sequence[str],
        stdout: int,
        stderr: int,
        *,
        has_stdin: bool = False,
        max_file_bytes: int | None = None,
    ) -> None:
        """`words`: those of `python`, which is the first. `stdout`, `stderr`: descriptors, which stay the caller's. `has_stdin`:
        its standard input is a pipe, which closes with this process or when the command has ended."""
        assert words[0] == sys.executable, words
        reading, writing = os.pipe() if has_stdin else (None, None)
        setup = CommandSetup(
            words=list(words[1:]), stdin=reading, stdout=stdout, stderr=stderr, max_file_bytes=max_file_bytes
        )
        descriptors = sorted({stdout, stderr} if reading is None else {stdout, stderr, reading})
        self._worker = LocalLauncher(is_warm=True).launch(
            "environment", TARGET, name="command", descriptors=descriptors
        )
        if reading is not None:
            os.close(reading)
        with self._worker.connection as connection:
            connection.sendall(frame(setup))
        self.args = words
        self.pid = self._worker.pid
        self.returncode: int | None = None
        self.stdin = None if writing is None else os.fdopen(writing, "w")
        self.stdout: TextIO | None = None
        self._output: list[str] = []

    def wait(self, timeout: float | None = None) -> int:
        reason = self._worker.exit_reason(timeout)
        if reason is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        found = re.search(r"exit code (-?\d+)", reason)
        assert found is not None, reason
        if self.stdin is not None:
            self.stdin.close()
        self.returncode = int(found[1])
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it has still to print."""
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return "".join(self._output), None

    def _read(self) -> None:
        if self.stdout is not None:
            with self.stdout:
                self._output.append(self.stdout.read())

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended, which is not known here yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()


def start_command(words: Sequence[str], *, stderr: int | None = None, max_file_bytes: int | None = None) -> Command:
    """Its `stdout` is a pipe; without `stderr`, a descriptor, what it prints there goes the same way. `max_file_bytes`: the size
    that none of its files can exceed."""
    reading, writing = os.pipe()
    try:
        command = Command(words, writing, writing if stderr is None else stderr, max_file_bytes=max_file_bytes)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    command.stdout = os.fdopen(reading)
    return command


def run_command(words: Sequence[str], timeout: float = 200.0) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with both streams captured."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        command = Command(words, stdout.fileno(), stderr.fileno())
        try:
            command.wait(timeout)
        finally:
            command.kill()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(words, command.wait(), stdout.read(), stderr.read())


@contextmanager
def own_warm_process() -> Iterator[str]:
    """The socket of another warm process, forked from that of all tests."""
    with tempfile.TemporaryDirectory(prefix="millstream-tests-") as folder:
        worker = LocalLauncher(is_warm=True).launch("environment", "support.command_worker:serve_forks", name="forks")
        with worker.connection as connection:
            connection.sendall(frame(f"{folder}/socket"))
            assert connection.recv(1), "it listens"
            yield f"{folder}/socket"
        assert worker.exit_reason(10.0) is not None
