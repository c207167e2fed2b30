"""A rank of a scorer or of a critic in its own process, on this machine or on a node of a cluster. Its other end is
`learner.remote_scorer`.

Inside is what a local one has on a thread (`learner.scorer`, `learner.critic`), so that the numbers of one rank are those of a
local run.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from millstream.errors import LearnerError
from millstream.learner.critic import CriticRank, whole_critic
from millstream.learner.messages import (
    Accumulate,
    ApplyStep,
    CriticMessage,
    LoadWeights,
    OpenStore,
    PackScores,
    RestoreSnapshot,
    RowsMessage,
    ScorerMessage,
    ScoreRows,
    ScorerSetup,
    TakeSnapshot,
    TakeTally,
    WriteSnapshot,
)
from millstream.learner.optimizer import OptimizerState
from millstream.learner.scorer import ScorerRank, whole_scorer
from millstream.learner.sharding import join_mesh, sharded_critic, sharded_scorer
from millstream.learner.share import empty_model, first_slices, own_device, set_up_process, whole_model
from millstream.learner.snapshots import KeptSnapshots
from millstream.learner.state import StateFiles, on_host
from millstream.learner.store_reader import StoreReader
from millstream.rpc.call import Channel
from millstream.rpc.process import own_node
from millstream.rpc.serve import Handler, serve_calls
from millstream.store.wire import PackedBlock
from millstream.types import Floats, TrainRow
from millstream.weights.transfer.fetcher import WeightsFetcher

Score = Callable[[Sequence[TrainRow]], list[Floats]]


class ScorerServer:
    """Handles the messages to a rank of a scorer."""

    def __init__(self, scorer: ScorerRank, store: StoreReader) -> None:
        self._scorer = scorer
        self._store = store
        self._fetcher = WeightsFetcher(own_node())

    def handle(self, message: ScorerMessage) -> Any:
        match message:
            case OpenStore():
                return self._store.open(message)
            case ScoreRows(passes):
                return _scores(self._scorer.score, passes, self._store)
            case PackScores(passes, column):
                return _packed(self._scorer.score, passes, column, self._store)
            case LoadWeights(weights):
                with self._fetcher.take(weights) as taken:
                    return self._scorer.load(taken.weights)
            case other:
                raise LearnerError(f"{type(other).__name__} is not a message for a scorer")


class CriticServer:
    """Handles the messages to a rank of a critic."""

    def __init__(self, critic: CriticRank, store: StoreReader, *, num_ranks: int) -> None:
        self._critic = critic
        self._store = store
        self._kept = KeptSnapshots[OptimizerState]()
        self._files = StateFiles(num_ranks=num_ranks)

    def handle(self, message: CriticMessage) -> Any:
        match message:
            case OpenStore():
                return self._store.open(message)
            case ScoreRows(passes):
                return _scores(self._critic.score, passes, self._store)
            case PackScores(passes, column):
                return _packed(self._critic.score, passes, column, self._store)
            case Accumulate(passes):
                began = time.monotonic()
                for some in passes:
                    self._critic.accumulate(self._store.rows(some))
                return time.monotonic() - began
            case TakeTally():
                return self._critic.tally()
            case ApplyStep(counted):
                began = time.monotonic()
                return self._critic.step(counted), time.monotonic() - began
            case TakeSnapshot(snapshot):
                self._critic.check_finite()
                return self._kept.keep(snapshot, on_host(self._critic.state()))
            case WriteSnapshot(snapshot, folder):
                return self._files.write(self._kept.pop(snapshot), Path(folder))
            case RestoreSnapshot(folder):
                masters = self._critic.optimizer.state()["masters"]
                return self._critic.optimizer.restore(self._files.read(Path(folder), masters))
            case other:
                raise LearnerError(f"{type(other).__name__} is not a message for a critic")


def _scores(score: Score, passes: Sequence[RowsMessage], store: StoreReader) -> bytes:
    """Of trained tokens only: all others are 0."""
    found = []
    for some in passes:
        rows = store.rows(some)
        found += [scores_T[row.loss_mask].tobytes() for row, scores_T in zip(rows, score(rows), strict=True)]
    return b"".join(found)


def _packed(score: Score, passes: Sequence[RowsMessage], column: str, store: StoreReader) -> PackedBlock | None:
    cells = [scores_T for some in passes for scores_T in score(store.rows(some))]
    return store.pack({column: cells}) if cells else None


def build_server(setup: ScorerSetup, store: StoreReader) -> Handler:
    set_up_process(setup.place)
    place, critic = setup.place, setup.critic
    device = own_device(setup.device, place)
    if place.num_ranks == 1:
        model = whole_model(setup, setup.files, dtype=setup.dtype, lora=setup.lora, device=device)
        if critic is not None:
            rank = whole_critic(model, critic, num_steps=setup.num_steps, is_fixed=setup.is_fixed)
            return CriticServer(rank, store, num_ranks=1).handle
        temperature, is_fixed = setup.temperature, setup.is_fixed
        return ScorerServer(
            whole_scorer(model, temperature=temperature, name=setup.name, is_fixed=is_fixed), store
        ).handle
    model = empty_model(setup.files, dtype=setup.dtype, lora=setup.lora)
    mesh = join_mesh(place.rank, place.num_ranks, (place.host, place.port), device)
    with first_slices(setup) as read:
        if critic is not None:
            own = sharded_critic(model, read, critic, mesh, num_steps=setup.num_steps)
            return CriticServer(own, store, num_ranks=place.num_ranks).handle
        scorer = sharded_scorer(
            model, read, mesh, setup.name, temperature=setup.temperature, is_head_plain=setup.is_head_plain
        )
    return ScorerServer(scorer, store).handle


def serve_scorer(connection: socket.socket) -> None:
    """The scorer or critic, until it is closed."""

    def is_background(message: ScorerMessage | CriticMessage) -> bool:
        return isinstance(message, WriteSnapshot)

    with closing(StoreReader("a scorer")) as store:
        begin, messages = partial(build_server, store=store), ScorerMessage | CriticMessage
        serve_calls(Channel(connection), ScorerSetup, begin, messages, is_background=is_background)
