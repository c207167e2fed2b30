"""Episodes in processes of their own: one that hangs, crashes or dies takes nothing with it.

A pool of workers that grows as episodes need it, one episode at a time each. A worker (`env.isolated_worker`) imports the
environment (and no torch), drives its episode, and calls back over a socket for what only the run can do, to let the model
speak. Messages are msgspec, nothing is pickled. Guarantees: a worker that dies or says what is no message fails its rollout by
name and is replaced; a rollout that is cancelled, be it by a time limit or an abort, has its worker killed at once, with every
process that it started; no worker outlives the run, however the run dies.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from millstream.env import Content, Context, Reward
from millstream.env.config import EnvironmentConfig
from millstream.errors import ClusterError, EnvironmentFailed, RequestRefused, RolloutError
from millstream.rpc.process import Launcher, WorkerProcess
from millstream.rpc.threads import on_a_thread
from millstream.types import Message, Task

T = TypeVar("T")
HEADER = 4
MAX_BYTES = 64 << 20  # of one message: more is no message
START_S = 60.0
PATIENCE_S = 30.0
# For a cluster to say that a process which was killed is gone: of a node that nobody reaches it says so late.
GONE_S = 5.0
MODULE = "millstream.env.isolated_worker"


class NotMade(EnvironmentFailed):
    """A worker could not make the environment."""


class Make(Struct, frozen=True, tag=True):
    config: EnvironmentConfig
    patience_s: float  # for a step that keeps the interpreter's lock: longer than it may last
    path: list[str]  # where the run looks for modules: a worker finds what it finds


class Begin(Struct, frozen=True, tag=True):
    task: Task
    seed: int
    has_chat: bool
    end_token: int


class Answer(Struct, frozen=True, tag=True):
    number: int
    value: Any


class Refused(Struct, frozen=True, tag=True):
    """What was asked for could not be had; the environment may still come to an end of its own."""

    number: int
    is_full: bool  # whether the model's context has no room for it
    message: str


class Ready(Struct, frozen=True, tag=True): ...


class Call(Struct, frozen=True, tag=True):
    """Of a method of the context, or of its text."""

    number: int
    part: int
    method: str
    argument: Any


class Finished(Struct, frozen=True, tag=True):
    reward: float | list[float]


class Failed(Struct, frozen=True, tag=True):
    message: str


FromRun = Make | Begin | Answer | Refused
FromWorker = Ready | Call | Finished | Failed


def framed(message: Any) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(HEADER, "little") + payload


# ---- the run's end -------------------------------------------------------------------------------------------------------


class Isolated:
    """An environment whose episodes are played elsewhere. Workers are started when they are first needed."""

    def __init__(self, config: EnvironmentConfig, launcher: Launcher | None = None) -> None:
        """`launcher`: of processes on a cluster. None: they are this machine's."""
        self._config = config
        self._launcher = launcher
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()

    async def rollout(self, context: Context) -> Reward:
        worker = await self._idle_worker() or await self._started(context)
        try:
            reward = await worker.play(context)
        except RolloutError:
            await self._settle(worker)
            raise
        except BaseException:  # cancelled, or the run is broken: whatever it does, it does no more
            await self._end(worker)
            raise
        await self._settle(worker)
        return reward

    async def _idle_worker(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            await self._end(worker)  # it died of something else: the machine's memory, say
        return None

    async def _started(self, context: Context) -> _Worker:
        worker = await _Worker.start(self._config, self._launcher)
        self._all.add(worker)
        try:
            await context.waiting(f"a process for {self._config.shown}", worker.until_ready(), is_timed=False)
        except BaseException:  # cancelled, say: nobody else would end the process
            await self._end(worker)
            raise
        return worker

    async def _settle(self, worker: _Worker) -> None:
        if worker.is_sound:
            self._idle.append(worker)
        else:
            await self._end(worker)

    async def _end(self, worker: _Worker) -> None:
        self._all.discard(worker)
        await worker.kill()

    async def close(self) -> None:
        self._idle.clear()
        for worker in list(self._all):
            await self._end(worker)


class _Worker:
    """One process, and our end of the line to it. `is_sound`: it is between two episodes, and has said nothing strange."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process | _Elsewhere,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._name = name
        self._process = process
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._exit: asyncio.Future[Any] = asyncio.ensure_future(process.wait())
        self._exit.add_done_callback(self._on_exit)
        self.is_sound = False

    @classmethod
    async def start(cls, config: EnvironmentConfig, launcher: Launcher | None) -> _Worker:
        process: asyncio.subprocess.Process | _Elsewhere
        if launcher is None:
            process, line = await _started_here()
        else:
            process = await _Elsewhere.start(launcher, config.shown)
            line = process.worker.connection
        try:
            reader, writer = await asyncio.open_connection(sock=line)
        except BaseException:  # cancelled: nobody will know of it
            process.kill()
            line.close()
            raise
        worker = cls(config.shown, process, reader, writer)
        worker._send(Make(config, config.step_timeout_s + PATIENCE_S, sys.path))
        return worker

    @property
    def is_alive(self) -> bool:
        return not self._exit.done()

    def _on_exit(self, _: asyncio.Future[Any]) -> None:
        """A process of its own may hold the line open when it is gone."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            asyncio.get_running_loop().call_later(0.1, self._reader.feed_eof)

    async def until_ready(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                message = await self._receive()
        except TimeoutError as error:
            raise NotMade(f"{self._name} was not made within {START_S:g} s in a process of its own") from error
        if isinstance(message, Failed):
            raise NotMade(f"{self._name} cannot be made in a process of its own: {message.message}")
        self.is_sound = True

    async def play(self, context: Context) -> Reward:
        """One episode. Calls are served one by one, as a model takes its turns."""
        self.is_sound = False
        contexts = [context]
        own = None
        self._send(Begin(context.task, context.seed, context.text.has_chat, context.text.end_token))
        while isinstance(message := await self._receive(), Call):
            try:
                self._send(Answer(message.number, await _serve(contexts, message)))
            except RolloutError as error:
                own = error
                self._send(Refused(message.number, isinstance(error, RequestRefused), str(error)))
        if isinstance(message, Ready):
            raise EnvironmentFailed(f"the process of {self._name} said that it is ready in the middle of an episode")
        self.is_sound = True
        if isinstance(message, Failed):
            raise own if own is not None and str(own) == message.message else EnvironmentFailed(message.message)
        return message.reward

    def _send(self, message: Any) -> None:
        try:
            self._writer.write(framed(message))
        except TypeError as error:
            raise EnvironmentFailed(
                f"{self._name}: a task that goes to a process has plain data alone: {error}"
            ) from error

    async def _receive(self) -> FromWorker:
        try:
            size = int.from_bytes(await self._reader.readexactly(HEADER), "little")
            if size <= MAX_BYTES:
                message: FromWorker = self._decoder.decode(await self._reader.readexactly(size))
                return message
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EnvironmentFailed(await self._how_it_ended()) from error
        except msgspec.DecodeError as error:
            raise EnvironmentFailed(f"the process of {self._name} sent what is no message: {error}") from error
        raise EnvironmentFailed(f"the process of {self._name} sent what is no message: one of {size} bytes")

    async def _how_it_ended(self) -> str:
        try:
            async with asyncio.timeout(1.0):
                code: int | str = await asyncio.shield(self._exit)
        except TimeoutError:
            return f"the process of {self._name} closed its line to the run"
        if isinstance(code, str):
            return f"the process of {self._name} ended in the middle of an episode: {code}"
        if code >= 0:
            return f"the process of {self._name} ended with exit code {code} in the middle of an episode"
        return f"the process of {self._name} was killed by signal {-code} ({signal.Signals(-code).name})"

    async def kill(self) -> None:
        """With everything that it started, and reaped. One of a cluster that is not heard of is left to the cluster."""
        self.is_sound = False
        limit_s: float | None = None
        if isinstance(self._process, _Elsewhere):
            self._process.kill()
            limit_s = GONE_S
        else:
            with suppress(ProcessLookupError, PermissionError):  # of its group, nobody may be left
                os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.shield(self._exit)


async def _started_here() -> tuple[asyncio.subprocess.Process, socket.socket]:
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,  # what an environment prints does not belong into our output
            start_new_session=True,
        )
    except BaseException:  # cancelled, say: nobody else has the socket
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


class _Elsewhere:
    """A process of a cluster, with what is asked of one of this machine."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker

    @classmethod
    async def start(cls, launcher: Launcher, name: str) -> _Elsewhere:
        """Whoever is cancelled meanwhile leaves nobody behind: one that comes late is ended when it comes."""
        launch = functools.partial(launcher.launch, "environment", MODULE, name=f"a process for {name}")
        coming = asyncio.ensure_future(on_a_thread("start of an environment", launch))
        try:
            return cls(await asyncio.shield(coming))
        except asyncio.CancelledError:
            coming.add_done_callback(_end_late)
            raise
        except ClusterError as error:
            raise NotMade(f"{name} has no process: {error}") from error

    async def wait(self) -> str:
        return await on_a_thread("end of an environment", self.worker.exit_reason) or "it is gone"

    def kill(self) -> None:
        self.worker.kill()


def _end_late(coming: asyncio.Future[WorkerProcess]) -> None:
    if not coming.cancelled() and coming.exception() is None:
        coming.result().kill()


async def _serve(contexts: list[Context], call: Call) -> Any:
    context, text = contexts[call.part], contexts[0].text
    match call.method:
        case "generate":
            return await context.generate(call.argument)
        case "ask":
            return await context.ask(_content(call.argument))
        case "earned":
            return context.earned(call.argument)
        case "part":
            contexts.append(context.part(call.argument))
            return len(contexts) - 1
        case "encode":
            return text.encode(call.argument)
        case "opening":
            return text.opening(_content(call.argument))
        case "render":
            return text.render(msgspec.convert(call.argument, list[Message]))
        case "decode":
            return text.decode(call.argument)
        case _:
            raise EnvironmentFailed(f"a process asked for {call.method!r}, which is nothing")


def _content(value: Any) -> Content:
    return value if isinstance(value, str) else msgspec.convert(value, tuple[Message, ...])
