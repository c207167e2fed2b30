"""Worker processes for a reward that may hang, crash or take the memory: they can be killed, and a thread cannot.

A worker has one call at a time, so that one which is killed or dies takes no other call with it. Whatever has ended a worker,
the next one is started at once. They are started as programs of their own (nothing is forked from a process with torch in it),
talk over a socket in msgpack, and end with the parent, however that ends.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct, structs

from millstream.env.rewards.config import RewardConfig
from millstream.errors import ClusterError, RewardFailed
from millstream.rpc.process import Launcher
from millstream.rpc.threads import on_a_thread
from millstream.types import Task

MODULE = "millstream.env.rewards.worker"
HEADER = 4
MAX_WORKERS = 8
START_S = 60.0  # for a worker to import the reward, whatever that imports
LAST_WORDS_S = 2.0


class Plan(Struct, frozen=True, kw_only=True):
    """What a worker has to know first."""

    config: RewardConfig


class Order(Struct, frozen=True, kw_only=True):
    task: Task
    said: str | tuple[str, ...]


class Answer(Struct, frozen=True, kw_only=True):
    """One number, or one a member of the group; or what went wrong, in words. Neither: ready."""

    values: tuple[float, ...] = ()
    failure: str = ""


class _Gone(Exception):
    """The worker's end of the line is closed."""


class Worker:
    """A process, from our side: of this machine, or where a launcher puts it."""

    def __init__(self, config: RewardConfig, launcher: Launcher | None = None) -> None:
        self._config = config
        if launcher is None:
            self.process, self.line = _here()
            self.how: Callable[[], str] = functools.partial(_how, self.process)
            self.end: Callable[[], object] = weakref.finalize(self, _kill, self.process, self.line)
        else:
            elsewhere = launcher.launch("reward", MODULE, name=f"a worker of reward {config.function}")
            self.line = elsewhere.connection
            self.how = lambda: elsewhere.exit_reason(LAST_WORDS_S) or "closed its line"
            self.end = weakref.finalize(self, elsewhere.kill)
        self.line.setblocking(False)

    async def ready(self) -> Worker:
        try:
            async with asyncio.timeout(START_S):
                await self._send(Plan(config=structs.replace(self._config, process=False)))
                answer = await self._receive()
        except TimeoutError as error:
            self.end()
            what = f"its worker process took longer than {START_S:g} s to start: what does the file import?"
            raise RewardFailed(f"reward {self._config.function}: {what}") from error
        except _Gone as error:
            how = await self.last_words()
            raise RewardFailed(f"reward {self._config.function}: its worker process {how} while it started") from error
        except BaseException:  # cancelled, say: nobody else would end the process
            self.end()
            raise
        if answer.failure:
            self.end()
            raise RewardFailed(answer.failure)
        return self

    async def call(self, order: Order) -> Answer:
        await self._send(order)
        return await self._receive()

    async def last_words(self) -> str:
        """How it ended: it has closed its line, and has a moment to follow."""
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                return await asyncio.to_thread(self.how)
        except TimeoutError:
            return "closed its line"
        finally:
            self.end()

    async def _send(self, message: Any) -> None:
        payload = msgspec.msgpack.encode(message)
        try:
            await asyncio.get_running_loop().sock_sendall(self.line, len(payload).to_bytes(HEADER, "little") + payload)
        except OSError as error:
            raise _Gone from error

    async def _receive(self) -> Answer:
        size = int.from_bytes(await self._exactly(HEADER), "little")
        try:
            return msgspec.msgpack.decode(await self._exactly(size), type=Answer)
        except msgspec.MsgspecError as error:  # somebody else has written to the line
            raise _Gone from error

    async def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = await asyncio.get_running_loop().sock_recv(self.line, min(1 << 20, size - len(data)))
            except OSError as error:
                raise _Gone from error
            if not piece:
                raise _Gone
            data += piece
        return bytes(data)


