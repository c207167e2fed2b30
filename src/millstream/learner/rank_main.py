"""A rank in a process of its own, here or on a node of a cluster. See `learner.ranks` for the other end.

It ends with the socket, at once and whatever it is doing: when the parent is gone, nobody needs what it has.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from transformers import AutoConfig

from millstream import imports
from millstream.errors import MillstreamError
from millstream.frames import Frames, frame
from millstream.learner import optimizer
from millstream.learner.orders import (
    READY,
    Accumulate,
    Answer,
    BeginBatch,
    Close,
    Count,
    GatherWeights,
    Keep,
    Measure,
    Numbered,
    Restore,
    Setup,
    Step,
    Write,
    unpack,
)
from millstream.learner.rank import Rank, policies
from millstream.learner.ranks import LOOPBACK
from millstream.learner.sharding import join, sharded
from millstream.learner.state import on_host, read_shards, read_state, write_shards, write_state
from millstream.model.adapters import add_adapters
from millstream.model.load import load_weights, new_model, set_up_cpu
from millstream.model.shared import SharedWeights
from millstream.parcels import Parcel
from millstream.parcels.inbox import Inbox
from millstream.parcels.outbox import open_outbox
from millstream.workers import own_node

MOST_KEPT = 2
"""Snapshots: one that is being written, and the next."""
ECHOES = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


class Line:
    """The rank's end of the socket. Listens from the beginning, so that the process ends with it."""

    def __init__(self, end: socket.socket, frames: Frames) -> None:
        self._end, self._frames, self._sending = end, frames, threading.Lock()
        self.orders: queue.SimpleQueue[Numbered] = queue.SimpleQueue()
        self.writes: queue.SimpleQueue[Numbered] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(Numbered)
        while (payloads := self._frames.receive(block=True)) is not None:
            for payload in payloads:
                numbered = decoder.decode(payload)
                (self.writes if isinstance(numbered.order, Write) else self.orders).put(numbered)
        os._exit(0)

    def send(self, answer: Answer) -> None:
        with self._sending, suppress(OSError):  # nobody listens any more: the listener ends us
            self._end.sendall(frame(answer))


class Post:
    """One rank at its work. Orders are carried out one after the other; snapshots are written beside them."""

    def __init__(self, rank: Rank, setup: Setup, line: Line) -> None:
        self._rank, self._plan, self._line = rank, setup.plan, line
        self._dtype = getattr(torch, setup.plan.dtype)
        self._kept: dict[int, optimizer.State] = {}
        self._shared = None if setup.layout is None else SharedWeights(setup.memory or 0, setup.layout)
        self._outbox = None if setup.delivery is None else open_outbox(setup.delivery)
        is_alone = setup.plan.num_ranks == 1
        self._files = None if is_alone else dist.new_group(backend="gloo")
        """A group of their own: training has its collectives meanwhile. None: there is one rank."""

    def work(self) -> None:
        """Until it is told to close. Weights that it let others have are gone then, except with those who have taken them."""
        writes = threading.Thread(target=self._carry_out, args=(self._line.writes,), name="snapshots", daemon=True)
        writes.start()
        self._carry_out(self._line.orders)
        if self._outbox is not None:
            self._outbox.close()

    def _carry_out(self, orders: queue.SimpleQueue[Numbered]) -> None:
        while not isinstance((numbered := orders.get()).order, Close):
            try:
                answer = self._obey(numbered)
            except Exception as error:  # the border of the rank: whoever waits must hear of it
                traceback.print_exc()
                answer = failed(numbered.number, error)
            self._line.send(answer)

    def _obey(self, numbered: Numbered) -> Answer:
        number = numbered.number
        match numbered.order:
            case BeginBatch():
                self._rank.begin_batch()
            case Accumulate(passes):
                for rows in passes:
                    self._rank.accumulate(unpack(rows))
            case Measure(passes):
                found = [of_row for rows in passes for of_row in self._rank.logprobs(unpack(rows))]
                return Answer(number=number, logprobs=b"".join(one.tobytes() for one in found))
            case Count():
                return Answer(number=number, tally=self._rank.tally())
            case Step(counted):
                return Answer(number=number, stepped=self._rank.step(counted))
            case GatherWeights(gathering):
                return Answer(number=number, parcel=self._gather(gathering))
            case Keep(snapshot):
                self._kept[snapshot] = on_host(self._rank.state())
                for old in sorted(self._kept)[:-MOST_KEPT]:
                    del self._kept[old]
            case Write(snapshot, folder):
                try:
                    self._write(self._kept.pop(snapshot), Path(folder))
                except OSError as error:
                    return Answer(number=number, refused=(error.errno or 0, error.strerror or str(error)))
            case Restore(folder):
                self._rank.restore(self._read(Path(folder)))
        return Answer(number=number)

    def _write(self, state: optimizer.State, folder: Path) -> None:
        if self._files is None:
            write_state(state, folder)
        else:
            write_shards(state, folder, self._files)

    def _read(self, folder: Path) -> optimizer.State:
        if self._files is None:
            return read_state(folder)
        return read_shards(folder, self._rank.optimizer.state()["masters"], self._files)

    def _gather(self, number: int) -> Parcel | None:
        """Every rank takes part, and one of them has it all."""
        weights = self._rank.weights(self._dtype)
        if self._outbox is not None:
            return self._outbox.put(number, weights)
        for name, tensor in weights:
            if self._shared is not None and self._plan.rank == 0:
                self._shared.views[name].copy_(tensor)
        return None


