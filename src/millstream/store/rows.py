"""Metadata of tasks, rows, groups and blocks of payload, and the numbers that a put brings. Payloads are opaque here.

Sets of columns and sets of tasks are bit masks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from sys import getsizeof
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from msgspec import Struct

from millstream.errors import StoreError
from millstream.store.base import Columns, Reads, Row, Saved, Want

UNVERSIONED = -1
MAX_MASKS = 1024  # sets of columns whose mask is kept
ROW_BYTES = 512  # what the store itself needs for a row, about
COLUMN_BYTES = 256  # the same for a column of a put or a write
_SCALARS = frozenset((int, float, bool, str, bytes))
P = TypeVar("P")
"""How a payload is held: as columns, or as a message of `store.wire`."""


class StoreTask(NamedTuple):
    name: str
    bit: int
    by_group: bool
    needs: int
    """Mask of the columns that it reads."""
    after: int
    """Mask of the tasks that come before it, and"""
    after_groups: int
    """of those among them that read groups."""


class TaskSet:
    """All tasks of one store, and the bit of every column that was ever named."""

    def __init__(self, tasks: Mapping[str, Reads]) -> None:
        self._column_bits: dict[str, int] = {}
        self._masks: dict[tuple[str, ...], int] = {}
        bits = {name: 1 << number for number, name in enumerate(tasks)}
        self.by_name: dict[str, StoreTask] = {}
        for name, reads in tasks.items():
            if unknown := set(reads.after) - bits.keys():
                raise StoreError(f"task {name} comes after {', '.join(sorted(unknown))}, which the store does not have")
            after = sum(bits[other] for other in reads.after)
            after_groups = sum(bits[other] for other in reads.after if tasks[other].by_group)
            needs = self.mask(reads.columns)
            self.by_name[name] = StoreTask(name, bits[name], reads.by_group, needs, after, after_groups)
        self.all = tuple(self.by_name.values())
        self.of_groups = tuple(task for task in self.all if task.by_group)
        self.all_bits = sum(task.bit for task in self.all)
        self.group_bits = sum(task.bit for task in self.of_groups)

    def mask(self, columns: tuple[str, ...]) -> int:
        mask = self._masks.get(columns)
        if mask is None:
            mask = 0
            for column in columns:
                mask |= self._column_bits.setdefault(column, 1 << len(self._column_bits))
            if len(self._masks) >= MAX_MASKS:
                self._masks.clear()
            self._masks[columns] = mask
        return mask

    def names_in(self, columns: tuple[str, ...], mask: int) -> list[str]:
        """Those of these columns that are in the mask."""
        return [name for name in columns if mask & self._column_bits[name]]

    def find(self, name: str) -> StoreTask:
        if name not in self.by_name:
            raise StoreError(f"no task {name!r}: the store was built for {', '.join(self.by_name)}")
        return self.by_name[name]


class BlockSpec(Struct, Generic[P], array_like=True, frozen=True, gc=False):
    """Some columns of some rows, as a put or a write brings them."""

    columns: tuple[str, ...]
    nbytes: int
    payload: P


class PartitionContent(Struct, array_like=True):
    """What a snapshot says of a partition, the rows in order."""

    row_ids: list[int]
    group_ids: list[int]
    versions: list[int]
    tokens: list[int]
    steps: list[dict[str, int]]
    """By task."""
    is_closed: dict[int, bool]
    acknowledged: dict[str, list[int]]
    generation: int


class SavedPartition(Struct, Generic[P], array_like=True):
    content: PartitionContent
    blocks: list[tuple[list[int], BlockSpec[P]]]
    """The places of rows with the same columns, and their cells."""


class RowBlock(Struct, eq=False, gc=False):
    """Some columns of some rows, held together until none of these rows is left."""

    id: int
    columns: tuple[str, ...]
    nbytes: int
    payload: Any
    mask: int
    num_live: int
    partition: str = ""
    """That its bytes count for: of its first row."""


class RowEntry(Struct, eq=False):
    """One row. `present` is a mask of columns; `offered`, `leased` and `done` are masks of tasks."""

    num_rows: ClassVar[int] = 1
    id: int
    group: GroupEntry
    version: int
    tokens: int
    since: float
    present: int
    parts: tuple[tuple[RowBlock, int], ...]
    """Blocks, and the row's index in each."""
    offered: int = 0
    leased: int = 0
    done: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    """Bits of tasks, and the step that each acknowledged this row for."""

    @property
    def last_step(self) -> int | None:
        """The step that a checkpoint has to cover before the row is freed."""
        return max(step for _, step in self.steps) if self.steps else None


