"""Lines: other processes than the driver send requests to an engine's process, and get what it samples for them.

    driver            add, abort, pause, resume, load ──▶  engine's process  ◀── add, abort   rollout worker (`LineHost`)
                      ◀── reports of its own requests            reports of its requests, and the version ──▶

`LinkHub` is the engine's side, of our own engine and of vLLM's. Commands of all connections are executed between two decode
steps, in the order in which they are read. A report goes to the connection whose request it is about. A line that closes aborts
its requests; when the engine closes, its lines do, and their requests continue on other engines.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import queue
import secrets
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from msgspec import MsgspecError, Struct, structs

from millstream.clock import Clock
from millstream.decoding import msgpack_decoder
from millstream.engine.base import NO_REQUEST, EngineLine
from millstream.engine.native.engine import TorchEngine
from millstream.engine.native.worker import Abort, Add, Command, WorkerReport
from millstream.errors import EngineGone
from millstream.events import EventSink
from millstream.rpc.call import Channel
from millstream.rpc.frames import FrameError, Frames, frame, keep_alive
from millstream.rpc.process import own_host
from millstream.types import RequestKey, Weights

HELLO_BYTES = 1024
HELLO_S = 10.0
CONNECT_S = 10.0
WELCOME = b"1"  # the engine's answer to a hello: nothing is sent before
FIRST_NUMBER = 1 << 40  # of commands of lines: the driver's are below


class LineHello(Struct, frozen=True):
    """The first message on a line."""

    token: str


class _Line:
    """The engine's end of one line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.channel = Channel(connection)
        self.version = -1  # that was reported


class LinkHub:
    """The lines of an engine's process. Commands may be read on another thread than that which reports."""

    def __init__(self) -> None:
        self._server = socket.create_server((own_host(), 0), backlog=64)
        self.address = EngineLine(own_host(), self._server.getsockname()[1], secrets.token_hex(16))
        self._woken, self._wake = socket.socketpair()
        self._new: queue.SimpleQueue[_Line] = queue.SimpleQueue()
        self._lines: dict[int, _Line] = {}  # by descriptor
        self._owners: dict[RequestKey, list[_Line]] = {}  # requests of one key end in the order in which they started
        self._orders: dict[int, tuple[_Line, int]] = {}
        self._numbers = itertools.count(FIRST_NUMBER)
        self._last = WorkerReport([], [])
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        threading.Thread(target=self._accept, name="lines", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connection,), name="hello", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """A client that sends no valid hello within `HELLO_S` is disconnected."""
        connection.settimeout(HELLO_S)
        try:
            hello = Frames(connection, HELLO_BYTES).first_as(LineHello)
        except (MsgspecError, OSError):
            hello = None
        if hello is None or not hmac.compare_digest(hello.token.encode(), self.address.token.encode()):
            connection.close()
            return
        connection.settimeout(None)
        keep_alive(connection)
        connection.sendall(WELCOME)
        self._new.put(_Line(connection))
        self._wake.send(b"x")

    # ---- in ----------------------------------------------------------------------------------------------------------

    def wait(self, driver: socket.socket, *, block: bool) -> tuple[bool, list[Command]]:
        """Whether the driver has sent something, and the commands of lines; with `block`, waits for either."""
        self._poll.register(driver, select.POLLIN)
        commands: list[Command] = []
        is_driver = False
        ready = self._poll.poll(None if block else 0)
        with self._lock:
            for descriptor, _ in ready:
                if descriptor == driver.fileno():
                    is_driver = True
                elif descriptor == self._woken.fileno():
                    self._add_lines()
                else:
                    commands += self._read(self._lines[descriptor])
        return is_driver, commands

    def _add_lines(self) -> None:
        for _ in self._woken.recv(64):
            line = self._new.get()
            self._lines[line.connection.fileno()] = line
            self._poll.register(line.connection, select.POLLIN)
            self._tell(line, WorkerReport([], []))

    def _read(self, line: _Line) -> list[Command]:
        try:
            packets = line.channel.receive(block=False)
            sent = [msgpack_decoder(Add | Abort).decode(packet.body) for packet in packets or []]
        except (MsgspecError, FrameError):
            packets, sent = None, []
        if packets is None:
            return self._close(line)
        return [own for command in sent for own in self._own(line, command)]

    def _own(self, line: _Line, command: Add | Abort) -> list[Command]:
        """After a partition that only one end has noticed, a key may come on a second line: the first has lost it, and what
        still arrives there is not about the new request."""
        if isinstance(command, Add):
            owners = self._owners.setdefault(command.request.key, [])
            owners.append(line)
            is_elsewhere = len(owners) > 1 and owners[-2] is not line
            return [Abort(-1, command.request.key), command] if is_elsewhere else [command]
        key = command.key if self._has(line, command.key) else NO_REQUEST
        if command.number < 0:
            return [Abort(-1, key)]
        number = next(self._numbers)
        self._orders[number] = line, command.number
        return [Abort(number, key)]

    def _has(self, line: _Line, key: RequestKey) -> bool:
        """Whether the request of this key that is in flight came on this line."""
        owners = self._owners.get(key)
        return owners is not None and owners[-1] is line

    def _close(self, line: _Line) -> list[Command]:
        del self._lines[line.connection.fileno()]
        self._poll.unregister(line.connection)
        line.connection.close()
        return [Abort(-1, key) for key in self._owners if self._has(line, key)]

    # ---- out ---------------------------------------------------------------------------------------------------------

    def split(self, report: WorkerReport) -> WorkerReport:
        """Send to each line what is its own. Returns what is the driver's."""
        with self._lock:
            return self._split(report)

    def _split(self, report: WorkerReport) -> WorkerReport:
        self._last = report
        of: dict[_Line, WorkerReport] = {}

        def own(line: _Line) -> WorkerReport:
            return of.setdefault(line, WorkerReport([], []))

        rest = WorkerReport([], [])
        for key, sampled in report.sampled:
            owners = self._owners.get(key)
            (rest if owners is None else own(owners[0])).sampled.append((key, sampled))
        for key, completion in report.finished:
            line = self._ended(key)
            (rest if line is None else own(line)).finished.append((key, completion))
        for key, reason in report.refused:
            line = self._ended(key)
            (rest if line is None else own(line)).refused.append((key, reason))
        for number, error in report.done:
            line, theirs = self._orders.pop(number, (None, number))
            (rest if line is None else own(line)).done.append((theirs, error))
        for line in self._lines.values():
            if line in of or line.version != report.version or report.spans:  # that it works is known by its reports
                self._tell(line, of.get(line, WorkerReport([], [])))
        return structs.replace(
            report, sampled=rest.sampled, finished=rest.finished, refused=rest.refused, done=rest.done
        )

    def _ended(self, key: RequestKey) -> _Line | None:
        owners = self._owners.get(key)
        if owners is None:
            return None
        line = owners.pop(0)
        if not owners:
            del self._owners[key]
        return line

    def _tell(self, line: _Line, own: WorkerReport) -> None:
        line.version = self._last.version
        line.channel.send(
            structs.replace(
                self._last,
                sampled=own.sampled,
                finished=own.finished,
                refused=own.refused,
                done=own.done,
                spans=[],
                path=None,
            )
        )

    def close(self) -> None:
        """Before the engine ends its requests: those of lines continue elsewhere."""
        self._server.close()
        with self._lock:
            for line in list(self._lines.values()):
                self._close(line)


