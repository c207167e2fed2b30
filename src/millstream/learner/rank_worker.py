"""A rank in a process of its own, here or on a node of a cluster. See `learner.ranks` for the other end."""

from __future__ import annotations

import logging
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from millstream import imports
from millstream.learner import optimizer
from millstream.learner.messages import (
    Accumulate,
    Answer,
    BeginBatch,
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
from millstream.learner.serve_calls import Kept, Obey, main, not_for, obey_line
from millstream.learner.sharding import join, sharded
from millstream.learner.state import on_host, read_shards, read_state, write_shards, write_state
from millstream.model.load import load_weights
from millstream.model.shared_memory import SharedWeights
from millstream.model.spec import model_from
from millstream.rpc.process import own_node
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.publisher import open_publisher


class RankServer:
    """One rank at its work."""

    def __init__(self, rank: Rank, setup: Setup) -> None:
        self._rank = rank
        self._plan = setup.plan
        self._dtype = getattr(torch, setup.plan.dtype)
        self._kept = Kept[optimizer.State]()
        self._shared = None if setup.layout is None else SharedWeights(setup.memory or 0, setup.layout)
        self._outbox = None if setup.delivery is None else open_publisher(setup.delivery)
        is_alone = setup.plan.num_ranks == 1
        self._files = None if is_alone else dist.new_group(backend="gloo")
        """A group of their own: training has its collectives meanwhile. None: there is one rank."""

    def close(self) -> None:
        """What it let others have is in shared memory, and would stay there."""
        if self._outbox is not None:
            self._outbox.close()

    def obey(self, numbered: Numbered) -> Answer:
        number = numbered.number
        match numbered.order:
            case BeginBatch():
                self._rank.begin_batch()
            case Accumulate(passes):
                for rows in passes:
                    self._rank.accumulate(unpack(rows))
            case Measure(passes):
                found = [of_row for rows in passes for of_row in self._rank.logprobs(unpack(rows))]
                return Answer(number=number, scores=b"".join(one.tobytes() for one in found))
            case Count():
                return Answer(number=number, tally=self._rank.tally())
            case Step(counted):
                return Answer(number=number, stepped=self._rank.step(counted))
            case GatherWeights(gathering):
                return Answer(number=number, parcel=self._gather(gathering))
            case Keep(snapshot):
                self._kept.keep(snapshot, on_host(self._rank.state()))
            case Write(snapshot, folder):
                return self._kept.write(number, snapshot, Path(folder), self._write)
            case Restore(folder):
                self._rank.restore(self._read(Path(folder)))
            case other:
                raise not_for("a rank", other)
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

    def _gather(self, number: int) -> WeightsRef | None:
        """Every rank takes part, and one of them has it all."""
        weights = self._rank.weights(self._dtype)
        if self._outbox is not None:
            return self._outbox.put(number, weights)
        for name, tensor in weights:
            if self._shared is not None and self._plan.rank == 0:
                self._shared.views[name].copy_(tensor)
        return None


def build(setup: Setup) -> Rank:
    """The model from its config and the weights to begin with; sharded, where there are other ranks."""
    plan = setup.plan
    with torch.device(plan.device if plan.num_ranks == 1 else "cpu"):  # what is sharded begins on the host
        model = model_from(plan.files, dtype=plan.dtype, lora=plan.config.lora)
    if setup.layout is not None:
        load_weights(model, SharedWeights(setup.memory or 0, setup.layout).views)
    elif setup.parcel is not None:
        with WeightsFetcher(own_node()).take(setup.parcel) as taken:
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


def begin(setup: Setup) -> RankServer:
    if setup.plan.rank:  # of a step that is left out every rank would say the same
        logging.getLogger(optimizer.__name__).setLevel(logging.ERROR)
    if setup.plan.host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return RankServer(build(setup), setup)


def work(line: socket.socket) -> None:
    """The rank: until the socket closes."""
    with ExitStack() as at_the_end:

        def begun(setup: Setup) -> Obey:
            post = begin(setup)
            at_the_end.callback(post.close)
            return post.obey

        obey_line(line, Setup, begun)


if __name__ == "__main__":
    main(work)
