"""Rollouts of a run folder, selected, sorted and as text: what `millstream rollouts` shows. Light: imports no torch."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from millstream.env.data import NEEDS_EXTRA
from millstream.errors import ConfigError
from millstream.events.rollouts.reader import KeptRollout, RolloutDump
from millstream.events.rollouts.text import Decode, TurnText, turn_texts
from millstream.run.keep_rollouts import decoder_in
from millstream.types import Fate, Floats

TOKENS_PER_ROW_GROUP = 500_000  # of Parquet
TOKENS_PER_ROW = 50  # a rollout without tokens counts as this many
SORT_KEYS: dict[str, Callable[[KeptRollout], float]] = {
    "reward": lambda one: one.reward,
    "advantage": lambda one: one.advantage,
    "length": lambda one: float(one.num_sampled),
    "lag": lambda one: math.nan if one.lag is None else float(one.lag),
}


ROLLOUT_FATES = (*(fate.value for fate in Fate), "restarted", "in flight", "kept")


class RolloutQuery(Struct, frozen=True, kw_only=True):
    """Which rollouts, and in which order. None: no restriction."""

    step: int | None = None
    version: int | None = None
    """Some of its tokens were sampled by this version."""
    group: int | None = None
    task: str | None = None
    fate: str | None = None
    sort: str | None = None
    """None: in the order in which groups left the run, those in flight last."""
    best: int | None = None
    """Only this many, the highest first."""
    worst: int | None = None
    """Only this many, the lowest first."""

    def __post_init__(self) -> None:
        if self.sort is not None and self.sort not in SORT_KEYS:
            raise ConfigError(f"--sort {self.sort}: expected one of {', '.join(SORT_KEYS)}")
        if self.fate is not None and self.fate not in ROLLOUT_FATES:
            raise ConfigError(f"--fate {self.fate!r}: expected one of {', '.join(map(repr, ROLLOUT_FATES))}")
        if self.best is not None and self.worst is not None:
            raise ConfigError("--best and --worst exclude each other: type one of them")


class PartText(Struct, frozen=True, kw_only=True):
    """One token sequence of a rollout, with its turns as text. Numbers are those of `types.Rollout`."""

    agent: int
    reward: float | None
    finish: str
    turns: list[TurnText]
    turn_rewards: list[float]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    """Of each token; -1: it was shown, not sampled."""
    advantages: list[float] | None
    trained_logprobs: list[float | None] | None
    """The learner's, when it trained the token; None: it was not trained, or the run did not record it."""


class RolloutText(Struct, frozen=True, kw_only=True):
    """A rollout as it is shown. None: it has none, or not yet."""

    group: int
    member: int
    attempt: int
    task: str
    epoch: int
    step: int | None
    fate: str
    why: str
    reward: float | None
    reward_parts: dict[str, float]
    advantage: float | None
    lag: int | None
    versions: tuple[int, int] | None
    num_sampled: int
    parts: list[PartText]


def find_rollouts(dump: RolloutDump, query: RolloutQuery) -> Iterator[KeptRollout]:
    """One after the other. With `sort` and without a number, all that match are held in memory. A rollout that has no value to
    sort by comes last; among the best or the worst it is left out. Raises `ConfigError` for a step that has none."""
    if query.step is not None and query.step not in (steps := _steps_in(dump)):
        there = f"expected {_spans(steps)}" if steps else "none was trained yet"
        raise ConfigError(f"--step {query.step}: no kept rollout was trained in this step: {there}")
    found = _matching(dump, query)
    num = query.best if query.best is not None else query.worst
    if query.sort is None and num is None:
        return found
    key = SORT_KEYS[query.sort or "reward"]
    if num is None:
        return iter(sorted(found, key=lambda one: (math.isnan(key(one)), key(one))))
    numbered = (one for one in found if not math.isnan(key(one)))
    choose = heapq.nlargest if query.best is not None else heapq.nsmallest
    return iter(choose(num, numbered, key=key))


def _steps_in(dump: RolloutDump) -> list[int]:
    """The steps that trained a kept rollout, in their order."""
    return sorted({group.version + 1 for group in dump.groups() if group.version is not None})


def _spans(numbers: Sequence[int]) -> str:
    """Of numbers in their order: 1 to 7, 9."""
    begins = [one for one in numbers if one - 1 not in numbers]
    ends = [one for one in numbers if one + 1 not in numbers]
    spans = [str(first) if first == last else f"{first} to {last}" for first, last in zip(begins, ends, strict=True)]
    return ", ".join(spans)


