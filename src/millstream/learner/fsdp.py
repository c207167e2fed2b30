"""The learner of several ranks: one policy sharded over processes, and the weights of one rank, to float tolerance.

It deals the rows of every micro-batch to the ranks, adds up what they counted, and tells them all to step by it. A rank that
dies or raises ends the learner with an error that names it (`learner.process_group`): `LearnerGone` if it died.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.errors import LearnerError
from millstream.learner import LearnerConfig
from millstream.learner.messages import (
    Accumulate,
    BeginBatch,
    Count,
    GatherWeights,
    Keep,
    Measure,
    Plan,
    Restore,
    Setup,
    Source,
    Step,
    pack,
)
from millstream.learner.packing import deal
from millstream.learner.process_group import CrewSnapshot
from millstream.learner.rank import FiniteGuard, total
from millstream.learner.ranks import Ranks
from millstream.learner.torch import save_trained
from millstream.model.load import check_layers, load_weights, model_weights
from millstream.model.shared_memory import Layout, SharedWeights, anonymous_memory, layout_of
from millstream.model.spec import described
from millstream.rpc.process import Launcher, LocalLauncher
from millstream.rpc.threads import DaemonThreads, on_a_thread
from millstream.types import Floats, Metrics, TrainRow, Weights
from millstream.weights.transfer import Delivery, WeightsRef
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.remote_weights import RemoteWeights

T = TypeVar("T")


class Elsewhere(NamedTuple):
    """What ranks on the nodes of a cluster need."""

    launcher: Launcher
    host: str
    """An address of this machine that they reach."""
    node: str
    """This machine's."""
    first: WeightsRef
    """The weights to begin with."""
    delivery: Delivery
    """How rank 0 lets others have weights."""
    device: str


class FsdpLearner:
    """See `millstream.learner.Learner` for the promises. The model is what training starts from; only `save` changes it.

    Ranks are processes of this machine that share memory with us; or they are `elsewhere`, one of them or many, and weights
    are said by where they are to be had."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        objective: Source,
        *,
        temperature: float = 1.0,
        num_steps: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        is_proximal_given: bool = False,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        check_layers(model)
        self.model = model
        self._config = config
        self._tokenizer = tokenizer
        self._barren = FiniteGuard(config.max_skipped_steps)
        plan = Plan(
            rank=0,
            num_ranks=config.ranks,
            host="",
            port=0,
            device=model.device.type if elsewhere is None else elsewhere.device,
            dtype=str(model.dtype).removeprefix("torch."),
            files=described(model),
            config=config,
            objective=objective,
            temperature=temperature,
            num_steps=num_steps,
            is_proximal_given=is_proximal_given,
        )
        self._shared: SharedWeights | None = None
        self._inbox = None if elsewhere is None else WeightsFetcher(elsewhere.node)
        if elsewhere is None:
            self.ranks = self._beside_us(plan)
        else:
            setup = Setup(plan=plan, parcel=elsewhere.first, delivery=elsewhere.delivery)
            self.ranks = Ranks(setup, elsewhere.launcher, host=elsewhere.host)
        self._snapshots = itertools.count()
        self._gatherings = itertools.count(1)
        self._thread = DaemonThreads("learner", most=1)

    def _beside_us(self, plan: Plan) -> Ranks:
        weights = model_weights(self.model)
        layout = layout_of(weights)
        memory = _memory_for(layout)
        self._shared = SharedWeights(memory, layout)
        self._shared.write(weights)
        try:
            return Ranks(Setup(plan=plan, memory=memory, layout=layout), LocalLauncher())
        finally:
            os.close(memory)

    async def _run(self, work: Callable[[], T]) -> T:
        result: T = await self._thread.call(work)
        return result

    async def ready(self) -> None:
        """Returns when all ranks are there, which takes seconds, so that nobody else's wait seems to take as long."""
        await self._run(self.ranks.wait)

    async def begin_batch(self) -> None:
        await self._run(lambda: self.ranks.ask(BeginBatch()))

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        if rows:
            await self._run(lambda: self._accumulate(rows))

    def _accumulate(self, rows: Sequence[TrainRow]) -> None:
        dealt = self._dealt(rows)
        self.ranks.ask([Accumulate([pack(some) for some in passes]) for passes in dealt])

    def _dealt(self, rows: Sequence[TrainRow]) -> Sequence[Sequence[Sequence[TrainRow]]]:
        """By rank, by pass. One rank alone gets what the learner of one device gets, and gives the same bits."""
        if self._config.ranks == 1:
            return [[rows]]
        return deal(rows, self._config.ranks, max_tokens=self._config.micro_batch_tokens)

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return await self._run(lambda: self._logprobs(rows)) if rows else []

    def _logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        dealt = self._dealt(rows)
        answers = self.ranks.ask([Measure([pack(some) for some in passes]) for passes in dealt])
        found: dict[int, Floats] = {}
        for passes, answer in zip(dealt, answers, strict=True):
            own = [row for some in passes for row in some]
            ends = np.cumsum([int(row.loss_mask.sum()) for row in own])
            parts = np.split(np.frombuffer(answer.scores, np.float32), ends[:-1]) if own else []
            found |= {id(row): part for row, part in zip(own, parts, strict=True)}
        return [found[id(row)] for row in rows]

    async def step(self) -> Metrics:
        return await self._run(self._step)

    def _step(self) -> Metrics:
        counted = total([answer.tally for answer in self.ranks.ask(Count()) if answer.tally is not None])
        self._barren.look_at(counted)
        if not counted.units:
            return counted.left_out()
        stepped = self.ranks.ask(Step(counted))[0].stepped
        assert stepped is not None
        return counted.metrics(stepped)

    async def weights(self) -> Weights:
        return await self._run(self._weights)

    def _weights(self) -> Weights:
        gathered = self._gathered()
        return gathered if self._shared is None else {name: view.clone() for name, view in gathered.items()}

    def _gathered(self) -> Weights:
        """In the memory that we share, until the next time; or said by where they are."""
        parcel = self.ranks.ask(GatherWeights(next(self._gatherings)))[0].parcel
        if self._shared is not None:
            return self._shared.views
        assert parcel is not None and self._inbox is not None
        return RemoteWeights(parcel, self._inbox)

    async def snapshot(self) -> CrewSnapshot:
        number = next(self._snapshots)
        await self._run(lambda: self.ranks.ask(Keep(number)))
        return CrewSnapshot(self.ranks, number)

    def restore(self, folder: Path) -> None:
        self.ranks.ask(Restore(str(folder.absolute())))

    def save(self, path: Path) -> None:
        load_weights(self.model, self._gathered())
        save_trained(self.model, self._tokenizer, path)

    async def close(self) -> None:
        """Let the work in hand come to its end. No process is left."""
        await on_a_thread("end of ranks", self.ranks.close)
        await self._thread.close()


def _memory_for(layout: Layout) -> int:
    try:
        return anonymous_memory(layout.ends[-1])
    except OSError as error:
        raise LearnerError(
            f"no room for {layout.ends[-1] / 2**20:.0f} MiB of shared weights ({error.strerror}): set learner.ranks = 1"
        ) from error
