"""Episodes in processes of their own: one that hangs, crashes or dies takes nothing with it.

A pool of workers that grows as episodes need it, one episode at a time each. A worker is `python -m millstream.env.isolated`:
it imports the environment (and no torch), drives its episode, and calls back over a socket for what only the run can do, to let
the model speak. Messages are msgspec, nothing is pickled. Guarantees: a worker that dies or says what is no message fails its
rollout by name and is replaced; a rollout that is cancelled, be it by a time limit or an abort, has its worker killed at once,
with every process that it started; no worker outlives the run, however the run dies.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import Struct

from millstream.env import Content, Context, Environment, Reward
from millstream.env.config import EnvironmentConfig
from millstream.env.find import find
from millstream.errors import EnvironmentFailed, MillstreamError, RequestRefused, RolloutError
from millstream.types import Completion, Message, Task

T = TypeVar("T")
HEADER = 4
MOST_BYTES = 64 << 20
"""Of one message: more is no message."""
START_S = 60.0
PATIENCE_S = 30.0
OURS = Path(__file__).parent


class NotMade(EnvironmentFailed):
    """A worker could not make the environment."""


class Make(Struct, frozen=True, tag=True):
    config: EnvironmentConfig
    patience_s: float
    """For a step that keeps the interpreter's lock: longer than it may last."""
    path: list[str]
    """Where the run looks for modules: a worker finds what it finds."""


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
    is_full: bool
    """Whether the model's context has no room for it."""
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


def _frame(message: Any) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(HEADER, "little") + payload


# ---- the run's end -------------------------------------------------------------------------------------------------------


class Isolated:
    """An environment whose episodes are played elsewhere. Workers are started when they are first needed."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
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
        worker = await _Worker.start(self._config)
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
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._name, self._process, self._reader, self._writer = name, process, reader, writer
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._exit = asyncio.ensure_future(process.wait())
        self._exit.add_done_callback(self._on_exit)
        self.is_sound = False

    @classmethod
    async def start(cls, config: EnvironmentConfig) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "millstream.env.isolated",
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
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:  # cancelled: nobody will know of it
            process.kill()
            ours.close()
            raise
        worker = cls(config.shown, process, reader, writer)
        worker._send(Make(config, config.step_timeout_s + PATIENCE_S, sys.path))
        return worker

    @property
    def is_alive(self) -> bool:
        return not self._exit.done()

    def _on_exit(self, _: asyncio.Future[int]) -> None:
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
        self.is_sound, contexts, own = False, [context], None
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
            self._writer.write(_frame(message))
        except TypeError as error:
            raise EnvironmentFailed(
                f"{self._name}: a task that goes to a process has plain data alone: {error}"
            ) from error

    async def _receive(self) -> FromWorker:
        try:
            size = int.from_bytes(await self._reader.readexactly(HEADER), "little")
            if size <= MOST_BYTES:
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
                code = await asyncio.shield(self._exit)
        except TimeoutError:
            return f"the process of {self._name} closed its line to the run"
        if code >= 0:
            return f"the process of {self._name} ended with exit code {code} in the middle of an episode"
        return f"the process of {self._name} was killed by signal {-code} ({signal.Signals(-code).name})"

    async def kill(self) -> None:
        """With everything that it started, and reaped."""
        self.is_sound = False
        with suppress(ProcessLookupError, PermissionError):  # of its group, nobody may be left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        await asyncio.shield(self._exit)


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


# ---- the worker's end ------------------------------------------------------------------------------------------------


class _Line:
    """Reads on a thread, so that it hears the run's end whatever the environment does."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._sending = line, threading.Lock()
        self._calls: dict[int, concurrent.futures.Future[Any]] = {}
        self._next, self._patience_s = 0, START_S + PATIENCE_S
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="the line to the run", daemon=True).start()

    def send(self, message: Any) -> None:
        with self._sending:
            self._line.sendall(_frame(message))

    def call(self, part: int, method: str, argument: Any) -> concurrent.futures.Future[Any]:
        self._next += 1
        answer = self._calls[self._next] = concurrent.futures.Future()
        self.send(Call(self._next, part, method, argument))
        return answer

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromRun)
        while header := self._exactly(HEADER):
            message = decoder.decode(self._exactly(int.from_bytes(header, "little")))
            if isinstance(message, Make):
                self._patience_s = message.patience_s
            if isinstance(message, Answer):
                self._calls.pop(message.number).set_result(message.value)
            elif isinstance(message, Refused):
                error = RequestRefused if message.is_full else EnvironmentFailed
                self._calls.pop(message.number).set_exception(error(message.message))
            else:
                self.inbox.put(message)
        os.killpg(0, signal.SIGKILL)  # the run is gone, and so is everything that was started here

    def _exactly(self, size: int) -> bytes:
        """Nothing when the run is gone. Where an environment keeps the interpreter's lock, this thread cannot hear that: the
        watchdog, which needs no lock, then ends the process, later than any step may last."""
        found = b""
        while len(found) < size:
            faulthandler.dump_traceback_later(self._patience_s, exit=True)
            if select.select([self._line], [], [], self._patience_s / 4)[0]:
                piece = self._line.recv(size - len(found))
                if not piece:
                    return b""
                found += piece
        return found


