"""The warm process: it has imported what workers need (torch and transformers take 6 s of CPU) and forks a worker per request.

    run ── Unix socket ── warm process        one thread, no CUDA, nothing but imports
     │                       └─ worker        forked: its own process group, streams, environment, random state
     └───── the worker's connection ──┘

`python -m millstream.rpc.forkserver SOCKET [PACKAGE ...]` listens on that path and ends when its standard input closes, which
its owner holds: it never outlives its owner, and it kills the process groups of its workers when it ends. The module of a
target is imported before the first fork if it is ours or in one of the packages, otherwise in the worker. Guarantees: a worker
is as if freshly started (see `_become`). A request that cannot be served so is refused with the reason (CUDA or threads are in
use in the warm process, or variables that libraries read at import differ), and the launcher starts an interpreter
(`python -m`) instead. If the warm process is killed, its workers continue, and the next request starts another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import itertools
import os
import random
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from millstream.rpc.frames import frame, receive_descriptors, send_descriptors
from millstream.rpc.worker import run_worker

SOCKET_VARIABLE = "MILLSTREAM_FORKSERVER"  # the path of a warm process to use; "off": none
IMPORT_VARIABLES = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "LD_", "TORCH_", "PYTORCH_", "HF_", "TRANSFORMERS_",
                    "TOKENIZERS_", "PYTHONHASHSEED")  # fmt: skip
PR_SET_NAME = 15
OWN_PACKAGE = "millstream"


class ForkRequest(Struct, frozen=True, kw_only=True):
    """Sent with descriptors: the worker's connection, its stderr, then `numbers`."""

    target: str
    name: str
    connection: int  # the number that the connection gets in the worker
    numbers: list[int]  # and those of the other descriptors
    environment: dict[str, str]
    folder: str
    path: list[str]  # sys.path
    package: str  # where the requester's own package is: workers run the same code


class Forked(Struct, frozen=True, tag=True):
    """Sent with a descriptor that is readable when the process has exited."""

    pid: int


class ForkRefused(Struct, frozen=True, tag=True):
    reason: str


class ForkedExit(Struct, frozen=True, tag=True):
    code: int  # negative: the signal


ForkReply = Forked | ForkRefused | ForkedExit


def own_package() -> str:
    return str(Path(__file__).resolve().parents[1])


def import_variables(environment: dict[str, str]) -> dict[str, str]:
    """Those that libraries read when they are imported."""
    return {name: value for name, value in environment.items() if name.startswith(IMPORT_VARIABLES)}


