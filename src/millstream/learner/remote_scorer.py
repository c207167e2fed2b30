"""Scorers and critics in worker processes: a scorer that survives the death of its processes, and a critic that reports it.

A score depends on weights and rows alone. So when a process of a scorer dies, another one is started with the same weights, and
the call is made again: callers notice only the time. A critic's training is lost with its process: it raises `LearnerGone`, and
a caller that knows what the critic was given may give it to a new one (`run.replay`).

A model is sharded over the ranks of a group, which are started and ended together. A scorer may have several such groups, its
replicas: the rows of a call are dealt to them by tokens, never by who is free, so that a call has the same passes in every run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel

from millstream.errors import LearnerError, LearnerGone, WeightsError
from millstream.learner.base import PackedScores
from millstream.learner.check import check_learner, check_shards
from millstream.learner.config import PASS_TOKENS, CriticConfig
from millstream.learner.critic import TABLE as CRITIC_TABLE
from millstream.learner.critic import step_metrics
from millstream.learner.messages import (
    Accumulate,
    ApplyStep,
    FindStore,
    LoadWeights,
    OpenStore,
    PackScores,
    RankPlace,
    RestoreSnapshot,
    ScoreRows,
    ScorerSetup,
    StoreAccess,
    TakeSnapshot,
    TakeTally,
    rows_message,
)
from millstream.learner.optimizer import StepResult
from millstream.learner.packing import deal, deal_shares, numbers_by_row
from millstream.learner.processes import LOOPBACK, GroupSnapshot, RankProcesses
from millstream.learner.scorer import spread
from millstream.learner.tally import StepTally, total_tally
from millstream.model.adapters import lora_of
from millstream.model.compare import small_model
from millstream.model.load import dtype_name, model_weights
from millstream.model.policy import has_plain_head
from millstream.model.slices import checkpoint_files
from millstream.model.spec import described
from millstream.retry import BackOff, Retry
from millstream.rpc.process import Launcher, replica_names, shard_names
from millstream.rpc.threads import DaemonThreads, on_a_thread
from millstream.store.wire import PackedBlock
from millstream.types import Floats, Metrics, StoredRow, TrainRow, Weights
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
OpenPublisher = Callable[[], WeightsPublisher]
PublishSetup = Callable[[], AbstractContextManager[ScorerSetup]]
"""Publishes the first weights for new processes, for as long as the context is open. Called again for each group of them."""


@contextmanager
def publish_setup(
    model: Callable[[], PreTrainedModel],
    open_publisher: OpenPublisher,
    *,
    device: str,
    name: str = "reference",
    ranks: int = 1,
    are_files_seen: bool = False,
    temperature: float = 1.0,
    critic: CriticConfig | None = None,
    num_steps: int | None = None,
    is_fixed: bool = False,
) -> Iterator[ScorerSetup]:
    """`model` is called once; the model is not used any more when its weights are published. `are_files_seen`: by all
    processes, so that several ranks need of the weights only what is not in the files of a checkpoint."""
    own = model()
    check_learner(own, is_small_only=True)
    if ranks > 1:
        check_shards(own, name)
    files, weights = checkpoint_files(own) if ranks > 1 else None, model_weights(own)
    rest = {} if files is None else {name: value for name, value in weights.items() if name not in files.files}
    publisher = open_publisher()
    try:
        setup = ScorerSetup(
            place=RankPlace(num_ranks=ranks),
            name=name,
            files=described(own),
            dtype=dtype_name(own),
            lora=lora_of(own),
            device=device,
            weights=None if files is not None and are_files_seen else publisher.put(0, weights.items()),
            checkpoint=files,
            rest=publisher.put(1, rest.items()) if rest else None,
            is_head_plain=ranks > 1 and has_plain_head(small_model(own.config, lora=lora_of(own)) or own),
            temperature=temperature,
            critic=critic,
            num_steps=num_steps,
            is_fixed=is_fixed,
        )
        del own, weights, rest  # the context may be open for long
        yield setup
    finally:
        publisher.close()


class SharedSetup:
    """A `PublishSetup` that publishes once for all groups that start at the same time."""

    def __init__(self, publish: PublishSetup) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._num_open = 0
        self._published = ExitStack()
        self._setup: ScorerSetup | None = None

    @contextmanager
    def __call__(self) -> Iterator[ScorerSetup]:
        with self._lock:
            if not self._num_open:
                self._setup = self._published.enter_context(self._publish())
            self._num_open += 1
        assert self._setup is not None
        try:
            yield self._setup
        finally:
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._setup = None
                    self._published.close()


class ScorerProcesses:
    """The ranks of one scorer or critic, perhaps still starting. Blocking; may be called from several threads."""

    def __init__(
        self,
        publish: PublishSetup,
        launcher: Launcher,
        name: str,
        *,
        host: str = LOOPBACK,
        pass_tokens: int = PASS_TOKENS,
    ) -> None:
        """`host`: the address of this machine that all ranks can reach. `pass_tokens`: of one pass of one of several ranks."""
        self._is_store_open = False
        self._pass_tokens = pass_tokens
        with ExitStack() as published:
            setup = published.enter_context(publish())
            names = shard_names(name, setup.place.num_ranks)
            self.group = RankProcesses(
                setup, launcher, names, kind="stage", target=SCORER_WORKER, who=f"the {name}", host=host
            )
            self._published = published.pop_all()

    def wait(self) -> None:
        """Until all are ready: they have their weights then, and what was published for them is freed."""
        try:
            self.group.wait()
        finally:
            self._published.close()

    def use(self, store: StoreAccess | None) -> None:
        """They read rows there from now on."""
        if store is not None and not self._is_store_open:
            self.call(OpenStore(store))
            self._is_store_open = True

    def deal(self, rows: Sequence[TrainRow]) -> list[list[list[TrainRow]]]:
        """By rank, by pass. Of a single process, a call is one pass already."""
        return deal(rows, len(self.group.members), max_tokens=self._pass_tokens)

    def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        dealt = self.deal(rows)
        messages = [ScoreRows([rows_message(some) for some in passes]) for passes in dealt]
        found = [np.frombuffer(own, np.float32) for own in self.call(messages, bytes)]
        rows_of = [[row for some in passes for row in some] for passes in dealt]
        return spread(numbers_by_row(rows, rows_of, found), rows)

    def pack_scores(self, store: StoreAccess | None, rows: Sequence[TrainRow], column: str) -> list[PackedScores]:
        self.use(store)
        dealt = self.deal(rows)
        messages = [PackScores([rows_message(some) for some in passes], column) for passes in dealt]
        blocks = self.call(messages, PackedBlock | None)
        ids = [[row.row_id for some in passes for row in some if isinstance(row, StoredRow)] for passes in dealt]
        return [PackedScores(own, block) for own, block in zip(ids, blocks, strict=True) if block is not None]

    def call(self, message: Any, answer: Any = None) -> list[Any]:
        """One message for all ranks, or one for each. Raises `LearnerGone` if a process died, `LearnerError` if it refused."""
        self.wait()
        return self.group.call(message, answer)

    def close(self) -> None:
        self.group.close()
        self._published.close()


class ScorerReplica:
    """The processes that have one copy of a scorer's model, started again when one of them dies. Blocking, one call at a time:
    on the thread of `run`."""

    def __init__(self, name: str, start: Callable[[], ScorerProcesses]) -> None:
        self.name = name
        self._start = start
        self._thread = DaemonThreads(name, most=1)
        self._retry = Retry(BACK_OFF, max_failures=MAX_RESTARTS)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._processes: ScorerProcesses | None = None
        self._loaded: WeightsRef | None = None  # the weights that were loaded last

    @property
    def pids(self) -> list[int]:
        processes = self._processes
        return [] if processes is None else processes.group.pids

    async def run(self, work: Callable[[ScorerProcesses], T]) -> T:
        """By the current processes, or by others if one of them dies, until the retry budget is used up."""
        return await self._thread.call(lambda: self._with_restarts(work))

    async def load(self, weights: WeightsRef) -> None:
        def load(processes: ScorerProcesses) -> None:
            self._loaded = weights
            processes.call(LoadWeights(weights))

        await self.run(load)

    def _with_restarts(self, work: Callable[[ScorerProcesses], T]) -> T:
        while True:
            processes: ScorerProcesses | None = None
            try:
                processes = self._current()
                result = work(processes)
                self._retry.succeeded()
                return result
            except LearnerGone as error:
                if processes is not None:
                    self._drop(processes)
                self._back_off(error)

    def _current(self) -> ScorerProcesses:
        """The running processes, or new ones with the weights that were loaded last."""
        if self._processes is not None:
            return self._processes
        if self._closing.is_set():
            raise LearnerError(f"the {self.name} is closed")
        processes = self._start()
        with self._lock:
            self._processes = processes
        if self._closing.is_set():  # since the check: `end` did not see these processes
            processes.close()
        try:
            if self._loaded is not None:
                processes.call(LoadWeights(self._loaded))
        except LearnerGone:
            self._drop(processes)
            raise
        return processes

    def _drop(self, processes: ScorerProcesses) -> None:
        with self._lock:
            self._processes = None if self._processes is processes else self._processes
        processes.close()

    def _back_off(self, error: LearnerGone) -> None:
        wait_s = self._retry.failed(time.monotonic())
        if wait_s is None:
            raise LearnerError(
                f"the {self.name} was started again {MAX_RESTARTS} times in a row, and is gone again: {error}. A restart does "
                "not fix what kills it: check the machine's memory, and the last lines that its process wrote"
            ) from error
        logger.warning("%s; it is started again (%d of %d)", error, self._retry.num_failures, MAX_RESTARTS)
        if self._closing.wait(wait_s):
            raise LearnerError(f"the {self.name} is closed") from error

    def end(self) -> None:
        with self._lock:
            self._closing.set()
            processes = self._processes
        if processes is not None:
            processes.close()

    async def close(self) -> None:
        await on_a_thread(f"end of the {self.name}", self.end)
        await self._thread.close()


class RemoteScorer:
    """A `Scorer` and a `Follower` (`learner.base`) in worker processes: `replicas` groups of ranks, each with the whole model.
    `open_outbox`: opens a publisher for weights of this process that are loaded; without it they must be `RemoteWeights`."""

    def __init__(
        self,
        publish: PublishSetup,
        launcher: Launcher,
        *,
        name: str = "reference",
        replicas: int = 1,
        host: str = LOOPBACK,
        pass_tokens: int = PASS_TOKENS,
        store: FindStore = lambda: None,
        open_outbox: OpenPublisher | None = None,
    ) -> None:

        def start(own: str) -> Callable[[], ScorerProcesses]:
            return lambda: ScorerProcesses(publish, launcher, own, host=host, pass_tokens=pass_tokens)

        self._name = name
        self._store = store
        self._replicas = [ScorerReplica(own, start(own)) for own in replica_names(name, replicas)]
        self._open_outbox = open_outbox
        self._outbox: WeightsPublisher | None = None
        self._numbers = itertools.count(1)

    @property
    def pids(self) -> list[int]:
        return [pid for replica in self._replicas for pid in replica.pids]

    async def ready(self) -> None:
        """Returns when it can score. Raises `LearnerError` if it never can."""
        await asyncio.gather(*(replica.run(ScorerProcesses.wait) for replica in self._replicas))

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        found = await self._dealt(rows, ScorerProcesses.score)
        by_row = {id(row): scores for share, own in found for row, scores in zip(share, own, strict=True)}
        return [by_row[id(row)] for row in rows]

    @property
    def reads_store(self) -> bool:
        return self._store() is not None

    async def score_stored(self, rows: Sequence[TrainRow], column: str) -> list[PackedScores]:
        store = self._store()
        found = await self._dealt(rows, lambda processes, share: processes.pack_scores(store, share, column))
        return [packed for _, own in found for packed in own]

    async def _dealt(
        self, rows: Sequence[TrainRow], work: Callable[[ScorerProcesses, list[TrainRow]], T]
    ) -> list[tuple[list[TrainRow], T]]:
        """What each replica makes of its share."""
        shares = deal_shares(rows, len(self._replicas))

        async def run(replica: ScorerReplica, share: list[TrainRow]) -> tuple[list[TrainRow], T]:
            return share, await replica.run(lambda processes: work(processes, share))

        pairs = zip(self._replicas, shares, strict=True)
        return await asyncio.gather(*(run(replica, share) for replica, share in pairs if share))

    async def load(self, weights: Weights) -> None:
        published = weights.ref if isinstance(weights, RemoteWeights) else await asyncio.to_thread(self._put, weights)
        await asyncio.gather(*(replica.load(published) for replica in self._replicas))

    def _put(self, weights: Weights) -> WeightsRef:
        if self._open_outbox is None:
            raise WeightsError(
                f"the {self._name} was given a {type(weights).__name__}, expected RemoteWeights: publish the weights first"
            )
        self._outbox = self._outbox or self._open_outbox()
        return self._outbox.put(next(self._numbers), weights.items())

    async def close(self) -> None:
        """Let the work in hand finish. No process is left."""
        await asyncio.gather(*(replica.close() for replica in self._replicas))
        self._close_outbox()

    def end(self) -> None:
        """As `close`, blocking: for a scorer that was never called."""
        for replica in self._replicas:
            replica.end()
        self._close_outbox()

    def _close_outbox(self) -> None:
        if self._outbox is not None:
            self._outbox.close()


class RemoteCritic:
    """A `RunCritic` (`learner.base`) in worker processes. It dies with any of them."""

    def __init__(
        self,
        publish: PublishSetup,
        launcher: Launcher,
        *,
        host: str = LOOPBACK,
        pass_tokens: int = PASS_TOKENS,
        store: FindStore = lambda: None,
    ) -> None:
        self._processes = ScorerProcesses(publish, launcher, CRITIC_TABLE, host=host, pass_tokens=pass_tokens)
        self._store = store
        self._snapshots = itertools.count()
        self._thread = DaemonThreads(CRITIC_TABLE, most=1)

    @property
    def pids(self) -> list[int]:
        return self._processes.group.pids

    async def ready(self) -> None:
        """Returns when it can train. Raises `LearnerError` if it cannot."""
        await self._thread.call(self._processes.wait)

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return await self._thread.call(lambda: self._processes.score(rows)) if rows else []

    @property
    def reads_store(self) -> bool:
        return self._store() is not None

    async def score_stored(self, rows: Sequence[TrainRow], column: str) -> list[PackedScores]:
        store = self._store()
        return await self._thread.call(lambda: self._processes.pack_scores(store, rows, column))

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        if rows:
            await self._thread.call(lambda: self._accumulate(rows))

    def _accumulate(self, rows: Sequence[TrainRow]) -> None:
        self._processes.use(self._store())
        dealt = self._processes.deal(rows)
        self._processes.call([Accumulate([rows_message(some) for some in passes]) for passes in dealt], float)

    async def step(self) -> Metrics:
        return await self._thread.call(self._step)

    def _step(self) -> Metrics:
        counted = total_tally(self._processes.call(TakeTally(), StepTally))
        if not counted.num_tokens:
            return {}
        stepped = self._processes.call(ApplyStep(counted), tuple[StepResult, float])
        return step_metrics(counted, stepped[0][0])

    async def snapshot(self) -> GroupSnapshot:
        number = next(self._snapshots)
        await self._thread.call(lambda: self._processes.call(TakeSnapshot(number)))
        return GroupSnapshot(self._processes.group, number)

    def restore(self, folder: Path) -> None:
        self._processes.call(RestoreSnapshot(str(folder.absolute())))

    async def close(self) -> None:
        """Let the work in hand finish. No process is left."""
        await on_a_thread("end of the critic", self._processes.close)
        await self._thread.close()
