"""Worker processes and who starts them: on this machine (`LocalLauncher`) or on a node of a cluster (`cluster.driver`).

A worker is a function of its connection, named by a target, `package.module:function`; on this machine it runs in
`python -m millstream.rpc.worker`. Its first message is its setup (`rpc.call`). Guarantees: a worker is the leader of its own
process group and is killed with everything it started; it ends when its connection closes, so none outlives the process that
started it; what it prints goes to stderr.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, Protocol

logger = logging.getLogger(__name__)
Kind = Literal[
    "engine", "learner", "stage", "rollout", "environment", "reward"
]  # which resources of a cluster a worker gets
KEPT_LINES = 20
STDERR_S = 1.0  # for the last lines of stderr to arrive after the exit
NODE = "MILLSTREAM_NODE"  # environment variable of a cluster's worker: the name of its node
OWN_PATH = "MILLSTREAM_PYTHONPATH"  # the PYTHONPATH of the starter, while an interpreter starts with another one
HOST = "MILLSTREAM_HOST"  # the same: the address under which other nodes reach it
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}  # variables of a process that sees none


class WorkerProcess(Protocol):
    """A started process, from the side that started it."""

    connection: socket.socket
    pid: int
    node: str  # the cluster's name for the node it is on; "" on this machine without a cluster

    def kill(self) -> None:
        """Kill it at once, with everything it started. A second call does nothing."""
        ...

    def exit_reason(self, timeout_s: float | None = None) -> str | None:
        """How it ended, in words, with the last line it wrote to stderr. Waits for the end. None: it still runs after
        `timeout_s`; without a timeout the wait has no limit."""
        ...

    @property
    def has_died(self) -> bool:
        """Whether a process that has ended was killed or crashed, as opposed to having exited by itself with status 0."""
        ...


class Launcher(Protocol):
    def launch(self, kind: Kind, target: str, *, name: str, descriptors: Sequence[int] = ()) -> WorkerProcess:
        """Start the worker that `target` names. Returns when the connection exists. May block for seconds, or for as long as a
        cluster has no room. Raises `MillstreamError` or `OSError`. `descriptors` are inherited under the same numbers by a
        process of this machine; on another node they mean nothing."""
        ...


def engine_names(num: int) -> list[str]:
    """The names of the engines that a run starts with."""
    return ["engine"] if num == 1 else [f"engine-{number}" for number in range(num)]


def rank_name(number: int) -> str:
    return f"rank {number}"


def replica_names(name: str, replicas: int) -> list[str]:
    """Of the groups of processes of a reference or a proximal policy; a critic is one group."""
    return [name] if replicas == 1 else [f"{name}-{number}" for number in range(replicas)]


def shard_names(name: str, ranks: int) -> list[str]:
    """Of the processes that have one copy of a scorer's model."""
    return [name] if ranks == 1 else [f"{name} rank {number}" for number in range(ranks)]


def own_node() -> str:
    """The name of the node that this process is on; "" without a cluster."""
    return os.environ.get(NODE, "")


def own_host() -> str:
    """The address under which the run's other processes reach this node: loopback unless the cluster has several nodes."""
    return os.environ.get(HOST, "127.0.0.1")


class LastLines:
    """Forwards a process's stderr to the log and keeps the last lines for its exit reason."""

    def __init__(self, stderr: int, name: str) -> None:
        self._stderr = stderr
        self._name = name
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._thread = threading.Thread(target=self._forward, name=f"{name} stderr", daemon=True)
        self._thread.start()

    def _forward(self) -> None:
        with os.fdopen(self._stderr, "rb") as file:
            for line in file:
                self._lines.append(line.decode(errors="replace").rstrip())
                logger.warning("%s: %s", self._name, self._lines[-1])

    def words(self) -> str:
        self._thread.join(STDERR_S)
        return f"; its last line on stderr: {self._lines[-1]}" if self._lines else ""