def failed(number: int, error: Exception) -> Answer:
    is_echo = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in ECHOES)
    said = str(error) if isinstance(error, MillstreamError) else f"{type(error).__name__}: {error}"
    return Answer(number=number, error=said, is_own=not is_echo)


def build(setup: Setup) -> Rank:
    """The model from its config and the weights to begin with; sharded, where there are other ranks."""
    plan = setup.plan
    with tempfile.TemporaryDirectory(prefix="millstream-") as folder:
        for name, data in plan.files.items():
            (Path(folder) / name).write_bytes(data)
        model = new_model(AutoConfig.from_pretrained(folder), seed=0, dtype=getattr(torch, plan.dtype))
    if plan.config.lora is not None:
        add_adapters(model, plan.config.lora, seed=0)
    if setup.layout is not None:
        load_weights(model, SharedWeights(setup.memory or 0, setup.layout).views)
    elif setup.parcel is not None:
        with Inbox(own_node()).take(setup.parcel) as taken:
            load_weights(model, taken.weights)
    objective = imports.load(plan.objective.function)(plan.objective.arguments)
    if plan.num_ranks == 1:
        kept = policies(model.to(plan.device), plan.config, plan.temperature, is_proximal_given=plan.is_proximal_given)
        return Rank(*kept, plan.config, objective, num_steps=plan.num_steps)
    mesh = join(plan.rank, plan.num_ranks, (plan.host, plan.port), torch.device(plan.device))
    return sharded(
        model,
        plan.config,
        objective,
        mesh,
        temperature=plan.temperature,
        num_steps=plan.num_steps,
        is_proximal_given=plan.is_proximal_given,
    )


def work(line: socket.socket) -> None:
    """The rank: until the socket closes."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    frames = Frames(line)
    first = frames.first()
    if first is None:
        return
    end = Line(line, frames)
    setup = msgspec.msgpack.decode(first, type=Setup)
    if setup.plan.rank:  # of a step that is left out every rank would say the same
        logging.getLogger(optimizer.__name__).setLevel(logging.ERROR)
    if setup.plan.host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    set_up_cpu()
    try:
        post = Post(build(setup), setup, end)
    except Exception as error:  # the border of the rank: whoever waits must hear of it
        traceback.print_exc()
        end.send(failed(READY, error))
    else:
        end.send(Answer(number=READY))
        post.work()


if __name__ == "__main__":
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # the parent's to handle; when it ends, the socket closes
    work(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # at once: what a process group still holds on to can keep it
