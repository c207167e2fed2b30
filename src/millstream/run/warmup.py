"""Supervised training on gold answers: a warm-up that gives a model something to reinforce, or all the training there is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from millstream.env import Text
from millstream.env.registry import Environments
from millstream.env.single_turn import SingleTurn
from millstream.errors import EnvironmentFailed
from millstream.learner import Learner
from millstream.learner.packing import Packer
from millstream.pipeline.episode import Episode
from millstream.pipeline.waits import Waits
from millstream.run.config import RunConfig, WarmupConfig
from millstream.seeds import derive_seed
from millstream.types import Completion, Finish, Metrics, Request, RequestKey, Sampling, Task, TrainRow


def gold_row(tokens: Sequence[int], mask: Sequence[bool]) -> TrainRow:
    return TrainRow(
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.bool_),
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        advantages=np.ones(len(tokens), dtype=np.float32),
    )


class Said(EnvironmentFailed):
    """The script has come to its end: what was played so far is the example."""


class Script:
    """Plays environments with a policy that says the gold turns: the rows of what was played are the examples.

    The environment of a single turn needs no play: its example is the prompt and the answer, and nothing is scored."""

    def __init__(self, environments: Environments, text: Text, config: RunConfig) -> None:
        self._environments = environments
        self._text = text
        self._config = config
        self._next = 0

    async def rows(self, task: Task) -> list[TrainRow]:
        """None of a task without gold turns."""
        gold = self._environments.gold(task)
        if not gold:
            return []
        if self._is_one_turn(task):
            prompt, answer = self._text.opening(task.prompt), self._turn(gold[0])
            return [gold_row([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))]
        number = self._next
        self._next = self._next + 1
        return await self._play(task, gold, RequestKey(group_id=number, member=0))

    def skip(self, tasks: Iterable[Task]) -> None:
        """As if these had been played: what is played has a number, and with it its seeds."""
        self._next += sum(not self._is_one_turn(task) and bool(self._environments.gold(task)) for task in tasks)

    def _is_one_turn(self, task: Task) -> bool:
        return isinstance(self._environments.of(task).environment, SingleTurn)

    async def _play(self, task: Task, gold: Sequence[str], key: RequestKey) -> list[TrainRow]:
        turns = iter(gold)

        async def speak(request: Request) -> Completion:
            said = next(turns, None)
            if said is None:
                raise Said(f"task {task.id}: the gold turns are over, and the episode is not")
            tokens = self._turn(said)
            zeros = (0,) * len(tokens)
            return Completion(tokens=tuple(tokens), logprobs=zeros, versions=zeros, finish=Finish.STOP)

        episode = Episode(
            task,
            key,
            generate=speak,
            waiting=lambda what, work: work,
            sampling=Sampling(max_tokens=self._config.rollout.max_tokens),
            run_seed=self._config.seed,
            role="warmup",
            max_parts=self._config.rollout.max_parts,
        )
        with suppress(Said):
            await self._environments.rollout(episode)
        return [gold_row(part.tokens.tolist(), part.loss_mask.tolist()) for part in episode.finish(0.0)]

    def _turn(self, said: str) -> list[int]:
        return [*self._text.encode(said), self._text.end_token]


def batches(tasks: Sequence[Task], config: WarmupConfig, *, seed: int) -> Iterator[list[Task]]:
    """The examples of every step: drawn with replacement, or each once an epoch. A function of the seed alone, so that
    training that goes on from a checkpoint goes on with the same ones."""
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


def micro_batches(rows: Iterable[TrainRow], max_tokens: int) -> Iterator[list[TrainRow]]:
    packer = Packer(max_tokens)
    for row in rows:
        if full := packer.add(row):
            yield full
    if rest := packer.flush():
        yield rest


async def _train_on(learner: Learner, rows: Sequence[TrainRow], max_tokens: int) -> Metrics:
    await learner.begin_batch()
    for micro_batch in micro_batches(rows, max_tokens):
        await learner.accumulate(micro_batch)
    return await learner.step()


class Checks(Struct, frozen=True, kw_only=True, eq=False):
    """What supervised training asks of the run around it."""

    accuracy: Callable[[], Awaitable[float]]
    """Sampled with the learner's weights as they are."""
    held_out_loss: Callable[[], Awaitable[float | None]]
    told: Callable[[WarmedUpSoFar], None]
    ends_after: Callable[[int], Awaitable[bool]]
    """Called with each step that is done: keeps what is to be kept. Whether the run was told to stop."""


class WarmedUpSoFar(NamedTuple):
    step: int
    loss: float | None = None
    held_out_loss: float | None = None
    accuracy: float | None = None


async def warm_up(
    learner: Learner,
    tasks: Sequence[Task],
    script: Script,
    config: WarmupConfig,
    checks: Checks,
    *,
    waits: Waits,
    seed: int,
    micro_batch_tokens: int,
    after_step: int = 0,
) -> None:
    """Train until the sampled accuracy reaches `stop_at`, the steps are spent, or the run is to stop. `after_step`: go on as if
    these had just been made."""
    num_steps = config.num_steps(len(tasks))
    for step, batch in enumerate(batches(tasks, config, seed=seed), 1):
        if step <= after_step:
            script.skip(batch)
            continue
        playing = asyncio.gather(*(script.rows(task) for task in batch))
        rows = [row for played in await waits.on("warm-up", "the environment", playing) for row in played]
        training = _train_on(learner, rows, micro_batch_tokens)
        loss = (await waits.on("warm-up", "the learner", training)).get("loss")
        is_check = step % config.check_every == 0
        if is_check or step == num_steps:
            held_out = await checks.held_out_loss()
            accuracy = await checks.accuracy() if is_check and config.stop_at is not None else None
            checks.told(WarmedUpSoFar(step, loss, held_out, accuracy))
            if accuracy is not None and config.stop_at is not None and accuracy >= config.stop_at:
                return
        if await checks.ends_after(step):
            return
