"""The stream store: rows are rollouts, columns are fields, and every task (a consumer) sees every row once.

A task may claim a row as soon as the row has the columns that the task reads; a task that works on whole groups, as soon as the
group is closed and all its rows have them. Columns may be written later, to rows already there, which is what lets stages
overlap by themselves. What is claimed is on *lease* until it is acknowledged; a lease that is given back, expires, or whose
holder dies is claimed again by whoever comes first. Rows are freed when every task is done with them, and, where they were
acknowledged for a step, when a checkpoint covers that step.

    put ──► [ room? ] ──► rows ──► ready, by task ──► [ claim ] ──► lease ──► acknowledge ──► [ cover ] ──► freed
                                      ▲                               │
                                    write (a later column)      give back, expire, die
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

Columns = Mapping[str, Sequence[Any]]
"""Name -> one cell for each row: a list (arrays of any length, tensors, strings, numbers, structs), or one array or tensor
whose first dimension is the rows."""
Choose = Callable[[Sequence[int]], int | None]
"""Which of the ready groups (the longest ready first) to hand out; None to wait. What it returns is handed out at once."""
TRAIN = "train"
"""The partition that rows belong to unless told otherwise."""


class Reads(NamedTuple):
    """What a task needs: columns of the row, and tasks that must have acknowledged it before."""

    columns: tuple[str, ...]
    after: tuple[str, ...] = ()
    by_group: bool = True
    """Whole groups, once they are closed; else any row that is ready."""


class Want(Struct, frozen=True, kw_only=True):
    """How much a claim asks for: the first limit that is reached ends it. A task that reads groups gets
    whole ones."""

    rows: int | None = None
    tokens: int | None = None
    """At most so many tokens, and at least one row or group, however long."""
    groups: int | None = None
    policy: str = "fifo"
    """fifo: the longest ready first. oldest_version: the lowest version first. balanced: so that the ranks that claim have had
    the same number of tokens. Or one of your own, as `package.module:function` (see `store.policies`)."""
    versions: tuple[int, int] | None = None
    """Only rows (groups) whose version is within these, both included."""
    rank: int = 0
    """For `balanced`: who asks."""
    patience_s: float | None = None
    """How long to wait for all of it. Then: what is there, at least one row or group. 0: what is there now. None: for ever."""
    deadline_s: float | None = None
    """After so long without an answer the claim fails with `StoreTimeout`. None: never."""
    expires_s: float | None = None
    """The lease ends so long after it was given or renewed. None: only with its holder."""

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.rows, self.tokens, self.groups) if limit is not None]
        if not limits or min(limits) < 1:
            raise ValueError("a claim needs rows, tokens or groups, each at least 1")


ONE_GROUP = Want(groups=1)


class Row(Struct, frozen=True, kw_only=True, eq=False):
    row_id: int
    group_id: int
    columns: dict[str, Any]


class Lease(Struct, frozen=True, kw_only=True, eq=False):
    """Rows in hand, as columns: `lease["tokens"][i]` belongs to `row_ids[i]`."""

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

    @property
    def rows(self) -> list[Row]:
        names = list(self.columns)
        cells = zip(*self.columns.values(), strict=True) if names else ([()] * len(self.row_ids))
        return [
            Row(row_id=row_id, group_id=group_id, columns=dict(zip(names, cell, strict=True)))
            for row_id, group_id, cell in zip(self.row_ids, self.group_ids, cells, strict=True)
        ]


class Saved(Struct, frozen=True, kw_only=True, eq=False):
    """A snapshot of one partition: every row that some task still needs. What was on lease is free again after a restore."""

    rows: tuple[Row, ...]
    is_closed: dict[int, bool]
    acknowledged: dict[str, tuple[int, ...]]
    """By task: the ids of rows; of groups for a task that reads groups."""
    versions: dict[int, int] = {}
    """By row, where it has one."""
    tokens: dict[int, int] = {}
    steps: dict[int, dict[str, int]] = {}
    """By row, by task: the step that it was acknowledged for, where it was for one."""
    generation: int = 0
    """Of the ids that were given out last: those of whoever restores it are of later ones."""


class Waiting(Struct, frozen=True, kw_only=True):
    """A producer or consumer that waits, and for what."""

    who: str
    what: str
    seconds: float


class StoreStats(Struct, frozen=True, kw_only=True):
    rows: int
    groups: int
    bytes: int
    leases: int
    waiting_producers: int
    waiting_consumers: dict[str, int]
    waiting: list[Waiting] = []
    """The longest waits, by name."""
    by_version: dict[int, int] = {}
    """Rows; -1: those without a version."""
    by_stage: dict[str, dict[str, int]] = {}
    """Task -> rows that lack a column, are ready, on lease, done."""
    oldest_s: float = 0.0
    """The age of the oldest row."""
    rows_put: int = 0
    rows_claimed: int = 0
    rows_freed: int = 0
    """Since the store began: the difference of two reports is a rate."""


class Store(Protocol):
    """`put` and `claim` may block: a put until acknowledged rows make room, a claim until what it wants is ready. Both are
    cancellable, first come first served, and block nobody else. Everything else is done when it returns, or raises `StoreError`
    and has changed nothing."""

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
        """Add rows, one for each cell of the columns, to open groups (the first row opens one); their ids.

        `tokens` is what a claim by tokens counts: by default the length of the cells of a column of that name, else 1."""
        ...

    async def write(self, row_ids: Sequence[int], columns: Columns, *, overwrite: bool = False) -> None:
        """Add columns to rows, all of them or none. Writing a cell twice is an error unless asked for: then the last is read.

        A write does not wait for room, since it may be what full rows need to be done with; what it brings counts, and the
        puts wait for it."""
        ...

    async def close_groups(self, group_ids: Sequence[int], *, partition: str = TRAIN) -> None:
        """No more rows will come: the groups may be claimed. A group closed without a row is claimable, and empty."""
        ...

    async def claim(
        self, task: str, want: Want = ONE_GROUP, *, choose: Choose | None = None, partition: str = TRAIN
    ) -> Lease:
        """The rows that `want` asks for. Raises `StreamEnded` after `finish`, when none is left; fewer than asked for when
        these are the last. What a `choose` or a policy of your own raises reaches the claim that named it, and nobody else."""
        ...

    async def renew(self, lease: Lease) -> None:
        """Still at work on it: a lease that expires begins anew."""
        ...

    async def acknowledge(self, lease: Lease, *, step: int | None = None) -> None:
        """The task is done with these rows: it never sees them again. With `step` they are kept until `cover` says that a
        checkpoint holds what they did."""
        ...

    async def drop(self, lease: Lease) -> None:
        """Forget the rows: no task shall see them any more."""
        ...

    async def give_back(self, lease: Lease) -> None:
        """Not done: whoever claims next gets it."""
        ...

    async def cover(self, step: int, *, partition: str = TRAIN) -> None:
        """A checkpoint holds every step up to this one."""
        ...

    async def rewind(self, task: str, step: int, *, partition: str = TRAIN) -> int:
        """The task lost what it did after this step: rows that it acknowledged for later steps are ready again; how many.
        Tasks that come after it wait for it again."""
        ...

    def wake(self) -> None:
        """Something outside that a `choose` reads has changed: ask the waiting claims again."""
        ...

    async def finish(self, *, partition: str = TRAIN) -> None:
        """No more rows will come: a claim ends with `StreamEnded` once every row is done with or on lease."""
        ...

    async def drop_partition(self, partition: str) -> int:
        """Forget all of it, leases included; how many rows that were. Claims that wait there end with `StreamEnded`."""
        ...

    async def snapshot(self, *, partition: str = TRAIN) -> Saved: ...

    async def restore(self, saved: Saved, *, partition: str = TRAIN) -> None:
        """Into an empty partition. Ids that were given out before and are not in it are stale from now on."""
        ...

    async def stats(self) -> StoreStats: ...
