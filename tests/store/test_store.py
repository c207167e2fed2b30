"""The store's promises, against the one in memory and the one of many processes."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from millstream.clock import VirtualClock, run_virtual
from millstream.errors import StoreError
from millstream.store import Lease, Reads, Store, Want
from millstream.store.host import ShardedStore, SharedStore, make_plan
from millstream.store.memory import MemoryStore
from millstream.store.sharded import ShardedClient, shard_of
from millstream.testing.store import GROUPS, MIXED, ROWS, StoreSuite, put_group, put_values, stop, values_now
from support.store_load import ForkedStore


class TestMemoryStore(StoreSuite):
    @asynccontextmanager
    async def open(
        self, tasks: Mapping[str, Reads], capacity_rows: int | None = None, capacity_bytes: int | None = None
    ) -> AsyncIterator[Store]:
        yield MemoryStore(tasks, clock=VirtualClock(), capacity_rows=capacity_rows, capacity_bytes=capacity_bytes)

    def run(self, program: Coroutine[Any, Any, None]) -> None:
        run_virtual(program)


@asynccontextmanager
async def started(tasks: Mapping[str, Reads], **more: Any) -> AsyncIterator[SharedStore]:
    with (
        tempfile.TemporaryDirectory() as folder,
        ForkedStore(make_plan(tasks, folder=Path(folder), disconnect_s=0.2, **more)) as shared,
    ):
        yield shared


class TestSharedStore(StoreSuite):
    """A coordinator for each test, and one client."""

    @asynccontextmanager
    async def open(
        self, tasks: Mapping[str, Reads], capacity_rows: int | None = None, capacity_bytes: int | None = None
    ) -> AsyncIterator[Store]:
        async with started(tasks, capacity_rows=capacity_rows, capacity_bytes=capacity_bytes) as shared:
            store = await shared.connect("the tests")
            try:
                yield store
            finally:
                await store.close()


class TestShardedStore(StoreSuite):
    """Two coordinators, which have the partitions of a test, and all rows on disk."""

    beside = "other"

    @asynccontextmanager
    async def open(
        self, tasks: Mapping[str, Reads], capacity_rows: int | None = None, capacity_bytes: int | None = None
    ) -> AsyncIterator[Store]:
        limits = {"capacity_rows": capacity_rows, "capacity_bytes": capacity_bytes, "memory_bytes": 1}
        async with started(tasks, **limits) as first, started(tasks, **limits, shard=1) as second:
            store = await ShardedClient.connect([first.address, second.address])
            try:
                yield store
            finally:
                await store.close()


def test_partitions_are_on_several_coordinators_and_one_that_is_killed_delays_only_its_own() -> None:
    async def program() -> None:
        with ShardedStore(ROWS, 2, disconnect_s=0.2) as shared:
            store = await shared.connect()
            names = {shard_of(f"{number}", 2): f"{number}" for number in range(8)}
            ids = {shard: await put_values(store, [shard], partition=name) for shard, name in names.items()}
            assert not set(ids[0]) & set(ids[1])
            with pytest.raises(StoreError, match="write those of each partition apart"):
                await store.write([*ids[0], *ids[1]], {"late": [0, 1]})
            shared.shards[0].process.kill()
            for shard in (1, 0):
                await store.write(ids[shard], {"late": [shard]})
                lease = await store.claim("read", Want(rows=1), partition=names[shard])
                assert (lease["value"], lease["late"]) == ([shard], [shard])
                await store.acknowledge(lease, step=3)
                assert await store.rewind("read", 2, partition=names[shard]) == 1
            saved, empty = await store.snapshot(partition=names[0]), await store.snapshot(partition="empty")
            for wrong, partition in ((saved, names[1]), (structs.replace(empty, generation=1 << 16), names[0])):
                with pytest.raises(StoreError, match="of another coordinator"):
                    await store.restore(wrong, partition=partition)
            stats = await store.stats()
            assert stats.rows == 2 and set(stats.by_partition) == set(names.values())
            rows = await store.stage({"value": [np.arange(3)]}, partition=names[1])
            await store.put_staged(7, rows, partition=names[1])
            store.drop_staged(await store.stage({"value": [np.arange(3)]}, partition=names[0]))
            assert (await store.stats()).rows == 3
            await store.close()

    asyncio.run(program())


def test_the_rows_of_a_consumer_that_is_gone_go_to_another_and_what_it_wrote_stays() -> None:
    async def program() -> None:
        async with started(ROWS) as shared:
            first, second = await shared.connect("first"), await shared.connect("second")
            ids = await put_values(first, [np.arange(20_000), "b"])
            await first.write(ids, {"late": [np.full(20_000, 7), None]})
            lease = await first.claim("read", Want(rows=2))
            waiting = asyncio.ensure_future(second.claim("read", Want(rows=2)))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            stats = await second.stats()
            assert [one.who for one in stats.waiting] == [second.name]
            await first.close()
            again = await asyncio.wait_for(waiting, 5)
            assert again.row_ids == lease.row_ids
            assert (again["value"][0] == np.arange(20_000)).all() and (again["late"][0] == 7).all()
            with pytest.raises(StoreError, match="has ended"):
                await second.acknowledge(lease)
            await second.acknowledge(again)
            assert (await second.stats()).bytes == 0
            await second.close()

    asyncio.run(program())


def test_bytes_and_operations_are_counted_by_partition_also_after_a_kill() -> None:
    async def program() -> None:
        async with started(ROWS) as shared:
            store = await shared.connect()
            (first,) = await put_values(store, [np.zeros(20_000)])
            await put_values(store, ["b"], partition="other")
            await store.write([first], {"late": [np.zeros(20_000)]})
            await store.acknowledge(await store.claim("read", Want(rows=1), partition="other"))
            shared.process.kill()
            stats = await store.stats()
            assert stats.operations == {"put": 2, "write": 1, "claim": 1, "acknowledge": 1}
            assert stats.by_partition["train"].bytes == stats.bytes > 320_000
            assert list(stats.by_partition) == ["train"]
            assert stats.by_partition["train"].by_stage["read"]["ready"] == 1
            await store.close()

    asyncio.run(program())


def memory_of(shared: SharedStore) -> int:
    return sum(path.stat().st_size for path in Path(shared.address.folder).iterdir())


def test_a_large_put_that_is_refused_leaves_neither_room_nor_memory_taken() -> None:
    async def program() -> None:
        async with started(MIXED, capacity_bytes=1 << 20) as shared:
            store = await shared.connect()
            await store.close_groups([0])
            for _ in range(20):
                with pytest.raises(StoreError, match="closed"):
                    await put_values(store, [np.zeros(200_000, np.uint8)])
                with pytest.raises(StoreError, match="not in the store"):
                    await store.write([12345], {"value": [np.zeros(200_000, np.uint8)]})
            await put_values(store, [np.zeros(800_000, np.uint8)], group_id=1, deadline_s=1)
            assert memory_of(shared) < 3 << 20
            await store.close()

    asyncio.run(program())


def test_a_claim_that_is_cancelled_while_the_coordinator_is_away_loses_nothing() -> None:
    async def program() -> None:
        async with started(ROWS) as shared:
            store = await shared.connect()
            waiting = [asyncio.ensure_future(store.claim("read", Want(rows=1))) for _ in range(3)]
            await asyncio.sleep(0.05)
            shared.process.kill()
            await asyncio.sleep(0.05)
            for claim in waiting[:2]:
                await stop(claim)
            await put_values(store, [1, 2])
            assert (await waiting[2])["value"] == [1]
            assert await values_now(store) == [2]
            await store.close()

    asyncio.run(program())


def test_a_claim_costs_the_same_however_many_wait_before_it() -> None:
    async def calls_of(num_waiting: int) -> int:
        """Python functions that are called while this many claims join the queue, a row is put, and all are withdrawn."""
        num_calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += event == "call"

        store = MemoryStore(ROWS)
        sys.setprofile(count)
        try:
            waiting = [asyncio.ensure_future(store.claim("read", Want(rows=2))) for _ in range(num_waiting)]
            await asyncio.sleep(0)
            await put_values(store, ["a"])
            for claim in waiting:
                claim.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            sys.setprofile(None)
        return num_calls

    assert asyncio.run(calls_of(800)) < 2.5 * asyncio.run(calls_of(400))


@given(
    num_groups=st.integers(1, 12),
    capacity=st.integers(4, 12),
    num_consumers=st.integers(1, 4),
    deaths=st.floats(0, 0.5),
    seed=st.integers(0, 1000),
)
def test_with_many_producers_and_consumers_that_die_every_group_is_trained_exactly_once(
    num_groups: int, capacity: int, num_consumers: int, deaths: float, seed: int
) -> None:
    rng = random.Random(seed)

    async def program() -> None:
        store = MemoryStore(GROUPS, capacity_rows=capacity)
        trained: list[int] = []

        async def produce(group_id: int) -> None:
            await asyncio.sleep(rng.random())
            await put_group(store, group_id, ["text"] * rng.randint(1, 2))

        async def consume(task: str) -> None:
            while True:
                lease = await store.claim(task)
                await asyncio.sleep(rng.random())
                if rng.random() < deaths:
                    await store.give_back(lease)
                    continue
                await work(lease)
                await store.acknowledge(lease)

        async def work(lease: Lease) -> None:
            if lease.task == "score":
                await store.write(lease.row_ids, {"score": [0.0] * len(lease)})
            else:
                trained.append(lease.group_id)

        consumers = [asyncio.ensure_future(consume(task)) for task in GROUPS for _ in range(num_consumers)]
        await asyncio.gather(*(produce(group_id) for group_id in range(num_groups)))
        while len(trained) < num_groups:
            await asyncio.sleep(1)
        await asyncio.sleep(10)
        assert sorted(trained) == list(range(num_groups))
        assert (await store.stats()).rows == 0
        for consumer in consumers:
            consumer.cancel()

    run_virtual(program())
