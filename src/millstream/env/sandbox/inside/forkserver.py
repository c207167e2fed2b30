"""A small process that has Python started already, and forks one keeper for every program that is to be run.

    the run's process ── socket ── zygote              holds nothing: no variables, no files, no code but this folder's
                                     └─ keeper         one a program: time limit, and the end of everything
                                          └─ init      the first process of a namespace: when it dies, the kernel kills the rest
                                               └─ the program, or one command after the other (`commands`)

A keeper gets its orders over a socket of its own. When that socket closes (the caller has lost interest, or is dead), or the
time is over, or the program has ended or uses more than it may (`usage`), everything that it started is killed. Where memory is
short, the kernel kills the program first: it and its children ask for that.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from . import candidate, commands, examiner, isolation, syscalls, usage

# What programs import most: there already.
WARM = (
    "bisect collections copy datetime decimal fractions functools heapq itertools math operator random re statistics string "
    "typing"
)

HEADER = 4
FIRST_VICTIM = "1000"  # of the kernel, when memory is short
ERROR = 2
FIRST_FREE = 16


def serve_forks(line: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no burial
    for name in WARM.split():
        importlib.import_module(name)
    sys.argv = ["program.py"]
    gc.freeze()
    while True:
        word, descriptors, _, _ = socket.recv_fds(line, 1, 8)
        if not word:
            return
        if os.fork() == 0:
            line.close()
            code = 1
            try:
                keep(descriptors)
                code = 0
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)


def keep(descriptors: list[int]) -> None:
    """The keeper: from the order to the report of how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    lead, *given = descriptors
    control = socket.socket(fileno=lead)
    order = json.loads(_exactly(control, int.from_bytes(_exactly(control, HEADER), "little")))
    report, theirs = os.pipe()
    folder = tempfile.mkdtemp(prefix="millstream-sandbox-") if order["walls"] == "none" else isolation.SCRATCH
    processes = usage.Processes()
    try:
        child = _start(order, given, theirs, folder)
        for descriptor in (theirs, *given):
            os.close(descriptor)
        how = _watch(child, control, order, folder, processes)
        _end(child, processes, has_namespace=order["walls"] != "none")
        report_text = os.read(report, 1 << 16).decode(errors="replace")
        answer = {"how": how, **_last_line(report_text)}
        if order["walls"] == "none":
            usage.remove_folder(folder)
    except OSError as error:
        answer = {"how": "broken", "why": str(error)}
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(answer).encode())


def _last_line(report_text: str) -> dict[str, Any]:
    return json.loads(report_text.splitlines()[-1]) if report_text else {}


