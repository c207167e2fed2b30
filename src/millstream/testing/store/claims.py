"""What a claim gets: columns, groups, limits."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from millstream.errors import StoreTimeout
from millstream.store import Store, Want
from millstream.testing.store.base import (
    GROUPS,
    MIXED,
    ROWS,
    StoreSuiteBase,
    put_group,
    put_values,
    refused,
    stop,
    store_promise,
    values_now,
)


class ClaimPromises(StoreSuiteBase):
    @store_promise(MIXED)
    async def test_every_task_sees_every_row_once(self, store: Store) -> None:
        await store.put([0, 0, 1, 2], {"value": [1, 2, 3, 4], "score": [0, 0, 0, 0]})
        await store.close_groups([0, 1, 2])
        assert await values_now(store, "score") == [1, 2, 3, 4]
        assert await values_now(store, "watch") == [1, 2, 3, 4]
        assert (await store.stats()).rows == 4
        assert await values_now(store, "train") == [1, 2, 3, 4]
        assert (await store.stats()).rows == 0
        for task in MIXED:
            assert await values_now(store, task) == []

    @store_promise(MIXED)
    async def test_a_task_gets_what_has_its_columns_after_the_tasks_it_comes_after(self, store: Store) -> None:
        first, second = await put_values(store, [1, 2])
        one = await store.claim("score", Want(rows=1))
        assert one["value"] == [1]
        for task in ("train", "watch"):
            assert await values_now(store, task) == [], "the group is open"
        await store.close_groups([0])
        assert await values_now(store, "watch") == [1, 2]
        await store.acknowledge(one)
        await store.write([first, second], {"score": [0, 0]})
        assert await values_now(store, "train") == [], "the second row is not scored"
        await values_now(store, "score")
        assert await values_now(store, "train") == [1, 2]

    @store_promise(GROUPS)
    async def test_an_open_group_is_not_handed_out_and_a_closed_one_takes_no_more_rows(self, store: Store) -> None:
        await store.put(0, {"text": ["a"]})
        waiting = await self.soon(store.claim("score"))
        assert not waiting.done()
        await store.close_groups([0])
        assert len(await waiting) == 1
        async with refused(store, "closed"):
            await store.put(0, {"text": ["b"]})

    @store_promise(GROUPS)
    async def test_a_group_that_was_closed_without_a_row_is_handed_out_empty(self, store: Store) -> None:
        await store.close_groups([4, 5])
        await put_group(store, 6, ["a"])
        lease = await store.claim("score", Want(groups=3))
        assert lease.empty_groups == [4, 5] and lease.group_ids == [6]
        await store.give_back(lease)
        lease = await store.claim("score")
        assert lease.group_id == 4 and len(lease) == 0 and lease.rows == []
        await store.acknowledge(lease)
        assert (await store.claim("train")).group_id == 4

    @store_promise(ROWS)
    async def test_a_claim_by_rows_or_by_tokens_ends_at_the_first_limit(self, store: Store) -> None:
        await store.put(0, {"value": list(range(8))}, tokens=[10, 20, 30, 40, 50, 500, 5, 5])
        assert (await store.claim("read", Want(rows=2)))["value"] == [0, 1]
        assert (await store.claim("read", Want(tokens=75)))["value"] == [2, 3]
        assert (await store.claim("read", Want(rows=5, tokens=60)))["value"] == [4]
        assert (await store.claim("read", Want(tokens=100)))["value"] == [5], "at least one, however long"
        assert (await store.claim("read", Want(rows=1, tokens=60, patience_s=0)))["value"] == [6]

    @store_promise(ROWS)
    async def test_tokens_are_counted_by_the_column_of_that_name(self, store: Store) -> None:
        await store.put(0, {"value": [0, 1, 2], "tokens": [np.zeros(3), np.zeros(4), np.zeros(5)]})
        assert (await store.claim("read", Want(tokens=7)))["value"] == [0, 1]
        await store.put(0, {"value": [3, 4], "tokens": [7, 8]})
        lease = await store.claim("read", Want(tokens=7, patience_s=0))
        assert lease["value"] == [2, 3, 4], "a number has no length: it is one token"

    @store_promise(GROUPS)
    async def test_whole_groups_are_never_split(self, store: Store) -> None:
        for group_id, size in enumerate((3, 3, 2, 5)):
            await put_group(store, group_id, ["x"] * size, tokens=[10] * size)
        assert (await store.claim("score", Want(rows=4))).group_ids == [0, 0, 0]
        assert (await store.claim("score", Want(tokens=50))).group_ids == [1, 1, 1, 2, 2]
        assert (await store.claim("score", Want(rows=2))).group_ids == [3] * 5, "at least one"

    @store_promise(GROUPS)
    async def test_a_claim_by_groups_gets_so_many(self, store: Store) -> None:
        for group_id in range(5):
            await put_group(store, group_id, ["x"] * (group_id + 1))
        lease = await store.claim("score", Want(groups=2))
        assert lease.group_ids == [0, 1, 1]
        assert (await store.claim("score", Want(groups=3, rows=4))).group_ids == [2, 2, 2]

    @store_promise(ROWS)
    async def test_sixty_four_asked_with_forty_ready(self, store: Store) -> None:
        await put_values(store, range(40))
        waiting = await self.soon(store.claim("read", Want(rows=64)))
        assert not waiting.done(), "waits"
        await stop(waiting)
        lease = await store.claim("read", Want(rows=64, patience_s=0))
        assert lease["value"] == list(range(40)), "gives forty, as asked"
        await store.give_back(lease)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        lease = await store.claim("read", Want(rows=64, patience_s=4 * self.tick_s))
        assert len(lease) == 40 and 3.9 * self.tick_s <= loop.time() - begin < 40 * self.tick_s
        await store.give_back(lease)
        begin = loop.time()
        with pytest.raises(StoreTimeout, match=r"64 rows for read.*40 rows"):
            await store.claim("read", Want(rows=64, deadline_s=4 * self.tick_s))
        assert loop.time() - begin >= 3.9 * self.tick_s
        waiting = await self.soon(store.claim("read", Want(rows=64)))
        await put_values(store, range(40, 63))
        assert await self.still_waits(waiting)
        await put_values(store, [63, 64])
        assert (await waiting)["value"] == list(range(64))

    @store_promise(ROWS)
    async def test_a_patient_claim_gets_all_of_it_and_an_impatient_one_at_least_one(self, store: Store) -> None:
        waiting = await self.soon(store.claim("read", Want(rows=2, patience_s=20 * self.tick_s)))
        await put_values(store, ["a"])
        assert await self.still_waits(waiting)
        await put_values(store, ["b"])
        assert (await waiting)["value"] == ["a", "b"]
        waiting = await self.soon(store.claim("read", Want(rows=2, patience_s=0)))
        assert not waiting.done()
        await put_values(store, ["c"])
        assert (await waiting)["value"] == ["c"]

    @store_promise(ROWS)
    async def test_a_claim_that_asks_for_nothing_is_an_error(self, store: Store) -> None:
        wrong: Any
        for wrong in ({}, {"rows": 0}, {"tokens": -1}, {"rows": 3, "groups": 0}):
            with pytest.raises(ValueError, match="at least 1"):
                await store.claim("read", Want(**wrong))
