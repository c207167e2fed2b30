"""Supervised fine-tuning on gold turns (`[warmup]`): before reinforcement learning, or, with `pipeline.steps = 0`, instead.

It is measured on held-out tasks, checkpointed and stopped cleanly like the rest of a run. Its checkpoints are in `RUN/warmup/`
in the format of all others; their version is the number of the supervised step. They are needed until reinforcement learning
has its first one, and are removed when the run's model is saved.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
from msgspec import structs

from millstream.clock import Clock
from millstream.env import Text
from millstream.env.registry import Environments
from millstream.env.single_turn import SingleTurn
from millstream.errors import SandboxLost
from millstream.events import CheckpointSealed, Event, EventSink, MicroBatchLowered, WarmedUp, WarmupSealed
from millstream.learner import LearnerConfig, RunLearner, Snapshot
from millstream.learner.packing import packed
from millstream.pipeline.episode import EndOfScript, Player
from millstream.pipeline.state import Ledger, PipelineState
from millstream.pipeline.waits import Waits
from millstream.run.checkpoint import WARMUP_FOLDER, Checkpoints, Found
from millstream.run.config import RunConfig, WarmupConfig
from millstream.seeds import derive_seed
from millstream.store import Saved
from millstream.types import Completion, Finish, Metrics, Request, RequestKey, Sampling, Task, TrainRow, Weights

MAX_PROBE_TASKS = 256
"""Tasks that one measurement uses, at most."""
MAX_GOLD_TRIES = 10
"""Of one example, if its sandbox is lost."""


# ---- examples --------------------------------------------------------------------------------------------------------


def gold_row(tokens: Sequence[int], mask: Sequence[bool]) -> TrainRow:
    return TrainRow(
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.bool_),
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        advantages=np.ones(len(tokens), dtype=np.float32),
    )


class GoldExamples:
    """Training rows from gold turns: an environment is played with a policy that says them.

    The environment of a single turn is not played: its example is the prompt and the answer, and nothing is scored."""

    def __init__(self, environments: Environments, text: Text, config: RunConfig) -> None:
        self._environments = environments
        self._text = text
        self._player = Player(
            environment=environments,
            sampling=Sampling(max_tokens=config.rollout.max_tokens),
            run_seed=config.seed,
            role="warmup",
            max_parts=config.rollout.max_parts,
        )
        self._next = 0  # number of the next episode: its seeds depend on it

    async def rows(self, task: Task) -> list[TrainRow]:
        """The rows of one task; none without gold turns."""
        gold = self._environments.gold(task)
        if not gold:
            return []
        if self._is_single_turn(task):
            prompt, answer = self._text.opening(task.prompt), self._tokens_of(gold[0])
            return [gold_row([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))]
        key = RequestKey(group_id=self._next, member=0)
        self._next += 1
        for _ in range(MAX_GOLD_TRIES):
            result = await self._player.play(task, key, self._says(gold))
            if not isinstance(result.failure, SandboxLost):  # it says nothing about the task: another sandbox may do
                break
        if result.failure is not None:
            raise result.failure
        return [gold_row(part.tokens.tolist(), part.loss_mask.tolist()) for part in result.parts]

    def skip(self, tasks: Iterable[Task]) -> None:
        """Count these tasks as played, so that later ones have the same seeds."""
        self._next += sum(not self._is_single_turn(task) and bool(self._environments.gold(task)) for task in tasks)

    def _is_single_turn(self, task: Task) -> bool:
        return isinstance(self._environments.of(task).environment, SingleTurn)

    def _says(self, gold: Sequence[str]) -> Callable[[Request], Awaitable[Completion]]:
        turns = iter(gold)

        async def generate(request: Request) -> Completion:
            said = next(turns, None)
            if said is None:
                raise EndOfScript("the gold turns are used up, and the episode is not over")
            tokens = self._tokens_of(said)
            zeros = (0,) * len(tokens)
            return Completion(tokens=tuple(tokens), logprobs=zeros, versions=zeros, finish=Finish.STOP)

        return generate

    def _tokens_of(self, said: str) -> list[int]:
        return [*self._text.encode(said), self._text.end_token]


def sft_batches(tasks: Sequence[Task], config: WarmupConfig, *, seed: int) -> Iterator[list[Task]]:
    """The tasks of every step: drawn with replacement, or each once an epoch. A function of the seed alone, so that training
    resumed from a checkpoint has the same batches."""
    if config.epochs is None:
        rng = random.Random(derive_seed(seed, "warmup"))
        for _ in range(config.num_steps(len(tasks))):
            yield rng.choices(tasks, k=config.batch_size)
        return
    order = chain.from_iterable(_shuffled(tasks, seed, epoch) for epoch in range(config.epochs))
    while batch := list(islice(order, config.batch_size)):
        yield batch


def _shuffled(tasks: Sequence[Task], seed: int, epoch: int) -> list[Task]:
    order = list(tasks)
    random.Random(derive_seed(seed, "warmup", epoch)).shuffle(order)
    return order


# ---- training --------------------------------------------------------------------------------------------------------


def learner_config(config: RunConfig, warmup: WarmupConfig) -> LearnerConfig:
    """The learning rate of `[warmup]`; from `[learner]` what concerns memory, speed and non-finite numbers."""
    return structs.replace(
        LearnerConfig(learning_rate=warmup.learning_rate, schedule=warmup.schedule, warmup_steps=warmup.warmup_steps),
        micro_batch_tokens=config.learner.micro_batch_tokens,
        recompute=config.learner.recompute,
        offload=config.learner.offload,
        compile=config.learner.compile,
        max_skipped_steps=config.learner.max_skipped_steps,
        ranks=config.learner.ranks,
        kind=config.learner.kind,
        args=config.learner.args,
    )


class SupervisedTraining:
    """From the first step, or from a checkpoint, to the last step, `stop_at`, or a stop. `accuracy_of` samples with the weights
    that it is given."""

    def __init__(
        self,
        config: WarmupConfig,
        learner: RunLearner,
        checkpoints: Checkpoints,
        *,
        tasks: Sequence[Task],
        held_out: Sequence[Task],
        new_examples: Callable[[], GoldExamples],
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
        self._held_out = held_out[:MAX_PROBE_TASKS]
        self._new_examples = new_examples
        self._accuracy_of = accuracy_of
        self._micro_batch_tokens = micro_batch_tokens
        self._seed = seed
        self._clock = clock
        self._sink = sink
        self._waits = waits
        self._held_out_rows: list[TrainRow] = []
        self._is_stopping = False

    def stop(self) -> None:
        """End after the current step, with a checkpoint."""
        self._is_stopping = True

    async def run(self, found: Found | None) -> None:
        """Train, from `found` if it is given. Returns when the last checkpoint is written. The loss of step 0 is that of the
        weights which the run began with, however often it was resumed."""
        try:
            self._held_out_rows = await self._held_out_examples()
            self._report(0, await self._held_out_loss())
            first_step = 0 if found is None else await self._restore(found)
            self._checkpoints.resume_from(first_step)
            await self._train(first_step)
        finally:
            writing = self._checkpoints.close()
            await self._waits.on("warm-up", "the last checkpoint to be written", writing)

    async def _restore(self, found: Found) -> int:
        reading = asyncio.to_thread(self._learner.restore, found.folder)
        await self._waits.on("warm-up", "the checkpoint to be read", reading)
        return found.manifest.version

    async def _train(self, after_step: int) -> None:
        """Train until the sampled accuracy reaches `stop_at`, all steps are made, or the run is stopped. `after_step`: the
        number of steps that were made before."""
        examples, num_steps = self._new_examples(), self._config.num_steps(len(self._tasks))
        for step, batch in enumerate(sft_batches(self._tasks, self._config, seed=self._seed), 1):
            if step <= after_step:
                examples.skip(batch)
                continue
            playing = asyncio.gather(*(examples.rows(task) for task in batch))
            rows = [row for played in await self._waits.on("warm-up", "the environment", playing) for row in played]
            metrics = await self._waits.on("warm-up", "the learner", self._train_on(rows))
            is_check = step % self._config.check_every == 0
            if (is_check or step == num_steps) and await self._measure(step, metrics.get("loss"), is_check=is_check):
                return
            await self._keep(step)
            if self._is_stopping:
                return

    async def _train_on(self, rows: Sequence[TrainRow]) -> Metrics:
        await self._learner.begin_batch()
        for micro_batch in packed(rows, self._micro_batch_tokens):
            await self._learner.accumulate(micro_batch)
        metrics = await self._learner.step()
        if tokens := int(metrics.get("micro_batch_tokens", 0)):
            self._sink.emit(MicroBatchLowered(at=self._clock.now(), micro_batch_tokens=tokens))
        return metrics

    async def _measure(self, step: int, loss: float | None, *, is_check: bool) -> bool:
        """Report the losses, and the accuracy where `stop_at` is set. Whether that is reached."""
        held_out_loss, accuracy, stop_at = await self._held_out_loss(), None, self._config.stop_at
        if is_check and stop_at is not None:
            weights = await self._waits.on("warm-up", "the learner to copy weights", self._learner.weights())
            accuracy = await self._accuracy_of(weights)
        self._report(step, held_out_loss, loss=loss, accuracy=accuracy)
        return accuracy is not None and stop_at is not None and accuracy >= stop_at

    async def _held_out_examples(self) -> list[TrainRow]:
        """Counted apart from the training examples: what is trained does not depend on how many tasks are held out."""
        examples = self._new_examples()
        return [row for task in self._held_out for row in await examples.rows(task)]

    async def _held_out_loss(self) -> float | None:
        """Mean negative log-likelihood of a token; None without held-out examples."""
        total, num_tokens = 0.0, 0
        for rows in packed(self._held_out_rows, self._micro_batch_tokens):
            measuring = self._learner.logprobs(rows)
            for logprobs in await self._waits.on("warm-up", "the learner to measure held-out tasks", measuring):
                total -= float(logprobs.sum())
                num_tokens += len(logprobs)
        return total / num_tokens if num_tokens else None

    def _report(
        self, step: int, held_out_loss: float | None, *, loss: float | None = None, accuracy: float | None = None
    ) -> None:
        self._sink.emit(
            WarmedUp(
                at=self._clock.now(),
                step=step,
                max_steps=self._config.num_steps(len(self._tasks)),
                loss=loss,
                held_out_loss=held_out_loss,
                accuracy=accuracy,
                stop_at=self._config.stop_at,
            )
        )

    async def _keep(self, step: int) -> None:
        """Write a checkpoint, if one is due."""
        if self._checkpoints.is_due(step, is_last=self._is_stopping):
            mark, began = self._checkpoints.mark(), self._clock.now()
            copying: Awaitable[Snapshot] = self._learner.snapshot()
            snapshot = await self._waits.on("warm-up", "the learner's state to be copied", copying)
            await self._checkpoints.keep(_empty_state(step), mark, snapshot, self._clock.now() - began)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _empty_state(step: int) -> PipelineState:
    """A pipeline with no group in flight and an empty store."""
    ledger = Ledger(version=step, next_group=0, groups={}, vacant=[], num_replaced=0, num_failed_in_a_row=0)
    return PipelineState(ledger, Saved(rows=(), is_closed={}, acknowledged={}))


class SftCheckpointSink:
    """Translates `CheckpointSealed` to `WarmupSealed`: the rules about weights versions do not apply to supervised steps."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink

    def emit(self, event: Event) -> None:
        if isinstance(event, CheckpointSealed):
            event = WarmupSealed(
                at=event.at,
                step=event.version,
                digest=event.digest,
                num_bytes=event.num_bytes,
                seconds=event.seconds,
            )
        self._sink.emit(event)


def remove_sft_checkpoints(run_dir: Path) -> None:
    shutil.rmtree(run_dir / WARMUP_FOLDER, ignore_errors=True)
