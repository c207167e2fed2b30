"""The event log of a session: what the service did, in the order in which it did it. `millstream audit FOLDER` reads it.

    sessions/ID.jsonl    an event per line, numbered by `seq` without a gap

A line reaches the operating system before the client can see what it says, so that it survives `kill -9`. Events of requests
that a restart undoes stay in the log: `model_restored` says from which request on they are computed again.
"""

from __future__ import annotations

import errno
import logging
import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from millstream.events import Event
from millstream.events.encoding import encode_json

logger = logging.getLogger(__name__)
MAX_NUMBERED = 1024  # sessions whose next number is in memory
TAIL = 1 << 20


class SessionStarted(Event, frozen=True, kw_only=True):
    session: str
    max_lag: int | None


class ModelMade(Event, frozen=True, kw_only=True):
    model: str
    rank: int | None  # None: the whole model is trained
    seed: int


class SamplerMade(Event, frozen=True, kw_only=True):
    sampler: str
    model: str | None  # None: the base
    version: int


class RequestAccepted(Event, frozen=True, kw_only=True):
    """It is in the journal. The client gets its answer after this."""

    model: str
    seq_id: int
    request: str
    digest: int  # CRC-32 of the body


class TrainedRow(Struct, frozen=True, array_like=True):
    """A row of a pass."""

    num_tokens: int
    sequences: Sequence[str]  # those that its tokens were sampled in; empty: the client does not say


class PassRecord(Struct, frozen=True, kw_only=True):
    loss_fn: str
    is_backward: bool
    is_sampled: bool  # the loss is for sampled tokens: the session's bound applies
    rows: Sequence[TrainedRow]


class RequestDone(Event, frozen=True, kw_only=True):
    model: str
    seq_id: int
    request: str
    version: int  # of the model when it began
    next_version: int  # and when it ended
    digest: int  # CRC-32 of the result
    error: str | None = None  # None: it has succeeded
    passed: PassRecord | None = None  # None: it is another request, or has failed


class ModelRestored(Event, frozen=True, kw_only=True):
    """From its folder: requests from `next_seq_id` on are computed again."""

    model: str
    version: int
    next_seq_id: int


class SamplesDone(Event, frozen=True, kw_only=True):
    sampler: str
    seq_id: int
    version: int
    num_samples: int
    num_tokens: int


def digest_of(data: bytes) -> int:
    return zlib.crc32(data)


class SessionLogs:
    """One file for each session. A disk that is full costs events, and no request: the numbers have a gap then, which the audit
    finds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next: OrderedDict[str, int] = OrderedDict()

    def emit(self, session_id: str, event: Event) -> None:
        path = self._folder / f"{session_id}.jsonl"
        try:
            seq = self._next.pop(session_id) if session_id in self._next else _next_seq(path)
            self._next[session_id] = seq + 1
            if len(self._next) > MAX_NUMBERED:
                self._next.popitem(last=False)
            _append(path, b'{"seq":%d,' % seq + encode_json(event)[1:] + b"\n")
        except OSError as error:
            logger.warning("an event is not in %s: %s", path, error.strerror)


def _append(path: Path, line: bytes) -> None:
    """All of the line, or nothing."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        if os.write(file, line) != len(line):
            os.ftruncate(file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


def _next_seq(path: Path) -> int:
    """After the last line that is whole. What comes after it was cut off by a crash, and is removed."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        size, length = file.seek(0, os.SEEK_END), TAIL
        while True:
            file.seek(max(0, size - length))
            tail = file.read()
            if tail.count(b"\n") > 1 or length >= size:
                break
            length *= 16
        end = tail.rfind(b"\n") + 1
        file.truncate(size - len(tail) + end)
    last = tail[:end].splitlines()[-1:] or [b'{"seq":-1,']
    return int(last[0].partition(b",")[0].removeprefix(b'{"seq":')) + 1
