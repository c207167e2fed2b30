"""Scorers and critics in worker processes: a scorer that survives the death of its process, and a critic that reports it.

A score depends on weights and rows alone. So when a scorer's process dies, another one is started with the same weights, and
the call is made again: callers notice only the time. A critic's training is lost with its process: it raises `LearnerGone`, and
a caller that knows what the critic was given may give it to a new one (`run.replay`).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from millstream.errors import LearnerError, LearnerGone, WeightsError
from millstream.learner.check import check_learner
from millstream.learner.config import CriticConfig
from millstream.learner.messages import (
    Accumulate,
    CriticStep,
    FindStore,
    LoadWeights,
    OpenStore,
    PackScores,
    RestoreSnapshot,
    ScoreRows,
    ScorerSetup,
    StoreAccess,
    TakeSnapshot,
    pack_rows,
    row_refs,
    rows_message,
)
from millstream.learner.processes import GroupSnapshot, LearnerProcesses
from millstream.learner.scorer import spread
from millstream.model.adapters import lora_of
from millstream.model.load import model_weights
from millstream.model.spec import described
from millstream.retry import BackOff, Retry
from millstream.rpc.call import Remote
from millstream.rpc.process import Launcher
from millstream.rpc.threads import DaemonThreads, on_a_thread
from millstream.store.wire import PackedBlock
from millstream.types import Floats, Metrics, TrainRow, Weights
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.publisher import WeightsPublisher
from millstream.weights.transfer.remote_weights import RemoteWeights

logger = logging.getLogger(__name__)
SCORER_WORKER = "millstream.learner.scorer_worker:serve_scorer"
MAX_RESTARTS = (
    5  # more than the answered calls in between: what kills a process that often would kill the next one, too
)
BACK_OFF = BackOff(first_s=0.5)
T = TypeVar("T")
PublishSetup = Callable[[], AbstractContextManager[ScorerSetup]]
"""Publishes the first weights for a new process, for as long as the context is open. Called again for each process."""


@contextmanager
def publish_setup(
    model: Callable[[], PreTrainedModel],
    open_publisher: Callable[[], WeightsPublisher],
    *,
    device: str,
    temperature: float = 1.0,
    critic: CriticConfig | None = None,
    num_steps: int | None = None,
    is_fixed: bool = False,
) -> Iterator[ScorerSetup]:
    """`model` is called once; the model is not used any more when its weights are published."""
    own = model()
    check_learner(own, is_small_only=True)
    publisher = open_publisher()
    try:
        yield ScorerSetup(
            files=described(own),
            dtype=str(own.dtype).removeprefix("torch."),
            lora=lora_of(own),
            device=device,
            weights=publisher.put(0, model_weights(own).items()),
            temperature=temperature,
            critic=critic,
            num_steps=num_steps,
            is_fixed=is_fixed,
        )
    finally:
        publisher.close()


class ScorerProcess:
    """One process of a scorer or critic, perhaps still starting. Blocking; may be called from several threads."""

    def __init__(self, publish: PublishSetup, launcher: Launcher, name: str) -> None:
        self._is_store_open = False
        self._published = ExitStack()
        setup = self._published.enter_context(publish())
        launch = partial(launcher.launch, "stage", SCORER_WORKER, name=name)
        self.group = LearnerProcesses([Remote(launch, setup, name=name)], who=f"the {name}")

    def wait(self) -> None:
        """Until it is ready: it has its weights then, and what was published for it is freed."""
        try:
            self.group.wait()
        finally:
            self._published.close()

    def use(self, store: StoreAccess | None) -> None:
        """It reads rows there from now on."""
        if store is not None and not self._is_store_open:
            self.call(OpenStore(store))
            self._is_store_open = True

    def pack_scores(self, store: StoreAccess | None, rows: Sequence[TrainRow], column: str) -> PackedBlock:
        self.use(store)
        packed: PackedBlock = self.call(PackScores(row_refs(rows), column), PackedBlock)
        return packed

    def call(self, message: Any, answer: Any = None) -> Any:
        """Raises `LearnerGone` if the process died, `LearnerError` if it refused."""
        self.wait()
        return self.group.call(message, answer)[0]

    def close(self) -> None:
        self.group.close()
        self._published.close()


class RemoteScorer:
    """A `Scorer` and a `Follower` (`learner.base`) in a worker process. Weights to load must be `RemoteWeights`."""

    def __init__(
        self, publish: PublishSetup, launcher: Launcher, *, name: str = "reference", store: FindStore = lambda: None
    ) -> None:
        self._publish = publish
        self._store = store
        self._launcher = launcher
        self._name = name
        self._thread = DaemonThreads(name, most=1)
        self._retry = Retry(BACK_OFF, max_failures=MAX_RESTARTS)
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._closing = threading.Event()
        self._process: ScorerProcess | None = None
        self._loaded: WeightsRef | None = None  # the weights that were loaded last

    @property
    def pids(self) -> list[int]:
        process = self._process
        return [] if process is None else process.group.pids

    async def ready(self) -> None:
        """Returns when it can score. Raises `LearnerError` if it never can."""
        await self._thread.call(lambda: self._with_restarts(ScorerProcess.wait))

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        if not rows:
            return []
        message = ScoreRows(pack_rows(rows))
        scores = await self._thread.call(lambda: self._with_restarts(lambda process: process.call(message, bytes)))
        return _by_row(scores, rows)

    @property
    def reads_store(self) -> bool:
        return self._store() is not None

    async def score_stored(self, rows: Sequence[TrainRow], column: str) -> PackedBlock:
        store = self._store()
        return await self._thread.call(
            lambda: self._with_restarts(lambda process: process.pack_scores(store, rows, column))
        )

    async def load(self, weights: Weights) -> None:
        if not isinstance(weights, RemoteWeights):
            raise WeightsError(
                f"the {self._name} was given a {type(weights).__name__}, expected RemoteWeights: publish the weights first"
            )
        published = weights.ref
        await self._thread.call(lambda: self._load(published))

    def _load(self, weights: WeightsRef) -> None:
        self._loaded = weights
        self._with_restarts(lambda process: process.call(LoadWeights(weights)))

    def _with_restarts(self, work: Callable[[ScorerProcess], T]) -> T:
        """By the current process, or by another one if it dies, until the retry budget is used up."""
        while True:
            process: ScorerProcess | None = None
            try:
                process = self._current()
                result = work(process)
                self._retry.succeeded()
                return result
            except LearnerGone as error:
                if process is not None:
                    self._drop(process)
                self._back_off(error)

    def _current(self) -> ScorerProcess:
        """The running process, or a new one with the weights that were loaded last."""
        with self._starting:
            if self._process is not None:
                return self._process
            if self._closing.is_set():
                raise LearnerError(f"the {self._name} is closed")
            process = ScorerProcess(self._publish, self._launcher, self._name)
            with self._lock:
                self._process = process
            if self._closing.is_set():  # since the check: `end` did not see this process
                process.close()
            try:
                if self._loaded is not None:
                    process.call(LoadWeights(self._loaded))
            except LearnerGone:
                self._drop(process)
                raise
            return process

    def _drop(self, process: ScorerProcess) -> None:
        with self._lock:
            self._process = None if self._process is process else self._process
        process.close()

    def _back_off(self, error: LearnerGone) -> None:
        wait_s = self._retry.failed(time.monotonic())
        if wait_s is None:
            raise LearnerError(
                f"the {self._name} was started again {MAX_RESTARTS} times in a row, and is gone again: {error}. A restart does "
                "not fix what kills it: check the machine's memory, and the last lines that its process wrote"
            ) from error
        logger.warning("%s; it is started again (%d of %d)", error, self._retry.num_failures, MAX_RESTARTS)
        if self._closing.wait(wait_s):
            raise LearnerError(f"the {self._name} is closed") from error

    async def close(self) -> None:
        """Let the work in hand finish. No process is left."""
        await on_a_thread(f"end of the {self._name}", self.end)
        await self._thread.close()

    def end(self) -> None:
        """As `close`, blocking: for a scorer that was never called."""
        with self._lock:
            self._closing.set()
            process = self._process
        if process is not None:
            process.close()


class RemoteCritic:
    """A `RunCritic` (`learner.base`) in a worker process. It dies with its process."""

    def __init__(self, publish: PublishSetup, launcher: Launcher, *, store: FindStore = lambda: None) -> None:
        self._process = ScorerProcess(publish, launcher, "critic")
        self._store = store
        self._snapshots = itertools.count()
        self._thread = DaemonThreads("critic", most=1)

    @property
    def pids(self) -> list[int]:
        return self._process.group.pids

    async def ready(self) -> None:
        """Returns when it can train. Raises `LearnerError` if it cannot."""
        await self._thread.call(self._process.wait)

    async def _call(self, message: Any, answer: Any = None) -> Any:
        return await self._thread.call(lambda: self._process.call(message, answer))

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return _by_row(await self._call(ScoreRows(pack_rows(rows)), bytes), rows) if rows else []

    @property
    def reads_store(self) -> bool:
        return self._store() is not None

    async def score_stored(self, rows: Sequence[TrainRow], column: str) -> PackedBlock:
        store = self._store()
        return await self._thread.call(lambda: self._process.pack_scores(store, rows, column))

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        if rows:
            await self._thread.call(lambda: self._accumulate(rows))

    def _accumulate(self, rows: Sequence[TrainRow]) -> None:
        self._process.use(self._store())
        self._process.call(Accumulate([rows_message(rows)]))

    async def step(self) -> Metrics:
        metrics: Metrics = await self._call(CriticStep(), dict[str, float])
        return metrics

    async def snapshot(self) -> GroupSnapshot:
        number = next(self._snapshots)
        await self._call(TakeSnapshot(number))
        return GroupSnapshot(self._process.group, number)

    def restore(self, folder: Path) -> None:
        self._process.call(RestoreSnapshot(str(folder.absolute())))

    async def close(self) -> None:
        """Let the work in hand finish. No process is left."""
        await on_a_thread("end of the critic", self._process.close)
        await self._thread.close()


def _by_row(scores: bytes, rows: Sequence[TrainRow]) -> list[Floats]:
    ends = np.cumsum([int(row.loss_mask.sum()) for row in rows])
    return spread(np.split(np.frombuffer(scores, np.float32), ends[:-1]), rows)
