"""A learner's ranks as processes of this machine: orders and answers over sockets, weights in shared memory. No pickle.

Every rank takes part in every order, or none does. So one that dies or raises ends them all, within seconds: the others wait in
a collective that will never come about. The error names the rank that began it, and what it said last: a `LearnerGone` if a
process died, a `LearnerError` if a rank refused, which it would do again. No process outlives the learner, or its parent,
however that ends.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import structs
from torch._C._distributed_c10d import TCPStore
from transformers import PreTrainedModel

from millstream.errors import LearnerError, LearnerGone
from millstream.frames import Frames, frame
from millstream.learner.orders import READY, Answer, Close, Numbered, Order, Plan

logger = logging.getLogger(__name__)
CLOSE_S = 10.0
HEARD_S = 1.0
"""How long, after a rank failed, others may say that it was they who began, or turn out to be dead."""
MOST_LINES = 20
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Failure(NamedTuple):
    rank: int
    what: str
    is_own: bool
    is_death: bool = False
    """Its process ended by itself, and not because it had nothing more to do."""


class Broken(Exception):
    """To whoever waits for an answer that will not come."""


class Member:
    """One rank's process, from outside."""

    def __init__(self, plan: Plan, memory: int, folder: Path, failures: list[Failure]) -> None:
        self.rank, self._failures = plan.rank, failures
        (folder / f"plan-{plan.rank}.json").write_bytes(msgspec.json.encode(plan))
        self._socket, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(memory), str(folder), str(plan.rank)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "millstream.learner.rank_main", *arguments],
            pass_fds=[theirs.fileno(), memory],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,
            env=os.environ | {"GLOO_SOCKET_IFNAME": LOOPBACK},
        )
        theirs.close()
        self.is_closing = self._is_gone = False
        self._said: deque[str] = deque(maxlen=MOST_LINES)
        self._waiting: dict[int, Future[Answer]] = {READY: Future()}
        self.ready = self._waiting[READY]
        self._lock = threading.Lock()
        self._hearing = threading.Thread(target=self._hear, name=f"rank {plan.rank} says", daemon=True)
        self._reading = threading.Thread(target=self._read, name=f"rank {plan.rank} answers", daemon=True)
        self._hearing.start()
        self._reading.start()

    def ask(self, numbered: Numbered) -> Future[Answer]:
        """`Broken` in the future, if no answer will come."""
        answer: Future[Answer] = Future()
        with self._lock:
            if self._is_gone:
                answer.set_exception(Broken())
                return answer
            self._waiting[numbered.number] = answer
            with suppress(OSError):  # it is gone: the reader says so
                self._socket.sendall(frame(numbered))
        return answer

    def _hear(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said.append(line.decode(errors="replace").rstrip())
            logger.warning("rank %d: %s", self.rank, self._said[-1])

    def _read(self) -> None:
        frames, decoder = Frames(self._socket), msgspec.msgpack.Decoder(Answer)
        while (payloads := frames.receive(block=True)) is not None:
            for payload in payloads:
                self._settle(decoder.decode(payload))
        code = self.process.wait()
        self._hearing.join(HEARD_S)
        if not self.is_closing:
            last = f"; it said last: {self._said[-1]}" if self._said else ""
            what = f"its process ended with exit code {code}{last}"
            self._failures.append(Failure(self.rank, what, is_own=True, is_death=code != 0))
        self._give_up()

    def _settle(self, answer: Answer) -> None:
        with self._lock:
            waiting = self._waiting.pop(answer.number)
        if answer.error is None:
            waiting.set_result(answer)
            return
        self._failures.append(Failure(self.rank, answer.error, answer.is_own))
        waiting.set_exception(Broken())

    def _give_up(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._is_gone = True
        for answer in waiting.values():
            answer.set_exception(Broken())

    def end(self, timeout_s: float) -> None:
        """Returns when there is no process any more; one that does not end by then is killed."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reading.join()
        self._hearing.join()
        self._socket.close()


class Ranks:
    """Started, but perhaps not yet ready: the first order waits for that. May be called from several threads."""

    def __init__(self, plan: Plan, model: PreTrainedModel, memory: int) -> None:
        self._store = TCPStore("127.0.0.1", 0, plan.num_ranks + 1, is_master=True, wait_for_workers=False)
        self._folder = Path(tempfile.mkdtemp(prefix="millstream-"))  # a few kilobytes, until all are ready
        model.config.save_pretrained(self._folder)
        self._failures: list[Failure] = []
        self._members: list[Member] = []
        self._numbers = itertools.count(READY + 1)
        self._lock = threading.Lock()
        self._error: LearnerError | None = None
        self._is_ready = False
        for rank in range(plan.num_ranks):
            device = f"cuda:{rank}" if plan.device == "cuda" else plan.device
            mine = structs.replace(plan, rank=rank, port=self._store.port, device=device)
            self._members.append(Member(mine, memory, self._folder, self._failures))

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members]

    def wait(self) -> None:
        """Until all are ready. Raises `LearnerError` as `ask` does."""
        if not self._is_ready:
            self._wait([member.ready for member in self._members])
            self._is_ready = True
            shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, orders: Order | Sequence[Order]) -> list[Answer]:
        """One order for all, or one for each; their answers, by rank. Raises `LearnerError` if any of them failed: then all
        are ended, and whatever is asked later fails the same way."""
        each = orders if isinstance(orders, Sequence) else [orders] * len(self._members)
        with self._lock:  # all ranks hear of orders in the same order
            self._raise_if_broken()
            number = next(self._numbers)
            answers = [member.ask(Numbered(number, order)) for member, order in zip(self._members, each, strict=True)]
        self.wait()
        return self._wait(answers)

    def _wait(self, answers: Sequence[Future[Answer]]) -> list[Answer]:
        try:
            for answer in futures.wait(answers, return_when=futures.FIRST_EXCEPTION).done:
                answer.result()
        except Broken:
            self._break()
        return [answer.result() for answer in answers]

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    def _break(self) -> None:
        deadline = time.monotonic() + HEARD_S
        while not any(failure.is_death for failure in self._failures) and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._lock:
            self._error = self._error or self._verdict()
        self.kill()
        self._raise_if_broken()

    def _verdict(self) -> LearnerError:
        """A death explains whatever else was said. Where nobody died and nobody refused, they have lost each other."""
        own = [failure for failure in self._failures if failure.is_own]
        deaths = [failure for failure in own if failure.is_death]
        named = next(iter([*deaths, *own, *self._failures]), None)
        what = "its ranks were ended" if named is None else f"rank {named.rank} of {len(self._members)}: {named.what}"
        kind = LearnerGone if deaths or not own else LearnerError
        return kind(f"the learner broke, {what}")

    def kill(self) -> None:
        for member in self._members:
            member.is_closing = True
            member.process.kill()
        for member in self._members:
            member.end(CLOSE_S)

    def close(self) -> None:
        """Let the work in hand come to its end, for a while. No process is left."""
        deadline = time.monotonic() + CLOSE_S
        if self._lock.acquire(timeout=CLOSE_S):  # a rank that stands still may have stopped reading
            try:
                self._error = self._error or LearnerError("the learner is closed")
                for member in self._members:
                    member.is_closing = True
                    member.ask(Numbered(next(self._numbers), Close()))
            finally:
                self._lock.release()
        for member in self._members:
            member.is_closing = True
            member.end(max(0.0, deadline - time.monotonic()))
        shutil.rmtree(self._folder, ignore_errors=True)
