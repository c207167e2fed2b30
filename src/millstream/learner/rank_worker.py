"""A rank in its own process, on this machine or on a node of a cluster. Its other end is `learner.processes.RankProcesses`."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from millstream import imports
from millstream.learner.messages import (
    Accumulate,
    ApplyStep,
    BeginBatch,
    ComputeLogprobs,
    GatherWeights,
    OpenStore,
    RankMessage,
    RankSetup,
    RestoreSnapshot,
    TakeSnapshot,
    TakeTally,
    WriteSnapshot,
)
from millstream.learner.optimizer import OptimizerState
from millstream.learner.rank import Rank, make_policies
from millstream.learner.sharding import join_mesh, sharded_rank
from millstream.learner.share import empty_model, first_slices, own_device, set_up_process, whole_model
from millstream.learner.snapshots import KeptSnapshots
from millstream.learner.state import StateFiles, on_host
from millstream.learner.store_reader import StoreReader
from millstream.model.shared_memory import SharedWeights
from millstream.model.slices import slices_of
from millstream.rpc.call import Channel
from millstream.rpc.process import rank_name
from millstream.rpc.serve import Handler, serve_calls
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.publisher import open_publisher


class RankServer:
    """Handles the messages to one rank."""

    def __init__(self, rank: Rank, setup: RankSetup) -> None:
        self._rank = rank
        self._plan = setup.plan
        self._dtype = getattr(torch, setup.plan.dtype)
        self._kept = KeptSnapshots[OptimizerState]()
        self._store = StoreReader(rank_name(setup.place.rank))
        self._shared = None if setup.layout is None else SharedWeights(setup.memory or 0, setup.layout)
        self._publisher = None if setup.delivery is None or setup.place.rank else open_publisher(setup.delivery)
        self._files = StateFiles(num_ranks=setup.place.num_ranks)

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
                return self._files.write(self._kept.pop(snapshot), Path(folder))
            case RestoreSnapshot(folder):
                masters = self._rank.optimizer.state()["masters"]
                return self._rank.restore(self._files.read(Path(folder), masters))

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
    plan, place = setup.plan, setup.place
    device, lora = own_device(plan.device, place), plan.config.lora
    objective = imports.load_function(plan.objective.function)(plan.objective.arguments)
    if place.num_ranks == 1:
        model = whole_model(setup, plan.files, dtype=plan.dtype, lora=lora, device=device)
        own = make_policies(model, plan.config, plan.temperature, is_proximal_given=plan.is_proximal_given)
        return Rank(*own, plan.config, objective, num_steps=plan.num_steps, is_fixed=plan.is_fixed)
    model = empty_model(plan.files, dtype=plan.dtype, lora=lora)
    mesh = join_mesh(place.rank, place.num_ranks, (place.host, place.port), device)
    with first_slices(setup) as read:
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


def serve_rank(connection: socket.socket) -> None:
    """The rank, until it is closed."""
    with ExitStack() as closing:

        def begin(setup: RankSetup) -> Handler:
            set_up_process(setup.place)
            server = RankServer(build_rank(setup), setup)
            closing.callback(server.close)
            return server.handle

        def is_background(message: RankMessage) -> bool:
            return isinstance(message, WriteSnapshot)

        serve_calls(Channel(connection), RankSetup, begin, RankMessage, is_background=is_background)
