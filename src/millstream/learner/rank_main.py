"""A rank in a process of its own, started as `python -m millstream.learner.rank_main`. See `learner.ranks` for the other end.

It ends with the socket, at once and whatever it is doing: when the parent is gone, nobody needs what it has.
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
    Plan,
    Restore,
    Step,
    Write,
    unpack,
)
from millstream.learner.rank import Rank
from millstream.learner.sharding import join, sharded
from millstream.learner.state import on_host, read_shards, write_shards
from millstream.model.load import load_weights, new_model, set_up_cpu
from millstream.model.shared import SharedWeights

MOST_KEPT = 2
"""Snapshots: one that is being written, and the next."""
ECHOES = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


class Line:
    """The rank's end of the socket. Listens from the beginning, so that the process ends with it."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._sending = end, threading.Lock()
        self.orders: queue.SimpleQueue[Numbered] = queue.SimpleQueue()
        self.writes: queue.SimpleQueue[Numbered] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        frames, decoder = Frames(self._end), msgspec.msgpack.Decoder(Numbered)
        while (payloads := frames.receive(block=True)) is not None:
            for payload in payloads:
                numbered = decoder.decode(payload)
                (self.writes if isinstance(numbered.order, Write) else self.orders).put(numbered)
        os._exit(0)

    def send(self, answer: Answer) -> None:
        with self._sending, suppress(OSError):  # nobody listens any more: the listener ends us
            self._end.sendall(frame(answer))


class Post:
    """One rank at its work. Orders are carried out one after the other; snapshots are written beside them."""

    def __init__(self, rank: Rank, plan: Plan, shared: SharedWeights, line: Line) -> None:
        self._rank, self._plan, self._shared, self._line = rank, plan, shared, line
        self._dtype = getattr(torch, plan.dtype)
        self._kept: dict[int, optimizer.State] = {}
        self._files = dist.new_group(backend="gloo")  # a group of their own: training has its collectives meanwhile

    def work(self) -> None:
        """Until it is told to close."""
        writes = threading.Thread(target=self._carry_out, args=(self._line.writes,), name="snapshots", daemon=True)
        writes.start()
        self._carry_out(self._line.orders)

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
            case GatherWeights():
                self._gather()
            case Keep(snapshot):
                self._kept[snapshot] = on_host(self._rank.state())
                for old in sorted(self._kept)[:-MOST_KEPT]:
                    del self._kept[old]
            case Write(snapshot, folder):
                try:
                    write_shards(self._kept.pop(snapshot), Path(folder), self._files)
                except OSError as error:
                    return Answer(number=number, refused=(error.errno or 0, error.strerror or str(error)))
            case Restore(folder):
                masters = self._rank.optimizer.state()["masters"]
                self._rank.restore(read_shards(Path(folder), masters, self._files))
        return Answer(number=number)

    def _gather(self) -> None:
        for name, tensor in self._rank.weights(self._dtype):
            if self._plan.rank == 0:
                self._shared.views[name].copy_(tensor)


def failed(number: int, error: Exception) -> Answer:
    is_echo = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in ECHOES)
    said = str(error) if isinstance(error, MillstreamError) else f"{type(error).__name__}: {error}"
    return Answer(number=number, error=said, is_own=not is_echo)


def build(plan: Plan, folder: Path, shared: SharedWeights) -> Rank:
    """The model from its config and the shared weights, sharded with the other ranks."""
    model = new_model(AutoConfig.from_pretrained(folder), seed=0, dtype=getattr(torch, plan.dtype))
    load_weights(model, shared.views)
    objective = imports.load(plan.objective.function)(plan.objective.arguments)
    mesh = join(plan.rank, plan.num_ranks, plan.port, torch.device(plan.device))
    return sharded(
        model,
        plan.config,
        objective,
        mesh,
        temperature=plan.temperature,
        num_steps=plan.num_steps,
        is_proximal_given=plan.is_proximal_given,
    )


def main(line: int, memory: int, folder: Path, number: int) -> None:
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # the parent's to handle; when it ends, the socket closes
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if number:  # of a step that is left out every rank would say the same
        logging.getLogger(optimizer.__name__).setLevel(logging.ERROR)
    end = Line(socket.socket(fileno=line))
    set_up_cpu()
    plan = msgspec.json.decode((folder / f"plan-{number}.json").read_bytes(), type=Plan)
    shared = SharedWeights(memory, plan.layout)
    try:
        post = Post(build(plan, folder, shared), plan, shared, end)
    except Exception as error:  # the border of the rank: whoever waits must hear of it
        traceback.print_exc()
        end.send(failed(READY, error))
    else:
        end.send(Answer(number=READY))
        post.work()
    os._exit(0)  # at once: what a process group still holds on to can keep it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
