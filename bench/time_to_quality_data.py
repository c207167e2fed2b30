"""What `bench/time_to_quality.py` trains on and what it measures: tasks of which no prompt is on both sides.

A generator with few tasks repeats them, so a split of tasks leaves every held-out prompt among the training tasks, too. Here a
share of the prompts is held out, by seed: tasks with these are measured, as many as the config's `data.holdout` at most, and
all others are trained.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from internals import data_of, derive_seed
from millstream import DataConfig, RunConfig
from millstream.types import Task

HELD_OUT_SHARE = 0.2
"""Of the prompts."""


class Split(NamedTuple):
    config: RunConfig
    """Its data is a file with the training tasks, in their order."""
    held_out: tuple[Task, ...]


def split_by_prompt(config: RunConfig, folder: Path) -> Split:
    """Writes the file to the folder."""
    data = data_of(config)
    prompts = list(dict.fromkeys(task.prompt for task in data.tasks))
    rng = random.Random(derive_seed(config.seed, "held-out prompts"))
    kept_back = set(rng.sample(prompts, round(HELD_OUT_SHARE * len(prompts))))
    measured = [task for task in data.tasks if task.prompt in kept_back]
    trained = [task for task in data.tasks if task.prompt not in kept_back]
    rng.shuffle(measured)
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(record_of(task)) + "\n" for task in trained))
    of_a_file = DataConfig(path=str(path), holdout=0, shuffle=config.data.shuffle)
    return Split(structs.replace(config, data=of_a_file), tuple(measured[: config.data.holdout]))


def record_of(task: Task) -> dict[str, Any]:
    """A line of a file of tasks."""
    prompt = task.prompt if isinstance(task.prompt, str) else [message.as_dict() for message in task.prompt]
    return {**task.data, "id": task.id, "prompt": prompt, "answer": task.answer}
