"""Data sets as lists of tasks, and the order they are trained in.

A JSONL file has one object a line; its prompt is a string or a list of {role, content} messages. Every error names the
file and the line. The order of an epoch comes from the seed alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from millstream.env import toy
from millstream.errors import DataError
from millstream.seeds import derive_seed
from millstream.types import Message, Task


class DataConfig(Struct, frozen=True, kw_only=True):
    path: str | None = None
    """A JSONL file."""
    toy: str | None = None
    """A task that is made on the spot, such as "sort_digits"."""
    toy_size: int = 4096
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    holdout: int = 256
    """Tasks set aside for evaluation: chosen by seed, never trained."""
    shuffle: bool = True

    def __post_init__(self) -> None:
        if (self.path is None) == (self.toy is None):
            raise ValueError("set either path (a JSONL file) or toy (a built-in task)")
        if self.holdout < 0 or self.toy_size < 1:
            raise ValueError("holdout must be at least 0 and toy_size at least 1")


class DataSet(Struct, frozen=True, kw_only=True):
    train: tuple[Task, ...]
    held_out: tuple[Task, ...]


def read(config: DataConfig, *, seed: int) -> DataSet:
    tasks = toy.make(config.toy, config.toy_size, seed) if config.toy else read_jsonl(Path(config.path or ""), config)
    if len(tasks) <= config.holdout:
        raise DataError(
            f"{config.path or config.toy} has {len(tasks)} tasks and data.holdout = {config.holdout} sets them all "
            "aside: nothing is left to train on. Set data.holdout lower"
        )
    order = list(range(len(tasks)))
    random.Random(derive_seed(seed, "holdout")).shuffle(order)
    held_out = sorted(order[: config.holdout])
    kept = sorted(order[config.holdout :])
    return DataSet(train=tuple(tasks[i] for i in kept), held_out=tuple(tasks[i] for i in held_out))


def in_order(tasks: Sequence[Task], *, seed: int, shuffle: bool) -> Iterator[tuple[int, Task]]:
    """(epoch, task) without end: each epoch holds every task once, in an order of its own."""
    epoch = 0
    while True:
        order = list(range(len(tasks)))
        if shuffle:
            random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
        for index in order:
            yield epoch, tasks[index]
        epoch += 1


def read_jsonl(path: Path, config: DataConfig) -> list[Task]:
    try:
        text = path.read_text()
    except OSError as error:
        raise DataError(f"cannot read data.path = {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    tasks = [
        _task(line, f"{path}, line {number}", config, number)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if not tasks:
        raise DataError(f"{path} has no tasks: expected one JSON object a line")
    return tasks


def _task(line: str, where: str, config: DataConfig, number: int) -> Task:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, got {type(record).__name__}")
    if config.prompt_key not in record:
        raise DataError(
            f"{where}: no key {config.prompt_key!r} among {', '.join(map(repr, record))}: set data.prompt_key"
        )
    answer = record.get(config.answer_key)
    return Task(
        id=str(record.get("id", number)),
        prompt=_prompt(record[config.prompt_key], where),
        answer=None if answer is None else str(answer),
        data={key: value for key, value in record.items() if key not in (config.prompt_key, config.answer_key)},
    )


def _prompt(value: Any, where: str) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        try:
            return tuple(Message(role=str(m["role"]), content=str(m["content"])) for m in value)
        except (TypeError, KeyError) as error:
            raise DataError(f"{where}: a chat prompt is a list of objects with role and content") from error
    raise DataError(f"{where}: the prompt must be a non-empty string or list of messages, got {value!r}")
