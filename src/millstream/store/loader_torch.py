"""The store as a dataset of torch's `DataLoader`.

    data = StoreDataset(store.address, "train", tokens=8192)
    for batch in DataLoader(data, batch_size=None, num_workers=2):
        batch["tokens"]                      # a list with one tensor for each row
        batch["row_ids"]

Each worker has its own connection, and every row goes to one worker. A micro-batch stays on lease until the training loop asks
for the next one, so that it is seen *at least once*: if a worker or the loop dies, its leases are given back. `DataLoader`
prefetches `prefetch_factor` micro-batches; a worker therefore acknowledges that many fewer than it has returned (`behind`). At
the end of the stream or the step a worker acknowledges all of them, although the last ones may not have reached the loop yet.
Where that matters use `store.loader`, where the loop acknowledges its steps itself.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Unpack

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from millstream.errors import StoreError
from millstream.store.base import Lease, Store
from millstream.store.blocking import CLIENT_CLOSE_S, BlockingClient
from millstream.store.blocks import Block, Packing
from millstream.store.client import Address, StoreClient
from millstream.store.loader import MicroBatches, StepOptions, share_of

Connect = Callable[[], Awaitable[Store]]
PREFETCH_FACTOR = 2
"""The default of `DataLoader`."""


class MicroBatch(dict[str, list[Any]]):
    """Column -> a cell for each row; and `row_ids`, `group_ids`, `versions`. Pickled as one block of bytes, not with one file
    descriptor for each tensor, of which a process may have few."""

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            return _unpacked, (bytes(Packing(self).to_bytes()), list(self), len(self["row_ids"]))
        except StoreError:  # cells that only pickle can encode
            return MicroBatch, (dict(self),)

    def __copy__(self) -> MicroBatch:
        return MicroBatch(self)


def _unpacked(data: bytes, names: list[str], num_rows: int) -> MicroBatch:
    block = Block(bytearray(data))
    return MicroBatch({name: block.cells(name, 0, num_rows) for name in names})


def as_batch(lease: Lease) -> MicroBatch:
    """Arrays and NumPy numbers become tensors that the caller owns; everything else is unchanged."""
    ids: dict[str, list[Any]] = {"row_ids": lease.row_ids, "group_ids": lease.group_ids, "versions": lease.versions}
    if taken := ids.keys() & lease.columns.keys():
        raise StoreError(f"a column is named {min(taken)}, which the micro-batch uses itself: rename the column")
    return MicroBatch({name: list(map(_owned, cells)) for name, cells in lease.columns.items()} | copy.deepcopy(ids))


def _owned(cell: Any) -> Any:
    if isinstance(cell, torch.Tensor):
        return cell.clone()
    is_number = isinstance(cell, np.ndarray | np.generic) and cell.dtype.kind in "biufc"
    return torch.tensor(cell) if is_number else cell


class StoreDataset(IterableDataset[MicroBatch]):
    """Micro-batches of at most `tokens` tokens, for `DataLoader(..., batch_size=None)`; one iteration is one step if its
    size is given, else the rest of the stream. The rows of a step are divided among ranks and workers as in `store.loader`.

    `where` is the address of a store of many processes, or a function that connects to a store, called in each worker on its
    event loop (it must be picklable where workers are spawned). `behind` is the number of micro-batches before the newest that
    stay on lease: pass `prefetch_factor` if you set that. None: the defaults of `DataLoader`, 2 in a worker and 0 without."""

    def __init__(
        self,
        where: Address | Connect,
        task: str,
        *,
        tokens: int,
        rank: int = 0,
        ranks: int = 1,
        behind: int | None = None,
        **step: Unpack[StepOptions],
    ) -> None:
        super().__init__()
        share_of(None, rank, ranks)
        if behind is not None and behind < 0:
            raise ValueError(f"behind = {behind}: expected 0 or more")
        self._where = where
        self._task = task
        self._tokens = tokens
        self._rank = rank
        self._ranks = ranks
        self._behind = behind
        self._step = step
        self._client: BlockingClient[Store] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}

    def _connected(self) -> BlockingClient[Store]:
        """The client of this process, kept from one iteration to the next."""
        if self._client is None or self._client.is_closed or self._client.pid != os.getpid():
            where = self._where
            self._client = BlockingClient((lambda: StoreClient.connect(where)) if isinstance(where, Address) else where)
            weakref.finalize(self, self._client.close)
        return self._client

    def __iter__(self) -> Iterator[MicroBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        behind = self._behind if self._behind is not None else (0 if info is None else PREFETCH_FACTOR)
        rank, ranks = self._rank * workers + worker, self._ranks * workers
        is_endless = self._step.get("rows_per_step") is None and self._step.get("groups_per_step") is None
        client = self._connected()
        batches = MicroBatches(
            client.store, self._task, tokens=self._tokens, rank=rank, ranks=ranks, is_endless=is_endless, **self._step
        )
        try:
            while (lease := client.call(batches.next())) is not None:
                yield as_batch(lease)
                client.call(batches.acknowledge(keep=behind))
            client.call(batches.acknowledge())
        finally:
            if not client.is_closed:
                client.call(batches.aclose(), CLIENT_CLOSE_S)

    def close(self) -> None:
        """Disconnect: what is on lease is given back."""
        if self._client is not None:
            self._client.close()
