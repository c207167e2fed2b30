"""Calls and one-way messages between this process and a worker, over one connection.

    ours (`Remote`)                               the worker's (`rpc.serve`)
      setup ───────────────────────────────────▶   the first call: builds what the worker is
      ◀────────────────────────────── READY, or why it could not be built
      call(message) ───────────────────────────▶   handler(message)
      ◀──────────────────────────────────────── its value, or its error
      send(message) ───────────────────────────▶   no answer
      ◀──────────────────────────────── events, and calls of its own, at any time
      close() ─────────────────────────────────▶   finishes the call in hand and exits

Guarantees. Every call's future ends: with the answer, with the handler's error, or with the reason why no answer will come.
Calls arrive in the order they were made. Sending never blocks. An error crosses as data: an error class of `millstream.errors`
arrives as itself, an `OSError` with its number, anything else as `WorkerError` with its text. There is one story of an end:
whatever ended the worker, `error` says it, and every later call fails with it.
"""

from __future__ import annotations

import asyncio
import itertools
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from enum import IntEnum
from typing import Any

import msgspec
from msgspec import Raw, Struct

from millstream import errors
from millstream.decoding import msgpack_decoder
from millstream.errors import MillstreamError, WorkerError, WorkerExited
from millstream.rpc.frames import MAX_FRAME_BYTES, FrameError, Frames, frame
from millstream.rpc.process import WorkerProcess

CLOSE_S = 10.0
EXIT_S = 1.0  # between the end of a connection and the exit of its process
SOCKET_BUFFER = 4 << 20


class PacketKind(IntEnum):
    CALL = 0
    ANSWER = 1
    FAILURE = 2
    MESSAGE = 3
    CLOSE = 4


class Packet(Struct, frozen=True, array_like=True):
    """What is in a frame. `number` matches an answer to its call; 0: there will be no answer."""

    kind: PacketKind
    number: int
    body: Raw


class ErrorInfo(Struct, frozen=True, array_like=True):
    """An error as data."""

    name: str  # of its class in `millstream.errors`; "": it has none
    text: str
    errno: int | None = None


def describe_error(error: BaseException) -> ErrorInfo:
    """By its nearest class in `millstream.errors`; any other in words, with the name of its own class."""
    own = next((kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__), None)
    if own is not None:
        return ErrorInfo(own.__name__, str(error))
    if isinstance(error, OSError) and error.errno is not None:
        return ErrorInfo("", error.strerror or str(error), error.errno)
    return ErrorInfo("", f"{type(error).__name__}: {error}")


def error_from(info: ErrorInfo) -> Exception:
    kind = getattr(errors, info.name, None)
    if isinstance(kind, type) and issubclass(kind, MillstreamError):
        with suppress(TypeError):  # it takes other arguments
            return kind(info.text)
    return WorkerError(info.text) if info.errno is None else OSError(info.errno, info.text)


