"""The table from a snapshot, or from the records of a journal: rows that exist already, with their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream.errors import StoreError
from millstream.store.partition import Partition
from millstream.store.rows import GroupEntry, RestoredRows, RowEntry
from millstream.store.table import GENERATION_SHIFT, RowTable


def restore_partition(
    table: RowTable,
    rows: Sequence[RestoredRows],
    is_closed: Mapping[int, bool],
    acknowledged: Mapping[str, Sequence[int]],
    partition: str,
    generation: int,
    now: float,
) -> None:
    part = table.partition(partition)
    ids = [row_id for some in rows for row_id in some.ids]
    _check_restore(table, part, rows, ids, is_closed, acknowledged)
    table.generation = max([table.generation, generation, *(row_id >> GENERATION_SHIFT for row_id in ids)]) + 1
    table.next_row = 0
    part.groups = {group_id: GroupEntry(group_id, partition) for group_id in is_closed}
    for some in rows:
        entries = table.add(part, some.ids, some.group_ids, part.groups, some.block, some.versions, some.tokens, now)
        for row, steps in zip(entries, some.steps, strict=True):
            row.steps = tuple((table.tasks.find(name).bit, step) for name, step in steps.items())
    part.rows = dict(sorted(part.rows.items()))  # in the order of the puts, whatever columns they have
    for group in part.groups.values():
        group.rows = dict(sorted(group.rows.items()))
        group.is_closed = is_closed[group.id]
    part.mark_done(acknowledged)
    table.forget(part.rebuild())


def _check_restore(
    table: RowTable,
    part: Partition,
    rows: Sequence[RestoredRows],
    ids: Sequence[int],
    is_closed: Mapping[int, bool],
    acknowledged: Mapping[str, Sequence[int]],
) -> None:
    if part.groups or part.rows:
        raise StoreError("a snapshot can only be restored into an empty partition")
    if alive := [row_id for row_id in ids if row_id in table.rows]:
        raise StoreError(f"row {alive[0]} of the snapshot is in the store already, in another partition")
    if len(set(ids)) != len(ids):
        raise StoreError("a row is in the snapshot twice")
    if strange := {group_id for some in rows for group_id in some.group_ids} - is_closed.keys():
        raise StoreError(f"the snapshot does not say whether group {min(strange)} is closed")
    for name in {*acknowledged, *(name for some in rows for steps in some.steps for name in steps)}:
        table.tasks.find(name)


def adopt_row(table: RowTable, row: RowEntry) -> None:
    """Add a row that has its group, its parts and its masks. Call `rebuild_all` afterwards."""
    table.rows[row.id] = row
    table.partition(row.group.partition).add([row])
    for block, _ in row.parts:
        block.num_live += 1
        row.present |= block.mask


def rebuild_all(table: RowTable) -> None:
    for part in table.partitions.values():
        table.forget(part.rebuild())


def steps_of(table: RowTable, row: RowEntry) -> dict[str, int]:
    names = {task.bit: task.name for task in table.tasks.all}
    return {names[bit]: step for bit, step in row.steps}