class GroupEntry(Struct, array_like=True, eq=False):
    id: int
    partition: str
    is_closed: bool = False
    offered: int = 0
    leased: int = 0
    done: int = 0
    rows: dict[int, RowEntry] = {}
    num_ready: dict[int, int] = {}
    """Bit of a task that reads groups -> rows that are ready for it."""

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        return sum([row.tokens for row in self.rows.values()])

    @property
    def version(self) -> int:
        """The oldest version of its rows."""
        return min([row.version for row in self.rows.values()], default=UNVERSIONED)


Unit = RowEntry | GroupEntry
"""What a task is handed: rows, or whole groups."""


class LeaseEntry(NamedTuple):
    id: int
    task: StoreTask
    partition: str
    units: list[Unit]
    holder: str
    want: Want

    @property
    def rows(self) -> list[RowEntry]:
        return rows_in(self.units)

    @property
    def empty_groups(self) -> list[int]:
        return [unit.id for unit in self.units if not unit.num_rows]


def rows_in(units: Sequence[Unit]) -> list[RowEntry]:
    """The rows of units that are all rows, or all groups."""
    found: list[RowEntry] = []
    for unit in units:
        if isinstance(unit, RowEntry):
            return list(units)  # type: ignore[arg-type]
        found.extend(unit.rows.values())
    return found


def contiguous_runs(rows: Sequence[RowEntry]) -> list[tuple[tuple[RowBlock, ...], list[int], int]]:
    """Stretches of rows whose cells are adjacent: (blocks, the index of the first row in each, number of rows)."""
    found: list[tuple[tuple[RowBlock, ...], list[int], int]] = []
    blocks: tuple[RowBlock, ...] = ()
    starts, count = list[int](), 0
    for row in rows:
        parts = row.parts
        is_next = len(parts) == len(blocks) and parts[0][0] is blocks[0] and parts[0][1] == starts[0] + count
        if is_next and len(parts) > 1:
            is_next = all(
                part[0] is block and part[1] == start + count
                for part, block, start in zip(parts, blocks, starts, strict=True)
            )
        if is_next:
            count += 1
            continue
        if count:
            found.append((blocks, starts, count))
        blocks, starts, count = tuple(part[0] for part in parts), [part[1] for part in parts], 1
    return [*found, (blocks, starts, count)] if count else found


# ---- snapshots -------------------------------------------------------------------------------------------------------


def saved_of(content: PartitionContent, cells: Iterable[dict[str, Any]]) -> Saved:
    """A snapshot; `cells` are those of each row."""
    ids = content.row_ids
    versions = zip(ids, content.versions, strict=True)
    return Saved(
        rows=tuple(
            Row(row_id=row_id, group_id=group_id, columns=columns)
            for row_id, group_id, columns in zip(ids, content.group_ids, cells, strict=True)
        ),
        is_closed=content.is_closed,
        acknowledged={task: tuple(done) for task, done in content.acknowledged.items()},
        versions={row_id: version for row_id, version in versions if version != UNVERSIONED},
        tokens=dict(zip(ids, content.tokens, strict=True)),
        steps={row_id: steps for row_id, steps in zip(ids, content.steps, strict=True) if steps},
        generation=content.generation,
    )


