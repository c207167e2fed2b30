"""A sandbox for programs that a model wrote. A program has limits of time, memory, disk, output and processes; it sees
neither the network, nor our files, nor our variables; and when it is over, nothing of it is left.

What holds here depends on the kernel and on who we are. It is not assumed but tried, once: `what_is_contained` runs a program
that attempts each escape, and says which failed. Where namespaces are refused, weaker isolation is used
(`inside.isolation`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from millstream.errors import MillstreamError

Walls = Literal["root", "user", "none"]
WALLS: tuple[Walls, ...] = ("root", "user", "none")
EXCESS = {"memory": "memory in all its processes", "disk": "files", "processes": "processes"}
HEADER = 4
VERDICT_BYTES = 4096
GRACE_S = 30.0  # past the time limit, after which the keeper is taken for dead
LAST_WORDS_S = 5.0
BOOT = (
    "import sys, socket; sys.path.insert(0, sys.argv[1]); from inside import forkserver; del sys.path[0]; "
    "forkserver.serve_forks(socket.socket(fileno=int(sys.argv[2])))"
)
# All that a program finds in its environment, with HOME and TMPDIR.
VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
}


class SandboxBroken(MillstreamError):
    """The sandbox itself has failed, and not the program in it."""


class Limits(Struct, frozen=True, kw_only=True):
    wall_s: float = 10.0
    cpu_s: float = 10.0  # of each process
    memory_bytes: int = 1 << 30  # of all processes together; and addresses of each
    scratch_bytes: int = 32 << 20  # all files together
    file_bytes: int = 16 << 20  # one file
    processes: int = 32
    open_files: int = 64
    output_bytes: int = 1 << 20  # what it prints; past that it is stopped


class Ran(Struct, frozen=True, kw_only=True):
    """How a program ended."""

    how: Literal[
        "ended", "time", "output", "memory", "disk", "processes", "stopped"
    ]  # stopped: the caller was cancelled
    code: int | None = None  # its exit code, or minus the number of the signal that killed it. None: we have ended it.
    output: str = ""
    errors: str = ""
    is_clean: bool = True  # no process holds its output any more


class Contained(Struct, frozen=True, kw_only=True):
    """What a program in the sandbox was tried and found unable to do, here."""

    walls: Walls
    network: bool  # reach a socket that listens on this machine
    writes: bool  # write a file or a setting of the kernel outside its scratch folder, or change a file's rights
    reads: bool  # read a file that is neither Python's nor the system's
    environment: bool  # read our environment variables
    signals: bool  # signal one of our processes
    processes: bool  # have more processes than it may
    survivors: bool  # leave a process behind

    def words(self) -> str:
        how = {
            "root": "in namespaces of its own, as nobody",
            "user": "in namespaces of its own, by a user namespace",
            "none": "without namespaces",
        }
        open_ = [name for name in PROMISES if not getattr(self, name)]
        rest = f"NOT contained: {', '.join(open_)}" if open_ else "contained: " + ", ".join(PROMISES)
        return f"a program runs {how[self.walls]}; {rest}"


PROMISES = ("network", "writes", "reads", "environment", "signals", "processes", "survivors")


class Sandbox:
    """As many programs at a time as you like; each in processes of its own, forked from one that has Python started already."""

    def __init__(self, limits: Limits | None = None, *, walls: Walls | None = None) -> None:
        self.limits = limits or Limits()
        self._walls = walls
        self._zygote: _Zygote | None = None

    @property
    def walls(self) -> Walls:
        if self._walls is None:
            self._walls = what_is_contained().walls
        return self._walls

    async def run(self, program: str, *, stdin: str = "", wall_s: float | None = None) -> Ran:
        """Run a Python program. Raises `SandboxBroken`, and nothing that is the program's fault."""
        (ours_in, their_in), (ours_out, their_out), (ours_err, their_err) = _pairs(3)
        order = {"role": "program", "program": program}
        with ours_in, ours_out, ours_err:
            async with self._keeper(order, (their_in, their_out, their_err), wall_s) as keeper:
                feeding = asyncio.create_task(_feed(ours_in, stdin.encode(errors="replace")))
                sources, heard, most = (ours_out, ours_err), (bytearray(), bytearray()), self.limits.output_bytes
                outputs = [
                    asyncio.create_task(_listen(source, most, data))
                    for source, data in zip(sources, heard, strict=True)
                ]
                ending = asyncio.create_task(keeper.ended())
                try:
                    how, code = await _first_of(ending, outputs)
                    output, errors = (_text(bytes(data[:most])) for data in heard)
                    is_clean = all(task.done() for task in outputs)
                    return Ran(how=how, code=code, output=output, errors=errors, is_clean=is_clean)
                finally:
                    for task in (feeding, ending, *outputs):
                        task.cancel()
                    await asyncio.gather(feeding, ending, *outputs, return_exceptions=True)

    async def examine(self, program: str, tests: Sequence[str], *, wall_s: float | None = None) -> list[str]:
        """Define what the program defines, and run tests against it: of each, why it fails; nothing, if it passes. Tests share
        one state, in their order. When the program dies or its time is over, the tests that are left have failed."""
        (theirs, others), (ours, judged) = _pairs(2)
        (err_ours, err_theirs), nothing = socket.socketpair(), [os.open(os.devnull, os.O_RDWR) for _ in range(5)]
        candidate = {"role": "candidate", "program": program}
        examiner = {"role": "examiner", "tests": list(tests)}
        with ours, err_ours:
            async with (
                self._keeper(candidate, (nothing[0], nothing[1], err_theirs, theirs), wall_s) as keeper,
                self._keeper(examiner, (nothing[2], nothing[3], nothing[4], others, judged), wall_s, grace_s=1.0),
            ):
                listening = asyncio.create_task(_listen(err_ours, self.limits.output_bytes))
                try:
                    whole, _ = await _listen(ours, len(tests) * VERDICT_BYTES)
                    lines = whole.decode().split("\n")[:-1]  # what has no end of line was cut off
                    verdicts = [str(json.loads(line)["why"]) for line in lines]
                    missing = len(tests) - len(verdicts)
                    if missing or any("has ended" in why for why in verdicts):
                        why = await _why(keeper, listening)
                        verdicts = [why if "the program has ended" in verdict else verdict for verdict in verdicts]
                        verdicts += [why] * missing
                    return verdicts
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)

    @asynccontextmanager
    async def _keeper(
        self,
        order: dict[str, Any],
        descriptors: Sequence[socket.socket | int],
        wall_s: float | None,
        grace_s: float = 0.0,
    ) -> AsyncIterator[_Keeper]:
        """One process tree. It is gone when this is left."""
        limits = msgspec.to_builtins(self.limits)
        limits["wall_s"] = (self.limits.wall_s if wall_s is None else wall_s) + grace_s
        given = [one if isinstance(one, int) else one.detach() for one in descriptors]
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            try:
                with theirs:
                    self._send([theirs.fileno(), *given])
            finally:
                for descriptor in given:
                    os.close(descriptor)
            payload = json.dumps({**order, "walls": self.walls, "limits": limits}).encode()
            loop = asyncio.get_running_loop()
            with suppress(BrokenPipeError, ConnectionResetError):  # shows as a missing answer
                await loop.sock_sendall(ours, len(payload).to_bytes(HEADER, "little") + payload)
            yield _Keeper(ours, limits["wall_s"])

    def _send(self, descriptors: Sequence[int]) -> None:
        for _ in range(2):  # a zygote that was killed is started again, once
            if self._zygote is None:
                self._zygote = _Zygote()
            try:
                socket.send_fds(self._zygote.line, [b"."], list(descriptors))
                return
            except OSError:
                self._zygote = None
        raise SandboxBroken("the sandbox's first process dies as soon as it is started")