class LineHost:
    """A worker process that another process has started, reached through a line: see `engine.native.host.EngineHost`. Weights
    are the other process's to load."""

    def __init__(self, line: EngineLine) -> None:
        self._line = line
        self._channel = Channel()
        self._connection: socket.socket | None = None
        self._is_closed = False

    def start(self, on_report: Callable[[WorkerReport], None]) -> None:
        threading.Thread(target=self._read, args=(on_report,), name="line", daemon=True).start()

    def _read(self, on_report: Callable[[WorkerReport], None]) -> None:
        why = "its line was closed"
        try:
            connection = socket.create_connection((self._line.host, self._line.port), timeout=CONNECT_S)
            keep_alive(connection)
            connection.sendall(frame(LineHello(self._line.token)))
            if connection.recv(len(WELCOME)) != WELCOME:
                raise ConnectionResetError("the engine refused it")
            connection.settimeout(None)
            self._connection = connection
            if self._is_closed:
                self._shut()
            self._channel.connect(connection)
            while (packets := self._channel.receive(block=True)) is not None:
                for packet in packets:
                    on_report(msgpack_decoder(WorkerReport).decode(packet.body))
        except (OSError, MsgspecError) as error:
            why = f"its line broke: {error}"
        on_report(WorkerReport([], [], broken=why))

    def send(self, command: Command) -> None:
        self._channel.post(command)

    def offer(self, version: int, weights: Weights) -> str:
        raise NotImplementedError("the driver of the run loads weights")

    async def close(self) -> None:
        self._is_closed = True
        self._shut()

    def _shut(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


class LineEngine(TorchEngine):
    """An engine through a line. Its version is the one that it reports. On the event loop, `on_version` is called when that has
    changed, `on_broken` when the line has broken."""

    def __init__(
        self,
        name: str,
        slots: int,
        line: EngineLine,
        on_version: Callable[[], None],
        on_broken: Callable[[LineEngine, EngineGone], None],
        *,
        clock: Clock,
        sink: EventSink,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_version = on_version
        self._on_broken = on_broken
        super().__init__(LineHost(line), slots=slots, max_length=None, clock=clock, sink=sink, name=name)

    def _on_report(self, report: WorkerReport) -> None:
        is_new = report.version > self._version
        if is_new:
            self._version = report.version
        super()._on_report(report)
        if is_new:
            self._tell(self._on_version)

    def _break(self, reason: str, kind: type[EngineGone] = EngineGone) -> None:
        super()._break(reason, kind)
        if self._broken is not None:
            self._tell(self._on_broken, self, self._broken)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nothing waits
            self._loop.call_soon_threadsafe(function, *arguments)
