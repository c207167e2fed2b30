"""A scorer or a critic in a process of its own, here or on a node of a cluster: the local one (`learner.scorer`, `.critic`), so
that its numbers are those of a local run. See `learner.remote_scorer` for the other end."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from transformers import PreTrainedModel

from millstream.learner.critic import TorchCritic
from millstream.learner.messages import (
    Accumulate,
    Answer,
    Keep,
    Learn,
    Load,
    Numbered,
    Restore,
    Score,
    StageSetup,
    Write,
    unpack,
)
from millstream.learner.scorer import TorchScorer
from millstream.learner.serve_calls import Kept, Obey, main, not_for, obey_line
from millstream.learner.torch import TorchSnapshot
from millstream.model.load import load_weights
from millstream.model.spec import model_from
from millstream.rpc.process import own_node
from millstream.weights.transfer.fetcher import WeightsFetcher


class ScorerPost:
    def __init__(self, scorer: TorchScorer, inbox: WeightsFetcher) -> None:
        self._scorer = scorer
        self._inbox = inbox
        self._runner = asyncio.Runner()

    def obey(self, numbered: Numbered) -> Answer:
        number = numbered.number
        match numbered.order:
            case Score(rows):
                return Answer(number=number, scores=_scores(self._scorer, rows, self._runner))
            case Load(parcel):
                with self._inbox.take(parcel) as taken:
                    self._runner.run(self._scorer.load(taken.weights))
            case other:
                raise not_for("a scorer", other)
        return Answer(number=number)


class CriticPost:
    def __init__(self, critic: TorchCritic) -> None:
        self._critic = critic
        self._runner = asyncio.Runner()
        self._kept = Kept[TorchSnapshot]()

    def obey(self, numbered: Numbered) -> Answer:
        number = numbered.number
        match numbered.order:
            case Score(rows):
                return Answer(number=number, scores=_scores(self._critic, rows, self._runner))
            case Accumulate(passes):
                for rows in passes:
                    self._runner.run(self._critic.accumulate(unpack(rows)))
            case Learn():
                return Answer(number=number, metrics=self._runner.run(self._critic.step()))
            case Keep(snapshot):
                self._kept.keep(snapshot, self._runner.run(self._critic.snapshot()))
            case Write(snapshot, folder):
                return self._kept.write(number, snapshot, Path(folder), TorchSnapshot.write)
            case Restore(folder):
                self._critic.restore(Path(folder))
            case other:
                raise not_for("a critic", other)
        return Answer(number=number)


def _scores(scorer: TorchScorer | TorchCritic, packed: bytes, runner: asyncio.Runner) -> bytes:
    """Of trained tokens alone: of all others it is known that they are 0."""
    rows = unpack(packed)
    found = runner.run(scorer.score(rows))
    return b"".join(scores_T[row.loss_mask].tobytes() for row, scores_T in zip(rows, found, strict=True))


def begin(setup: StageSetup) -> Obey:
    inbox = WeightsFetcher(own_node())
    model: PreTrainedModel = model_from(setup.files, dtype=setup.dtype, lora=setup.lora)
    with inbox.take(setup.parcel) as taken:
        load_weights(model, taken.weights)
    model = model.to(setup.device)
    if setup.critic is not None:
        return CriticPost(TorchCritic(model, setup.critic, num_steps=setup.num_steps)).obey
    return ScorerPost(TorchScorer(model, temperature=setup.temperature), inbox).obey


def work(line: socket.socket) -> None:
    """The stage: until the socket closes."""
    obey_line(line, StageSetup, begin)


if __name__ == "__main__":
    main(work)
