"""Metadata of a row, a group and a block of payload. Payloads are opaque here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from millstream.store.base import Want
from millstream.store.tasks import StoreTask

UNVERSIONED = -1


class BlockSpec(NamedTuple):
    """Some columns of some rows, as a put or a write brings them."""

    columns: tuple[str, ...]
    nbytes: int
    payload: Any


class RowBlock:
    """Some columns of some rows, held together until none of these rows is left."""

    __slots__ = ("columns", "id", "mask", "nbytes", "num_live", "payload")

    def __init__(self, block_id: int, spec: BlockSpec, mask: int, num_rows: int) -> None:
        self.id = block_id
        self.columns = spec.columns
        self.nbytes = spec.nbytes
        self.payload = spec.payload
        self.mask = mask
        self.num_live = num_rows


class RowEntry:
    """One row. `present` is a mask of columns; `offered`, `leased` and `done` are masks of tasks."""

    num_rows: ClassVar[int] = 1
    __slots__ = ("done", "group", "id", "leased", "offered", "parts", "present", "since", "steps", "tokens", "version")

    def __init__(
        self,
        row_id: int,
        group: GroupEntry,
        version: int,
        tokens: int,
        since: float,
        present: int,
        part: tuple[RowBlock, int],
    ) -> None:
        self.id = row_id
        self.group = group
        self.version = version
        self.tokens = tokens
        self.since = since
        self.present = present
        self.offered = 0
        self.leased = 0
        self.done = 0
        self.parts: tuple[tuple[RowBlock, int], ...] = (part,)  # block, index in it
        self.steps: tuple[tuple[int, int], ...] = ()  # bit of a task, step that it acknowledged this row for

    @property
    def last_step(self) -> int | None:
        """The step that a checkpoint has to cover before the row is freed."""
        return max(step for _, step in self.steps) if self.steps else None


class GroupEntry:
    __slots__ = ("done", "id", "is_closed", "leased", "num_ready", "offered", "partition", "rows")

    def __init__(self, group_id: int, partition: str) -> None:
        self.id = group_id
        self.partition = partition
        self.is_closed = False
        self.offered = 0
        self.leased = 0
        self.done = 0
        self.rows: dict[int, RowEntry] = {}
        self.num_ready: dict[int, int] = {}  # bit of a task that reads groups -> rows that are ready for it

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


class RestoredRows(NamedTuple):
    """Rows with the same columns, as a snapshot had them."""

    ids: list[int]
    group_ids: list[int]
    block: BlockSpec
    versions: list[int]
    tokens: list[int]
    steps: Sequence[dict[str, int]]
    """By task."""


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