class Channel:
    """One end of a connection; both ends are alike, with the same bound on a message. What is sent before `connect` waits for
    it. May be used from any thread; one thread at a time calls `receive`. What sends raises as `frame` does, in the caller."""

    def __init__(self, connection: socket.socket | None = None, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._posted: list[bytes] = []  # in this turn of the event loop
        self._unsent: deque[memoryview] = deque()
        self._flushing: threading.Thread | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Future[Any], Any]] = {}
        self._error: Exception | None = None
        if connection is not None:
            self.connect(connection)

    def connect(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        self._frames = Frames(connection, self._max_bytes)
        with self._lock:
            self._connection = connection
            self._flush_if_needed()

    # ---- out ---------------------------------------------------------------------------------------------------------

    def call(self, message: Any, answer: Any = None) -> Future[Any]:
        """`answer`: the type of the value that comes back. Await it by `asyncio.wrap_future`."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        data = self._frame(PacketKind.CALL, number, message)
        with self._lock:
            error = self._error
            if error is None:
                self._waiting[number] = (future, answer)
                self._send(data)
        if error is not None:
            future.set_exception(error)
        return future

    def send(self, *messages: Any) -> None:
        """One-way, and in one system call. Ignored when the other end is gone: the reader reports that."""
        data = b"".join(self._frame(PacketKind.MESSAGE, 0, message) for message in messages)
        with self._lock:
            self._send(data)

    def post(self, *messages: Any) -> None:
        """As `send`, together with everything else that is posted in this turn of the running event loop. What is sent
        otherwise does not overtake it."""
        data = b"".join(self._frame(PacketKind.MESSAGE, 0, message) for message in messages)
        with self._lock:
            if not self._posted:
                asyncio.get_running_loop().call_soon(self._send_posted)
            self._posted.append(data)

    def _send_posted(self) -> None:
        with self._lock:
            if self._posted:
                self._send(b"")

    def answer(self, number: int, value: Any) -> None:
        data = self._frame(PacketKind.ANSWER, number, value)
        with self._lock:
            self._send(data)

    def fail(self, number: int, error: BaseException) -> None:
        with self._lock:
            self._send(self._frame(PacketKind.FAILURE, number, describe_error(error)))

    def send_close(self) -> None:
        with self._lock:
            self._send(self._frame(PacketKind.CLOSE, 0, None))

    def _frame(self, *packet: Any) -> bytes:
        return frame(packet, self._max_bytes)

    def _send(self, data: bytes) -> None:
        """With the lock."""
        if self._posted:
            data = b"".join([*self._posted, data])
            self._posted.clear()
        self._write(data)

    def _write(self, data: bytes) -> None:
        """With the lock. What the socket does not take at once is left to a thread, so that no sender ever blocks."""
        rest = memoryview(data)
        if self._connection is not None and self._flushing is None:
            try:
                rest = rest[self._connection.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except OSError:  # the other end is gone: the reader reports it
                return
        if rest:
            self._unsent.append(rest)
            self._flush_if_needed()

    def _flush_if_needed(self) -> None:
        if self._unsent and self._connection is not None and self._flushing is None:
            self._flushing = threading.Thread(target=self._flush, args=(self._connection,), name="unsent", daemon=True)
            self._flushing.start()

    def _flush(self, connection: socket.socket) -> None:
        while True:
            with self._lock:
                if not self._unsent:
                    self._flushing = None
                    return
                data = self._unsent.popleft()
            try:
                connection.sendall(data)
            except OSError:  # the other end is gone: the reader reports it
                with self._lock:
                    self._unsent.clear()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is handed to the operating system."""
        self._send_posted()
        flushing = self._flushing
        if flushing is not None:
            flushing.join(timeout_s)

    # ---- in ----------------------------------------------------------------------------------------------------------

    def receive(self, *, block: bool) -> list[Packet] | None:
        """Settles the calls that were answered; returns the calls and messages of the other end, perhaps none. With `block`,
        waits until anything arrives. None: the other end is gone. Raises `FrameError` or `msgspec.MsgspecError` if it sent
        something that is not a packet."""
        payloads = self._frames.receive(block=block)
        if payloads is None:
            return None
        packets = [msgpack_decoder(Packet).decode(payload) for payload in payloads]
        for packet in packets:
            if packet.kind in (PacketKind.ANSWER, PacketKind.FAILURE):
                self._settle(packet)
        return [packet for packet in packets if packet.kind not in (PacketKind.ANSWER, PacketKind.FAILURE)]

    def _settle(self, packet: Packet) -> None:
        """A call whose answer cannot be decoded still waits: it ends with the connection, and for the same reason."""
        is_failure = packet.kind is PacketKind.FAILURE
        kind = ErrorInfo if is_failure else self._waiting.get(packet.number, (None, None))[1]
        value: Any = None if kind is None else msgpack_decoder(kind).decode(packet.body)
        with self._lock:
            future, _ = self._waiting.pop(packet.number, (None, None))
        if future is None:
            raise msgspec.ValidationError(f"an answer to call {packet.number}, which does not wait for one")
        if is_failure:
            _fail(future, error_from(value))
        elif future.set_running_or_notify_cancel():
            future.set_result(value)

    @property
    def num_unanswered(self) -> int:
        """Calls without an answer, including those whose caller has cancelled."""
        return len(self._waiting)

    def end(self, error: Exception) -> None:
        """No answer will come any more: every call that waits and every later one fails with this error."""
        with self._lock:
            self._error = self._error or error
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for future, _ in waiting:
            _fail(future, self._error)


def _fail(future: Future[Any], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


class Remote:
    """A worker process, from the side that uses it. It may start late (a cluster needs time): calls wait for it."""

    def __init__(
        self,
        launch: Callable[[], WorkerProcess],
        setup: Any,
        *,
        name: str,
        messages: Any = None,
        on_message: Callable[[Any, int], None] | None = None,
        on_exit: Callable[[Exception], None] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """`launch` is called on a thread. `on_message(message, number)` gets what the worker sends by itself, decoded as
        `messages`: an event (number 0), or a call, to be answered by `answer(number, value)`. Answers and messages are
        delivered on `loop`; without one, on a reader thread. `on_exit(error)` is called once, on that thread or loop."""
        self.name = name
        self.process: WorkerProcess | None = None
        self.launched: Future[None] = Future()  # when the process exists, or cannot be started
        self.error: Exception | None = None  # why it is over; None while it may still answer
        self.exited: Future[str] = Future()  # the reason, when the process is gone
        self._launch = launch
        self._messages = messages
        self._on_message = on_message
        self._on_exit = on_exit
        self._loop = loop
        self._lock = threading.Lock()
        self._reason: str | None = None  # why this end gave it up
        self._is_killed = False
        self._is_closing = False
        self._channel = Channel(max_bytes=max_bytes)
        self.ready = self._channel.call(setup)  # done when the worker is built; its exception says why it could not be
        self.call = self._channel.call
        self.send = self._channel.send
        self.post = self._channel.post
        self.answer = self._channel.answer
        self.fail = self._channel.fail
        threading.Thread(target=self._start, name=f"{name}: reader", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Built, alive, and without a call that it has not answered."""
        return self.error is None and self.ready.done() and not self._channel.num_unanswered

    # ---- the reader --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            process = self._launch()
        except Exception as error:  # thread boundary: the callers that wait get the reason
            is_ours = isinstance(error, MillstreamError)
            reason = str(error) if is_ours else f"it could not be started: {type(error).__name__}: {error}"
            self.launched.set_result(None)
            self._deliver(self._conclude, None, reason)
            return
        with self._lock:
            self.process = process
            is_killed = self._is_killed
        if is_killed:
            process.kill()
        self.launched.set_result(None)
        self._channel.connect(process.connection)
        if self._loop is None:
            while self._read(process, block=True):
                pass
            found = process.exit_reason(CLOSE_S)
        else:
            self._deliver(self._loop.add_reader, process.connection, self._on_readable, self._loop, process)
            found = process.exit_reason()
        if found is None:  # without its connection it is of no use
            process.kill()
        self._deliver(self._conclude, process, found)

    def _deliver(self, function: Callable[..., Any], *arguments: Any) -> None:
        if self._loop is None:
            function(*arguments)
        else:
            with suppress(RuntimeError):  # the loop is closed: no one waits
                self._loop.call_soon_threadsafe(function, *arguments)

    def _on_readable(self, loop: asyncio.AbstractEventLoop, process: WorkerProcess) -> None:
        if not self._read(process, block=False):
            loop.remove_reader(process.connection)
            loop.call_later(EXIT_S, process.kill)  # without its connection it is of no use: the exit should follow
            loop.call_later(2 * EXIT_S, self._conclude, process)  # a cluster may never report it

    def _read(self, process: WorkerProcess, *, block: bool) -> bool:
        """False: the connection is over."""
        try:
            packets = self._channel.receive(block=block)
            for packet in packets or []:
                if self._on_message is None:
                    raise msgspec.ValidationError("a message that this end does not expect")
                self._on_message(msgpack_decoder(self._messages).decode(packet.body), packet.number)
        except (msgspec.MsgspecError, FrameError) as error:
            self._reason = f"it sent something that is not a message: {error}"
            process.kill()
            return False
        return packets is not None

    def _conclude(self, process: WorkerProcess | None, reason: str | None = None) -> None:
        """The one place where a worker's end becomes known. A second call does nothing."""
        if self.exited.done():
            return
        if process is not None and self._loop is not None:
            is_open = self._loop.remove_reader(process.connection)
            while is_open and _is_readable(process.connection):  # what it wrote before its exit
                is_open = self._read(process, block=False)
        reason = self._reason or reason or "its process closed its connection"
        refused = self.ready.exception() if self.ready.done() and not self.ready.cancelled() else None
        if isinstance(refused, Exception):  # it said itself why it could not be built
            self.error = refused
        elif self._is_closing:
            self.error = WorkerExited(f"{self.name} is closed")
        else:
            self.error = WorkerExited(reason, is_death=process is None or process.has_died)
        self._channel.end(self.error)
        if self.exited.set_running_or_notify_cancel():
            self.exited.set_result(reason)
        if process is not None:
            process.connection.close()
        if self._on_exit is not None:
            self._on_exit(self.error)

    # ---- its end -----------------------------------------------------------------------------------------------------

    def kill(self, why: str | None = None) -> None:
        """At once, with everything it started; if it is still being started, as soon as it is there. Waits for nothing. `why`:
        the reason that `error` gives, in place of the signal."""
        with self._lock:
            self._is_killed = True
            self._reason = self._reason or why
            process = self.process
        if process is not None:
            process.kill()

    def begin_close(self) -> None:
        """Ask it to finish the call in hand and to exit. Its exit is not an error from here on."""
        self._is_closing = True
        self._channel.send_close()

    def close(self, timeout_s: float | None = None) -> None:
        """Blocks until the process is gone: let it finish the call in hand, and kill it if that takes longer than `timeout_s`.
        One that is still being started is not waited for: it is killed when it comes."""
        deadline = time.monotonic() + (CLOSE_S if timeout_s is None else timeout_s)
        self.begin_close()
        with self._lock:
            process = self.process
            self._is_killed = self._is_killed or process is None
        if process is not None and process.exit_reason(max(0.0, deadline - time.monotonic())) is None:
            process.kill()
            process.exit_reason(CLOSE_S)
        self.error = self.error or WorkerExited(f"{self.name} is closed")
        self._channel.end(self.error)
        if process is not None and self._loop is None:
            with suppress(TimeoutError):
                self.exited.result(CLOSE_S)


def _is_readable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))
