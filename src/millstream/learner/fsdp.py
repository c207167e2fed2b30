"""The learner of one or more processes: one policy, sharded where there are several ranks. One rank computes the bits of
`TorchLearner`; several give the same weights, to float tolerance.

It deals the rows of every micro-batch to the ranks, adds up their tallies, and makes all of them step by the total. A rank that
dies or raises ends the learner with an error that names it (`learner.processes`): `LearnerGone` if it died.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millstream.errors import LearnerError
from millstream.learner.check import check_learner
from millstream.learner.config import LearnerConfig
from millstream.learner.messages import (
    Accumulate,
    ApplyStep,
    BeginBatch,
    ComputeLogprobs,
    FindStore,
    GatherWeights,
    ObjectiveSource,
    OpenStore,
    RankPlan,
    RankSetup,
    RestoreSnapshot,
    RowsMessage,
    TakeSnapshot,
    TakeTally,
    rows_message,
)
from millstream.learner.optimizer import StepResult
from millstream.learner.packing import deal_passes, numbers_by_row
from millstream.learner.processes import GroupSnapshot, RankProcesses, learner_ranks
from millstream.learner.tally import FiniteGuard, StepTally, total_tally
from millstream.learner.trainer import save_trained
from millstream.model.adapters import lora_of, trained_weights
from millstream.model.compare import small_model
from millstream.model.load import load_weights, model_weights
from millstream.model.policy import has_plain_head
from millstream.model.shared_memory import Layout, SharedWeights, anonymous_memory, layout_of
from millstream.model.slices import CheckpointFiles, checkpoint_files
from millstream.model.spec import described
from millstream.rpc.process import Launcher, LocalLauncher
from millstream.rpc.threads import DaemonThreads, on_a_thread
from millstream.types import Floats, HalfFloats, Metrics, TrainRow, Weights
from millstream.weights.transfer import Delivery, WeightsRef
from millstream.weights.transfer.fetcher import WeightsFetcher
from millstream.weights.transfer.remote_weights import RemoteWeights


class PublishingRanks(NamedTuple):
    """What ranks need that share no memory with this process: on the nodes of a cluster, or on the GPU of an engine."""

    launcher: Launcher
    host: str  # an address of this machine that they reach
    node: str  # the name of this machine's node
    first: WeightsRef  # the first weights
    delivery: Delivery  # how rank 0 publishes weights
    publish: Callable[[Weights], WeightsRef] | None = None
    """Of several ranks: some of the first weights, where they read the others from files."""


class FsdpLearner:
    """A `RunLearner` (`learner.base`). The model is what training starts from; only `save` changes it.

    Ranks are processes of this machine that share memory with this one; or, with `publishing`, processes that may be anywhere,
    and `weights()` returns a reference to published weights. `device`: of the ranks, "cpu" or "cuda"; None: the model's.
    `store`: where they read `StoredRow`s by themselves, once it is open. Other rows are sent. `records_ratios`: whether
    `log_ratios` is read."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        objective: ObjectiveSource,
        *,
        temperature: float = 1.0,
        num_steps: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        is_proximal_given: bool = False,
        is_fixed: bool = False,
        records_ratios: bool = True,
        device: str | None = None,
        store: FindStore = lambda: None,
        publishing: PublishingRanks | None = None,
    ) -> None:
        check_learner(model, is_small_only=True)
        self.model = model
        self._config = config
        self._tokenizer = tokenizer
        self._guard = FiniteGuard(config.max_skipped_steps)
        plan = RankPlan(
            device=device or model.device.type,
            dtype=str(model.dtype).removeprefix("torch."),
            files=described(model),
            config=structs.replace(config, lora=lora_of(model)),  # what the model has: a rank reads no adapter's folder
            objective=objective,
            temperature=temperature,
            num_steps=num_steps,
            is_proximal_given=is_proximal_given,
            is_fixed=is_fixed,
            records_ratios=records_ratios,
            is_head_plain=config.ranks > 1 and has_plain_head(small_model(model.config, lora=lora_of(model)) or model),
        )
        files = checkpoint_files(model) if config.ranks > 1 else None
        self._shared: SharedWeights | None = None
        self._fetcher = None if publishing is None else WeightsFetcher(publishing.node, without=("nccl",))
        self.ranks = self._start_here(plan, files) if publishing is None else self._start_there(plan, files, publishing)
        self._store = store
        self._is_store_open = False  # in the ranks
        self._snapshots = itertools.count()
        self._gathers = itertools.count(1)
        self._thread = DaemonThreads("learner", most=1)
        self._rows: list[TrainRow] = []  # since the last step
        self._rows_of: list[list[TrainRow]] = [[] for _ in range(config.ranks)]  # the same, as they were dealt
        self._log_ratios: HalfFloats = np.zeros(0, np.float16)
        self._rank_seconds: list[float] = []

    def _start_there(self, plan: RankPlan, files: CheckpointFiles | None, publishing: PublishingRanks) -> RankProcesses:
        rest = {} if files is None else _not_in(files, self.model)
        assert publishing.publish is not None or not rest
        setup = RankSetup(
            plan=plan,
            weights=publishing.first,
            delivery=publishing.delivery,
            checkpoint=files,
            rest=publishing.publish(rest) if rest and publishing.publish is not None else None,
        )
        return learner_ranks(setup, self._config.ranks, publishing.launcher, host=publishing.host)

    def _start_here(self, plan: RankPlan, files: CheckpointFiles | None) -> RankProcesses:
        """The shared memory has room for what is trained, and for what ranks do not read from files."""
        sent = model_weights(self.model) if files is None else _not_in(files, self.model)
        layout = layout_of({**trained_weights(self.model), **sent})
        memory = _memory_for(layout)
        self._shared = SharedWeights(memory, layout)
        self._shared.write(sent)
        try:
            launcher = LocalLauncher(is_warm=plan.device == "cpu")
            setup = RankSetup(plan=plan, memory=memory, layout=layout, checkpoint=files)
            return learner_ranks(setup, self._config.ranks, launcher)
        finally:
            os.close(memory)

    async def ready(self) -> None:
        """Returns when all ranks are ready, which takes seconds."""
        await self._thread.call(self.ranks.wait)

    async def begin_batch(self) -> None:
        await self._thread.call(lambda: self.ranks.call(BeginBatch()))

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        if rows:
            await self._thread.call(lambda: self._accumulate(rows))

    @property
    def reads_store(self) -> bool:
        return self._store() is not None

    def _passes(self, dealt: Sequence[Sequence[Sequence[TrainRow]]]) -> list[list[RowsMessage]]:
        """By rank: its passes, as messages."""
        access = self._store()
        if access is not None and not self._is_store_open:
            self.ranks.call(OpenStore(access))
            self._is_store_open = True
        return [[rows_message(rows) for rows in passes] for passes in dealt]

    def _accumulate(self, rows: Sequence[TrainRow]) -> None:
        dealt = deal_passes(rows, self._config.ranks, max_tokens=self._config.pass_tokens)
        messages = [Accumulate(passes) for passes in self._passes(dealt)]
        self._rank_seconds = self.ranks.call(messages, float)
        self._rows += rows
        for own, passes in zip(self._rows_of, dealt, strict=True):
            own += [row for some in passes for row in some]

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return await self._thread.call(lambda: self._logprobs(rows)) if rows else []

    def _logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        dealt = deal_passes(rows, self._config.ranks, max_tokens=self._config.pass_tokens)
        messages = [ComputeLogprobs(passes) for passes in self._passes(dealt)]
        rows_of = [[row for some in passes for row in some] for passes in dealt]
        found = [np.frombuffer(own, np.float32) for own in self.ranks.call(messages, bytes)]
        return numbers_by_row(rows, rows_of, found)

    async def step(self) -> Metrics:
        return await self._thread.call(self._step)

    def _step(self) -> Metrics:
        tallies = self.ranks.call(TakeTally(), StepTally)
        found = [np.frombuffer(tally.log_ratios, np.float16) for tally in tallies]
        ordered = numbers_by_row(self._rows, self._rows_of, found) if any(map(len, found)) else []
        self._log_ratios = np.concatenate([np.zeros(0, np.float16), *ordered])
        self._rows = []
        self._rows_of = [[] for _ in tallies]
        self._rank_seconds = []
        counted = total_tally(tallies)
        self._guard.check(counted)
        if not counted.units:
            return counted.skipped_rows()
        stepped = self.ranks.call(ApplyStep(counted), tuple[StepResult, float])
        self._rank_seconds = [seconds for _, seconds in stepped]
        return counted.metrics(stepped[0][0])

    def log_ratios(self) -> HalfFloats:
        return self._log_ratios

    def rank_seconds(self) -> list[float]:
        return self._rank_seconds if self._config.ranks > 1 else []

    async def weights(self) -> Weights:
        return await self._thread.call(self._weights)

    def _weights(self) -> Weights:
        gathered = self._gathered()
        trained = trained_weights(self.model)
        return gathered if self._shared is None else {name: gathered[name].clone() for name in trained}

    def _gathered(self) -> Weights:
        """In the shared memory, valid until the next call; or a reference to where rank 0 has published them."""
        published = self.ranks.call(GatherWeights(next(self._gathers)), WeightsRef | None)[0]
        if self._shared is not None:
            return self._shared.views
        assert published is not None and self._fetcher is not None
        return RemoteWeights(published, self._fetcher)

    async def snapshot(self) -> GroupSnapshot:
        number = next(self._snapshots)
        await self._thread.call(lambda: self.ranks.call(TakeSnapshot(number)))
        return GroupSnapshot(self.ranks, number)

    def restore(self, folder: Path) -> None:
        self.ranks.call(RestoreSnapshot(str(folder.absolute())))

    def save(self, path: Path) -> None:
        weights = self._gathered()
        load_weights(self.model, {name: weights[name] for name in trained_weights(self.model)})
        save_trained(self.model, self._tokenizer, path)

    async def close(self) -> None:
        """Let the work in hand finish. No process is left."""
        await on_a_thread("end of ranks", self.ranks.close)
        await self._thread.close()


def _not_in(files: CheckpointFiles, model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value for name, value in model_weights(model).items() if name not in files.files}


def _memory_for(layout: Layout) -> int:
    try:
        return anonymous_memory(layout.ends[-1])
    except OSError as error:
        raise LearnerError(
            f"no room for {layout.ends[-1] / 2**20:.0f} MiB of shared weights ({error.strerror}): set learner.ranks = 1 and "
            "engine.process = false"
        ) from error
