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
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec import Struct, structs

from millstream.env.sandbox.base import Limits
from millstream.env.sandbox.keepers import (
    WALLS,
    Keeper,
    Keepers,
    ProgramEnd,
    SandboxBroken,
    Walls,
    feed,
    receive_all,
)

T = TypeVar("T")
EXCESS = {"memory": "memory in all its processes", "disk": "files", "processes": "processes"}
VERDICT_BYTES = 4096
LAST_WORDS_S = 5.0


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


class ProgramSandbox:
    """As many programs at a time as you like; each in processes of its own, forked from one that has Python started already."""

    def __init__(self, limits: Limits | None = None, *, walls: Walls | None = None) -> None:
        self.limits = limits or Limits()
        self._walls = walls
        self._keepers = Keepers()

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
                feeding = asyncio.create_task(feed(ours_in, stdin.encode(errors="replace")))
                sources, heard, most = (ours_out, ours_err), (bytearray(), bytearray()), self.limits.output_bytes
                outputs = [
                    asyncio.create_task(receive_all(source, most, data))
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
                listening = asyncio.create_task(receive_all(err_ours, self.limits.output_bytes))
                try:
                    whole, _ = await receive_all(ours, len(tests) * VERDICT_BYTES)
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

    def _keeper(
        self,
        order: dict[str, Any],
        descriptors: Sequence[socket.socket | int],
        wall_s: float | None,
        grace_s: float = 0.0,
    ) -> AbstractAsyncContextManager[Keeper]:
        limit_s = (self.limits.wall_s if wall_s is None else wall_s) + grace_s
        return self._keepers.keeper(order, descriptors, structs.replace(self.limits, wall_s=limit_s), self.walls)


def _pairs(number: int) -> list[tuple[socket.socket, socket.socket]]:
    return [socket.socketpair() for _ in range(number)]


async def _first_of(
    ending: asyncio.Task[ProgramEnd], outputs: Sequence[asyncio.Task[tuple[bytes, bool]]]
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


async def _why(keeper: Keeper, errors: asyncio.Task[tuple[bytes, bool]]) -> str:
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
            return in_thread(functools.partial(_try, one))
        except SandboxBroken as error:
            problems.append(f"{one}: {error}")
    raise SandboxBroken("; ".join(problems))


def in_thread(program: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it on an event loop of its own, whether or not one runs here."""
    result: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(asyncio.run(program()))
        except BaseException as error:  # raised by the caller
            failure.append(error)

    thread = threading.Thread(target=work, name="sandbox probe")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


async def _try(walls: Walls) -> Contained:
    limits = Limits(wall_s=60.0, processes=8)
    with (
        tempfile.TemporaryDirectory(prefix="millstream-probe-") as name,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        _lay_out(Path(name))
        asked = {"port": server.getsockname()[1], "folder": name, "process": os.getpid(), "processes": limits.processes}
        ran = await ProgramSandbox(limits, walls=walls).run(PROBE, stdin=json.dumps(asked))
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
