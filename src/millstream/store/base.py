"""The interface of the store, and what it promises.

A task may claim a row as soon as the row has the columns that the task reads; a task that reads whole groups, as soon as the
group is closed and all its rows have them. Columns may be written later, to rows that are already in the store, so that stages
overlap without further coordination. Claimed rows are on *lease* until they are acknowledged. A lease that is given back,
expires, or whose holder dies is claimed again by the next consumer. Rows are freed when every task has acknowledged them, and,
where that was for a step, when a checkpoint covers the step.

    put ──► [ room? ] ──► rows ──► ready, by task ──► [ claim ] ──► lease ──► acknowledge ──► [ cover ] ──► freed
                                      ▲                               │
                                    write (a later column)      give back, expire, die
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

Columns = Mapping[str, Sequence[Any]]
"""Name -> one cell for each row: a list (arrays of any length, tensors, strings, numbers, structs), or one array or tensor
whose first dimension is the rows."""
Choose = Callable[[Sequence[int]], int | None]
"""Picks one of the ready groups (the longest ready first), or None to wait. The group it returns is claimed at once."""
TRAIN = "train"
"""The default partition."""


class Reads(NamedTuple):
    """What a task needs: columns of the row, and tasks that must have acknowledged it before."""

    columns: tuple[str, ...]
    after: tuple[str, ...] = ()
    by_group: bool = True
    """Whole groups, once they are closed; else any row that is ready."""


class Want(Struct, frozen=True, kw_only=True):
    """The size of a claim: it ends at the first limit that is reached. A task that reads groups gets whole groups."""

    rows: int | None = None
    tokens: int | None = None
    """An upper bound, but at least one row or group, however long it is."""
    groups: int | None = None
    policy: str = "fifo"
    """fifo: the longest ready first. oldest_version: the lowest version first. balanced: equalizes the number of tokens that
    the claiming ranks have received. Or a user's own function, as `package.module:function` (see `store.policies`)."""
    versions: tuple[int, int] | None = None
    """Only rows (groups) whose version is within these bounds, both included."""
    rank: int = 0
    """For `balanced`: the rank that claims."""
    patience_s: float | None = None
    """How long to wait for the full size. After that the claim takes what is ready, at least one row or group. 0: what is
    ready now. None: no limit."""
    deadline_s: float | None = None
    """The claim fails with `StoreTimeout` after this time. None: never."""
    expires_s: float | None = None
    """The lease expires this long after it was granted or renewed. None: only when its holder dies."""

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.rows, self.tokens, self.groups) if limit is not None]
        if not limits or min(limits) < 1:
            raise ValueError("a claim needs rows, tokens or groups, each at least 1")


ONE_GROUP = Want(groups=1)


class Row(Struct, frozen=True, kw_only=True, eq=False):
    row_id: int
    group_id: int
    columns: dict[str, Any]


