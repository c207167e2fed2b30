"""A learner or critic that outlives its processes: a new one restores the newest checkpoint and replays the calls since.

    call ──► the learner ──► done: appended to the log ──► a checkpoint is sealed: the calls that it covers leave the log
                  │
                  └─ its process died ──► a new learner ──► restores that checkpoint ──► replays the log ──► the call again

Guarantees. The caller notices only the time: no version falls, no row is left out, none counts twice in the learner that
survives, and since the same calls in the same order give the same bits, the weights are those of an undisturbed run (on a CPU;
elsewhere, to float tolerance). Rollouts are not sampled again: the log has the rows, or their ids in a store that keeps them,
until a checkpoint covers them. It is used where the learner has processes of its own (`build_training.py`); one on a thread of
the driver ends with the driver, and `--resume` continues. Only a learner whose processes died or stopped answering
(`LearnerGone`)
is restarted, within a budget; one that refuses a call (`LearnerError`) would refuse it again.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from millstream.clock import Clock
from millstream.errors import LearnerError, LearnerGone
from millstream.events import EventSink, LearnerRestarted, Warned
from millstream.learner import RunCritic, RunLearner, Snapshot
from millstream.learner.base import PackedScores, StoreScorer, reads_store
from millstream.pipeline.state import CRITIC_FOLDER
from millstream.retry import BackOff, Retry
from millstream.run.replay_log import CheckpointView, LearnerCall, ReplayLog
from millstream.store.segments import MIN_FREE_BYTES, free_shared_memory
from millstream.types import Floats, HalfFloats, Metrics, TrainRow, Weights

T = TypeVar("T")
MAX_LEARNER_RESTARTS = (
    5  # each sealed checkpoint gives one back; beyond them, the fault is not one that a new process repairs
)
LEARNER_BACK_OFF = BackOff(first_s=0.5)
LOG_SHARE = 8  # rows in the log may have this part of the shared memory that is free when the run starts


def max_log_bytes(free: int | None) -> int:
    """Of rows in the log: beyond it the next checkpoint is made as soon as possible. `free`: of the shared memory, where the
    rows of a store are; if that is too little, the store does not use it either."""
    return MIN_FREE_BYTES if free is None or free < MIN_FREE_BYTES else free // LOG_SHARE


class Replayable(Protocol):
    """What learners and critics have in common: see `millstream.learner`."""

    async def ready(self) -> None: ...
    async def accumulate(self, rows: Sequence[TrainRow]) -> None: ...
    async def step(self) -> Metrics: ...
    async def snapshot(self) -> Snapshot: ...
    def restore(self, folder: Path) -> None: ...
    async def close(self) -> None: ...


InnerT = TypeVar("InnerT", bound=Replayable)


class Replayed(Generic[InnerT]):
    """What a learner and a critic that outlive their processes share. `make` builds one in its first state, as often as needed;
    `version` is that of its weights, or of the checkpoint that `restore` is given.

    A call that takes longer than `patience_s` means that the process is dead. `progress` is called after each replayed call.
    `save` and `restore` must not be called on the event loop's thread once it is ready: they may have to wait for it."""

    who = "the learner"  # in messages
    subfolder = ""  # of a checkpoint: the part that is restored

    def __init__(
        self,
        make: Callable[[], InnerT],
        checkpoints: CheckpointView,
        *,
        clock: Clock,
        sink: EventSink,
        version: int = 0,
        patience_s: float = math.inf,
        progress: Callable[[], None] = lambda: None,
        in_thread: Callable[..., Coroutine[Any, Any, Any]] = asyncio.to_thread,
    ) -> None:
        self._make = make
        self._checkpoints = checkpoints
        self._clock = clock
        self._sink = sink
        self._patience_s = None if patience_s == math.inf else patience_s
        self._progress = progress
        self._in_thread = in_thread
        self._log = ReplayLog(version)
        self._max_log_bytes = max_log_bytes(free_shared_memory())
        self._first_version = version
        self._first_checkpoint: Path | None = None  # None: the first state is what `make` builds
        self._retry = Retry(LEARNER_BACK_OFF, max_failures=MAX_LEARNER_RESTARTS)
        self._has_warned = False
        self._turn = asyncio.Lock()  # one call at a time; during a restart, all others wait
        self._making: asyncio.Future[InnerT] | None = None
        self._loop: tuple[asyncio.AbstractEventLoop, int] | None = None
        self._inner = make()

    @property
    def inner(self) -> InnerT:
        """The current one."""
        return self._inner

    @property
    def reads_store(self) -> bool:
        return reads_store(self._inner)

    # ---- calls -------------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        self._loop = asyncio.get_running_loop(), threading.get_ident()
        await self._call(lambda inner: inner.ready())

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        await self._call(lambda inner: inner.accumulate(rows))
        self._append(LearnerCall("accumulate", tuple(rows)))

    async def step(self) -> Metrics:
        metrics: Metrics = await self._call(lambda inner: inner.step())
        self._append(LearnerCall("step"))
        return metrics

    async def snapshot(self) -> Snapshot:
        """It is lost with the processes that hold it: then writing it fails, and the log stays as it is."""
        snapshot: Snapshot = await self._call(lambda inner: inner.snapshot())
        self._log.mark()
        return snapshot

    def restore(self, folder: Path) -> None:
        self._call_blocking(lambda inner: inner.restore(folder))
        self._log = ReplayLog(self._log.since)
        self._first_checkpoint = folder

    async def close(self) -> None:
        """Close the current one, and one whose construction was cancelled."""
        made = [] if self._making is None else await asyncio.gather(self._making, return_exceptions=True)
        for one in {self._inner, *(one for one in made if not isinstance(one, BaseException))}:
            await one.close()

    async def _call(self, work: Callable[[InnerT], Awaitable[T]]) -> T:
        async with self._turn:
            while True:
                try:
                    return await self._within_patience(work(self._inner))
                except LearnerGone as error:
                    await self._restart(error)

    def _call_blocking(self, work: Callable[[InnerT], None]) -> None:
        if self._loop is None or self._loop[1] == threading.get_ident():
            work(self._inner)
            return
        loop = self._loop[0]
        asyncio.run_coroutine_threadsafe(self._turn.acquire(), loop).result()
        try:
            while True:
                try:
                    work(self._inner)
                    return
                except LearnerGone as error:
                    asyncio.run_coroutine_threadsafe(self._restart(error), loop).result()
        finally:
            loop.call_soon_threadsafe(self._turn.release)

    async def _within_patience(self, work: Awaitable[T]) -> T:
        limit = asyncio.timeout(self._patience_s)
        try:
            async with limit:
                return await work
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise LearnerGone(f"{self.who} has said nothing for {self._patience_s:g} s") from error

    # ---- the log -----------------------------------------------------------------------------------------------------

    def _append(self, call: LearnerCall) -> None:
        self._log.append(call)
        if self._log.num_bytes <= self._max_log_bytes:
            return
        self._checkpoints.hurry()
        if self._log.num_bytes > 2 * self._max_log_bytes and not self._has_warned:
            self._has_warned = True
            message = (
                f"{self._log.num_bytes >> 20} MiB of rows were trained since version {self._log.since} and are kept until a "
                "checkpoint covers them: none was written"
            )
            self._sink.emit(Warned(at=self._clock.now(), message=message))

    def _truncate(self, version: int | None) -> None:
        if version is not None and self._log.truncate(version):
            self._retry.succeeded()
            self._has_warned = False

    # ---- restarts ----------------------------------------------------------------------------------------------------

    async def _restart(self, error: LearnerGone) -> None:
        """Returns when a new one is in the state of the last one. Raises `LearnerError` when the budget is used up."""
        began, why = self._clock.now(), error
        while True:
            wait_s = self._retry.failed(self._clock.now())
            if wait_s is None:
                raise LearnerError(
                    f"{self.who} was restarted {MAX_LEARNER_RESTARTS} times, and died again: {why}. A restart does not repair "
                    "this: look at the memory of the machine, and at the last output of its processes"
                ) from why
            await self._inner.close()
            await asyncio.sleep(wait_s)
            try:
                await self._rebuild()
                break
            except LearnerGone as again:
                why = again
        log = self._log
        self._sink.emit(
            LearnerRestarted(
                at=self._clock.now(),
                who=self.who,
                why=str(why),
                from_version=log.since,
                to_version=log.version,
                num_batches_replayed=log.num_batches,
                num_rows=log.num_rows,
                seconds=self._clock.now() - began,
            )
        )

    async def _rebuild(self) -> None:
        folder = await self._replay_from()
        self._making = asyncio.ensure_future(self._in_thread(self._make))
        self._inner = await asyncio.shield(self._making)
        self._making = None
        await self._within_patience(self._inner.ready())
        self._progress()
        if folder is not None:
            await self._within_patience(self._in_thread(self._inner.restore, folder))
        for call in self._log:
            await self._within_patience(self._replay(call))
            self._progress()

    async def _replay_from(self) -> Path | None:
        """The checkpoint before the first call in the log; None: what `make` builds. Raises `LearnerError` if it is missing:
        without the calls that left the log, the weights would be those of another run."""
        sealed = await self._checkpoints.newest_sealed()
        folder = None if sealed is None else sealed.folder / self.subfolder
        if sealed is not None and folder is not None and folder.is_dir():
            self._truncate(sealed.version)
            return folder
        if self._log.since == self._first_version:
            return self._first_checkpoint
        what = f"a checkpoint of version {self._log.since}" if folder is None else str(folder)
        raise LearnerError(
            f"{self.who} must be restarted, and {what}, which has everything that was trained before it, is missing: restore "
            "it and resume the run, or resume the run from the checkpoint before"
        )

    async def _begin_batch_of(self, inner: InnerT) -> None:
        """What the first call of a batch does: nothing, unless a subclass says otherwise."""

    async def _replay(self, call: LearnerCall) -> None:
        match call.what:
            case "begin_batch":
                await self._begin_batch_of(self._inner)
            case "accumulate":
                await self._inner.accumulate(call.rows)
            case "step":
                await self._inner.step()