class ForkServer:
    """The warm process. Single-threaded: everything that it waits for is in one `poll`."""

    def __init__(self, path: str, owner: int, packages: Sequence[str] = ()) -> None:
        """`owner`: a descriptor that closes when the owner is gone. `packages`: other ones whose modules are imported here."""
        self._listening = socket.socket(socket.AF_UNIX)
        new = Path(path).with_name("new")  # a short name: such paths have at most 107 bytes
        self._listening.bind(str(new))
        self._listening.listen(128)
        new.rename(path)  # what is there can be connected to
        self._owner = owner
        self._packages = {OWN_PACKAGE, *packages}
        self._requests: dict[int, socket.socket] = {}  # by descriptor: connections without a request so far
        self._workers: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of a worker's exit: who and whose
        self._poll = select.poll()
        for descriptor in (owner, self._listening.fileno()):
            self._poll.register(descriptor, select.POLLIN | select.POLLHUP)

    def run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._owner:
                    self._end()
                    return
                if descriptor == self._listening.fileno():
                    connection, _ = self._listening.accept()
                    self._requests[connection.fileno()] = connection
                    self._poll.register(connection, select.POLLIN)
                elif descriptor in self._requests:
                    self._poll.unregister(descriptor)
                    self._serve(self._requests.pop(descriptor))
                elif descriptor in self._workers:
                    self._reap(descriptor)

    def _end(self) -> None:
        for pid, _ in self._workers.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(5.0)
        try:
            request, descriptors = receive_descriptors(connection, ForkRequest)
        except (OSError, msgspec.MsgspecError):
            connection.close()
            return
        try:
            reason = self._objection(request)
            if reason is None:
                self._fork(connection, request, descriptors)
            else:
                connection.sendall(frame(ForkRefused(reason)))
        except OSError as error:
            with contextlib.suppress(OSError):
                connection.sendall(frame(ForkRefused(f"it could not be forked: {error}")))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _objection(self, request: ForkRequest) -> str | None:
        """Why a forked worker would not be as if freshly started, if so."""
        if request.package != own_package():
            return f"the warm process runs the code in {own_package()}"
        if import_variables(request.environment) != import_variables(dict(os.environ)):
            return "environment variables that libraries read at import differ"
        module = request.target.partition(":")[0]
        if module.partition(".")[0] in self._packages and module not in sys.modules:
            gc.disable()  # a library that is imported makes a million objects, and no garbage: a tenth of the time
            try:
                importlib.import_module(module)
            except Exception as error:  # whatever it is, `python -m` will report it
                return f"{module} cannot be imported: {error}"
            finally:
                gc.enable()
            gc.collect()
            gc.freeze()  # no garbage collection writes to pages that are shared with the workers
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return "CUDA is initialized in the warm process"
        if threading.active_count() > 1:
            return "there are threads in the warm process"
        return None

    def _fork(self, connection: socket.socket, request: ForkRequest, descriptors: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            _become(request, descriptors)
        with contextlib.suppress(OSError):  # it has done so itself, or is gone already
            os.setpgid(pid, pid)
        exit_descriptor = os.pidfd_open(pid)
        self._workers[exit_descriptor] = (pid, connection)
        self._poll.register(exit_descriptor, select.POLLIN)
        with contextlib.suppress(OSError):  # the requester is gone: so is the worker, soon
            send_descriptors(connection, Forked(pid), [exit_descriptor])

    def _reap(self, descriptor: int) -> None:
        pid, connection = self._workers.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what it started and left behind: until it is reaped, the number is its own
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError), connection:
            connection.sendall(frame(ForkedExit(os.waitstatus_to_exitcode(status))))


def _become(request: ForkRequest, descriptors: list[int]) -> NoReturn:
    """In the forked process: become the worker. It has its own process group and name, default signal handlers, the requester's
    environment, folder, import path and descriptors, /dev/null as standard input, and random numbers of its own."""
    code = 1
    try:
        os.setpgid(0, 0)
        _set_name(request.name)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGPIPE else signal.SIG_DFL)
        _place(descriptors, request)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        sys.path[:] = request.path
        sys.argv = [request.target]
        _reseed()
        run_worker(request.target, request.connection)
    except BaseException:  # process boundary: what it says goes to the requester's log
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _place(descriptors: list[int], request: ForkRequest) -> None:
    """Give every descriptor its number, and close all others: those of the warm process and of its other workers."""
    numbers = [request.connection, *request.numbers]
    beyond = 1 + max(*numbers, *descriptors)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, beyond) for descriptor in descriptors]
    for kept, next_kept in itertools.pairwise([2, *moved, os.sysconf("SC_OPEN_MAX")]):  # ascending
        os.closerange(kept + 1, next_kept)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    connection, stderr, *others = moved
    os.dup2(stderr, 1)
    os.dup2(stderr, 2)
    for number, descriptor in zip(numbers, [connection, *others], strict=True):
        os.dup2(descriptor, number)
    for descriptor in moved:
        os.close(descriptor)


def _reseed() -> None:
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _set_name(name: str) -> None:
    """What `ps` shows: 15 bytes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner's to handle
    try:
        ForkServer(sys.argv[1], owner=0, packages=sys.argv[2:]).run()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # its owner waits for it, and taking torch apart would take seconds
