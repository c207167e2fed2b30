"""The first process of a sandbox for commands. It runs one command at a time, and ends whatever is left of it.

It has given up all rights before the first command, and has the identity of the commands. The kernel keeps signals of its own
namespace from it; nothing can look into it (`hide`). When it ends, the kernel kills the rest of the namespace.

A command comes with three descriptors: a line for its order and for the report of how it ended, its standard input, and its
output. If the line closes, the command is killed. Files are read and written by a process like that of a command: whatever a
path or a link says, it leads to a place in the sandbox.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import socket
import stat
import sys
import tarfile
import time
from typing import Any

from . import isolation, syscalls, usage

HEADER = 4
LINE, REPORT, FIRST_FREE = 3, 4, 16
SHELLS = ("/bin/bash", "/bin/sh")
CANNOT_RUN = 126
PIECE = 1 << 16


def serve_commands(order: dict[str, Any], line: int, report: int, keeper: int) -> None:
    """Until the other side closes, or the lifetime is over."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel drops signals to a first process that have no handler
    places = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST_FREE) for descriptor in (line, report)]
    for number, place in zip((LINE, REPORT), places, strict=True):
        os.dup2(place, number, inheritable=False)
    os.closerange(REPORT + 1, 1 << 16)
    try:
        _confine(order, keeper)
    except OSError as error:
        os.write(REPORT, json.dumps({"how": "broken", "why": str(error)}).encode())
        return
    server = _CommandServer(socket.socket(fileno=LINE), order["limits"])
    server.line.sendall(json.dumps({"keeper": keeper}).encode())
    if server.serve() == "time":
        os.write(REPORT, json.dumps({"how": "time"}).encode())


