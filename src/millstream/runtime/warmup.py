"""A supervised warm-up on gold answers, so that a model from nothing has something to reinforce. Stops by accuracy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import numpy as np

from millstream.env import Text
from millstream.env.hosted import Environments
from millstream.env.single_turn import SingleTurn
from millstream.errors import EnvironmentFailed
from millstream.learner import Learner
from millstream.runtime.config import RunConfig, WarmupConfig
from millstream.runtime.episode import Episode
from millstream.runtime.waits import Waits
from millstream.seeds import derive_seed
from millstream.types import Completion, Finish, Request, RequestKey, Sampling, Task, TrainRow, Weights


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
        self._environments, self._text, self._config = environments, text, config
        self._next = 0

    async def rows(self, task: Task) -> list[TrainRow]:
        gold = self._environments.gold(task)
        if isinstance(self._environments.of(task).environment, SingleTurn):
            prompt, answer = self._text.opening(task.prompt), self._turn(gold[0] if gold else "")
            return [gold_row([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))]
        if not gold:
            return []
        number, self._next = self._next, self._next + 1
        return await self._play(task, gold, RequestKey(group_id=number, member=0))

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


async def _train_on(learner: Learner, rows: Sequence[TrainRow]) -> None:
    await learner.begin_batch()
    await learner.accumulate(rows)
    await learner.step()


async def warm_up(
    learner: Learner,
    tasks: Sequence[Task],
    rows_of: Callable[[Task], Awaitable[Sequence[TrainRow]]],
    accuracy_of: Callable[[Weights], Awaitable[float]],
    config: WarmupConfig,
    *,
    waits: Waits,
    seed: int,
    on_progress: Callable[[int, float], None],
) -> int:
    """Train until the sampled accuracy reaches `stop_at` or the steps are spent; the number of steps."""
    rng = random.Random(derive_seed(seed, "warmup"))
    for step in range(1, config.max_steps + 1):
        playing = asyncio.gather(*(rows_of(task) for task in rng.choices(tasks, k=config.batch_size)))
        rows = [row for played in await waits.on("warm-up", "the environment", playing) for row in played]
        await waits.on("warm-up", "the learner", _train_on(learner, rows))
        if step % config.check_every == 0:
            weights = await waits.on("warm-up", "the learner to copy weights", learner.weights())
            accuracy = await accuracy_of(weights)
            on_progress(step, accuracy)
            if accuracy >= config.stop_at:
                return step
    return config.max_steps