def _start(order: dict[str, Any], given: list[int], report: int, folder: str) -> int:
    """The process whose end is the end of everything: an init in a namespace, or the program itself."""
    keeper = os.getpid()
    with contextlib.suppress(OSError):
        syscalls.control(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    isolation.divide(order["walls"])
    child = os.fork()
    if child:
        syscalls.hide()
        return child
    try:
        os.setsid()
        _offer_first()
        with contextlib.suppress(OSError):
            syscalls.control(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # the keeper may be killed
        if order["walls"] == "none":
            os.chdir(folder)
            if os.geteuid() == 0:
                os.chmod(folder, 0o777)
        else:
            isolation.furnish(order["limits"]["scratch_bytes"])
        if order["role"] == "commands":
            commands.serve_commands(order, given[0], report, keeper)
        else:
            _init(order, given, report, keeper, folder)
    except BaseException as error:  # a child that is about to end: the reason is all that can be saved
        os.write(report, json.dumps({"how": "broken", "why": f"{type(error).__name__}: {error}"}).encode())
    finally:
        os._exit(0)


def _init(order: dict[str, Any], given: list[int], report: int, keeper: int, folder: str) -> None:
    """Start the program, bury whatever ends, and say how the program did."""
    handler = signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # the kernel drops signals to a first process without a handler
    program = os.fork()
    if program == 0:
        signal.signal(signal.SIGINT, handler)
        _become(order, given, keeper, folder)
    for descriptor in given:
        os.close(descriptor)
    if order["walls"] != "none":
        with contextlib.suppress(OSError):
            syscalls.drop_capabilities()
    syscalls.hide()
    while True:
        ended, status = os.wait()
        if ended == program:
            break
    code = os.waitstatus_to_exitcode(status)
    os.write(report, (json.dumps({"code": code}) + "\n").encode())


def _become(order: dict[str, Any], given: list[int], keeper: int, folder: str) -> None:
    """The program's process: its descriptors, its limits, then the program. Never returns."""
    code = 1
    try:
        os.setsid()
        places = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST_FREE) for descriptor in given]
        for place, descriptor in enumerate(places):
            os.dup2(descriptor, place, inheritable=place <= ERROR)
        os.closerange(len(places), 1 << 16)
        isolation.limit_cpu(order["limits"]["cpu_s"])
        isolation.confine(order["walls"], order["limits"], keeper, folder)
        if order["role"] == "examiner":
            syscalls.hide()
        os.environ["HOME"] = os.environ["TMPDIR"] = folder
        tempfile.tempdir = None
        code = _play(order)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        with contextlib.suppress(BaseException):  # the candidate may have replaced both streams
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _play(order: dict[str, Any]) -> int:
    """The exit code."""
    for name in [name for name in sys.modules if name.split(".")[0] == __name__.split(".")[0]]:
        del sys.modules[name]  # nothing of ours is there to be found by its name
    match order["role"]:
        case "program":
            return candidate.run_candidate(order["program"], "__main__")[0]
        case "candidate":
            return candidate.be_examined(order["program"])
        case _:
            return examiner.examine_candidate(order["tests"])


def _offer_first() -> None:
    """Before anything else on this machine, the kernel kills this process and its children when memory is short."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(FIRST_VICTIM)


def _watch(child: int, control: socket.socket, order: dict[str, Any], folder: str, processes: usage.Processes) -> str:
    """Until it ends, its time is over, it uses more than it may, or the client has disconnected."""
    limits = order["limits"]
    if order["role"] == "commands":  # its first process watches them
        select.select([control.fileno(), os.pidfd_open(child)], [], [])
        return "stopped"
    deadline = time.monotonic() + limits["wall_s"]
    poll = select.poll()
    handle = os.pidfd_open(child)
    poll.register(handle, select.POLLIN)
    poll.register(control, select.POLLIN)
    pause_s = usage.WATCH_S
    while (left_s := deadline - time.monotonic()) > 0:
        ready = poll.poll(1000 * min(left_s, pause_s))
        if any(descriptor == control.fileno() for descriptor, _ in ready):
            return "stopped"
        if ready:
            return "ended"
        began = time.monotonic()
        excess = processes.excess(limits)
        if not excess and order["walls"] == "none":
            excess = _disk_excess(folder, limits, processes)
        if excess:
            return excess
        pause_s = usage.pause_after(began)
    return "time"


def _disk_excess(folder: str, limits: dict[str, Any], processes: usage.Processes) -> str:
    """Of a folder whose size nothing else limits."""
    num_bytes, num_files = usage.folder_usage(folder, isolation.MAX_FILES)
    num_bytes += processes.num_deleted_bytes(processes.find())
    return "disk" if num_files > isolation.MAX_FILES or num_bytes > limits["scratch_bytes"] else ""


def _end(child: int, processes: usage.Processes, *, has_namespace: bool) -> None:
    """Kill the child and everything below it. In a namespace that is one signal, and it is over when the last one is dead;
    elsewhere whatever has lost its parent comes to us, the subreaper, and is killed in turn."""
    os.kill(child, signal.SIGKILL)  # at most a zombie, and ours: its number is not another's
    if has_namespace:
        os.waitpid(child, 0)
        return
    while True:
        for process in processes.find():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data
