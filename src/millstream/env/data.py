"""Data sets as lists of tasks, and the order they are trained in. `env.records` makes a task of a record.

Records come from a file, from the `datasets` library, or from Python. Every error names the file and the line. What is held
out, and the order of an epoch, come from the seed alone.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from msgspec import Struct

from millstream import imports
from millstream.env.games import toy
from millstream.env.records import ONE_A_LINE, RecordKeys, task_of
from millstream.errors import ConfigError, DataError, shown
from millstream.hub import why_not_on_hub
from millstream.paths import did_you_mean, kind_of
from millstream.seeds import derive_seed
from millstream.types import Task

MakeTasks = Callable[[int, int], list[Task]]  # from a number and a seed
DataRecord = tuple[str, Any]  # where it came from, in words, and what it is
PassedData = Iterable[Mapping[str, Any]]  # records from Python: a list of dicts, a `datasets.Dataset`
NEEDS_EXTRA = "pip install 'millstream[data]'"
NO_SYSTEM = "system goes with path or name: tasks that are made on the spot have prompts of their own"
MAX_SIZE = 10_000_000  # of tasks that are made on the spot: they are held in memory


class DataConfig(Struct, frozen=True, kw_only=True):
    path: str | None = None  # a JSONL file (.jsonl) or a Parquet file (.parquet)
    name: str | None = None  # a data set of the `datasets` library: a name on the hub, or a folder that it can load
    # Of the `datasets` data set, where it has several: what the library calls a configuration, such as "main".
    subset: str | None = None
    split: str = "train"  # of the `datasets` data set
    # Whether the records were passed from Python, which a config cannot hold: train(config, data=records) sets it.
    passed: bool = False
    toy: str | None = None  # a task that is made on the spot, such as "sort_digits"
    size: int = 4096  # tasks to make, where they are made on the spot: by `toy`, or by the environment
    prompt_key: str = "prompt"  # the field of a record that is the prompt
    answer_key: str = "answer"  # the field that is the gold answer, if there is one
    # Makes a chat of every prompt that is a string, for models with a chat template: this as the system's message, and
    # the prompt as the user's. "": the user's alone. None: strings stay strings.
    system: str | None = None
    holdout: int = 256  # tasks set aside for evaluation: chosen by seed, never trained
    shuffle: bool = True  # another order in every epoch, by the seed
    # A function of your own that says which task is next: file.py:name (docs/parts.md). Empty: all of them, epoch by epoch.
    sampler: str = ""
    sampler_args: dict[str, Any] = {}  # keyword arguments of the sampler
    # A run folder whose rollouts are trained again, batch by batch, instead of new ones: see docs/rollouts.md. The tasks are
    # still read, for evaluations.
    rollouts: str | None = None
    # Whether rollouts are sessions of real use: `millstream serve RUN --learn` sets it. The tasks are still read, for
    # evaluations.
    sessions: bool = False

    def __post_init__(self) -> None:
        if sum(source is not None for source in (self.path, self.name, self.toy)) > 1:
            raise ValueError(
                "set only one of path (a JSONL or Parquet file), name (of `datasets`) and toy (a built-in task)"
            )
        if self.holdout < 0 or not 1 <= self.size <= MAX_SIZE:
            raise ValueError(f"holdout must be at least 0, size from 1 to {MAX_SIZE:,}")
        if self.sampler and not imports.is_part("sampler", self.sampler):
            raise ValueError(imports.unknown_part("sampler", self.sampler))
        if self.sampler_args and not self.sampler:
            raise ValueError("sampler_args are of data.sampler, which is not set: leave them out")
        if self.subset is not None and self.name is None:
            raise ValueError("subset goes with name (a data set of `datasets`): a file has no subsets")
        if self.system is not None and self.toy is not None:
            raise ValueError(NO_SYSTEM)


class DataSet(Struct, frozen=True, kw_only=True):
    train: tuple[Task, ...]
    held_out: tuple[Task, ...]
    places: dict[str, str] = {}  # by task: the file and line that it comes from. Toy tasks come from nowhere.

    @property
    def tasks(self) -> tuple[Task, ...]:
        return (*self.held_out, *self.train)

    def place_of(self, task: Task) -> str:
        return self.places.get(task.id, f"task {task.id}")


def read(config: DataConfig, *, seed: int, make: MakeTasks | None = None, passed: PassedData | None = None) -> DataSet:
    """`make` makes the tasks where no data set is named; `passed`: records that take the place of one."""
    source = config.path or config.name or config.toy or ("the environment" if passed is None else "data=")
    places: dict[str, str] = {}
    if passed is None and config.passed:
        raise DataError(
            "the records are none of the config's: they were passed to train. Pass them again from Python: "
            "millstream.resume(RUN, data=records), or millstream.evaluate(config, data=records); or name a file that has them: "
            "--set data.passed=false --set data.path=FILE"
        )
    if passed is None and config.path is None and config.name is None:
        tasks = _made(config, seed, make)
    else:
        tasks = _tasks(config, places, _records(config) if passed is None else _passed_records(config, passed))
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
            "no data: set one of data.path (a JSONL or Parquet file), data.name (of `datasets`) and data.toy, or pass records "
            "from Python: train(config, data=...)"
        )
    if config.system is not None:
        raise DataError(f"data.{NO_SYSTEM}")
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


def sampled(tasks: Sequence[Task], config: DataConfig, *, seed: int) -> Iterator[tuple[int, Task]]:
    """The tasks in the order of training, each with its epoch: `in_order`, or that of the user's own sampler, where an epoch
    ends before a task that it has had. Raises `ConfigError`."""
    if not config.sampler:
        return in_order(tasks, seed=seed, shuffle=config.shuffle)
    chosen = own_sampler(config)(tasks, derive_seed(seed, "sampler"))
    return _own_order(chosen, config.sampler, {task.id for task in tasks})


def own_sampler(config: DataConfig) -> Callable[[Sequence[Task], int], Iterable[Task]]:
    """The user's own, with its arguments. Raises `ConfigError`."""
    part = imports.load_part("sampler", config.sampler)
    return imports.bound(part, config.sampler_args, "data.sampler_args", ("tasks", "seed"))


