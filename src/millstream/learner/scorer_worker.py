"""A scorer or a critic in its own process, on this machine or on a node of a cluster. Its other end is `learner.remote_scorer`.

Inside is the local one (`learner.scorer`, `learner.critic`), so that its numbers are those of a local run.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from millstream.errors import LearnerError
from millstream.learner.critic import TorchCritic
from millstream.learner.messages import (
    Accumulate,
    CriticMessage,
    CriticStep,
    LoadWeights,
    OpenStore,
    PackScores,
    RestoreSnapshot,
    ScorerMessage,
    ScoreRows,
    ScorerSetup,
    TakeSnapshot,
    WriteSnapshot,
    unpack_rows,
)
from millstream.learner.scorer import TorchScorer
from millstream.learner.snapshots import KeptSnapshots, files_in
from millstream.learner.state import TorchSnapshot
from millstream.learner.store_reader import StoreReader
from millstream.model.load import load_weights, set_up_cpu
from millstream.model.spec import model_from
from millstream.rpc.call import Channel
from millstream.rpc.process import own_node
from millstream.rpc.serve import Handler, serve_calls
from millstream.weights.transfer.fetcher import WeightsFetcher


class ScorerServer:
    """Handles the messages to a scorer."""

    def __init__(self, scorer: TorchScorer, fetcher: WeightsFetcher, store: StoreReader) -> None:
        self._scorer = scorer
        self._store = store
        self._fetcher = fetcher
        self._runner = asyncio.Runner()

    def handle(self, message: ScorerMessage) -> Any:
        match message:
            case OpenStore():
                return self._store.open(message)
            case ScoreRows(rows):
                return _scores(self._scorer, rows, self._runner)
            case PackScores(rows, column):
                return self._store.pack({column: self._runner.run(self._scorer.score(self._store.rows(rows)))})
            case LoadWeights(weights):
                with self._fetcher.take(weights) as taken:
                    return self._runner.run(self._scorer.load(taken.weights))
            case other:
                raise LearnerError(f"{type(other).__name__} is not a message for a scorer")


class CriticServer:
    """Handles the messages to a critic."""

    def __init__(self, critic: TorchCritic, store: StoreReader) -> None:
        self._critic = critic
        self._store = store
        self._runner = asyncio.Runner()
        self._kept = KeptSnapshots[TorchSnapshot]()

    def handle(self, message: CriticMessage) -> Any:
        match message:
            case OpenStore():
                return self._store.open(message)
            case ScoreRows(rows):
                return _scores(self._critic, rows, self._runner)
            case PackScores(rows, column):
                return self._store.pack({column: self._runner.run(self._critic.score(self._store.rows(rows)))})
            case Accumulate(passes):
                for some in passes:
                    self._runner.run(self._critic.accumulate(self._store.rows(some)))
                return None
            case CriticStep():
                return self._runner.run(self._critic.step())
            case TakeSnapshot(snapshot):
                return self._kept.keep(snapshot, self._runner.run(self._critic.snapshot()))
            case WriteSnapshot(snapshot, folder):
                self._kept.pop(snapshot).write(Path(folder))
                return files_in(Path(folder))
            case RestoreSnapshot(folder):
                return self._critic.restore(Path(folder))
            case other:
                raise LearnerError(f"{type(other).__name__} is not a message for a critic")


def _scores(scorer: TorchScorer | TorchCritic, packed: bytes, runner: asyncio.Runner) -> bytes:
    """Of trained tokens only: all others are 0."""
    rows = unpack_rows(packed)
    found = runner.run(scorer.score(rows))
    return b"".join(scores_T[row.loss_mask].tobytes() for row, scores_T in zip(rows, found, strict=True))


def build_server(setup: ScorerSetup, store: StoreReader) -> Handler:
    set_up_cpu()
    fetcher = WeightsFetcher(own_node())
    model: PreTrainedModel = model_from(setup.files, dtype=setup.dtype, lora=setup.lora)
    with fetcher.take(setup.weights) as taken:
        load_weights(model, taken.weights)
    model = model.to(setup.device)
    if setup.critic is not None:
        critic = TorchCritic(model, setup.critic, num_steps=setup.num_steps, is_fixed=setup.is_fixed)
        return CriticServer(critic, store).handle
    scorer = TorchScorer(model, temperature=setup.temperature, is_fixed=setup.is_fixed)
    return ScorerServer(scorer, fetcher, store).handle


def serve_scorer(connection: socket.socket) -> None:
    """The scorer or critic, until it is closed."""

    def is_background(message: ScorerMessage | CriticMessage) -> bool:
        return isinstance(message, WriteSnapshot)

    with closing(StoreReader("a scorer")) as store:
        begin, messages = partial(build_server, store=store), ScorerMessage | CriticMessage
        serve_calls(Channel(connection), ScorerSetup, begin, messages, is_background=is_background)
