"""The end of a line at which orders are obeyed, in a process of its own. See `learner.process_group` for the other end.

Orders are carried out one after the other; snapshots are written beside them. The process ends with the socket, at once and
whatever it is doing: when the parent is gone, nobody needs what it has.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from millstream.errors import LearnerError, MillstreamError
from millstream.learner.messages import READY, Answer, Close, Numbered, Order, Write
from millstream.learner.shared_disk import files_in
from millstream.model.load import set_up_cpu
from millstream.rpc.frames import Frames, frame

MAX_KEPT = 2
"""Snapshots: one that is being written, and the next."""
ECHOES = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
Obey = Callable[[Numbered], Answer]
T = TypeVar("T")
SetupT = TypeVar("SetupT", bound=Struct)


class Line:
    """Listens from the beginning, so that the process ends with it."""

    def __init__(self, end: socket.socket, frames: Frames) -> None:
        self._end = end
        self._frames = frames
        self._sending = threading.Lock()
        self._orders: queue.SimpleQueue[Numbered] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Numbered] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(Numbered)
        while (payloads := self._frames.receive(block=True)) is not None:
            for payload in payloads:
                numbered = decoder.decode(payload)
                (self._writes if isinstance(numbered.order, Write) else self._orders).put(numbered)
        os._exit(0)

    def send(self, answer: Answer) -> None:
        with self._sending, suppress(OSError):  # nobody listens any more: the listener ends us
            self._end.sendall(frame(answer))

    def work(self, obey: Obey) -> None:
        """Until it is told to close."""
        writes = threading.Thread(target=self._carry_out, args=(self._writes, obey), name="snapshots", daemon=True)
        writes.start()
        self._carry_out(self._orders, obey)

    def _carry_out(self, orders: queue.SimpleQueue[Numbered], obey: Obey) -> None:
        while not isinstance((numbered := orders.get()).order, Close):
            try:
                answer = obey(numbered)
            except Exception as error:  # the border of the process: whoever waits must hear of it
                traceback.print_exc()
                answer = failed(numbered.number, error)
            self.send(answer)


class Kept(Generic[T]):
    """Snapshots that wait to be written, by number: the newest few."""

    def __init__(self) -> None:
        self._kept: dict[int, T] = {}

    def keep(self, number: int, snapshot: T) -> None:
        self._kept[number] = snapshot
        for old in sorted(self._kept)[:-MAX_KEPT]:
            del self._kept[old]

    def write(self, number: int, snapshot: int, folder: Path, write: Callable[[T, Path], None]) -> Answer:
        """The answer to the order of this number. A disk that refuses leaves all else as it was."""
        try:
            write(self._kept.pop(snapshot), folder)
            return Answer(number=number, files=files_in(folder))
        except OSError as error:
            return Answer(number=number, refused=(error.errno or 0, error.strerror or str(error)))


def failed(number: int, error: Exception) -> Answer:
    is_echo = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in ECHOES)
    said = str(error) if isinstance(error, MillstreamError) else f"{type(error).__name__}: {error}"
    return Answer(number=number, error=said, is_own=not is_echo)


def not_for(who: str, order: Order) -> LearnerError:
    return LearnerError(f"{type(order).__name__} is no order for {who}")


def obey_line(line: socket.socket, kind: type[SetupT], begin: Callable[[SetupT], Obey]) -> None:
    """The whole life of a process: its setup, what it makes of that, and orders until it is told to close."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    frames = Frames(line)
    first = frames.first()
    if first is None:
        return
    end = Line(line, frames)
    set_up_cpu()
    try:
        obey = begin(msgspec.msgpack.decode(first, type=kind))
    except Exception as error:  # the border of the process: whoever waits must hear of it
        traceback.print_exc()
        end.send(failed(READY, error))
    else:
        end.send(Answer(number=READY))
        end.work(obey)


def main(work: Callable[[socket.socket], None]) -> None:
    """Of `python -m MODULE LINE`."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # the parent's to handle; when it ends, the socket closes
    work(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # at once: what a process group still holds on to can keep it
