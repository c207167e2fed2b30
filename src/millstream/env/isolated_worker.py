"""What runs in the process of an environment: episode after episode, until the line to the run closes. See `env.isolated` for
the other end.
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
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from millstream.env import Content, Environment
from millstream.env.isolated import (
    HEADER,
    PATIENCE_S,
    START_S,
    Answer,
    Begin,
    Call,
    Failed,
    Finished,
    FromRun,
    Make,
    Ready,
    Refused,
    framed,
)
from millstream.env.resolve import find
from millstream.errors import EnvironmentFailed, MillstreamError, RequestRefused
from millstream.types import Completion, Message

T = TypeVar("T")
OURS = Path(__file__).parent


class _Line:
    """Reads on a thread, so that it hears the run's end whatever the environment does."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._sending = threading.Lock()
        self._calls: dict[int, concurrent.futures.Future[Any]] = {}
        self._next = 0
        self._patience_s = START_S + PATIENCE_S
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="the line to the run", daemon=True).start()

    def send(self, message: Any) -> None:
        with self._sending:
            self._line.sendall(framed(message))

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
        self._line = line
        self.has_chat = begin.has_chat
        self.end_token = begin.end_token

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
        self._line = line
        self._begin = begin
        self._part = part
        self.task = begin.task
        self.seed = begin.seed
        self.text = _RemoteText(line, begin)

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
    frames = [frame for frame in frames if "millstream/rpc/threads.py" not in frame.filename]
    if not frames:
        return "its call"
    last = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def work(end: socket.socket) -> NoReturn:
    """The worker: episode after episode, until the line closes."""
    line = _Line(end)
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's to handle
    work(socket.socket(fileno=int(sys.argv[1])))
