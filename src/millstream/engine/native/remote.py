"""Our engine on a node of a cluster: commands and reports over a socket (`engine.native.child`), weights by parcel.

Weights are fetched and verified beside decoding, and only then does the swap wait for its turn between two steps: decoding
stands still for as long as the copy takes, not for as long as the network does.
"""

from __future__ import annotations

import itertools
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

import torch
from msgspec import Struct

from millstream.engine.native.child import ChildHost, Launch, SocketLink
from millstream.engine.native.engine import CLOSED, START_S, OnReport
from millstream.engine.native.process import Plan, batcher_from
from millstream.engine.native.worker import Command, Offer, Report, Worker
from millstream.errors import WeightsError, WeightsSuperseded, WeightsUnreachable
from millstream.model.load import set_up_cpu
from millstream.rpc.frames import Frames, frame
from millstream.rpc.process import WorkerProcess, own_node
from millstream.types import Weights
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.fetcher import Taken, WeightsFetcher
from millstream.weights.transfer.remote_weights import RemoteWeights

MODULE = "millstream.engine.native.remote"
FIRST_OFFER = 1 << 40
"""Offers have numbers of their own: what is done of them is heard here, and nowhere else."""
Stage = Callable[[Weights], WeightsRef]
KINDS = {kind.__name__: kind for kind in (WeightsError, WeightsSuperseded, WeightsUnreachable)}
"""Of errors that go over the line by name: whoever waits for weights goes on by what kind of error it is."""


class Setup(Struct, frozen=True, kw_only=True):
    """The first message."""

    plan: Plan
    parcel: WeightsRef
    """The whole model, to begin with."""


class RemoteHost(ChildHost):
    """Our end. See `engine.native.engine.Host`. `stage` puts weights that are in this process where other processes can fetch
    them."""

    def __init__(self, launch: Launch, setup: Setup, stage: Stage, *, answer_s: float) -> None:
        super().__init__(launch, setup)
        self._stage = stage
        self._answer_s = answer_s
        self._offers = itertools.count(FIRST_OFFER)
        self._taken: dict[int, queue.SimpleQueue[WeightsError | None]] = {}
        self._gone: str | None = None
        self._has_come = threading.Event()
        self._has_begun = threading.Event()
        """Whether its process is there, and whether it has said its first word. Both are set, too, when it never will."""

    def start(self, on_report: OnReport) -> None:
        def hear(report: Report) -> None:
            self._has_begun.set()
            mine = [one for one in report.done if one[0] >= FIRST_OFFER]
            report.done = [one for one in report.done if one[0] < FIRST_OFFER]
            for number, error in mine:
                if (answer := self._taken.get(number)) is not None:  # else it came too late: nobody waits any more
                    answer.put(None if error is None else KINDS.get(report.kind, WeightsError)(error))
            on_report(report)  # first: whoever is told that its offer failed looks whether the engine lives
            if report.broken is not None:
                self._end_offers(report.broken)

        self._hear = hear
        super().start(hear)

    def _read(self, child: WorkerProcess, on_report: OnReport) -> None:
        self._has_come.set()
        super()._read(child, on_report)

    def join(self) -> None:
        super().join()
        self._end_offers(CLOSED)

    def _end_offers(self, why: str) -> None:
        """Those that wait, and those that come: nobody will answer them."""
        self._gone = why
        self._has_come.set()
        self._has_begun.set()
        for answer in list(self._taken.values()):
            answer.put(WeightsError(why))

    def offer(self, weights: Weights) -> None:
        """Returns when they are there, and verified. Raises `WeightsError` where they could not be had, of the kind that it is
        there. How long it takes a cluster to find room, or an engine to begin, counts for nothing: both have limits of their
        own."""
        self._wait_until_begun()
        parcel = weights.parcel if isinstance(weights, RemoteWeights) else self._stage(weights)
        number, answer = next(self._offers), queue.SimpleQueue[WeightsError | None]()
        self._taken[number] = answer
        try:
            self._raise_if_gone()
            self._send(frame(Offer(number, parcel)))
            error = answer.get(timeout=self._answer_s)
        except queue.Empty:
            raise WeightsUnreachable(f"weights were offered and not taken within {self._answer_s:g} s") from None
        finally:
            del self._taken[number]
        if error is not None:
            raise error

    def _wait_until_begun(self) -> None:
        """The launcher bounds the time until its process is there. One that says nothing from then on is given up. Raises
        `WeightsError` if it is gone."""
        self._has_come.wait()
        limit_s = max(self._answer_s, START_S)
        if not self._has_begun.wait(limit_s):
            self._hear(Report([], [], broken=f"it has said nothing in the {limit_s:g} s since its process was started"))
        self._raise_if_gone()

    def _raise_if_gone(self) -> None:
        if self._gone is not None:
            raise WeightsError(self._gone)


class RemoteLink(SocketLink):
    """The worker's end. Offers are taken on a thread of their own."""

    def __init__(self, line: socket.socket, frames: Frames, inbox: WeightsFetcher) -> None:
        super().__init__(line, frames, {})
        self._inbox = inbox
        self._taken = ExitStack()
        self._offers: queue.SimpleQueue[Offer] = queue.SimpleQueue()
        threading.Thread(target=self._take, name="weights", daemon=True).start()

    def receive(self, *, block: bool) -> list[Command]:
        while True:
            commands = super().receive(block=block)
            for command in commands:
                if isinstance(command, Offer):
                    self._offers.put(command)
            others: list[Command] = [command for command in commands if not isinstance(command, Offer)]
            if others or not block:
                return others

    def _take(self) -> None:
        while True:
            offer = self._offers.get()
            self.loaded()  # of one that was never loaded
            try:
                taken: Taken = self._inbox.take(offer.parcel)
            except WeightsError as error:
                report = Report([], [(offer.number, str(error))], is_aside=True, kind=type(error).__name__)
                self.send(report)
                continue
            self._taken.callback(taken.release)
            self._loaded = taken.weights
            self.send(Report([], [(offer.number, None)], is_aside=True))

    def loaded(self) -> None:
        """What was taken is in use: its place may be another's, once the device has read it."""
        if self._loaded and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._loaded = {}
        self._taken.close()


def work(line: socket.socket) -> None:
    """The worker: until the socket closes."""
    set_up_cpu()
    frames = Frames(line)
    setup = frames.first_as(Setup)
    if setup is None:
        return
    inbox = WeightsFetcher(own_node())
    try:
        with inbox.take(setup.parcel) as taken:
            batcher = batcher_from(setup.plan, taken.weights)
    except Exception as error:  # the border of the process: whoever waits must hear of it
        line.sendall(frame(Report([], [], broken=f"it could not begin: {type(error).__name__}: {error}")))
        return
    link = RemoteLink(line, frames, inbox)
    link.send(Report([], []))  # ready: from here on, silence with work to do is a fault
    Worker(batcher, link).run()
