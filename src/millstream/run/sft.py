"""Supervised training within a run: measured on held-out tasks, kept in checkpoints of its own, stopped cleanly.

Its checkpoints are in `RUN/warmup/`, in the format of all others, with the number of the supervised step for a version. They
are of use until reinforcement learning has its first one, and go when the run's model is saved.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from msgspec import structs

from millstream.clock import Clock
from millstream.events import CheckpointSealed, Event, EventSink, WarmedUp, WarmupSealed
from millstream.learner import LearnerConfig, RunLearner, Snapshot
from millstream.pipeline.state import Ledger, PipelineState
from millstream.pipeline.waits import Waits
from millstream.run.checkpoint import WARMUP_FOLDER, Checkpoints, Found, RunState
from millstream.run.config import RunConfig, WarmupConfig
from millstream.run.warmup import Checks, Script, WarmedUpSoFar, micro_batches, warm_up
from millstream.store import Saved
from millstream.types import Task, TrainRow, Weights

PROBE = 256
"""Tasks that it is measured on, at most."""


def learner_config(config: RunConfig, warmup: WarmupConfig) -> LearnerConfig:
    """Its own learning rate; of the `[learner]` table, what is about memory, speed and numbers that are not finite."""
    return structs.replace(
        LearnerConfig(learning_rate=warmup.learning_rate, schedule=warmup.schedule, warmup_steps=warmup.warmup_steps),
        micro_batch_tokens=config.learner.micro_batch_tokens,
        recompute=config.learner.recompute,
        compile=config.learner.compile,
        max_skipped_steps=config.learner.max_skipped_steps,
        ranks=config.learner.ranks,
    )


class Supervised:
    """From the first step, or from a checkpoint, to its end. `accuracy_of` samples with the weights that it is given."""

    def __init__(
        self,
        config: WarmupConfig,
        learner: RunLearner,
        checkpoints: Checkpoints,
        *,
        tasks: Sequence[Task],
        held_out: Sequence[Task],
        new_script: Callable[[], Script],
        accuracy_of: Callable[[Weights], Awaitable[float]],
        micro_batch_tokens: int,
        seed: int,
        clock: Clock,
        sink: EventSink,
        waits: Waits,
    ) -> None:
        self._config = config
        self._learner = learner
        self._checkpoints = checkpoints
        self._tasks = tasks
        self._held_out = held_out[:PROBE]
        self._new_script = new_script
        self._accuracy_of = accuracy_of
        self._micro_batch_tokens = micro_batch_tokens
        self._seed = seed
        self._clock = clock
        self._sink = sink
        self._waits = waits
        self._rows: list[TrainRow] = []
        self._is_stopping = False
        self.is_at_work = False

    def stop(self) -> None:
        """End after the step in hand, with a checkpoint."""
        self._is_stopping = True

    @property
    def step_kept(self) -> int:
        """That of the newest checkpoint that is written; 0 if there is none."""
        return self._checkpoints.version or 0

    async def run(self, found: Found | None) -> None:
        """The loss before is that of the weights which the run began with, however often it was resumed."""
        self.is_at_work = True
        try:
            self._rows = await self._examples()
            self._tell(WarmedUpSoFar(0, held_out_loss=await self._held_out_loss()))
            await self._train(0 if found is None else await self._restore(found))
        finally:
            self.is_at_work = False
            writing = self._checkpoints.close()
            await self._waits.on("warm-up", "the last checkpoint to be written", writing)

    async def _restore(self, found: Found) -> int:
        reading = asyncio.to_thread(self._learner.restore, found.folder)
        await self._waits.on("warm-up", "the checkpoint to be read", reading)
        return found.manifest.version

    async def _train(self, after_step: int) -> None:
        self._checkpoints.goes_on_from(after_step)
        await warm_up(
            self._learner,
            self._tasks,
            self._new_script(),
            self._config,
            Checks(
                accuracy=self._accuracy,
                held_out_loss=self._held_out_loss,
                told=self._tell,
                ends_after=self._ends_after,
            ),
            waits=self._waits,
            seed=self._seed,
            micro_batch_tokens=self._micro_batch_tokens,
            after_step=after_step,
        )

    async def _examples(self) -> list[TrainRow]:
        """Of the held-out tasks, by a script of their own: what is trained does not depend on how many there are."""
        script = self._new_script()
        return [row for task in self._held_out for row in await script.rows(task)]

    async def _held_out_loss(self) -> float | None:
        """Mean negative log-likelihood of a token."""
        total, num_tokens = 0.0, 0
        for rows in micro_batches(self._rows, self._micro_batch_tokens):
            measuring = self._learner.logprobs(rows)
            for logprobs in await self._waits.on("warm-up", "the learner to measure held-out tasks", measuring):
                total, num_tokens = total - float(logprobs.sum()), num_tokens + len(logprobs)
        return total / num_tokens if num_tokens else None

    async def _accuracy(self) -> float:
        weights = await self._waits.on("warm-up", "the learner to copy weights", self._learner.weights())
        return await self._accuracy_of(weights)

    def _tell(self, so_far: WarmedUpSoFar) -> None:
        self._sink.emit(
            WarmedUp(
                at=self._clock.now(),
                max_steps=self._config.num_steps(len(self._tasks)),
                stop_at=self._config.stop_at,
                **so_far._asdict(),
            )
        )

    async def _ends_after(self, step: int) -> bool:
        if self._checkpoints.is_due(step, is_last=self._is_stopping):
            mark, began = self._checkpoints.mark(), self._clock.now()
            copying: Awaitable[Snapshot] = self._learner.snapshot()
            snapshot = await self._waits.on("warm-up", "the learner's state to be copied", copying)
            await self._checkpoints.keep(_standing_at(step), mark, snapshot, self._clock.now() - began)
        return self._is_stopping


def _standing_at(step: int) -> PipelineState:
    """No group is in flight, and the store is empty."""
    ledger = Ledger(version=step, next_group=0, groups={}, vacant=[], num_replaced=0, num_failed_in_a_row=0)
    return PipelineState(ledger, Saved(rows=(), is_closed={}, acknowledged={}))


class _Seals:
    """Tells of checkpoints as those of supervised training: the rules about versions are not for them."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink

    def emit(self, event: Event) -> None:
        if isinstance(event, CheckpointSealed):
            seconds, size = event.seconds, event.num_bytes
            event = WarmupSealed(at=event.at, step=event.version, digest=event.digest, num_bytes=size, seconds=seconds)
        self._sink.emit(event)


def build_checkpoints(
    run_dir: Path,
    config: RunConfig,
    *,
    clock: Clock,
    sink: EventSink,
    last_seq: Callable[[], int],
    sync: Callable[[], None],
    run_state: Callable[[], RunState],
    num_steps: int,
) -> Checkpoints:
    """By the `[checkpoint]` table; none after the last step, since reinforcement learning begins with one."""
    return Checkpoints(
        run_dir,
        config.checkpoint,
        last_step=num_steps + 1,
        clock=clock,
        sink=_Seals(sink),
        last_seq=last_seq,
        sync=sync,
        run_state=run_state,
        folder=WARMUP_FOLDER,
    )


def remove_checkpoints(run_dir: Path) -> None:
    shutil.rmtree(run_dir / WARMUP_FOLDER, ignore_errors=True)