class ReplayedLearner(Replayed[RunLearner]):
    """See `millstream.learner.Learner` for the promises."""

    async def begin_batch(self) -> None:
        self._truncate(self._checkpoints.version)
        await self._call(self._begin_batch_of)
        self._append(LearnerCall("begin_batch"))

    async def _begin_batch_of(self, inner: RunLearner) -> None:
        await inner.begin_batch()

    async def logprobs(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return await self._call(lambda inner: inner.logprobs(rows))

    def log_ratios(self) -> HalfFloats:
        return self._inner.log_ratios()

    def rank_seconds(self) -> list[float]:
        return self._inner.rank_seconds()

    async def weights(self) -> Weights:
        return await self._call(lambda inner: inner.weights())

    async def weights_of(self, version: int) -> Weights | None:
        """The weights of this version, published again; None where training is beyond it. A batch that has made its first step
        counts as the next version, so that what is returned is never from the middle of a batch."""

        async def look(inner: RunLearner) -> Weights | None:
            return await inner.weights() if self._log.version == version else None

        return await self._call(look)

    def save(self, path: Path) -> None:
        self._call_blocking(lambda inner: inner.save(path))


class ReplayedCritic(Replayed[RunCritic]):
    """See `millstream.learner.Critic` for the promises. A batch begins with its first call, since a critic has no
    `begin_batch`. Rows may be scored while others are learned from: calls wait for their turn, as they would in the critic."""

    who = "the critic"
    subfolder = CRITIC_FOLDER
    _is_in_batch = False

    async def score(self, rows: Sequence[TrainRow]) -> list[Floats]:
        return await self._call(lambda inner: inner.score(rows))

    async def score_stored(self, rows: Sequence[TrainRow], column: str) -> list[PackedScores]:
        async def score(inner: RunCritic) -> list[PackedScores]:
            assert isinstance(inner, StoreScorer)
            return await inner.score_stored(rows, column)

        return await self._call(score)

    async def accumulate(self, rows: Sequence[TrainRow]) -> None:
        self._begin_batch()
        await super().accumulate(rows)

    async def step(self) -> Metrics:
        self._begin_batch()
        metrics = await super().step()
        self._is_in_batch = False
        return metrics

    def _begin_batch(self) -> None:
        if not self._is_in_batch:
            self._truncate(self._checkpoints.version)
            self._append(LearnerCall("begin_batch"))
            self._is_in_batch = True
