"""Data sets as lists of tasks, and the order they are trained in.

A record has a prompt, a string or a list of {role, content} messages, and may have an answer, a string or a number; every other
field is there for the reward to read. With `data.system` a string becomes a chat. Nothing else is turned into text: what is
neither is refused. Every error names the file and the line. What is held out, and the order of an epoch, come from the seed
alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct

from millstream.config import MAX_DEPTH, is_deeper
from millstream.env.games import toy
from millstream.errors import DataError, shown
from millstream.hub import why_not_on_hub
from millstream.paths import did_you_mean, kind_of
from millstream.seeds import derive_seed
from millstream.types import Message, Task

MakeTasks = Callable[[int, int], list[Task]]  # from a number and a seed
DataRecord = tuple[str, Any]  # where it came from, in words, and what it is
ONE_A_LINE = "Expected one JSON object a line (JSONL), with a prompt"
NEEDS_EXTRA = "pip install 'millstream[data]'"
MAX_SIZE = 10_000_000  # of tasks that are made on the spot: they are held in memory
MAX_NAMES = 8  # of keys in a message


class DataConfig(Struct, frozen=True, kw_only=True):
    path: str | None = None  # a JSONL file (.jsonl) or a Parquet file (.parquet)
    name: str | None = None  # a data set of the `datasets` library: a name on the hub, or a folder that it can load
    # Of the `datasets` data set, where it has several: what the library calls a configuration, such as "main".
    subset: str | None = None
    split: str = "train"  # of the `datasets` data set
    toy: str | None = None  # a task that is made on the spot, such as "sort_digits"
    size: int = 4096  # tasks to make, where they are made on the spot: by `toy`, or by the environment
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    # Makes a chat of every prompt that is a string, for models with a chat template: this as the system's message, and
    # the prompt as the user's. "": the user's alone. None: strings stay strings.
    system: str | None = None
    holdout: int = 256  # tasks set aside for evaluation: chosen by seed, never trained
    shuffle: bool = True
    # A run folder whose rollouts are trained again, batch by batch, instead of new ones: see docs/rollouts.md. The tasks are
    # still read, for evaluations.
    rollouts: str | None = None

    def __post_init__(self) -> None:
        if sum(source is not None for source in (self.path, self.name, self.toy)) > 1:
            raise ValueError(
                "set only one of path (a JSONL or Parquet file), name (of `datasets`) and toy (a built-in task)"
            )
        if self.holdout < 0 or not 1 <= self.size <= MAX_SIZE:
            raise ValueError(f"holdout must be at least 0, size from 1 to {MAX_SIZE:,}")
        if self.subset is not None and self.name is None:
            raise ValueError("subset goes with name (a data set of `datasets`): a file has no subsets")
        if self.system is not None and self.path is None and self.name is None:
            raise ValueError("system goes with path or name: tasks that are made on the spot have prompts of their own")


class DataSet(Struct, frozen=True, kw_only=True):
    train: tuple[Task, ...]
    held_out: tuple[Task, ...]
    places: dict[str, str] = {}  # by task: the file and line that it comes from. Toy tasks come from nowhere.

    @property
    def tasks(self) -> tuple[Task, ...]:
        return (*self.held_out, *self.train)

    def place_of(self, task: Task) -> str:
        return self.places.get(task.id, f"task {task.id}")


def read(config: DataConfig, *, seed: int, make: MakeTasks | None = None) -> DataSet:
    """`make` makes the tasks where no data set is named."""
    source = config.path or config.name or config.toy or "the environment"
    places: dict[str, str] = {}
    tasks = _made(config, seed, make) if config.path is None and config.name is None else _tasks(config, places)
    if not tasks:
        raise DataError(f"{source} has no tasks: expected records with a {config.prompt_key!r}")
    if len(tasks) <= config.holdout:
        raise DataError(
            f"{source} has {len(tasks)} tasks and data.holdout = {config.holdout} sets them all "
            "aside: nothing is left to train on. Set data.holdout lower"
        )
    order = list(range(len(tasks)))
    random.Random(derive_seed(seed, "holdout")).shuffle(order)
    held_out = sorted(order[: config.holdout])
    kept = sorted(order[config.holdout :])
    return DataSet(train=tuple(tasks[i] for i in kept), held_out=tuple(tasks[i] for i in held_out), places=places)


def _made(config: DataConfig, seed: int, make: MakeTasks | None) -> list[Task]:
    if config.toy is not None:
        return toy.make_toy_tasks(config.toy, config.size, seed)
    if make is None:
        raise DataError(
            "no data: set one of data.path (a JSONL or Parquet file), data.name (of `datasets`) and data.toy"
        )
    return make(config.size, seed)


def digest(data: DataSet) -> str:
    """Digest of the tasks and their order: a run can be resumed only with the data that it began with."""
    found = hashlib.sha256()
    for task in data.train:
        found.update(repr((task.id, task.prompt, task.answer, task.data)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


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


def _tasks(config: DataConfig, places: dict[str, str]) -> list[Task]:
    """The tasks; where each comes from is put into `places`."""
    tasks: list[Task] = []
    for number, record in enumerate(_records(config), start=1):
        task, where = _task(record, config, number), record[0]
        if task.id in places:
            raise DataError(f"{where}: the id {task.id!r} is that of {places[task.id]}, too")
        places[task.id] = where
        tasks.append(task)
    return tasks


def _records(config: DataConfig) -> Iterable[DataRecord]:
    if config.name is not None:
        return _hub_records(config.name, config.subset, config.split)
    path = Path(config.path or "")
    match kind_of(path, "data.path"):
        case None:
            here = f"cannot read data.path = {path}: No such file (looked for it from {Path.cwd()})"
            raise DataError(f"{here}.{near}" if (near := did_you_mean(path)) else here)
        case "folder":
            raise DataError(
                f"data.path = {path} is a folder: expected a JSONL file (.jsonl) or a Parquet file (.parquet). A folder that "
                f"the datasets library can load: --set data.path= --set data.name={path}"
            )
        case "other":
            raise DataError(f"data.path = {path} is not a file: expected a JSONL file or a Parquet file")
    return _parquet_records(path) if path.suffix == ".parquet" else _jsonl_records(path)


def _jsonl_records(path: Path) -> Iterator[DataRecord]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # Windows writes a mark of the byte order
    except OSError as error:
        raise DataError(f"cannot read data.path = {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
                is_whole = "\\ud" not in line.lower() or _has_whole_characters(
                    record
                )  # only an escape can write half a pair
            except ValueError as error:  # also an integer of more digits than Python reads
                raise DataError(f"{where}: not JSON: {error}. {ONE_A_LINE}") from error
            except RecursionError as error:
                raise DataError(f"{where}: objects or lists nested too deeply") from error
            if not is_whole:
                raise DataError(
                    f"{where}: half of a surrogate pair (\\ud800 to \\udfff) in a text: expected whole characters"
                )
            yield where, record


def _parquet_records(path: Path) -> Iterator[DataRecord]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow: {NEEDS_EXTRA}") from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException, ValueError) as error:  # also text that is not UTF-8
        raise DataError(f"{path} is not a Parquet file: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def check_hub_data(name: str) -> None:
    """Raises `DataError` if the library is not installed, or could not get this data set from anywhere; loads nothing."""
    if find_spec("datasets") is None:
        raise DataError(f"data.name = {name!r} needs the datasets library: {NEEDS_EXTRA}")
    if kind_of(name, "data.name") is None and (why := why_not_on_hub(name, "datasets")):
        near = did_you_mean(Path(name))
        raise DataError(
            f"datasets cannot load {name!r}: neither a folder here nor on the Hugging Face hub: {why}.{near}"
        )


def _hub_records(name: str, subset: str | None, split: str) -> Iterator[DataRecord]:
    check_hub_data(name)
    import datasets

    try:
        rows = datasets.load_dataset(name, subset, split=split, trust_remote_code=False)
    except Exception as error:  # a library that raises many kinds: reported as one, with its cause
        of = f"{name!r}, " + (f"subset {subset!r}, " if subset is not None else "") + f"split {split!r}"
        raise DataError(f"datasets cannot load {of}: {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{name}, {split} row {number}", row


def _task(record: DataRecord, config: DataConfig, number: int) -> Task:
    where, fields = record
    if not isinstance(fields, Mapping):
        raise DataError(f"{where}: expected an object, got {type(fields).__name__}. {ONE_A_LINE}")
    if config.prompt_key not in fields:
        raise DataError(f"{where}: no key {config.prompt_key!r} among {_names(fields)}: set data.prompt_key")
    if is_deeper(fields, MAX_DEPTH):
        raise DataError(f"{where}: objects or lists nested too deeply: expected at most {MAX_DEPTH}")
    own_id = _plain_text(fields.get("id"), f"{where}: id")
    return Task(
        id=str(number) if own_id is None else own_id,
        prompt=_prompt(fields[config.prompt_key], where, config.system),
        answer=_plain_text(fields.get(config.answer_key), f"{where}: {config.answer_key}"),
        data={key: value for key, value in fields.items() if key not in (config.prompt_key, config.answer_key)},
    )


def _names(fields: Mapping[str, Any]) -> str:
    names = [repr(shown(name)) for name in fields]
    return ", ".join([*names[:MAX_NAMES], *(["..."] if len(names) > MAX_NAMES else [])]) or "none"


def _plain_text(value: Any, where: str) -> str | None:
    """A string, or a finite number, a truth value or a date as a string. None: there is none."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, int | float | Decimal | date) or (
        isinstance(value, float | Decimal) and not math.isfinite(value)
    ):
        raise DataError(
            f"{where} is {shown(value)}: expected a string or a finite number. Leave it out where there is none; what a reward "
            "reads in another form goes under another key"
        )
    return str(value)