def _here() -> tuple[subprocess.Popen[bytes], socket.socket]:
    line, theirs = socket.socketpair()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,  # never written to: it closes when we end
            stdout=2,  # what a reward prints is no part of ours
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,
        )
    return process, line


def _kill(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    """With all that it started, unless that made a process group of its own. Waits for nothing."""
    line.close()
    if process.returncode is None:  # nobody has waited for it: its id, and that of its group, are still its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(RuntimeError):  # the interpreter ends, and with it everything
            threading.Thread(target=process.wait, name="reward reaper", daemon=True).start()
    if process.stdin is not None:
        process.stdin.close()


def _how(process: subprocess.Popen[bytes]) -> str:
    """Waits for its end, and leaves it to be waited for once more: until then its id is nobody else's."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return "ended"
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if ended is None:
        return "is gone"
    status = ended.si_status
    if ended.si_code == os.CLD_EXITED:
        return f"ended itself with exit code {status}"
    name = signal.Signals(status).name if status in set(signal.Signals) else f"signal {status}"
    return f"was killed by {name}" + (" (out of memory?)" if status == signal.SIGKILL else "")


class Workers:
    """At most so many at a time; a call waits for one that is free. Started when first needed."""

    def __init__(self, config: RewardConfig, launcher: Launcher | None = None) -> None:
        self._config = config
        self._launcher = launcher
        self._most = config.workers or min(MAX_WORKERS, os.cpu_count() or 1)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, task: Task, said: str | tuple[str, ...]) -> Any:
        """One number, or one a member. Raises `RewardFailed`."""
        self._settle_in()
        async with self._free:
            worker = await self._take()
            is_well = False
            try:
                answer = await self._ask(worker, Order(task=task, said=said))
                is_well = True
            finally:  # a caller that was cancelled leaves a busy worker behind: it goes, too
                if is_well:
                    self._put(worker)
                else:
                    worker.end()
                    self._start()
        if answer.failure:
            raise RewardFailed(answer.failure)
        return answer.values[0] if isinstance(said, str) else answer.values

    async def _ask(self, worker: Worker, order: Order) -> Answer:
        name, limit_s = self._config.function, self._config.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await worker.call(order)
        except TimeoutError as error:
            what = f"took longer than {limit_s:g} s, and its worker process was killed; reward.timeout_s sets the limit"
            raise RewardFailed(f"reward {name} {what}") from error
        except _Gone as error:
            how = await worker.last_words()
            raise RewardFailed(
                f"reward {name}: its worker process {how} in the call; another has taken its place"
            ) from error
        except TypeError as error:
            what = f"task {order.task.id} cannot be sent to a worker process ({error}): its fields must be plain data"
            raise RewardFailed(f"reward {name}: {what}") from error

    def _settle_in(self) -> None:
        """Workers belong to the event loop that started them: for another loop, others."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._free = asyncio.Semaphore(self._most)
            self._idle: list[asyncio.Future[Worker]] = []  # free, or on their way: whoever takes one waits for it

    async def _take(self) -> Worker:
        if not self._idle:
            self._start()
        coming = self._idle.pop()
        try:
            return await asyncio.shield(coming)
        except asyncio.CancelledError:
            self._idle.append(coming)
            raise

    def _put(self, worker: Worker) -> None:
        here: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        here.set_result(worker)
        self._idle.append(here)

    def _start(self) -> None:
        coming = asyncio.ensure_future(_started(self._config, self._launcher))
        coming.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever takes it, is told
        self._idle.append(coming)


async def _started(config: RewardConfig, launcher: Launcher | None) -> Worker:
    try:
        # it may wait long for room on a cluster: nothing else must wait for that
        worker = await on_a_thread("start of a reward", functools.partial(Worker, config, launcher))
    except ClusterError as error:
        raise RewardFailed(f"reward {config.function}: no worker process: {error}") from error
    return await worker.ready()
