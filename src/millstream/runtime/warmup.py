"""A supervised warm-up on gold answers, so that a model from nothing has something to reinforce. Stops by accuracy."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from millstream.learner import Learner
from millstream.runtime.config import WarmupConfig
from millstream.runtime.waits import Waits
from millstream.seeds import derive_seed
from millstream.types import Task, TrainRow, Weights


def gold_row(prompt: Sequence[int], answer: Sequence[int]) -> TrainRow:
    tokens = np.array([*prompt, *answer], dtype=np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return TrainRow(
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        advantages=np.ones(len(tokens), dtype=np.float32),
    )


async def _train_on(learner: Learner, rows: Sequence[TrainRow]) -> None:
    await learner.begin_batch()
    await learner.accumulate(rows)
    await learner.step()


async def warm_up(
    learner: Learner,
    tasks: Sequence[Task],
    row_of: Callable[[Task], TrainRow],
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
        rows = [row_of(task) for task in rng.choices(tasks, k=config.batch_size)]
        await waits.on("warm-up", "the learner", _train_on(learner, rows))
        if step % config.check_every == 0:
            weights = await waits.on("warm-up", "the learner to copy weights", learner.weights())
            accuracy = await accuracy_of(weights)
            on_progress(step, accuracy)
            if accuracy >= config.stop_at:
                return step
    return config.max_steps
