"""The store as a data set of torch's `DataLoader`.

    data = StoreDataset(store.address, "train", tokens=8192)
    for batch in DataLoader(data, batch_size=None, num_workers=2):
        batch["tokens"]                      # a list with one tensor for each row
        batch["row_ids"]

Each worker connects by itself, and every row goes to one of them. A micro-batch stays on lease until the training loop has come
back for the next one, so that it is seen *at least once*: the leases of a worker that dies come back, those of a loop that dies
as well. `DataLoader` fetches `prefetch_factor` micro-batches ahead; a worker therefore acknowledges so many fewer than it has
handed over (`behind`). At the end of the stream or the step a worker acknowledges all of it: the last ones may then still be on
their way to the loop. Who cannot have that uses `store.loader`, where the loop acknowledges its steps itself.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from millstream.errors import StoreError
from millstream.store.base import TRAIN, Lease, Store
from millstream.store.blocking import CLOSE_S, Line
from millstream.store.blocks import Block, Packing
from millstream.store.client import Address, StoreClient
from millstream.store.loader import Claims, share_of

Connect = Callable[[], Awaitable[Store]]
PREFETCH_FACTOR = 2
"""DataLoader's own default."""


class MicroBatch(dict[str, list[Any]]):
    """Column -> a cell for each row; and `row_ids`, `group_ids`, `versions`. Travels between processes as one stretch of
    bytes, not as one file descriptor for each tensor, of which a process may have few."""

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            return _unpacked, (bytes(Packing(self).to_bytes()), list(self), len(self["row_ids"]))
        except StoreError:  # cells of a kind that only pickle knows
            return MicroBatch, (dict(self),)

    def __copy__(self) -> MicroBatch:
        return MicroBatch(self)


def _unpacked(data: bytes, names: list[str], num_rows: int) -> MicroBatch:
    block = Block(bytearray(data))
    return MicroBatch({name: block.cells(name, 0, num_rows) for name in names})


def as_batch(lease: Lease) -> MicroBatch:
    """Arrays and their numbers become tensors of the caller's own; everything else stays what it is."""
    ids: dict[str, list[Any]] = {"row_ids": lease.row_ids, "group_ids": lease.group_ids, "versions": lease.versions}
    if taken := ids.keys() & lease.columns.keys():
        raise StoreError(f"a column is named {min(taken)}, as are the micro-batch's own: name it otherwise")
    return MicroBatch({name: list(map(_owned, cells)) for name, cells in lease.columns.items()} | copy.deepcopy(ids))


def _owned(cell: Any) -> Any:
    if isinstance(cell, torch.Tensor):
        return cell.clone()
    is_number = isinstance(cell, np.ndarray | np.generic) and cell.dtype.kind in "biufc"
    return torch.tensor(cell) if is_number else cell


class StoreDataset(IterableDataset[MicroBatch]):
    """Micro-batches of at most `tokens` tokens, for `DataLoader(..., batch_size=None)`; one iteration is one step if it is told
    how large that is, else the rest of the stream. The step's rows are shared out to ranks and workers as `store.loader` says.

    `where` is the address of a store of many processes, or a function that connects to one, called in each worker on its event
    loop (one that can be pickled, where workers are spawned). `behind` is how many micro-batches more than the newest stay on
    lease: give `prefetch_factor` if you set that. None: what `DataLoader` does by default, 2 in a worker and 0 without any."""

    def __init__(
        self,
        where: Address | Connect,
        task: str,
        *,
        tokens: int,
        rows_per_step: int | None = None,
        groups_per_step: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        partition: str = TRAIN,
        patience_s: float | None = None,
        deadline_s: float | None = None,
        behind: int | None = None,
    ) -> None:
        super().__init__()
        share_of(None, rank, ranks)
        if behind is not None and behind < 0:
            raise ValueError(f"behind = {behind}: expected 0 or more")
        self._where = where
        self._task = task
        self._tokens = tokens
        self._partition = partition
        self._rows = rows_per_step
        self._groups = groups_per_step
        self._rank = rank
        self._ranks = ranks
        self._patience_s = patience_s
        self._deadline_s = deadline_s
        self._behind = behind
        self._line: Line[Store] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_line": None}

    def _connected(self) -> Line[Store]:
        """This process's line, kept from one iteration to the next."""
        if self._line is None or self._line.is_closed or self._line.pid != os.getpid():
            where = self._where
            self._line = Line((lambda: StoreClient.connect(where)) if isinstance(where, Address) else where)
            weakref.finalize(self, self._line.close)
        return self._line

    def __iter__(self) -> Iterator[MicroBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        behind = self._behind if self._behind is not None else (0 if info is None else PREFETCH_FACTOR)
        rank, ranks = self._rank * workers + worker, self._ranks * workers
        line = self._connected()
        claims = Claims(
            line.store,
            self._task,
            tokens=self._tokens,
            rows=share_of(self._rows, rank, ranks),
            groups=share_of(self._groups, rank, ranks),
            rank=rank,
            partition=self._partition,
            patience_s=self._patience_s,
            deadline_s=self._deadline_s,
        )
        try:
            while (lease := line.call(claims.next())) is not None:
                yield as_batch(lease)
                line.call(claims.acknowledge(keep=behind))
            line.call(claims.acknowledge())
        finally:
            if not line.is_closed:
                line.call(claims.give_back(), CLOSE_S)

    def close(self) -> None:
        """Hang up: what is on lease comes back."""
        if self._line is not None:
            self._line.close()
