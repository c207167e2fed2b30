"""A rank in its own process, on this machine or on a node of a cluster. Its other end is `learner.processes.RankProcesses`."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor

from millstream import imports
from millstream.learner import optimizer
from millstream.learner.messages import (
    Accumulate,
    ApplyStep,
    BeginBatch,
    ComputeLogprobs,
    GatherWeights,
    OpenStore,
    RankMessage,
    RankPlan,
    RankSetup,
    RestoreSnapshot,
    TakeSnapshot,
    TakeTally,
    WriteSnapshot,
)
from millstream.learner.optimizer import OptimizerState
from millstream.learner.processes import LOOPBACK
from millstream.learner.rank import Rank, make_policies
from millstream.learner.sharding import join_mesh, sharded_rank
from millstream.learner.snapshots import KeptSnapshots, files_in
from millstream.learner.state import on_host, read_shards, read_state, write_shards, write_state
from millstream.learner.store_reader import StoreReader
from millstream.model.load import load_weights, set_up_cpu
from millstream.model.shared_memory import SharedWeights
from millstream.model.slices import ReadSlice, parameters_on_meta, slices_of
from millstream.model.spec import model_from
from millstream.rpc.call import Channel
from millstream.rpc.process import own_node, rank_name
from millstream.rpc.serve import Handler, serve_calls
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.publisher import open_publisher


class RankServer:
    """Handles the messages to one rank."""

    def __init__(self, rank: Rank, setup: RankSetup) -> None:
        self._rank = rank
        self._plan = setup.plan
        self._dtype = getattr(torch, setup.plan.dtype)
        self._kept = KeptSnapshots[OptimizerState]()
        self._store = StoreReader(rank_name(setup.plan.rank))
        self._shared = None if setup.layout is None else SharedWeights(setup.memory or 0, setup.layout)
        self._publisher = None if setup.delivery is None else open_publisher(setup.delivery)
        is_alone = setup.plan.num_ranks == 1
        # snapshots have their own process group: training uses the other one at the same time. None: there is one rank
        self._snapshot_group = None if is_alone else dist.new_group(backend="gloo")

    def close(self) -> None:
        """Published weights are in shared memory, which would stay."""
        self._store.close()
        if self._publisher is not None:
            self._publisher.close()

    def handle(self, message: RankMessage) -> Any:
        match message:
            case OpenStore():
                return self._store.open(message)
            case BeginBatch():
                return self._rank.begin_batch()
            case Accumulate(passes):
                began = time.monotonic()
                for rows in passes:
                    self._rank.accumulate(self._store.rows(rows))
                return time.monotonic() - began
            case ComputeLogprobs(passes):
                found = [of_row for rows in passes for of_row in self._rank.logprobs(self._store.rows(rows))]
                return b"".join(logprobs.tobytes() for logprobs in found)
            case TakeTally():
                tally = self._rank.tally()
                return tally if self._plan.records_ratios else structs.replace(tally, log_ratios=b"")
            case ApplyStep(counted):
                began = time.monotonic()
                return self._rank.step(counted), time.monotonic() - began
            case GatherWeights(number):
                return self._gather(number)
            case TakeSnapshot(snapshot):
                self._rank.check_finite()
                return self._kept.keep(snapshot, on_host(self._rank.state()))
            case WriteSnapshot(snapshot, folder):
                return self._write(self._kept.pop(snapshot), Path(folder))
            case RestoreSnapshot(folder):
                return self._rank.restore(self._read(Path(folder)))

    def _write(self, state: OptimizerState, folder: Path) -> dict[str, int]:
        if self._snapshot_group is None:
            write_state(state, folder)
        else:
            write_shards(state, folder, self._snapshot_group)
        return files_in(folder)

    def _read(self, folder: Path) -> OptimizerState:
        if self._snapshot_group is None:
            return read_state(folder)
        return read_shards(folder, self._rank.optimizer.state()["masters"], self._snapshot_group)

    def _gather(self, number: int) -> WeightsRef | None:
        """On this machine every rank writes its slices. On a cluster it is a collective: rank 0 publishes one tensor after the
        other. No rank ever has the whole model."""
        self._rank.check_finite()
        if self._shared is not None:
            place = slices_of(self._shared.views)
            for name, part, value in self._rank.slices(self._dtype):
                place(name, part).copy_(value)
            return None
        weights = self._rank.weights(self._dtype)
        if self._publisher is not None:
            return self._publisher.put(number, weights, self._rank.layout(self._dtype))
        for _ in weights:
            pass
        return None


def build_rank(setup: RankSetup) -> Rank:
    """The model from its config and its first weights; of several ranks, one shard of it."""
    plan = setup.plan
    device = own_device(plan)
    objective = imports.load_function(plan.objective.function)(plan.objective.arguments)
    if plan.num_ranks == 1:
        with torch.device(device):
            model = model_from(plan.files, dtype=plan.dtype, lora=plan.config.lora)
        with _first_weights(setup) as weights:
            load_weights(model, weights)
        own = make_policies(model.to(device), plan.config, plan.temperature, is_proximal_given=plan.is_proximal_given)
        return Rank(*own, plan.config, objective, num_steps=plan.num_steps, is_fixed=plan.is_fixed)
    with parameters_on_meta():
        model = model_from(plan.files, dtype=plan.dtype, lora=plan.config.lora)
    mesh = join_mesh(plan.rank, plan.num_ranks, (plan.host, plan.port), device)
    with _first_slices(setup) as read:
        return sharded_rank(
            model,
            read,
            plan.config,
            objective,
            mesh,
            temperature=plan.temperature,
            num_steps=plan.num_steps,
            is_head_plain=plan.is_head_plain,
            is_proximal_given=plan.is_proximal_given,
        )


def own_device(plan: RankPlan) -> torch.device:
    """The only GPU that this process sees; of several, the one with the rank's number."""
    if plan.device != "cuda":
        return torch.device(plan.device)
    return torch.device("cuda", plan.rank if torch.cuda.device_count() > 1 else 0)


@contextmanager
def _first_weights(setup: RankSetup) -> Iterator[Mapping[str, Tensor]]:
    """Mapped, of this node; from another node, in memory of this process."""
    if setup.layout is not None:
        yield SharedWeights(setup.memory or 0, setup.layout).views
    elif setup.weights is None:
        yield {}
    else:
        with WeightsFetcher(own_node()).take(setup.weights) as taken:
            yield taken.weights


@contextmanager
def _first_slices(setup: RankSetup) -> Iterator[ReadSlice]:
    """What the checkpoint's files have is read from them, where this process sees them; then only the rest is fetched."""
    files = setup.checkpoint
    if files is None or not files.are_here():
        with _first_weights(setup) as weights:
            yield slices_of(weights)
        return
    with (
        _first_weights(structs.replace(setup, weights=setup.rest)) as weights,
        files.opened(slices_of(weights)) as read,
    ):
        yield read


def serve_rank(connection: socket.socket) -> None:
    """The rank, until it is closed."""
    with ExitStack() as closing:

        def begin(setup: RankSetup) -> Handler:
            set_up_cpu()
            if setup.plan.rank:  # every rank would report the same skipped step
                logging.getLogger(optimizer.__name__).setLevel(logging.ERROR)
            if setup.plan.host == LOOPBACK:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
            server = RankServer(build_rank(setup), setup)
            closing.callback(server.close)
            return server.handle

        def is_background(message: RankMessage) -> bool:
            return isinstance(message, WriteSnapshot)

        serve_calls(Channel(connection), RankSetup, begin, RankMessage, is_background=is_background)
