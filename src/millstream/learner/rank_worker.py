"""A rank in its own process, on this machine or on a node of a cluster. Its other end is `learner.processes.RankProcesses`."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from millstream import imports
from millstream.learner import optimizer
from millstream.learner.messages import (
    Accumulate,
    ApplyStep,
    BeginBatch,
    ComputeLogprobs,
    GatherWeights,
    RankMessage,
    RankSetup,
    RestoreSnapshot,
    TakeSnapshot,
    TakeTally,
    WriteSnapshot,
    unpack_rows,
)
from millstream.learner.optimizer import OptimizerState
from millstream.learner.processes import LOOPBACK
from millstream.learner.rank import Rank, make_policies
from millstream.learner.sharding import join_mesh, sharded_rank
from millstream.learner.snapshots import KeptSnapshots, files_in
from millstream.learner.state import on_host, read_shards, read_state, write_shards, write_state
from millstream.model.load import load_weights, set_up_cpu
from millstream.model.shared_memory import SharedWeights
from millstream.model.spec import model_from
from millstream.rpc.call import Channel
from millstream.rpc.process import own_node
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
        self._shared = None if setup.layout is None else SharedWeights(setup.memory or 0, setup.layout)
        self._publisher = None if setup.delivery is None else open_publisher(setup.delivery)
        is_alone = setup.plan.num_ranks == 1
        # snapshots have their own process group: training uses the other one at the same time. None: there is one rank
        self._snapshot_group = None if is_alone else dist.new_group(backend="gloo")

    def close(self) -> None:
        """Published weights are in shared memory, which would stay."""
        if self._publisher is not None:
            self._publisher.close()

    def handle(self, message: RankMessage) -> Any:
        match message:
            case BeginBatch():
                return self._rank.begin_batch()
            case Accumulate(passes):
                began = time.monotonic()
                for rows in passes:
                    self._rank.accumulate(unpack_rows(rows))
                return time.monotonic() - began
            case ComputeLogprobs(passes):
                found = [of_row for rows in passes for of_row in self._rank.logprobs(unpack_rows(rows))]
                return b"".join(logprobs.tobytes() for logprobs in found)
            case TakeTally():
                return self._rank.tally()
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
        """A collective: every rank takes part, and rank 0 keeps the weights."""
        self._rank.check_finite()
        weights = self._rank.weights(self._dtype)
        if self._publisher is not None:
            return self._publisher.put(number, weights)
        for name, tensor in weights:
            if self._shared is not None and self._plan.rank == 0:
                self._shared.views[name].copy_(tensor)
        return None


def build_rank(setup: RankSetup) -> Rank:
    """The model from its config and its first weights; sharded, if there are other ranks."""
    plan = setup.plan
    with torch.device(plan.device if plan.num_ranks == 1 else "cpu"):  # a model to shard starts on the host
        model = model_from(plan.files, dtype=plan.dtype, lora=plan.config.lora)
    if setup.layout is not None:
        load_weights(model, SharedWeights(setup.memory or 0, setup.layout).views)
    elif setup.weights is not None:
        with WeightsFetcher(own_node()).take(setup.weights) as taken:
            load_weights(model, taken.weights)
    objective = imports.load_function(plan.objective.function)(plan.objective.arguments)
    if plan.num_ranks == 1:
        on_device = model.to(plan.device)
        own = make_policies(on_device, plan.config, plan.temperature, is_proximal_given=plan.is_proximal_given)
        return Rank(*own, plan.config, objective, num_steps=plan.num_steps, is_fixed=plan.is_fixed)
    mesh = join_mesh(plan.rank, plan.num_ranks, (plan.host, plan.port), torch.device(plan.device))
    return sharded_rank(
        model,
        plan.config,
        objective,
        mesh,
        temperature=plan.temperature,
        num_steps=plan.num_steps,
        is_proximal_given=plan.is_proximal_given,
    )


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