def _matching(dump: RolloutDump, query: RolloutQuery) -> Iterator[KeptRollout]:
    found = dump.groups() if query.group is None else iter([dump.group(query.group)])
    for group in found:
        if group is None or (query.step is not None and group.version != query.step - 1):
            continue
        for one in dump.rollouts(group):
            span = one.versions
            is_of_version = query.version is None or (span is not None and span[0] <= query.version <= span[1])
            is_of_step = query.step in (None, one.step)
            if is_of_version and is_of_step and query.task in (None, one.task_id) and query.fate in (None, one.fate):
                yield one


def as_text(one: KeptRollout, decode: Decode) -> RolloutText:
    """With every turn of the environment and of the model."""
    nothing = [None] * len(one.parts)
    advantages = nothing if one.advantages is None else [own.tolist() for own in one.advantages]
    trained = nothing if one.trained_logprobs is None else [_numbers(own) for own in one.trained_logprobs]
    return RolloutText(
        group=one.group_id,
        member=one.member,
        attempt=one.attempt,
        task=one.task_id,
        epoch=one.epoch,
        step=one.step,
        fate=one.fate,
        why=one.why,
        reward=_number(one.reward),
        reward_parts=one.reward_parts,
        advantage=_number(one.advantage),
        lag=one.lag,
        versions=one.versions,
        num_sampled=one.num_sampled,
        parts=[
            PartText(
                agent=part.agent,
                reward=_number(part.reward),
                finish=part.finish,
                turns=turn_texts(part, decode),
                turn_rewards=part.turn_rewards.tolist(),
                tokens=part.tokens.tolist(),
                logprobs=part.logprobs.tolist(),
                versions=part.versions.tolist(),
                advantages=own,
                trained_logprobs=own_trained,
            )
            for part, own, own_trained in zip(one.parts, advantages, trained, strict=True)
        ],
    )


def open_dump(run_dir: Path) -> tuple[RolloutDump, Decode]:
    """The rollouts of a run folder, and what turns their tokens into text."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a run folder")
    dump = RolloutDump(run_dir)
    return dump, decoder_in(dump.folder)


def write_parquet(found: Iterable[RolloutText], path: Path) -> int:
    """One row a rollout; returns how many. One row group is held in memory, and the file is complete or not there. Raises
    `ConfigError` without pyarrow, and where the file cannot be written."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"writing {path} needs pyarrow: {NEEDS_EXTRA}") from error
    schema, num_rows, partial = _schema(pyarrow), 0, path.with_name(f".{path.name}.partial")
    try:
        with pyarrow.parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
            for rows in _row_groups(found):
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                num_rows += len(rows)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return num_rows


def _row_groups(found: Iterable[RolloutText]) -> Iterator[list[dict[str, Any]]]:
    """By the number of their tokens: a rollout may have ten or a hundred thousand."""
    rows: list[dict[str, Any]] = []
    num_tokens = 0
    for one in found:
        rows.append(_row(one))
        num_tokens += TOKENS_PER_ROW + sum(len(part.tokens) for part in one.parts)
        if num_tokens >= TOKENS_PER_ROW_GROUP:
            yield rows
            rows, num_tokens = [], 0
    if rows:
        yield rows


def _schema(pyarrow: Any) -> Any:
    """Of `_row`: the types do not depend on which values the first rollouts have."""
    integer, number, text, several = pyarrow.int64(), pyarrow.float64(), pyarrow.string(), pyarrow.list_
    turn, named = {"speaker": text, "text": text}, {"name": text, "value": number}
    part = {"agent": integer, "reward": number, "finish": text, "turns": several(_struct(pyarrow, turn))}
    part |= {"turn_rewards": several(number), "tokens": several(integer), "logprobs": several(number)}
    part |= {"versions": several(integer), "advantages": several(number), "trained_logprobs": several(number)}
    row = dict.fromkeys(("group", "member", "attempt"), integer)
    row |= {"task": text, "epoch": integer, "step": integer, "fate": text, "why": text, "reward": number}
    row |= {"reward_parts": several(_struct(pyarrow, named)), "advantage": number, "lag": integer}
    row |= {"versions": several(integer), "num_sampled": integer, "parts": several(_struct(pyarrow, part))}
    assert [*row] == [*RolloutText.__struct_fields__] and [*part] == [*PartText.__struct_fields__]
    return pyarrow.schema(row)


def _struct(pyarrow: Any, fields: dict[str, Any]) -> Any:
    return pyarrow.struct(list(fields.items()))


def _row(one: RolloutText) -> dict[str, Any]:
    """As `--json` has it; what has a key of its own in each rollout becomes a list of pairs."""
    row: dict[str, Any] = msgspec.to_builtins(one)
    row["reward_parts"] = [{"name": name, "value": value} for name, value in one.reward_parts.items()]
    for part, own in zip(row["parts"], one.parts, strict=True):
        part["turns"] = [{"speaker": speaker, "text": text} for speaker, text in own.turns]
    return row


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _numbers(values: Floats) -> list[float | None]:
    return [_number(value) for value in values.tolist()]