class _Zygote:
    """See `env.sandbox.inside.forkserver`. It ends when we do, or let go of it."""

    def __init__(self) -> None:
        self.line, theirs = socket.socketpair()
        folder = str(Path(__file__).parent)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", BOOT, folder, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=VARIABLES,
                cwd="/",
                start_new_session=True,
            )
        weakref.finalize(self, _let_go, self.line, self.process)


def _let_go(line: socket.socket, process: subprocess.Popen[bytes]) -> None:
    line.close()
    with suppress(RuntimeError):  # the interpreter ends, and with it everything
        threading.Thread(target=process.wait, name="sandbox reaper", daemon=True).start()


class _Ended(Struct, frozen=True, kw_only=True):
    how: Literal["ended", "time", "memory", "disk", "processes", "stopped", "broken"]
    code: int | None = None
    why: str = ""


class _Keeper:
    def __init__(self, control: socket.socket, wall_s: float) -> None:
        self._control = control
        self.wall_s = wall_s

    async def ended(self) -> _Ended:
        """How it ended, when everything of it is gone."""
        try:
            async with asyncio.timeout(self.wall_s + GRACE_S):
                answer, _ = await _listen(self._control, 1 << 16)
        except TimeoutError as error:
            raise SandboxBroken("the keeper of a program does not answer") from error
        if not answer:
            raise SandboxBroken("the keeper of a program was killed")
        ended = msgspec.json.decode(answer, type=_Ended)
        if ended.how == "broken":
            raise SandboxBroken(f"the sandbox cannot be set up: {ended.why}")
        return ended


def _pairs(number: int) -> list[tuple[socket.socket, socket.socket]]:
    return [socket.socketpair() for _ in range(number)]


async def _feed(target: socket.socket, data: bytes) -> None:
    target.setblocking(False)
    with suppress(OSError):  # it need not read
        await asyncio.get_running_loop().sock_sendall(target, data)
        target.shutdown(socket.SHUT_WR)