class LocalWorker:
    """A process of this machine. A user's script needs no `if __name__ == "__main__"`: its main module is not imported."""

    node = ""

    def __init__(
        self,
        target: str,
        name: str,
        descriptors: Sequence[int] = (),
        *,
        keeps_stderr: bool = False,
        environment: Mapping[str, str] = {},
    ) -> None:
        """`keeps_stderr`: through `LastLines`. Otherwise the worker writes to this process's stderr directly. `environment`:
        variables that it gets on top of this process's."""
        self._exit: int | None = None
        self.connection, theirs = socket.socketpair()
        self.name = name
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "millstream.rpc.worker", target, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *descriptors],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
                stderr=subprocess.PIPE if keeps_stderr else None,
                env={**child_environment(), **environment},
                process_group=0,
            )
        self.pid = self.process.pid
        if hasattr(os, "pidfd_open"):
            self._exit = os.pidfd_open(self.pid)  # readable when it has exited
        self._lock = threading.Lock()
        pipe = self.process.stderr
        self._last_lines = None if pipe is None else LastLines(os.dup(pipe.fileno()), name)
        if pipe is not None:
            pipe.close()

    def kill(self) -> None:
        with self._lock:
            self._kill_group()

    def _kill_group(self) -> None:
        """With the lock. Until the process is reaped, its number and that of its group are its own."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def exit_reason(self, timeout_s: float | None = None) -> str | None:
        if not self._has_exited(timeout_s):
            return None
        with self._lock:
            self._kill_group()  # what it started and left behind
            code = self.process.wait()
        return exit_words(code) + ("" if self._last_lines is None else self._last_lines.words())

    def _has_exited(self, timeout_s: float | None) -> bool:
        """Without reaping it."""
        if self._exit is None or self.process.returncode is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
            return self.process.returncode is not None
        poll = select.poll()
        poll.register(self._exit, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

    @property
    def has_died(self) -> bool:
        return self.exit_reason(0.0) is None or self.process.returncode != 0

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound here: at exit the module may be gone
        if self._exit is not None:
            close(self._exit)


class LocalLauncher:
    """Starts every worker on this machine."""

    def __init__(
        self,
        *,
        is_warm: bool = False,
        environment_of: Callable[[str], Mapping[str, str]] = lambda name: {},
        rewards_see_gpus: bool = False,
    ) -> None:
        """`is_warm`: fork workers from the warm process (`rpc.forkserver`), where that is possible. Not for CUDA.
        `environment_of`: by the name of a worker, variables that it gets: the GPUs that it sees, say. Rollout workers and
        environments see none, and rewards only with `rewards_see_gpus`: the GPUs are those of engines and learner."""
        self._is_warm = is_warm
        self._environment_of = environment_of
        self._without_gpus = ("rollout", "environment") if rewards_see_gpus else ("rollout", "environment", "reward")

    def launch(self, kind: Kind, target: str, *, name: str, descriptors: Sequence[int] = ()) -> WorkerProcess:
        keeps_stderr = kind in ("engine", "learner", "stage")
        environment = {**(NO_GPUS if kind in self._without_gpus else {}), **self._environment_of(name)}
        if self._is_warm:
            from millstream.rpc.warm import WARM  # it needs this module

            forked = WARM.fork(target, name, descriptors, keeps_stderr=keeps_stderr, environment=environment)
            if forked is not None:
                return forked
        return LocalWorker(target, name, descriptors, keeps_stderr=keeps_stderr, environment=environment)


def exit_words(code: int) -> str:
    """Of the code that `subprocess` has: negative for a signal."""
    signal_name = f" ({signal.Signals(-code).name})" if -code in set(signal.Signals) else ""
    return f"its process ended with exit code {code}{signal_name}"


def import_path() -> list[str]:
    """This process's `sys.path`, in full: a worker imports what its starter could import."""
    return [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109


def child_environment() -> dict[str, str]:
    """This process's, and its `sys.path` as PYTHONPATH, which `restore_environment` undoes in the started interpreter."""
    own = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(import_path()), OWN_PATH: own}


def restore_environment() -> None:
    """In an interpreter that has started: what it starts itself gets the PYTHONPATH that its starter had."""
    own = os.environ.pop(OWN_PATH, None)
    if own is not None:
        os.environ["PYTHONPATH"] = own
    if own == "":
        del os.environ["PYTHONPATH"]
