"""Waiting claims and puts, and the bounds of the store."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest

from millstream.errors import StoreError, StoreTimeout
from millstream.store import Store, Want
from millstream.testing.store.base import (
    GROUPS,
    MIXED,
    ROWS,
    StoreSuiteBase,
    put_group,
    put_values,
    refused,
    score,
    stop,
    store_promise,
    values_now,
)


class WaitingPromises(StoreSuiteBase):
    @store_promise(ROWS)
    async def test_a_claim_for_many_is_not_starved_by_later_ones_for_few(self, store: Store) -> None:
        many = await self.soon(store.claim("read", Want(rows=4)))
        few = [await self.soon(store.claim("read", Want(rows=1))) for _ in range(2)]
        for value in range(3):
            await put_values(store, [value])
        assert await self.still_waits(many) and not any(task.done() for task in few)
        await put_values(store, [3, 4])
        assert (await many)["value"] == [0, 1, 2, 3]
        assert (await few[0])["value"] == [4] and not few[1].done()
        await put_values(store, [5])
        assert (await few[1])["value"] == [5]

    @store_promise(ROWS)
    async def test_when_the_first_gives_up_the_next_is_served_at_once(self, store: Store) -> None:
        many = await self.soon(store.claim("read", Want(rows=4, deadline_s=4 * self.tick_s)))
        few = await self.soon(store.claim("read", Want(rows=1)))
        await put_values(store, ["a"])
        assert not few.done()
        with pytest.raises(StoreTimeout):
            await many
        assert (await few)["value"] == ["a"]
        many = await self.soon(store.claim("read", Want(rows=4)))
        few = await self.soon(store.claim("read", Want(rows=1)))
        await put_values(store, ["b"])
        await stop(many)
        assert (await few)["value"] == ["b"]

    @store_promise(MIXED, capacity_rows=8)
    async def test_a_call_that_waits_for_ever_blocks_no_other(self, store: Store) -> None:
        for_ever = [
            await self.soon(store.claim("watch", Want(rows=10**6))),
            await self.soon(store.claim("score", Want(rows=1), partition="empty")),
            await self.soon(store.claim("train", choose=lambda ready: None)),
            await self.soon(store.claim("score", Want(rows=1, versions=(99, 99)))),
        ]
        for turn in range(4):
            await store.put(turn, {"value": [turn], "score": [turn]})
            await store.close_groups([turn])
            assert await values_now(store, "score") == [turn]
            assert await values_now(store, "train") == [turn]
            assert len((await store.snapshot()).rows) == turn + 1
        full = await self.soon(store.put(9, {"value": [0] * 8}))
        assert await self.still_waits(full)
        assert (await store.stats()).waiting_consumers == {"watch": 1, "score": 2, "train": 1}
        for task in (full, *for_ever):
            await stop(task)
        assert await values_now(store, "watch") == [0, 1, 2, 3]

    @store_promise(ROWS)
    async def test_a_claim_that_is_cancelled_just_as_it_is_served_loses_nothing(self, store: Store) -> None:
        for number in range(40):
            waiting = asyncio.ensure_future(store.claim("read", Want(rows=1)))
            await asyncio.sleep(0 if number % 2 else self.tick_s / 20)
            await put_values(store, [number])
            for _ in range(number % 5):
                await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await store.give_back(await waiting)
            again = await store.claim("read", Want(rows=1, deadline_s=1 + self.tick_s))
            assert again["value"] == [number]
            await store.acknowledge(again)
        assert (await store.stats()).leases == 0

    @store_promise(ROWS, capacity_rows=2)
    async def test_a_put_that_is_cancelled_just_as_there_is_room_blocks_no_other(self, store: Store) -> None:
        for number in range(20):
            await put_values(store, [0, 0])
            waiting = asyncio.ensure_future(put_values(store, [1, np.zeros(30_000)] if number % 2 else [1, 1]))
            await asyncio.sleep(self.tick_s / 20)
            await values_now(store)
            for _ in range(number % 5):
                await asyncio.sleep(0)
            await stop(waiting)
            await asyncio.sleep(self.tick_s / 20)
            await values_now(store)
            assert (await store.stats()).rows == 0
        await put_values(store, [2, 2], deadline_s=1)

    @store_promise(ROWS, capacity_rows=3)
    async def test_a_put_waits_while_the_store_is_full_and_puts_are_served_in_turn(self, store: Store) -> None:
        await put_values(store, [1, 2])
        large = await self.soon(put_values(store, [3, 4, 5]))
        small = await self.soon(put_values(store, [6]))
        assert not large.done() and not small.done(), "the small one would fit, and came later"
        stats = await store.stats()
        assert stats.waiting_producers == 2 and stats.rows == 2
        await store.acknowledge(await store.claim("read", Want(rows=1)))
        assert await self.still_waits(large)
        await store.acknowledge(await store.claim("read", Want(rows=1)))
        await large
        assert await self.still_waits(small)
        assert await values_now(store) == [3, 4, 5]
        await small
        assert await values_now(store) == [6]

    @store_promise(ROWS, capacity_bytes=1 << 20)
    async def test_a_bound_in_bytes_holds(self, store: Store) -> None:
        put = 0
        with pytest.raises(StoreTimeout, match="no room"):
            for _ in range(30):
                await put_values(store, [np.zeros(200_000, np.uint8)], deadline_s=2 * self.tick_s)
                put += 1
                assert (await store.stats()).bytes <= 1 << 20
        assert 3 <= put <= 5
        waiting = await self.soon(put_values(store, [np.ones(200_000, np.uint8)]))
        small = await self.soon(put_values(store, [0]))
        assert not waiting.done() and not small.done()
        await store.acknowledge(await store.claim("read", Want(rows=1)))
        await waiting
        await small
        while await values_now(store):
            pass
        assert (await store.stats()).bytes == 0

    @store_promise(ROWS, capacity_rows=4, capacity_bytes=1 << 20)
    async def test_what_can_never_fit_is_an_error(self, store: Store) -> None:
        async with refused(store, "5 rows"):
            await put_values(store, range(5))
        async with refused(store, "bytes"):
            await put_values(store, [np.zeros(2 << 20, np.uint8)])
        ids = await put_values(store, range(4))
        async with refused(store, "bytes"):
            await store.write(ids[:1], {"more": [np.zeros(2 << 20, np.uint8)]})

    @store_promise(ROWS, capacity_rows=2)
    async def test_a_put_has_a_deadline(self, store: Store) -> None:
        await put_values(store, [1, 2])
        with pytest.raises(StoreTimeout, match=r"no room for 1 rows.*2 rows"):
            await put_values(store, [3], deadline_s=2 * self.tick_s)
        after = await self.soon(put_values(store, [4]))
        assert await values_now(store) == [1, 2]
        await after
        assert await values_now(store) == [4]

    @store_promise(GROUPS, capacity_rows=2)
    async def test_room_that_a_refused_put_does_not_need_goes_to_the_next(self, store: Store) -> None:
        await put_group(store, 0, ["a", "b"])
        refused_later = await self.soon(store.put(0, {"text": ["x", "y"]}))
        after = await self.soon(store.put(1, {"text": ["c", "d"]}))
        await store.drop(await store.claim("score"))
        with suppress(StoreError):  # the group is gone with its rows: a new one of that name, or an error
            await refused_later
            await store.close_groups([0])
            await store.drop(await store.claim("score"))
        await after
        await store.close_groups([1])
        closed = await self.soon(store.put(1, {"text": ["y", "z"]}))
        last = await self.soon(store.put(2, {"text": ["e", "f"]}))
        lease = await score(store)
        assert lease.group_id == 1 and not closed.done()
        await store.finish()
        await store.acknowledge(await store.claim("train"))
        for task in (closed, last):
            with pytest.raises(StoreError):
                await task
        await put_group(store, 3, ["g", "h"], partition="other", deadline_s=1)

    @store_promise(ROWS, capacity_bytes=1 << 20)
    async def test_a_write_does_not_wait_for_room_and_counts(self, store: Store) -> None:
        ids = await put_values(store, [np.zeros(700_000, np.uint8)])
        before = (await store.stats()).bytes
        await store.write(ids, {"small": [1]})
        await store.write(ids, {"large": [np.zeros(400_000, np.uint8)]})
        assert (await store.stats()).bytes >= before + 400_000
        with pytest.raises(StoreTimeout):
            await put_values(store, [0], deadline_s=2 * self.tick_s)
        assert len(await values_now(store)) == 1
        assert (await store.stats()).bytes == 0
        await put_values(store, [np.zeros(700_000, np.uint8)], deadline_s=1)
