"""The stream store: rows are rollouts, columns are fields, and every task (a consumer) sees every row once.

A task claims a whole group as soon as the group is closed and its rows have the columns that the task reads; columns may be
written later, to rows already there, which is what lets stages overlap by themselves. What is claimed is on *lease* until it
is acknowledged; a lease that is given back or expires is claimed again by whoever comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

Columns = Mapping[str, Any]
Choose = Callable[[Iterable[int]], int | None]
"""Which of the ready groups (the longest ready first) to hand out; None to wait. What it returns is handed out at once."""


class Reads(NamedTuple):
    """What a task needs: columns of every row of the group, and tasks that must have acknowledged the group before."""

    columns: tuple[str, ...]
    after: tuple[str, ...] = ()


class Row(Struct, frozen=True, kw_only=True, eq=False):
    row_id: int
    group_id: int
    columns: dict[str, Any]


class Lease(Struct, frozen=True, kw_only=True, eq=False):
    lease_id: int
    task: str
    group_id: int
    rows: tuple[Row, ...]


class Saved(Struct, frozen=True, kw_only=True, eq=False):
    """A snapshot: every row that some task still needs. What was on lease is free again after a restore."""

    rows: tuple[Row, ...]
    is_closed: dict[int, bool]
    acknowledged: dict[str, tuple[int, ...]]


class StoreStats(NamedTuple):
    rows: int
    groups: int
    leases: int
    waiting_producers: int
    waiting_consumers: dict[str, int]


class Store(Protocol):
    """`put` and `claim` may block: a put until acknowledged rows make room, a claim until `choose` accepts a ready group.
    Both are cancellable and neither blocks anybody else. Everything else returns at once or raises `StoreError`."""

    async def put(self, group_id: int, columns: Columns) -> int:
        """Add a row to an open group (the first put opens it); its id."""
        ...

    def write(self, row_id: int, columns: Columns) -> None:
        """Add columns to a row. Writing a cell twice is an error."""
        ...

    def close_group(self, group_id: int) -> None:
        """No more rows will come: the group may be claimed. A group closed without a row is claimable, and empty."""
        ...

    async def claim(self, task: str, choose: Choose | None = None, *, expires_s: float | None = None) -> Lease:
        """One whole group, by default the oldest ready one. Raises `StreamEnded` after `finish`, when none is left."""
        ...

    def wake(self) -> None:
        """Something outside that a `choose` reads has changed: ask the waiting claims again."""
        ...

    def finish(self) -> None:
        """No more groups will come: a claim ends with `StreamEnded` once every group is done with or on lease."""
        ...

    def acknowledge(self, lease: Lease) -> None:
        """The task is done with these rows: it never sees them again. Freed when every task is done."""
        ...

    def drop(self, lease: Lease) -> None:
        """Forget the group: no task shall see it any more."""
        ...

    def give_back(self, lease: Lease) -> None:
        """Not done: whoever claims next gets it."""
        ...

    def snapshot(self) -> Saved: ...

    def restore(self, saved: Saved) -> None:
        """Into an empty store."""
        ...

    def stats(self) -> StoreStats: ...