def _own_order(chosen: Iterable[Task], name: str, known: set[str]) -> Iterator[tuple[int, Task]]:
    epoch, seen = 0, set[str]()
    for task in chosen:
        if not isinstance(task, Task) or task.id not in known:
            found = task.id if isinstance(task, Task) else type(task).__name__
            raise DataError(
                f"data.sampler = {name!r} gave {shown(str(found))!r}: expected one of the tasks that it was given"
            )
        if task.id in seen:
            epoch, seen = epoch + 1, set()
        seen.add(task.id)
        yield epoch, task


def _tasks(config: DataConfig, places: dict[str, str], records: Iterable[DataRecord]) -> list[Task]:
    """The tasks; where each comes from is put into `places`."""
    tasks: list[Task] = []
    keys = RecordKeys(config.prompt_key, config.answer_key, config.system)
    for number, (where, fields) in enumerate(records, start=1):
        task = task_of(fields, where, number, keys)
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
                f"the datasets library can load: --set data.path= --set {quote(f'data.name={path}')}"
            )
        case "other":
            raise DataError(f"data.path = {path} is not a file: expected a JSONL file or a Parquet file")
    return _parquet_records(path) if path.suffix == ".parquet" else _jsonl_records(path)


def _passed_records(config: DataConfig, passed: PassedData) -> Iterator[DataRecord]:
    for key, value in (("path", config.path), ("name", config.name), ("toy", config.toy)):
        if value is not None:
            raise ConfigError(f"data= was passed, and the config has data.{key} = {value!r}: leave one of them out")
    if isinstance(passed, Mapping | str | bytes) or not isinstance(passed, Iterable):
        splits = f"; it has the splits {', '.join(map(str, passed))}: pass one" if isinstance(passed, Mapping) else ""
        raise DataError(f"data= is a {type(passed).__name__}: expected a list of dicts, or a datasets.Dataset{splits}")
    for number, row in enumerate(passed, start=1):
        yield f"data=, record {number}", row


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


def _has_whole_characters(record: Any) -> bool:
    """Whether every string in it has whole characters."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