def _confine(order: dict[str, Any], keeper: int) -> None:
    if os.getpid() != 1:
        raise OSError(errno.ENOSYS, "no namespace of processes: killing all would kill others")
    if not os.path.exists("/proc/self/stat"):
        raise OSError(errno.ENOSYS, "no /proc can be mounted, which is needed to limit memory and processes")
    limits = order["limits"]
    own = {**limits, "processes": limits["processes"] + usage.NUM_OURS}
    isolation.confine(order["walls"], own, keeper, isolation.SCRATCH)
    syscalls.hide()
    syscalls.control(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of identity has cleared it
    variables = {"HOME": isolation.SCRATCH, "TMPDIR": isolation.SCRATCH}
    variables["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    os.environ.update(variables)


class _CommandServer:
    def __init__(self, line: socket.socket, limits: dict[str, Any]) -> None:
        self.line = line
        self._limits = limits
        self._processes = usage.Processes()
        self._deadline = time.monotonic() + limits["lifetime_s"]

    def serve(self) -> str:
        while self._wait():
            word, descriptors, _, _ = socket.recv_fds(self.line, 1, 3)
            if not word:
                return "closed"
            lead, source, target = descriptors
            with socket.socket(fileno=lead) as control:
                self._serve_one(control, source, target)
        return "time"

    def _wait(self) -> bool:
        """For the next command. Processes in the background are watched, if there are any."""
        pause_s = usage.WATCH_S
        while (left_s := self._deadline - time.monotonic()) > 0:
            has_others = _bury()
            if select.select([self.line], [], [], min(left_s, pause_s) if has_others else left_s)[0]:
                return True
            began = time.monotonic()
            if has_others and self._processes.excess(self._limits):
                _kill_all()
            pause_s = usage.pause_after(began)
        return False

    def _serve_one(self, control: socket.socket, source: int, target: int) -> None:
        order = _order(control)
        if order is not None and order["role"] in ("start", "stop"):
            _kill_all()
        if order is not None and order["role"] == "start":
            self._deadline = time.monotonic() + self._limits["lifetime_s"]
        child = None if order is None else self._forked(order, source, target)
        os.close(source)
        os.close(target)
        if order is None:
            return
        how = "processes" if child is None else self._watch(child, control, order["wall_s"])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child is not None and how == "ended" else None
        if how != "ended":
            _kill_all()
        with contextlib.suppress(OSError):  # it is not waited for
            control.sendall(json.dumps({"how": how, "code": code}).encode())

    def _forked(self, order: dict[str, Any], source: int, target: int) -> int | None:
        """None: what is in the background has all processes, or all memory."""
        try:
            child = os.fork()
        except OSError:
            return None
        if child == 0:
            _become(order, source, target, self._limits["cpu_s"])
        return child

    def _watch(self, child: int, control: socket.socket, wall_s: float) -> str:
        deadline = min(time.monotonic() + wall_s, self._deadline)
        handle = os.pidfd_open(child)
        pause_s = usage.WATCH_S
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                ready = select.select([handle, control.fileno()], [], [], min(left_s, pause_s))[0]
                if handle in ready:
                    return "ended"
                if ready:
                    return "stopped"
                began = time.monotonic()
                _bury_others(child)
                if excess := self._processes.excess(self._limits):
                    return excess
                pause_s = usage.pause_after(began)
            return "time"
        finally:
            os.close(handle)


def _order(control: socket.socket) -> dict[str, Any] | None:
    """None: the other side was cancelled before it had sent it."""
    with contextlib.suppress(OSError), control.makefile("rb") as file:
        size = int.from_bytes(file.read(HEADER), "little")
        text = file.read(size)
        if size and len(text) == size:
            order: dict[str, Any] = json.loads(text)
            return order
    return None


def _bury() -> bool:
    """Whether there are processes but this one."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _bury_others(child: int) -> None:
    """Processes that have ended, except the command's own, whose status is read later."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid == child:
                return
            os.waitpid(found.si_pid, 0)


def _kill_all() -> None:
    """Every process of the namespace but this one: all are below it, and come to it when their parents die. The kernel lets no
    fork slip through between."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


# ---- the process of a command ----------------------------------------------------------------------------------------------


def _become(order: dict[str, Any], source: int, target: int, cpu_s: float) -> None:
    """Never returns. An action on files ends with 0, or with the number of its error."""
    code = errno.EIO
    try:
        os.setsid()
        for number, descriptor in enumerate((source, target, target)):
            os.dup2(descriptor, number)
        os.closerange(LINE, 1 << 16)
        isolation.limit_cpu(cpu_s)
        os.chdir(isolation.SCRATCH)
        _act(order)
        code = 0
    except OSError as error:
        code = error.errno or code
    finally:
        os._exit(code)


def _act(order: dict[str, Any]) -> None:
    match order["role"]:
        case "exec":
            _run_shell(order["command"])
        case "read":
            _read(order["path"])
        case "write":
            _write(order["path"])
        case "snapshot":
            _pack()
        case "start":
            usage.empty_folder(isolation.SCRATCH)
            if order["has_snapshot"]:
                _unpack()


def _run_shell(command: str) -> None:
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    shell = next(path for path in SHELLS if os.path.exists(path))
    try:
        os.execv(shell, [shell, "-c", command])
    except OSError as error:
        os.write(1, f"{shell}: {error.strerror}\n".encode())
        os._exit(CANNOT_RUN)


def _read(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    _check_regular(file)
    _copy(file, 1)


def _write(path: str) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
    _check_regular(file)
    os.ftruncate(file, 0)
    _copy(0, file)


def _check_regular(file: int) -> None:
    mode = os.fstat(file).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "")


def _copy(source: int, target: int) -> None:
    while piece := os.read(source, PIECE):
        while piece:
            piece = piece[os.write(target, piece) :]


def _pack() -> None:
    """All other processes are stopped meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGSTOP)
    try:
        with os.fdopen(1, "wb", closefd=False) as out, tarfile.open(fileobj=out, mode="w|") as archive:
            for name in sorted(os.listdir(".")):
                archive.add(name)
    except RecursionError as error:
        raise OSError(errno.ENAMETOOLONG, "folders too deep") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGCONT)


def _unpack() -> None:
    """Whatever is in the archive: this process can write only where the commands can."""

    def owned(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        member.uid = os.getuid()
        member.gid = os.getgid()
        member.uname = member.gname = ""
        return member

    with os.fdopen(0, "rb", closefd=False) as source, tarfile.open(fileobj=source, mode="r|") as archive:
        archive.extraction_filter = staticmethod(owned)
        archive.extractall(".")
