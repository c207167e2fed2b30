"""One store of several coordinators, for more operations than one can do: each has some partitions, and clients know which.

Every promise of the store holds within a partition, since one coordinator has all of it: its journal, its order, its leases.
What spans partitions does not: a write names rows of one coordinator, capacities are of each coordinator, and a snapshot is
restored into a partition of the coordinator that it comes from. An id of a row or a lease has the number of its coordinator.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Sequence

from millstream.errors import StoreError
from millstream.store import wire
from millstream.store.base import ONE_GROUP, TRAIN, Choose, Columns, Lease, Saved, StoreStats, Want
from millstream.store.client import GIVE_UP_S, Address, StoreClient
from millstream.store.rows import integers
from millstream.store.table import GENERATION_SHIFT, MAX_WAITERS_SHOWN, SHARD_SHIFT


def shard_of(partition: str, num_shards: int) -> int:
    """The coordinator that has a partition."""
    return zlib.crc32(partition.encode()) % num_shards


class ShardedClient:
    """See `millstream.store.Store` for the promises. `shards`: a client of each coordinator, in the order of their plans."""

    def __init__(self, shards: Sequence[StoreClient]) -> None:
        self._shards = list(shards)

    @classmethod
    async def connect(
        cls, addresses: Sequence[Address], name: str | None = None, *, give_up_s: float = GIVE_UP_S
    ) -> ShardedClient:
        store = cls([])
        try:
            for address in addresses:
                store._shards.append(await StoreClient.connect(address, name, give_up_s=give_up_s))
        except BaseException:  # also when cancelled
            await store.close()
            raise
        return store

    async def close(self) -> None:
        for shard in self._shards:
            await shard.close()

    def _having(self, partition: str) -> StoreClient:
        return self._shards[shard_of(partition, len(self._shards))]

    def _that_gave(self, number: int) -> StoreClient:
        """The coordinator that has given out this id; any, for one that none can have given."""
        return self._shards[(number >> SHARD_SHIFT) % len(self._shards)]

    # ---- producers ---------------------------------------------------------------------------------------------------

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
        return await self._having(partition).put(
            group_ids, columns, versions=versions, tokens=tokens, partition=partition, deadline_s=deadline_s
        )

    async def stage(
        self,
        columns: Columns,
        *,
        small: Columns | None = None,
        versions: int | Sequence[int] | None = None,
        partition: str = TRAIN,
    ) -> wire.StagedRows:
        """Pack rows for this partition."""
        return await self._having(partition).stage(columns, small=small, versions=versions)

    async def put_staged(self, group_id: int, rows: wire.StagedRows, *, partition: str = TRAIN) -> None:
        await self._having(partition).put_staged(group_id, rows, partition=partition)

    def drop_staged(self, rows: wire.StagedRows) -> None:
        for shard in self._shards:  # those that do not have it ignore it
            shard.drop_staged(rows)

    async def write(self, row_ids: Sequence[int], columns: Columns, *, overwrite: bool = False) -> None:
        ids = integers(row_ids)
        if len({self._that_gave(row_id) for row_id in ids}) > 1:
            raise StoreError("the rows are in partitions of several coordinators: write those of each partition apart")
        await self._that_gave(ids[0] if ids else 0).write(ids, columns, overwrite=overwrite)

    async def close_groups(self, group_ids: Sequence[int], *, partition: str = TRAIN) -> None:
        await self._having(partition).close_groups(group_ids, partition=partition)

    # ---- consumers ---------------------------------------------------------------------------------------------------

    async def claim(
        self, task: str, want: Want = ONE_GROUP, *, choose: Choose | None = None, partition: str = TRAIN
    ) -> Lease:
        return await self._having(partition).claim(task, want, choose=choose, partition=partition)

    async def renew(self, lease: Lease) -> None:
        await self._that_gave(lease.lease_id).renew(lease)

    async def acknowledge(self, lease: Lease, *, step: int | None = None) -> None:
        await self._that_gave(lease.lease_id).acknowledge(lease, step=step)

    async def drop(self, lease: Lease) -> None:
        await self._that_gave(lease.lease_id).drop(lease)

    async def give_back(self, lease: Lease) -> None:
        await self._that_gave(lease.lease_id).give_back(lease)

    async def cover(self, step: int, *, partition: str = TRAIN) -> None:
        await self._having(partition).cover(step, partition=partition)

    async def rewind(self, task: str, step: int, *, partition: str = TRAIN) -> int:
        return await self._having(partition).rewind(task, step, partition=partition)

    def wake(self) -> None:
        for shard in self._shards:
            shard.wake()

    async def finish(self, *, partition: str = TRAIN) -> None:
        await self._having(partition).finish(partition=partition)

    async def drop_partition(self, partition: str) -> int:
        return await self._having(partition).drop_partition(partition)

    # ---- whole partitions --------------------------------------------------------------------------------------------

    async def snapshot(self, *, partition: str = TRAIN, with_held: bool = True) -> Saved:
        return await self._having(partition).snapshot(partition=partition, with_held=with_held)

    async def restore(self, saved: Saved, *, partition: str = TRAIN) -> None:
        shard = self._having(partition)
        newest = [saved.generation << GENERATION_SHIFT] if saved.generation else []
        for number in (*newest, *(row.row_id for row in saved.rows)):
            if self._that_gave(number) is not shard:
                raise StoreError(
                    "the snapshot is of another coordinator, which may have its rows already: restore into the partition that "
                    "the snapshot was taken of, in a store with as many coordinators"
                )
        await shard.restore(saved, partition=partition)

    async def stats(self) -> StoreStats:
        return merged_stats(await asyncio.gather(*(shard.stats() for shard in self._shards)))

    async def lost(self) -> list[wire.LostRow]:
        return [row for shard in self._shards for row in await shard.lost()]


def merged_stats(found: Sequence[StoreStats]) -> StoreStats:
    """The reports of several coordinators as one."""

    def total(name: str) -> int:
        return sum(getattr(one, name) for one in found)

    by_stage = {
        task: {state: sum(one.by_stage[task][state] for one in found) for state in states}
        for task, states in found[0].by_stage.items()
    }
    waiting = sorted((waiter for one in found for waiter in one.waiting), key=lambda waiter: -waiter.seconds)
    return StoreStats(
        rows=total("rows"),
        groups=total("groups"),
        bytes=total("bytes"),
        leases=total("leases"),
        waiting_producers=total("waiting_producers"),
        waiting_consumers={
            task: sum(one.waiting_consumers[task] for one in found) for task in found[0].waiting_consumers
        },
        waiting=waiting[:MAX_WAITERS_SHOWN],
        by_version=dict(sum((Counter(one.by_version) for one in found), Counter())),
        by_stage=by_stage,
        oldest_s=max(one.oldest_s for one in found),
        rows_put=total("rows_put"),
        rows_claimed=total("rows_claimed"),
        rows_freed=total("rows_freed"),
        operations=dict(sum((Counter(one.operations) for one in found), Counter())),
        spilled_bytes=total("spilled_bytes"),
        by_partition={name: part for one in found for name, part in one.by_partition.items()},
    )