class _RemoteText:
    def __init__(self, line: _Line, begin: Begin) -> None:
        self._line, self.has_chat, self.end_token = line, begin.has_chat, begin.end_token

    def encode(self, text: str) -> list[int]:
        return self._call("encode", text)  # type: ignore[no-any-return]

    def opening(self, content: Content) -> list[int]:
        return self._call("opening", content if isinstance(content, str) else list(content))  # type: ignore[no-any-return]

    def render(self, messages: Sequence[Message]) -> str:
        return str(self._call("render", list(messages)))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._call("decode", list(tokens)))

    def _call(self, method: str, argument: Any) -> Any:
        return self._line.call(0, method, argument).result()


class _RemoteContext:
    """See `millstream.env.Context`: everything is asked of the run."""

    def __init__(self, line: _Line, begin: Begin, part: int = 0) -> None:
        self._line, self._begin, self._part = line, begin, part
        self.task, self.seed, self.text = begin.task, begin.seed, _RemoteText(line, begin)

    async def generate(self, tokens: Sequence[int]) -> Completion:
        return msgspec.convert(await self._call("generate", list(map(int, tokens))), Completion)

    async def ask(self, content: Content) -> str:
        return str(await self._call("ask", content if isinstance(content, str) else list(content)))

    async def waiting(self, what: str, work: Awaitable[T], *, is_timed: bool = True) -> T:
        return await work  # the run sees the process, and waits for it

    def earned(self, reward: float) -> None:
        self._line.call(self._part, "earned", float(reward)).result()

    def part(self, agent: int = 0) -> _RemoteContext:
        return _RemoteContext(self._line, self._begin, self._line.call(self._part, "part", agent).result())

    async def _call(self, method: str, argument: Any) -> Any:
        return await asyncio.wrap_future(self._line.call(self._part, method, argument))


async def _play(environment: Environment, begin: Begin, line: _Line, name: str) -> Finished | Failed:
    try:
        reward = await environment.rollout(_RemoteContext(line, begin))
    except MillstreamError as error:
        return Failed(str(error))
    except Exception as error:  # the border to the user's code: any error fails this rollout, and only it
        return Failed(f"{name} raised {type(error).__name__} at {_place(error)}: {error}")
    try:
        return Finished([float(one) for one in reward] if isinstance(reward, Sequence) else float(reward))
    except (TypeError, ValueError):
        return Failed(f"the environment returned {reward!r}: expected a number, or one per agent")


def _place(error: Exception) -> str:
    """The line of the user's own file where it was raised, or from where a library that raised it was called."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if OURS not in Path(frame.filename).parents]
    frames = [frame for frame in frames if "millstream/threads.py" not in frame.filename]
    if not frames:
        return "its call"
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def main(descriptor: int) -> NoReturn:
    """The worker: episode after episode, until the line closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's to handle
    line = _Line(socket.socket(fileno=descriptor))
    make: Make = line.inbox.get()
    config = make.config
    sys.path += [place for place in make.path if place not in sys.path]
    try:
        environment = find(config).environment
    except Exception as error:  # said to the run, which knows whom it concerns
        line.send(Failed(f"{type(error).__name__}: {error}"))
        os._exit(1)
    assert environment is not None
    line.send(Ready())
    with asyncio.Runner() as runner:
        while True:
            begin: Begin = line.inbox.get()
            line.send(runner.run(_play(environment, begin, line, config.shown)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
