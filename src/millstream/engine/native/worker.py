"""The decode loop, on a thread of this process or in a process of its own.

Commands are executed between two decode steps, in the order they were given; their results, and every request that ended, are
sent back in reports. Commands and reports are plain structs: the same in memory and on the wire.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

from msgspec import Struct

from millstream.engine.base import SPAN_S, EngineLine
from millstream.engine.native.batching import Batcher
from millstream.errors import EngineError, RequestRefused
from millstream.types import Completion, ComputePath, Request, RequestKey, Sampled, Weights
from millstream.weights.transfer import WeightsRef


class Add(Struct, frozen=True, tag=True, array_like=True):
    request: Request
    is_watched: bool = False  # whether its tokens are reported as they come; else all together when it ends


class Abort(Struct, frozen=True, tag=True, array_like=True):
    number: int
    key: RequestKey


class Pause(Struct, frozen=True, tag=True, array_like=True):
    number: int


class Resume(Struct, frozen=True, tag=True, array_like=True):
    number: int


class Load(Struct, frozen=True, tag=True, array_like=True):
    """Use the weights that were offered last: they are there (`Link.weights`)."""

    number: int
    version: int


class Close(Struct, frozen=True, tag=True, array_like=True):
    """Requests in flight end as aborted, and the worker stops."""


Command = Add | Abort | Pause | Resume | Load | Close


class Offer(Struct, frozen=True, array_like=True):
    """A call: fetch the weights of the next `Load`, while decoding continues. Its answer is the way by which they came."""

    ref: WeightsRef


class WorkerSpan(Struct, frozen=True, array_like=True):
    """A stretch of decoding. None: what is not counted."""

    seconds: float
    num_tokens: int  # generated
    num_steps: int | None = None  # this and the next two: as in `events.Span`
    num_context: int | None = None
    num_prompt: int | None = None


class WorkerReport(Struct, array_like=True):
    finished: list[tuple[RequestKey, Completion]]
    done: list[tuple[int, str | None]]  # numbers of the commands that were executed, each with an error or None
    running: int = 0
    waiting: int = 0
    tokens_generated: int = 0
    spans: list[WorkerSpan] = []  # that ended now
    broken: str | None = None  # why the worker can never continue, if it cannot
    sampled: list[tuple[RequestKey, Sampled]] = []  # new tokens of requests that are watched and have not ended
    refused: list[tuple[RequestKey, str]] = []  # requests that can never run, each with the reason
    cache_used: float = 0.0  # this and the next two: as in `EngineStats`
    swap_s: float = 0.0
    num_preempted: int = 0
    is_raised: bool = False  # it broke by an error in its own code, which another worker would raise as well
    num_drafted: int = 0  # this and the next: as in `EngineStats`
    num_accepted: int = 0
    path: ComputePath | None = None  # what computes from now on; None: the same as before
    version: int = 0  # of the weights that sample the next token
    line: EngineLine | None = None  # where other processes reach the worker; None: nowhere, or it was said before


class Link(Protocol):
    """The worker's end of the connection."""

    def receive(self, *, block: bool) -> list[Command]:
        """The commands that have come; with `block`, at least one. `Close` if the other end is gone."""
        ...

    def send(self, report: WorkerReport) -> None: ...

    def weights(self) -> Weights:
        """Those of a `Load`."""
        ...

    def release(self) -> None:
        """The `Load` is done: its weights may be freed."""
        ...


class DecodeWorker:
    """`news_s`: at least so long between two reports of the tokens of watched requests."""

    def __init__(self, batcher: Batcher, link: Link, news_s: float = 0.0) -> None:
        self._batcher = batcher
        self._link = link
        self._news_s = news_s
        self._reported_at = -math.inf
        self._is_paused = False
        self._is_closed = False
        self._began: float | None = None
        self._at_begin = (0, 0, 0, 0)  # counts of the batcher
        self._path: ComputePath | None = None
        self._report = WorkerReport([], [])

    def run(self) -> None:
        """Until `Close`. Each turn: execute the commands that have come, then one decode step, then report."""
        try:
            self._send()  # what computes
            while not self._is_closed:
                is_idle = self._is_paused or not self._batcher.has_work
                if is_idle:
                    self._end_span()
                    self._send_if_any()
                for command in self._link.receive(block=is_idle):
                    self._execute(command)
                if self._batcher.has_work and not self._is_paused and not self._is_closed:
                    self._begin_span()
                    self._report.finished += self._batcher.step()
                    self._report_sampled()
                    self._end_long_span()
                self._send_if_any()
        except Exception as error:  # the border of the worker: the engine must fail what waits
            self._report.broken = f"{type(error).__name__}: {error}"
            self._report.is_raised = True
            self._send()

    def _report_sampled(self) -> None:
        if time.monotonic() - self._reported_at >= self._news_s:
            self._reported_at = time.monotonic()
            self._report.sampled += self._batcher.take_unreported()

    def _begin_span(self) -> None:
        if self._began is None:
            self._began = time.monotonic()
            self._at_begin = self._batcher.counts

    def _end_long_span(self) -> None:
        if self._began is not None and time.monotonic() - self._began >= SPAN_S:
            self._end_span()

    def _end_span(self) -> None:
        if self._began is not None:
            counts = (now - begin for now, begin in zip(self._batcher.counts, self._at_begin, strict=True))
            self._report.spans.append(WorkerSpan(time.monotonic() - self._began, *counts))
            self._began = None

    def _execute(self, command: Command) -> None:
        match command:
            case Add():
                self._add(command)
            case Abort():
                self._report.finished += self._batcher.abort(command.key)
                self._report.done.append((command.number, None))
            case Pause() | Resume():
                self._is_paused = isinstance(command, Pause)
                self._report.finished += self._batcher.settle()
                self._report.done.append((command.number, None))
            case Load():
                self._report.done.append((command.number, self._load(command.version)))
            case Close():
                self._is_closed = True
                self._end_span()
                self._report.finished += self._batcher.abort_all()

    def _add(self, command: Add) -> None:
        if any(key == command.request.key for key, *_ in (*self._report.finished, *self._report.refused)):
            self._send()  # a key that is used again: the end of its last request is reported before the start of the new one
        try:
            self._batcher.add(command.request, is_watched=command.is_watched)
        except RequestRefused as error:
            self._report.refused.append((command.request.key, str(error)))

    def _load(self, version: int) -> str | None:
        try:
            self._batcher.load(version, self._link.weights())
        except EngineError as error:
            return str(error)
        finally:
            self._link.release()
        return None

    def _send_if_any(self) -> None:
        report = self._report
        if report.finished or report.done or report.spans or report.sampled or report.refused:
            self._send()

    def _send(self) -> None:
        report = self._report
        self._report = WorkerReport([], [])
        report.running = self._batcher.running
        report.waiting = self._batcher.waiting
        report.tokens_generated = self._batcher.tokens_generated
        report.num_preempted = self._batcher.num_preempted
        report.num_drafted = self._batcher.num_drafted
        report.num_accepted = self._batcher.num_accepted
        report.cache_used = self._batcher.cache_used
        report.swap_s = self._batcher.swap_s
        report.version = self._batcher.version
        path = self._batcher.path
        report.path = None if path == self._path else path
        self._path = path
        self._link.send(report)
