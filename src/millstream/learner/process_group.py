"""Processes that obey orders one after the other, here or on the nodes of a cluster: from outside. No pickle.

All of a crew take part in every order, or none does. So one that dies or raises ends them all, within seconds: others may wait
for what it will never do. The error names who began it, and what it said last: a `LearnerGone` if a process died, a
`LearnerError` if one refused, which it would do again. No process outlives the crew, or its parent, however that ends.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from millstream.errors import LearnerError, LearnerGone, MillstreamError
from millstream.learner.messages import READY, Answer, Close, Numbered, Order, Write
from millstream.learner.shared_disk import look_for_files
from millstream.rpc.frames import Frames, frame
from millstream.rpc.process import Kind, Launcher, WorkerProcess

CLOSE_S = 10.0
HEARD_S = 1.0
"""How long, after one failed, others may say that it was they who began, or turn out to be dead."""


class ProcessSpec(NamedTuple):
    """What a process is started for."""

    kind: Kind
    module: str
    name: str
    setup: Struct
    """Its first message."""
    place: str = ""
    """Who it is among several: "rank 0 of 2". Empty if it is the only one."""
    descriptors: tuple[int, ...] = ()
    """Passed on to a process of this machine; ours are closed when it is there."""


class Failure(NamedTuple):
    place: str
    what: str
    is_own: bool
    is_death: bool = False
    """It never came, or its process ended, and not because it had nothing more to do."""


class ConnectionBroken(Exception):
    """To whoever waits for an answer that will not come."""


class Remote:
    """One process, from outside. Orders wait until it is there."""

    def __init__(self, job: ProcessSpec, launcher: Launcher, failures: list[Failure]) -> None:
        self._job = job
        self._failures = failures
        self._launcher = launcher
        self.worker: WorkerProcess | None = None
        self.is_closing = False
        self._is_gone = False
        self._is_connected = False
        self._unsent: list[bytes] = [frame(job.setup)]
        self._waiting: dict[int, Future[Answer]] = {READY: Future()}
        self.ready = self._waiting[READY]
        self._lock = threading.Lock()
        self._working = threading.Thread(target=self._work, name=f"{job.name} answers", daemon=True)
        self._working.start()

    def who(self, all_of_them: str) -> str:
        """And on which node it is, where nodes have names."""
        node = "" if self.worker is None else self.worker.node
        return (self._job.place or all_of_them) + (f" on node {node}" if node else "")

    def _work(self) -> None:
        job = self._job
        try:
            worker = self._launcher.launch(job.kind, job.module, name=job.name, descriptors=job.descriptors)
        except Exception as error:  # the border of the thread: whoever waits must hear of it
            is_ours = isinstance(error, MillstreamError)
            said = str(error) if is_ours else f"it could not be started: {type(error).__name__}: {error}"
            self._failures.append(Failure(job.place, said, is_own=True, is_death=True))
            self._give_up()
            return
        finally:
            for descriptor in job.descriptors:
                os.close(descriptor)
        with self._lock:
            self.worker = worker
            is_late = self._is_gone
        if is_late:
            worker.kill()
        self._send_unsent(worker)
        self._read(worker)

    def _send_unsent(self, worker: WorkerProcess) -> None:
        """From here on `ask` sends by itself: when there is nothing left to be sent before."""
        while True:
            with self._lock:
                messages = self._unsent
                self._unsent = []
                if not messages:
                    self._is_connected = True
                    return
            with suppress(OSError):  # it is gone: the reader says so
                worker.connection.sendall(b"".join(messages))

    def ask(self, numbered: Numbered) -> Future[Answer]:
        """`ConnectionBroken` in the future, if no answer will come. Not thread-safe. Blocks for as long as the process does
        not read: without the lock, so that it can be killed."""
        answer: Future[Answer] = Future()
        with self._lock:
            if self._is_gone:
                answer.set_exception(ConnectionBroken())
                return answer
            self._waiting[numbered.number] = answer
            if self.worker is None or not self._is_connected:
                self._unsent.append(frame(numbered))
                return answer
            worker = self.worker
        with suppress(OSError):  # it is gone: the reader says so
            worker.connection.sendall(frame(numbered))
        return answer

    def _read(self, worker: WorkerProcess) -> None:
        frames, decoder = Frames(worker.connection), msgspec.msgpack.Decoder(Answer)
        while (payloads := frames.receive(block=True)) is not None:
            for payload in payloads:
                self._settle(decoder.decode(payload))
        if not self.is_closing:
            how = worker.exit_reason(CLOSE_S) or "its process closed its line"
            self._failures.append(Failure(self._job.place, how, is_own=True, is_death=worker.has_died))
        self._give_up()

    def _settle(self, answer: Answer) -> None:
        with self._lock:
            waiting = self._waiting.pop(answer.number)
        if answer.error is None:
            waiting.set_result(answer)
            return
        self._failures.append(Failure(self._job.place, answer.error, answer.is_own))
        waiting.set_exception(ConnectionBroken())

    def _give_up(self) -> None:
        with self._lock:
            waiting = self._waiting
            self._waiting = {}
            self._is_gone = True
        for answer in waiting.values():
            answer.set_exception(ConnectionBroken())

    def kill(self) -> None:
        self.is_closing = True
        with self._lock:
            self._is_gone = True
        if self.worker is None:
            self._give_up()
        else:
            self.worker.kill()

    def end(self, timeout_s: float) -> None:
        """Returns when there is no process any more; one that does not end by then is killed."""
        with self._lock:
            self._is_gone = True
        if self.worker is None:
            return
        if self.worker.exit_reason(timeout_s) is None:
            self.worker.kill()
            self.worker.exit_reason(CLOSE_S)
        self._working.join(CLOSE_S)
        self.worker.connection.close()


class ProcessGroup:
    """Started, but perhaps not yet ready: the first order waits for that. May be called from several threads."""

    def __init__(self, jobs: Sequence[ProcessSpec], launcher: Launcher, *, who: str) -> None:
        """`who`: what they are together, in words: the learner."""
        self._who = who
        self._failures: list[Failure] = []
        self._numbers = itertools.count(READY + 1)
        self._lock = threading.Lock()
        self._error: LearnerError | None = None
        self._is_ready = False
        self._members = [Remote(job, launcher, self._failures) for job in jobs]

    @property
    def pids(self) -> list[int]:
        """Of those that are there."""
        return [member.worker.pid for member in self._members if member.worker is not None]

    @property
    def members(self) -> list[str]:
        """Who and where each of them is, in words."""
        return [member.who(self._who) for member in self._members]

    def wait(self) -> None:
        """Until all are ready. Raises as `ask` does."""
        if not self._is_ready:
            self._wait([member.ready for member in self._members])
            self._is_ready = True

    def ask(self, orders: Order | Sequence[Order]) -> list[Answer]:
        """One order for all, or one for each; their answers, one by one. Raises `LearnerError`, or `LearnerGone`, if any of
        them failed: then all are ended, and whatever is asked later fails the same way."""
        each = orders if isinstance(orders, Sequence) else [orders] * len(self._members)
        with self._lock:  # all hear of orders in the same order
            self._raise_if_broken()
            number = next(self._numbers)
            answers = [member.ask(Numbered(number, order)) for member, order in zip(self._members, each, strict=True)]
        self.wait()
        return self._wait(answers)

    def _wait(self, answers: Sequence[Future[Answer]]) -> list[Answer]:
        try:
            for answer in futures.wait(answers, return_when=futures.FIRST_EXCEPTION).done:
                answer.result()
        except ConnectionBroken:
            self._break()
        return [answer.result() for answer in answers]

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    def _break(self) -> None:
        deadline = time.monotonic() + HEARD_S
        while self._may_be_told_more() and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            self._error = self._error or self._verdict()
        self.kill()
        self._raise_if_broken()

    def _may_be_told_more(self) -> bool:
        """Of one alone all is known as soon as anything is."""
        known = self._failures if len(self._members) == 1 else [one for one in self._failures if one.is_death]
        return not known

    def _verdict(self) -> LearnerError:
        """A death explains whatever else was said. Where nobody died and nobody refused, they have lost each other."""
        own = [failure for failure in self._failures if failure.is_own]
        deaths = [failure for failure in own if failure.is_death]
        named = next(iter([*deaths, *own, *self._failures]), None)
        kind = LearnerGone if deaths or not own else LearnerError
        if named is None:
            return kind(f"{self._who} broke: its processes were ended")
        return kind(f"{self._who} broke{', ' if named.place else ''}{named.place}: {named.what}")

    def kill(self) -> None:
        for member in self._members:
            member.kill()
        for member in self._members:
            member.end(CLOSE_S)

    def close(self) -> None:
        """Let the work in hand come to its end, for a while. No process is left."""
        deadline = time.monotonic() + CLOSE_S
        if self._lock.acquire(timeout=CLOSE_S):  # one that stands still may have stopped reading
            try:
                self._error = self._error or LearnerError(f"{self._who} is closed")
                for member in self._members:
                    member.is_closing = True
                    member.ask(Numbered(next(self._numbers), Close()))
            finally:
                self._lock.release()
        for member in self._members:
            member.is_closing = True
            member.end(max(0.0, deadline - time.monotonic()))


class CrewSnapshot:
    """Each of them has its part of it, until it is written. See `millstream.learner.Snapshot`."""

    def __init__(self, crew: ProcessGroup, number: int) -> None:
        self._crew = crew
        self._number = number

    def write(self, folder: Path) -> None:
        answers = self._crew.ask(Write(self._number, str(folder.absolute())))
        for answer in answers:
            if answer.refused is not None:
                raise OSError(*answer.refused)
        written = [answer.files for answer in answers]
        look_for_files(folder, dict(zip(self._crew.members, written, strict=True)))
