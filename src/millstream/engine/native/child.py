"""Our end of the line to a worker in a process of its own: commands and reports over a socket. No pickle.

The worker ends when the socket closes, however the run died; if it dies itself, the engine is reported as broken. It may come
late, since a cluster takes its time: commands wait for it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from millstream.engine.native.engine import CLOSE_S, OnReport
from millstream.engine.native.worker import Close, Command, Report
from millstream.errors import MillstreamError
from millstream.rpc.frames import Frames, frame
from millstream.rpc.process import WorkerProcess
from millstream.types import Weights

Launch = Callable[[], WorkerProcess]
SOCKET_BUFFER = 4 << 20


class ChildHost:
    """A `Host` (see `millstream.engine.native.engine`) but for the weights, which are for whoever knows them to offer."""

    def __init__(self, launch: Launch, setup: Any) -> None:
        """`setup` is the first message, before any command."""
        self._launch = launch
        self._child: WorkerProcess | None = None
        self._is_closing = False
        self._is_closed = False
        self._outbox = bytearray(frame(setup))
        self._pending = b""
        self._is_due = False
        self._sending = threading.Lock()

    def start(self, on_report: OnReport) -> None:
        self._reader = threading.Thread(target=self._work, args=(on_report,), name="engine reports", daemon=True)
        self._reader.start()

    def send(self, command: Command) -> None:
        """Commands of one turn of the event loop go out together: a group's requests are one call to the system."""
        self._is_closing = self._is_closing or isinstance(command, Close)
        self._pending += frame(command)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send_pending)

    def _send_pending(self) -> None:
        self._is_due = False
        frames = self._pending
        self._pending = b""
        self._send(frames)

    def _send(self, frames: bytes) -> None:
        """From any thread."""
        with self._sending:
            is_first = not self._outbox and self._child is not None
            if is_first and self._child is not None:
                try:
                    frames = frames[self._child.connection.send(frames, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:  # the process is gone: the reader says so to everybody who waits
                    return
            self._outbox += frames
            is_thread_needed = is_first and bool(self._outbox)
        if is_thread_needed:  # it reads more slowly than we write, or not at all: that must not hold the event loop up
            threading.Thread(target=self._send_rest, name="engine commands", daemon=True).start()

    def _send_rest(self) -> None:
        assert self._child is not None
        while True:
            with self._sending:
                piece = bytes(self._outbox[: 1 << 20])
            try:
                sent = self._child.connection.send(piece)
            except OSError:
                sent = len(self._outbox)
            with self._sending:
                del self._outbox[:sent]
                if not self._outbox:
                    return

    def _work(self, on_report: OnReport) -> None:
        try:
            child = self._launch()
        except Exception as error:  # the border of the thread: whoever waits must hear of it
            is_ours = isinstance(error, MillstreamError)
            said = str(error) if is_ours else f"it could not be started: {type(error).__name__}: {error}"
            on_report(Report([], [], broken=said))
            return
        child.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        with self._sending:
            self._child = child
            is_wanted = not self._is_closed
        if not is_wanted:
            child.kill()
            child.connection.close()
            return
        threading.Thread(target=self._send_rest, name="engine commands", daemon=True).start()
        self._read(child, on_report)

    def _read(self, child: WorkerProcess, on_report: OnReport) -> None:
        frames = Frames(child.connection)
        decoder = msgspec.msgpack.Decoder(Report)
        while (payloads := frames.receive(block=True)) is not None:
            for payload in payloads:
                on_report(decoder.decode(payload))
        if not self._is_closing:
            how = child.exit_reason(CLOSE_S) or "its process closed its line"
            on_report(Report([], [], broken=how))

    def join(self) -> None:
        """One that has not come yet is ended when it does."""
        with self._sending:
            self._is_closed = True
            if self._child is None:
                return
        if self._child.exit_reason(CLOSE_S) is None:
            self._child.kill()
            self._child.exit_reason(CLOSE_S)  # reaped, where it is this machine's
        self._reader.join(CLOSE_S)
        self._child.connection.close()


class SocketLink:
    """The worker's end. See `millstream.engine.native.worker.Link`."""

    def __init__(self, line: socket.socket, frames: Frames, loaded: Weights) -> None:
        self._line = line
        self._loaded = loaded
        self._frames = frames
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._sending = threading.Lock()

    def receive(self, *, block: bool) -> list[Command]:
        payloads = self._frames.receive(block=block)
        if payloads is None:
            return [Close()]
        return [self._decoder.decode(payload) for payload in payloads]

    def send(self, report: Report) -> None:
        with self._sending, suppress(OSError):  # nobody listens any more: the next receive says so
            self._line.sendall(frame(report))

    def weights(self) -> Weights:
        return self._loaded

    def loaded(self) -> None:
        """They stay where they are."""
