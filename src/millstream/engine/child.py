"""Our end of the line to a worker in a process of its own: commands and reports over a socket. No pickle.

The child is started as `python -m MODULE`, so that a script of the user's needs no guard around its main part. It ends when the
socket closes, however the parent died; if it dies itself, the parent reports the engine as broken.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from millstream.engine.torch import CLOSE_S, OnReport
from millstream.engine.worker import Close, Command, Report
from millstream.frames import Frames, frame
from millstream.types import Weights

SOCKET_BUFFER = 4 << 20


class ChildHost:
    """A `Host` (see `millstream.engine.torch`) but for the weights, which are for whoever knows them to offer."""

    def __init__(self, module: str, argument: str, *, descriptors: Sequence[int] = ()) -> None:
        """`python -m module`, with the numbers of the socket and of these descriptors, and the argument."""
        self._socket, theirs = socket.socketpair()
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        passed = [theirs.fileno(), *descriptors]
        self._child = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, passed), argument],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        theirs.close()
        self._is_closing = False
        self._outbox = bytearray()
        self._pending, self._is_due = b"", False
        self._sending = threading.Lock()

    def start(self, on_report: OnReport) -> None:
        self._reader = threading.Thread(target=self._read, args=(on_report,), name="engine reports", daemon=True)
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
        frames, self._pending = self._pending, b""
        with self._sending:
            is_first = not self._outbox
            if is_first:
                try:
                    frames = frames[self._socket.send(frames, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:  # the process is gone: the reader says so to everybody who waits
                    return
            self._outbox += frames
            is_thread_needed = is_first and bool(self._outbox)
        if is_thread_needed:  # it reads more slowly than we write, or not at all: that must not hold the event loop up
            threading.Thread(target=self._send_rest, name="engine commands", daemon=True).start()

    def _send_rest(self) -> None:
        while True:
            with self._sending:
                piece = bytes(self._outbox[: 1 << 20])
            try:
                sent = self._socket.send(piece)
            except OSError:
                sent = len(self._outbox)
            with self._sending:
                del self._outbox[:sent]
                if not self._outbox:
                    return

    def _read(self, on_report: OnReport) -> None:
        frames = Frames(self._socket)
        decoder = msgspec.msgpack.Decoder(Report)
        while (payloads := frames.receive(block=True)) is not None:
            for payload in payloads:
                on_report(decoder.decode(payload))
        code = self._child.wait()
        if not self._is_closing:
            on_report(Report([], [], broken=f"its process ended with exit code {code}"))

    def join(self) -> None:
        try:
            self._child.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._reader.join()
        self._socket.close()


class SocketLink:
    """The child's end. See `millstream.engine.worker.Link`."""

    def __init__(self, line: socket.socket, loaded: Weights) -> None:
        self._line, self._loaded = line, loaded
        self._frames = Frames(line)
        self._decoder = msgspec.msgpack.Decoder(Command)

    def receive(self, *, block: bool) -> list[Command]:
        payloads = self._frames.receive(block=block)
        if payloads is None:
            return [Close()]
        return [self._decoder.decode(payload) for payload in payloads]

    def send(self, report: Report) -> None:
        with suppress(OSError):  # nobody listens any more: the next receive says so
            self._line.sendall(frame(report))

    def weights(self) -> Weights:
        return self._loaded