def _prompt(value: Any, where: str, system: str | None) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value if system is None else _chat(system, value)
    if isinstance(value, list) and value:
        return tuple(_message(message, where, number) for number, message in enumerate(value))
    raise DataError(f"{where}: the prompt must be a non-empty string or list of messages, got {shown(repr(value))}")


def _message(message: Any, where: str, number: int) -> Message:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise DataError(
            f"{where}: a chat prompt is a list of objects with role and content, and message {number} is {shown(message)}"
        )
    where = f"{where}: message {number}"
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not role:
        raise DataError(f"{where}: the role is {shown(role)}: expected a string, such as 'user'")
    if isinstance(content, list):
        content = "".join(_text_of_part(part, f"{where}, part {number}") for number, part in enumerate(content))
    if not isinstance(content, str):
        raise DataError(f"{where}: the content is {shown(content)}: expected a string, or a list of parts of text")
    return Message(role=role, content=content)


def _text_of_part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise DataError(f"{where} is {shown(part)}: expected text, as {{'type': 'text', 'text': '...'}}")
    return text


def _has_whole_characters(record: Any) -> bool:
    """Whether every string in it has whole characters."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _chat(system: str, prompt: str) -> tuple[Message, ...]:
    opening = (Message(role="system", content=system),) if system else ()
    return (*opening, Message(role="user", content=prompt))
