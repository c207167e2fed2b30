"""Who works beside the learner, as processes: a scorer that outlives them, and a critic that says when its own is gone.

A score depends on weights and rows alone. So a scorer whose process dies has another one, with the weights that the last one
had, and what was asked is asked again: whoever waits notices nothing but the time. A critic has learned something that is lost
with its process: it raises `LearnerGone`, and whoever knows what it was told may tell another one (`run.replay_critic`).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from transformers import PreTrainedModel

from millstream.errors import LearnerError, LearnerGone, WeightsError
from millstream.learner import CriticConfig
from millstream.learner.messages import Accumulate, Answer, Keep, Learn, Load, Order, Restore, Score, StageSetup, pack
from millstream.learner.process_group import CrewSnapshot, ProcessGroup, ProcessSpec
from millstream.learner.scorer import spread
from millstream.model.adapters import lora_of
from millstream.model.load import check_layers, model_weights
from millstream.model.spec import described
from millstream.rpc.process import Launcher
from millstream.rpc.threads import DaemonThreads, on_a_thread
from millstream.types import Floats, Metrics, TrainRow, Weights
from millstream.weights.transfer import WeightsRef
from millstream.weights.transfer.publisher import WeightsPublisher
from millstream.weights.transfer.remote_weights import RemoteWeights

logger = logging.getLogger(__name__)
MODULE = "millstream.learner.scorer_worker"
MAX_RESTARTS = 5
"""In a row, with nothing answered in between: what kills a process as often would kill the next one, too."""
BACK_OFF_S = 0.5
"""Before the first restart; twice as long before each that follows it."""
T = TypeVar("T")
Begin = Callable[[], AbstractContextManager[StageSetup]]
"""What a process begins with, for as long as the context is open: weights are staged there. Asked again for another process."""


@contextmanager
def beginning(
    model: Callable[[], PreTrainedModel],
    open_publisher: Callable[[], WeightsPublisher],
    *,
    device: str,
    temperature: float = 1.0,
    critic: CriticConfig | None = None,
    num_steps: int | None = None,
) -> Iterator[StageSetup]:
    """`model` is called once, and not looked at any more when its weights are staged."""
    own = model()
    check_layers(own)
    outbox = open_publisher()
    try:
        yield StageSetup(
            files=described(own),
            dtype=str(own.dtype).removeprefix("torch."),
            lora=lora_of(own),
            device=device,
            parcel=outbox.put(0, model_weights(own).items()),
            temperature=temperature,
            critic=critic,
            num_steps=num_steps,
        )
    finally:
        outbox.close()


class StageProcess:
    """One process, on its way or there. Blocking; may be called from several threads."""

    def __init__(self, begin: Begin, launcher: Launcher, name: str) -> None:
        self._staged = ExitStack()
        setup = self._staged.enter_context(begin())
        self.crew = ProcessGroup([ProcessSpec("stage", MODULE, name, setup)], launcher, who=f"the {name}")

    def wait(self) -> None:
        """Until it is ready: it has its weights then, and what was staged for it is let go."""
        try:
            self.crew.wait()
        finally:
            self._staged.close()

    def ask(self, order: Order) -> Answer:
        """Raises `LearnerGone` if it died, `LearnerError` if it refused."""
        self.wait()
        return self.crew.ask(order)[0]

    def close(self) -> None:
        self.crew.close()
        self._staged.close()


class RemoteScorer:
    """See `millstream.learner.Scorer` and `Follower` for the promises. Weights to follow must be `RemoteWeights`."""

    def __init__(self, begin: Begin, launcher: Launcher, *, name: str = "reference") -> None:
        self._begin = begin
        self._launcher = launcher
        self._name = name
        self._thread = DaemonThreads(name, most=1)
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._closing = threading.Event()
        self._follows: WeightsRef | None = None
        """What was loaded last; None: what it began with."""
        self._process: StageProcess | None = StageProcess(begin, launcher, name)

    @property
    def pids(self) -> list[int]:
        return [] if self._process is None else self._process.crew.pids

    async def ready(self) -> None:
        """Returns when it can begin. Raises `LearnerError` if it cannot."""
        await self._thread.call(lambda: self._lasting(lambda process: process.wait()))

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        scores: list[Floats] = await self._thread.call(lambda: self._score(rows)) if rows else []
        return scores

    def _score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        packed = pack(rows)
        return _per_row(self._lasting(lambda process: process.ask(Score(packed))), rows)

    async def load(self, weights: Weights) -> None:
        if not isinstance(weights, RemoteWeights):
            raise WeightsError(
                f"the {self._name} was given a {type(weights).__name__}, expected StagedWeights: put it into an Outbox first"
            )
        parcel = weights.ref
        await self._thread.call(lambda: self._load(parcel))

    def _load(self, parcel: WeightsRef) -> None:
        self._follows = parcel
        self._lasting(lambda process: process.ask(Load(parcel)))

    def _lasting(self, work: Callable[[StageProcess], T]) -> T:
        """Of one process after the other, until one of them has done it."""
        num_restarts = 0
        while True:
            process: StageProcess | None = None
            try:
                process = self._present()
                return work(process)
            except LearnerGone as error:
                if process is not None:
                    self._drop(process)
                self._back_off(error, num_restarts)
                num_restarts += 1

    def _present(self) -> StageProcess:
        """The one at work, or another one that is where the last one was."""
        with self._starting:
            if self._process is not None:
                return self._process
            if self._closing.is_set():
                raise LearnerError(f"the {self._name} is closed")
            process = StageProcess(self._begin, self._launcher, self._name)
            with self._lock:
                self._process = process
            if self._closing.is_set():  # meanwhile, and nobody else knows of this one
                process.close()
            try:
                if self._follows is not None:
                    process.ask(Load(self._follows))
            except LearnerGone:
                self._drop(process)
                raise
            return process

    def _drop(self, process: StageProcess) -> None:
        with self._lock:
            self._process = None if self._process is process else self._process
        process.close()

    def _back_off(self, error: LearnerGone, num_restarts: int) -> None:
        if num_restarts >= MAX_RESTARTS:
            raise LearnerError(
                f"the {self._name} was started again {num_restarts} times in a row, and is gone again: {error}. What kills it "
                "is not mended by a restart: look at the memory of the machine, and at what its process said last"
            ) from error
        logger.warning("%s; it is started again (%d of %d)", error, num_restarts + 1, MAX_RESTARTS)
        if self._closing.wait(BACK_OFF_S * 2**num_restarts):
            raise LearnerError(f"the {self._name} is closed") from error

    async def close(self) -> None:
        """Let the work in hand come to its end. No process is left."""
        await on_a_thread(f"end of the {self._name}", self.end)
        await self._thread.close()

    def end(self) -> None:
        """As `close`, blocking: for one that nobody has called yet."""
        with self._lock:
            self._closing.set()
            process = self._process
        if process is not None:
            process.close()


class RemoteCritic:
    """See `millstream.learner.Critic` for the promises. It dies with its process."""

    def __init__(self, begin: Begin, launcher: Launcher) -> None:
        self._process = StageProcess(begin, launcher, "critic")
        self._snapshots = itertools.count()
        self._thread = DaemonThreads("critic", most=1)

    @property
    def pids(self) -> list[int]:
        return self._process.crew.pids

    async def ready(self) -> None:
        """Returns when it can begin. Raises `LearnerError` if it cannot."""
        await self._thread.call(self._process.wait)

    async def _ask(self, order: Order) -> Answer:
        answer: Answer = await self._thread.call(lambda: self._process.ask(order))
        return answer

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return _per_row(await self._ask(Score(pack(rows))), rows) if rows else []

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        if rows:
            await self._ask(Accumulate([pack(rows)]))

    async def step(self) -> Metrics:
        metrics = (await self._ask(Learn())).metrics
        assert metrics is not None
        return metrics

    async def snapshot(self) -> CrewSnapshot:
        number = next(self._snapshots)
        await self._ask(Keep(number))
        return CrewSnapshot(self._process.crew, number)

    def restore(self, folder: Path) -> None:
        self._process.ask(Restore(str(folder.absolute())))

    async def close(self) -> None:
        """Let the work in hand come to its end. No process is left."""
        await on_a_thread("end of the critic", self._process.close)
        await self._thread.close()


def _per_row(answer: Answer, rows: Sequence[TrainRow]) -> list[Floats]:
    ends = np.cumsum([int(row.loss_mask.sum()) for row in rows])
    return spread(np.split(np.frombuffer(answer.scores, np.float32), ends[:-1]), rows)
