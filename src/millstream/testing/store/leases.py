"""Leases, acknowledgement, steps and rewinds."""

from __future__ import annotations

import asyncio

from millstream.store import Store, Want
from millstream.testing.store.base import (
    MIXED,
    ROWS,
    StoreSuiteBase,
    put_values,
    refused,
    store_promise,
    values_now,
)


class LeasePromises(StoreSuiteBase):
    @store_promise(ROWS)
    async def test_what_is_on_lease_is_with_one_holder(self, store: Store) -> None:
        await put_values(store, range(10))
        leases = await asyncio.gather(*(store.claim("read", Want(rows=2)) for _ in range(5)))
        assert sorted(value for lease in leases for value in lease["value"]) == list(range(10))
        assert (await store.stats()).leases == 5
        assert await values_now(store) == []

    @store_promise(ROWS)
    async def test_what_is_given_back_comes_first_again(self, store: Store) -> None:
        await put_values(store, range(6))
        first = await store.claim("read", Want(rows=2))
        second = await store.claim("read", Want(rows=2))
        await store.give_back(second)
        await store.give_back(first)
        assert (await store.claim("read", Want(rows=6)))["value"] == [0, 1, 2, 3, 4, 5]

    @store_promise(ROWS)
    async def test_a_lease_that_has_ended_cannot_be_used(self, store: Store) -> None:
        for end in (store.acknowledge, store.give_back, store.drop):
            await put_values(store, [1])
            lease = await store.claim("read", Want(rows=1))
            await end(lease)
            for call in (store.acknowledge, store.give_back, store.drop, store.renew):
                async with refused(store, "has ended"):
                    await call(lease)
            await values_now(store)

    @store_promise(ROWS)
    async def test_a_lease_expires_and_its_rows_go_to_a_waiting_claim(self, store: Store) -> None:
        await put_values(store, ["a"])
        lease = await store.claim("read", Want(rows=1, expires_s=4 * self.tick_s))
        waiting = await self.soon(store.claim("read", Want(rows=1)))
        assert not waiting.done()
        assert (await waiting)["value"] == ["a"]
        async with refused(store, "has ended"):
            await store.acknowledge(lease)
        await store.acknowledge(await waiting)
        await asyncio.sleep(5 * self.tick_s)
        assert await values_now(store) == []

    @store_promise(ROWS)
    async def test_a_renewed_lease_expires_later_and_one_that_ended_does_not_expire(self, store: Store) -> None:
        await put_values(store, ["a"])
        lease = await store.claim("read", Want(rows=1, expires_s=6 * self.tick_s))
        for _ in range(4):
            await asyncio.sleep(2 * self.tick_s)
            await store.renew(lease)
        await store.acknowledge(lease)
        await asyncio.sleep(7 * self.tick_s)
        assert await values_now(store) == []

    @store_promise(MIXED)
    async def test_acknowledged_rows_never_come_back_and_are_freed_when_every_task_is_done(self, store: Store) -> None:
        ids = await put_values(store, [1, 2])
        await store.close_groups([0])
        lease = await store.claim("score", Want(rows=2))
        await store.write(ids, {"score": [0, 0]})
        await store.acknowledge(lease)
        assert await values_now(store, "score") == []
        await store.acknowledge(await store.claim("train"))
        assert (await store.stats()).rows == 2
        await store.acknowledge(await store.claim("watch"))
        stats = await store.stats()
        assert (stats.rows, stats.groups, stats.bytes, stats.leases, stats.rows_freed) == (0, 0, 0, 0, 2)

    @store_promise(ROWS)
    async def test_rows_of_a_step_are_freed_when_a_checkpoint_covers_it(self, store: Store) -> None:
        await put_values(store, range(5))
        for step in range(4):
            await store.acknowledge(await store.claim("read", Want(rows=1)), step=step)
        await store.acknowledge(await store.claim("read", Want(rows=1)))
        assert (await store.stats()).rows == 4, "one was acknowledged without a step"
        for step, left in ((0, 3), (2, 1), (1, 1), (3, 0)):
            await store.cover(step)
            assert (await store.stats()).rows == left
        await put_values(store, [5])
        await store.acknowledge(await store.claim("read", Want(rows=1)), step=2)
        assert (await store.stats()).rows == 0, "covered already"

    @store_promise(ROWS)
    async def test_a_rewind_makes_rows_of_later_steps_ready_again(self, store: Store) -> None:
        await put_values(store, range(4))
        for step in range(4):
            await store.acknowledge(await store.claim("read", Want(rows=1)), step=step)
        await store.cover(0)
        assert await store.rewind("read", 1) == 2
        assert await store.rewind("read", 1) == 0
        lease = await store.claim("read", Want(rows=2))
        assert lease["value"] == [2, 3]
        await store.acknowledge(lease, step=2)
        await store.cover(2)
        assert (await store.stats()).rows == 0

    @store_promise(MIXED)
    async def test_a_rewind_concerns_its_task_and_those_that_come_after_wait_for_it(self, store: Store) -> None:
        await store.put([0, 0, 1], {"value": [1, 2, 3], "score": [0, 0, 0]})
        await store.close_groups([0, 1])
        await store.acknowledge(await store.claim("score", Want(rows=2)), step=5)
        await store.acknowledge(await store.claim("score", Want(rows=1)), step=1)
        held = await store.claim("train", Want(groups=2))
        await store.acknowledge(await store.claim("watch", Want(groups=2)), step=3)
        assert await store.rewind("watch", 4) == 0 and await store.rewind("score", 4) == 2
        await store.give_back(held)
        assert await values_now(store, "train") == [3], "the others are to be scored again"
        assert await values_now(store, "score") == [1, 2]
        assert await values_now(store, "train") == [1, 2]
        assert (await store.stats()).rows == 3, "watched for step 3"
        await store.cover(3)
        assert (await store.stats()).rows == 0

    @store_promise(MIXED)
    async def test_what_one_task_did_for_a_step_is_kept_when_another_is_rewound(self, store: Store) -> None:
        await store.put(0, {"value": [1], "score": [0]})
        await store.close_groups([0])
        await store.acknowledge(await store.claim("score", Want(rows=1)), step=9)
        await store.acknowledge(await store.claim("watch"), step=2)
        await store.acknowledge(await store.claim("train"))
        assert await store.rewind("train", 0) == 0, "it was acknowledged for no step"
        assert await store.rewind("watch", 0) == 1
        await store.acknowledge(await store.claim("watch"))
        assert (await store.stats()).rows == 1
        await store.cover(9)
        assert (await store.stats()).rows == 0

    @store_promise(MIXED)
    async def test_dropped_rows_are_seen_by_no_task(self, store: Store) -> None:
        await store.put([0, 0, 1], {"value": [1, 2, 3], "score": [0, 0, 0]}, versions=[1, 2, 3])
        await store.close_groups([0, 1])
        await store.drop(await store.claim("score", Want(rows=1)))
        stats = await store.stats()
        assert stats.rows == 2 and stats.by_stage["watch"]["ready"] == 2
        lease = await store.claim("watch", Want(groups=1, versions=(2, 2)))
        assert lease["value"] == [2], "its version is that of the rows that are left"
        await store.drop(lease)
        assert await values_now(store, "score") == [3]
        assert await values_now(store, "watch") == [3]
        assert await values_now(store, "train") == [3]
        stats = await store.stats()
        assert stats.rows == stats.groups == stats.bytes == 0

    @store_promise(MIXED)
    async def test_what_is_on_lease_to_another_task_cannot_be_dropped(self, store: Store) -> None:
        await put_values(store, [1])
        await store.close_groups([0, 1])
        mine, other = await store.claim("score", Want(rows=1)), await store.claim("watch", Want(groups=2))
        for lease in (mine, other):
            async with refused(store, "cannot be dropped"):
                await store.drop(lease)
        empty = await store.claim("train")
        assert empty.empty_groups == [1]
        async with refused(store, "cannot be dropped"):
            await store.drop(empty)
        await store.give_back(mine)
        await store.acknowledge(empty)
        await store.drop(other)
        assert (await store.stats()).rows == 0