def _by_columns(saved: Saved) -> dict[tuple[str, ...], list[int]]:
    """The places of rows with the same columns."""
    found: dict[tuple[str, ...], list[int]] = {}
    for place, row in enumerate(saved.rows):
        found.setdefault(tuple(row.columns), []).append(place)
    return found


def saved_columns(saved: Saved) -> list[Columns]:
    """The cells of a snapshot: one entry for all rows with the same columns."""
    return [
        {name: [saved.rows[place].columns[name] for place in places] for name in names}
        for names, places in _by_columns(saved).items()
    ]


def partition_of(saved: Saved, blocks: Sequence[BlockSpec[P]]) -> SavedPartition[P]:
    """`blocks` hold the cells, in the order of `saved_columns`."""
    ids = [row.row_id for row in saved.rows]
    content = PartitionContent(
        row_ids=ids,
        group_ids=[row.group_id for row in saved.rows],
        versions=[saved.versions.get(row_id, UNVERSIONED) for row_id in ids],
        tokens=[saved.tokens.get(row_id, 1) for row_id in ids],
        steps=[saved.steps.get(row_id, {}) for row_id in ids],
        is_closed=saved.is_closed,
        acknowledged={task: list(done) for task, done in saved.acknowledged.items()},
        generation=saved.generation,
    )
    return SavedPartition(content, list(zip(_by_columns(saved).values(), blocks, strict=True)))


# ---- the numbers that a put brings -----------------------------------------------------------------------------------


def each(values: Any, count: int, name: str) -> list[int]:
    """One number for all rows, or one for each, as Python integers."""
    if type(values) is int:
        return [values] * count
    if not hasattr(values, "__len__"):
        return [operator.index(values)] * count
    if len(values) != count:
        raise StoreError(f"{len(values)} {name} for {count} rows")
    return integers(values)


def integers(values: Iterable[int]) -> list[int]:
    """As Python integers, also from arrays."""
    return [operator.index(value) for value in values]


def num_rows_of(columns: Columns) -> int:
    num_rows = -1
    for cells in columns.values():
        if len(cells) != num_rows:
            num_rows = len(cells) if num_rows < 0 else 0
            if not num_rows:
                break
    if num_rows < 1:
        counts = {name: len(cells) for name, cells in columns.items()}
        raise StoreError(
            f"expected at least one column, all with the same number of rows, at least one: found {counts}"
        )
    return num_rows


def token_counts(columns: Columns, tokens: Sequence[int] | None, num_rows: int) -> list[int]:
    if tokens is not None:
        return each(tokens, num_rows, "tokens")
    cells = columns.get("tokens")
    return [1] * num_rows if cells is None else [_length(cell) for cell in cells]


def _length(cell: Any) -> int:
    """A cell without a length (a number, or an array without dimensions) is one token."""
    try:
        return len(cell)
    except TypeError:
        return 1


def num_bytes_of(columns: Columns, num_rows: int) -> int:
    """The memory that the columns need, about. Of structs and other objects only the outermost is counted."""
    nbytes = ROW_BYTES * num_rows + COLUMN_BYTES * len(columns)
    for cells in columns.values():
        size = getattr(cells, "nbytes", None)
        if size is not None:
            nbytes += int(size)
        elif num_rows == 1:
            nbytes += _num_bytes(cells[0])
        else:
            nbytes += sum(map(getsizeof if _SCALARS.issuperset(map(type, cells)) else _num_bytes, cells))
    return nbytes


def _num_bytes(cell: Any) -> int:
    """Of a cell with everything that is nested in it."""
    if type(cell) in _SCALARS:
        return getsizeof(cell)
    size = getattr(cell, "nbytes", None)
    if size is not None:
        return int(size)
    nbytes, unseen = 0, [cell]
    while unseen:
        one = unseen.pop()
        size = getattr(one, "nbytes", None)
        nbytes += getsizeof(one) if size is None else int(size)
        if isinstance(one, dict):
            unseen.extend(one)
            unseen.extend(one.values())
        elif isinstance(one, (list, tuple, set, frozenset)):
            unseen.extend(one)
    return nbytes