class Lease(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """Claimed rows, as columns: `lease["tokens"][i]` belongs to `row_ids[i]`."""

    lease_id: int
    task: str
    row_ids: list[int]
    group_ids: list[int]
    """One for each row."""
    versions: list[int]
    columns: dict[str, list[Any]]
    empty_groups: list[int] = []
    """Groups that were closed without a row."""

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def group_id(self) -> int:
        """Of a lease of one group."""
        (group_id,) = {*self.group_ids, *self.empty_groups}
        return group_id

    @cached_property
    def rows(self) -> list[Row]:
        names = list(self.columns)
        cells = zip(*self.columns.values(), strict=True) if names else ([()] * len(self.row_ids))
        return [
            Row(row_id=row_id, group_id=group_id, columns=dict(zip(names, cell, strict=True)))
            for row_id, group_id, cell in zip(self.row_ids, self.group_ids, cells, strict=True)
        ]


class Saved(Struct, frozen=True, kw_only=True, eq=False):
    """A snapshot of one partition: every row that some task still needs. Leases are not part of it: rows that were on lease
    are ready after a restore."""

    rows: tuple[Row, ...]
    is_closed: dict[int, bool]
    acknowledged: dict[str, tuple[int, ...]]
    """By task: ids of rows; ids of groups for a task that reads groups."""
    versions: dict[int, int] = {}
    """By row, where it has one."""
    tokens: dict[int, int] = {}
    steps: dict[int, dict[str, int]] = {}
    """By row, by task: the step that it was acknowledged for, where it was for one."""
    generation: int = 0
    """The generation of the newest ids. A store that restores the snapshot gives out ids of a later generation."""


class StoreWaiter(Struct, frozen=True, kw_only=True):
    """A producer or consumer that waits, and for what."""

    who: str
    what: str
    seconds: float


class PartitionStats(Struct, frozen=True, kw_only=True):
    rows: int
    groups: int
    bytes: int
    by_stage: dict[str, dict[str, int]] = {}
    """As in `StoreStats`."""


class StoreStats(Struct, frozen=True, kw_only=True):
    rows: int
    groups: int
    bytes: int
    leases: int
    waiting_producers: int
    waiting_consumers: dict[str, int]
    waiting: list[StoreWaiter] = []
    """The longest waits."""
    by_version: dict[int, int] = {}
    """Number of rows; -1: rows without a version."""
    by_stage: dict[str, dict[str, int]] = {}
    """Task -> number of rows that are waiting (for a column or another task), ready, leased, done."""
    oldest_s: float = 0.0
    """The age of the oldest row."""
    rows_put: int = 0
    rows_claimed: int = 0
    rows_freed: int = 0
    """Totals since the store was created: the difference of two reports is a rate."""
    operations: dict[str, int] = {}
    """How many of each kind the store has carried out: put, write, close, claim, ..."""
    spilled_bytes: int = 0
    """On disk."""
    by_partition: dict[str, PartitionStats] = {}
    """Those that have rows or groups."""


class Store(Protocol):
    """`put` and `claim` may block: a put until freed rows make room, a claim until what it wants is ready. Both can be
    cancelled, are served first come first served, and do not block other callers. Every other call returns when it is done,
    or raises `StoreError` and has changed nothing."""

    async def put(
        self,
        group_ids: int | Sequence[int],
        columns: Columns,
        *,
        versions: int | Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
        partition: str = TRAIN,
        deadline_s: float | None = None,
    ) -> Sequence[int]:
        """Add rows, one for each cell of the columns, to open groups (the first row opens a group). Returns their ids.

        `tokens` is what a claim by tokens counts: by default the length of the cells of a column of that name, else 1.
        Raises `StoreTimeout` if there is no room within `deadline_s`."""
        ...

    async def write(self, row_ids: Sequence[int], columns: Columns, *, overwrite: bool = False) -> None:
        """Add columns to rows, to all of them or to none. Writing a cell twice is an error unless `overwrite` is set; then
        readers get the last value.

        A write does not wait for room, because it may be what the rows in a full store need to become done. What it adds
        counts, and puts wait for it. It raises `StoreError` if the store would have twice its capacity in bytes."""
        ...

    async def close_groups(self, group_ids: Sequence[int], *, partition: str = TRAIN) -> None:
        """The groups are complete: they may be claimed. A group that is closed without a row is claimable, and empty. Raises
        `StoreError` for more empty groups than rows fit."""
        ...

    async def claim(
        self, task: str, want: Want = ONE_GROUP, *, choose: Choose | None = None, partition: str = TRAIN
    ) -> Lease:
        """The rows that `want` asks for. After `finish`: fewer than asked for when these are the last, then `StreamEnded`.
        An exception of `choose`, or of a user's policy, is raised by the claim that named it and affects no other claim."""
        ...

    async def renew(self, lease: Lease) -> None:
        """Restart the expiry time of a lease."""
        ...

    async def acknowledge(self, lease: Lease, *, step: int | None = None) -> None:
        """The task is done with these rows and never sees them again. With `step`, the rows are kept until `cover` says that
        a checkpoint includes that step."""
        ...

    async def drop(self, lease: Lease) -> None:
        """Remove the rows: no task sees them any more."""
        ...

    async def give_back(self, lease: Lease) -> None:
        """End the lease without acknowledging it: the next claim gets the rows."""
        ...

    async def cover(self, step: int, *, partition: str = TRAIN) -> None:
        """A checkpoint includes every step up to this one."""
        ...

    async def rewind(self, task: str, step: int, *, partition: str = TRAIN) -> int:
        """The task lost its work after this step: rows that it acknowledged for later steps are ready again. Returns how many.
        Tasks that come after it wait for it again."""
        ...

    def wake(self) -> None:
        """Call the waiting `choose` functions again, because something that they read has changed."""
        ...

    async def finish(self, *, partition: str = TRAIN) -> None:
        """No more rows will come: a claim raises `StreamEnded` once every row is done or on lease."""
        ...

    async def drop_partition(self, partition: str) -> int:
        """Remove the partition with its rows and leases. Returns the number of rows. Claims that wait there raise
        `StreamEnded`."""
        ...

    async def snapshot(self, *, partition: str = TRAIN) -> Saved: ...

    async def restore(self, saved: Saved, *, partition: str = TRAIN) -> None:
        """Into an empty partition. Ids that were given out before and are not in the snapshot are invalid from now on."""
        ...

    async def stats(self) -> StoreStats: ...