async def _listen(source: socket.socket, most: int, data: bytearray | None = None) -> tuple[bytes, bool]:
    """All that comes until the other end closes, and whether that was all: past the limit it is not read any more. `data` has
    what came so far."""
    source.setblocking(False)
    loop, data = asyncio.get_running_loop(), bytearray() if data is None else data
    while len(data) <= most:
        try:
            piece = await loop.sock_recv(source, 1 << 16)
        except ConnectionResetError:  # it has died with something unread
            piece = b""
        if not piece:
            return bytes(data), True
        data += piece
    return bytes(data[:most]), False


async def _first_of(
    ending: asyncio.Task[_Ended], outputs: Sequence[asyncio.Task[tuple[bytes, bool]]]
) -> tuple[Any, int | None]:
    """How a run ended: by itself, or because it has printed too much."""
    waiting: set[asyncio.Task[Any]] = {ending, *outputs}
    while not ending.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if any(task in done and not task.result()[1] for task in outputs):
            return "output", None
    ended = ending.result()
    await asyncio.wait(outputs, timeout=LAST_WORDS_S)  # all its processes are gone: what they wrote is there
    if any(task.done() and not task.result()[1] for task in outputs):
        return "output", None
    return ended.how, ended.code


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


async def _why(keeper: _Keeper, errors: asyncio.Task[tuple[bytes, bool]]) -> str:
    """Why the program did not answer to the end."""
    ended = await keeper.ended()
    if ended.how == "time":
        return f"the program took longer than {keeper.wall_s:g} s"
    if ended.how in EXCESS:
        return f"the program has more {EXCESS[ended.how]} than it may"
    last = _text((await errors)[0]).strip().splitlines()[-1:]
    return f"the program has ended with {ended.code}" + "".join(f": {line}" for line in last)


# ---- what holds here -------------------------------------------------------------------------------------------------------

PROBE = """
import json, os, signal, socket, sys, time
asked = json.loads(sys.stdin.read())
def fails(attempt):
    try:
        attempt()
    except OSError:
        return True
    return False
def connect():
    socket.create_connection(("127.0.0.1", asked["port"]), timeout=2).close()
def write():
    with open(asked["folder"] + "/written", "w") as file:
        file.write("x")
def fork():
    for _ in range(asked["processes"] + 1):
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
    time.sleep(1)  # in which it is killed
def set_kernel(name):
    os.close(os.open("/proc/" + name, os.O_WRONLY))  # nothing is written
def survive():
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(5)
        os._exit(0)
survive()
found = dict(
    network=fails(connect),
    writes=all([
        fails(write),
        fails(lambda: os.chmod(asked["folder"] + "/secret", 0o666)),
        fails(lambda: os.chmod("/dev/null", 0o666)),
        *(fails(lambda: set_kernel(name)) for name in ("sys/kernel/core_pattern", "sys/vm/overcommit_memory", "sysrq-trigger")),
    ]),
    reads=fails(lambda: open(asked["folder"] + "/secret").read()),
    environment=fails(lambda: open("/proc/%d/environ" % asked["process"], "rb").read()),
    signals=fails(lambda: os.kill(asked["process"], 0)),
)
print(json.dumps(found), flush=True)
print(json.dumps(fails(fork)))
"""


def what_is_contained(walls: Walls | None = None) -> Contained:
    """Tried on this machine, once a process: with the best walls that can be had, or with these. Raises `SandboxBroken`."""
    return _tried(walls)


@functools.cache
def _tried(walls: Walls | None) -> Contained:
    asked = (walls,) if walls is not None else WALLS if os.geteuid() == 0 else WALLS[1:]
    problems = []
    for one in asked:
        try:
            return _in_thread(one)
        except SandboxBroken as error:
            problems.append(f"{one}: {error}")
    raise SandboxBroken("; ".join(problems))


def _in_thread(walls: Walls) -> Contained:
    """On an event loop of its own, whether or not one runs here."""
    result: list[Contained | BaseException] = []

    def work() -> None:
        try:
            result.append(asyncio.run(_try(walls)))
        except BaseException as error:  # handed to the caller
            result.append(error)

    thread = threading.Thread(target=work, name="sandbox probe")
    thread.start()
    thread.join()
    (answer,) = result
    if isinstance(answer, BaseException):
        raise answer
    return answer


async def _try(walls: Walls) -> Contained:
    limits = Limits(wall_s=60.0, processes=8)
    with (
        tempfile.TemporaryDirectory(prefix="millstream-probe-") as name,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        _lay_out(Path(name))
        asked = {"port": server.getsockname()[1], "folder": name, "process": os.getpid(), "processes": limits.processes}
        ran = await Sandbox(limits, walls=walls).run(PROBE, stdin=json.dumps(asked))
    try:
        first, *rest = ran.output.splitlines()
        processes = ran.how == "processes" or json.loads(rest[0])
        return Contained(walls=walls, survivors=ran.is_clean, processes=processes, **json.loads(first))
    except (ValueError, IndexError) as error:
        raise SandboxBroken(f"the program that tries the walls came to nothing: {ran}") from error


def _lay_out(folder: Path) -> None:
    """Something to read and a place to write, that no permission of the file system protects."""
    folder.chmod(0o777)
    (folder / "secret").write_text("secret")
    (folder / "secret").chmod(0o666)
