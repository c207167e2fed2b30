"""The tasks of a store, numbered: sets of columns and sets of tasks are bit masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from millstream.errors import StoreError
from millstream.store.base import Reads

MAX_MASKS = 1024
"""Sets of columns whose mask is kept."""


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
            self.by_name[name] = StoreTask(
                name, bits[name], reads.by_group, self.mask(reads.columns), after, after_groups
            )
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
