"""Rows, their ids and their cells; leases, acknowledgement, steps and rewinds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from millstream.store import Store, Want
from millstream.testing.cells import PLAIN_CELLS, arrays, is_same, tensors
from millstream.testing.store.base import (
    GROUPS,
    MIXED,
    ROWS,
    StoreSuiteBase,
    put_group,
    put_values,
    refused,
    store_promise,
    values_now,
)


class RowPromises(StoreSuiteBase):
    # ---- rows and cells

    @store_promise(ROWS)
    async def test_ids_of_rows_are_never_used_again(self, store: Store) -> None:
        seen: set[int] = set()
        for _ in range(3):
            ids = set(await put_values(store, [1, 2, 3]))
            assert len(ids) == 3 and not ids & seen
            seen |= ids
            lease = await store.claim("read", Want(rows=3))
            assert set(lease.row_ids) == ids
            await store.acknowledge(lease)

    @store_promise(ROWS)
    async def test_a_stale_id_is_an_error_after_the_row_was_freed_dropped_or_forgotten(self, store: Store) -> None:
        (freed,) = await put_values(store, ["freed"])
        await store.acknowledge(await store.claim("read", Want(rows=1)))
        (dropped,) = await put_values(store, ["dropped"])
        await store.drop(await store.claim("read", Want(rows=1)))
        (forgotten,) = await put_values(store, ["forgotten"], partition="other")
        await store.drop_partition("other")
        (alive,) = await put_values(store, ["alive"])
        for stale in (freed, dropped, forgotten, alive + 1, -1):
            async with refused(store, "not in the store"):
                await store.write([stale], {"value": ["another's"]}, overwrite=True)
        assert await values_now(store) == ["alive"]

    @store_promise(ROWS)
    async def test_after_a_restore_ids_that_are_not_in_it_are_stale_and_never_given_again(self, store: Store) -> None:
        kept = await put_values(store, [1, 2])
        saved = await store.snapshot()
        late = await put_values(store, [3, 4])
        for _ in range(2):
            await store.drop_partition("train")
            await store.restore(saved)
            new = await put_values(store, [5])
            assert not {*kept, *late} & set(new)
            for stale in late:
                async with refused(store, "not in the store"):
                    await store.write([stale], {"more": [0]})
            await store.write(kept, {f"more{new[0]}": [0, 0]})
            late += new
        assert await values_now(store) == [1, 2, 5]

    @store_promise(ROWS)
    async def test_ids_of_a_history_that_ended_empty_are_not_given_again_either(self, store: Store) -> None:
        given = set(await put_values(store, [1]))
        await values_now(store)
        await store.restore(await store.snapshot())
        given |= set(await put_values(store, [2]))
        await values_now(store)
        saved = await store.snapshot()
        async with self.open(ROWS) as other:
            await other.restore(saved)
            assert not given & set(await put_values(other, [3]))

    @store_promise(ROWS)
    async def test_plain_cells_come_out_as_they_went_in(self, store: Store) -> None:
        await self._come_out(store, PLAIN_CELLS)

    @store_promise(ROWS)
    async def test_arrays_come_out_with_their_type_and_shape(self, store: Store) -> None:
        await self._come_out(store, arrays())

    @store_promise(ROWS)
    async def test_tensors_come_out_with_their_type_and_shape(self, store: Store) -> None:
        await self._come_out(store, tensors(pytest.importorskip("torch")))

    async def _come_out(self, store: Store, columns: Mapping[str, Sequence[Any]]) -> None:
        await store.put(0, {"value": [0] * 4, **columns})
        lease = await store.claim("read", Want(rows=3))
        last = await store.claim("read", Want(rows=1))
        saved = await store.snapshot()
        for name, cells in columns.items():
            for index, cell in enumerate(cells):
                found = lease[name][index] if index < 3 else last[name][0]
                assert is_same(found, cell), f"{name}, row {index}: {cell!r} came out as {found!r}"
                assert is_same(saved.rows[index].columns[name], cell), f"{name} of the snapshot, row {index}"

    @store_promise(ROWS)
    async def test_every_kind_of_cell_comes_out_after_a_restore(self, store: Store) -> None:
        columns = {**PLAIN_CELLS, **{f"array, {name}": cells for name, cells in arrays().items()}}
        await store.put(0, {"value": [0] * 4, **columns})
        saved = await store.snapshot()
        await store.drop_partition("train")
        await store.restore(saved)
        lease = await store.claim("read", Want(rows=4))
        for name, cells in columns.items():
            for index, cell in enumerate(cells):
                assert is_same(lease[name][index], cell), name

    @store_promise(ROWS)
    async def test_what_the_caller_does_to_its_list_afterwards_changes_nothing(self, store: Store) -> None:
        mine = ["a", "b"]
        (first, second) = await store.put(0, {"value": mine})
        mine[0] = "changed"
        mine.clear()
        scores = [1.0, 2.0]
        await store.write([first, second], {"score": scores})
        scores[:] = []
        lease = await store.claim("read", Want(rows=2))
        assert lease["value"] == ["a", "b"] and lease["score"] == [1.0, 2.0]

    @store_promise(GROUPS)
    async def test_a_column_may_be_written_later_and_only_what_all_rows_have_is_handed_out(self, store: Store) -> None:
        ids = await put_group(store, 7, ["a", "b", "c"])
        await store.write([ids[2], ids[0]], {"mark": ["third", "first"]})
        lease = await store.claim("score")
        assert lease["text"] == ["a", "b", "c"] and "mark" not in lease.columns
        await store.write([ids[1]], {"mark": ["second"], "score": [2.0]})
        await store.write([ids[2], ids[0]], {"score": [3.0, 1.0]})
        await store.acknowledge(lease)
        trained = await store.claim("train")
        assert trained["mark"] == ["first", "second", "third"] and trained["score"] == [1.0, 2.0, 3.0]
        assert trained.row_ids == ids and trained.group_ids == [7, 7, 7] and trained.group_id == 7
        assert [row.columns["mark"] for row in trained.rows] == ["first", "second", "third"]

    @store_promise(ROWS)
    async def test_a_cell_is_written_once_unless_asked_for_and_then_the_last_is_read(self, store: Store) -> None:
        first, second = await put_values(store, ["a", "b"])
        async with refused(store, "already"):
            await store.write([second, first], {"new": [0, 0], "value": ["x", "y"]})
        await store.write([second], {"value": ["c"], "new": [1]}, overwrite=True)
        await store.write([first], {"new": [5]})
        await store.write([second, first], {"new": [7, 6]}, overwrite=True)
        lease = await store.claim("read", Want(rows=2))
        assert lease["value"] == ["a", "c"] and lease["new"] == [6, 7]

    @store_promise(ROWS, capacity_bytes=1 << 20)
    async def test_writing_a_cell_again_and_again_takes_no_more_room_than_once(self, store: Store) -> None:
        ids = await put_values(store, [np.zeros(100_000, np.uint8)])
        before = (await store.stats()).bytes
        for number in range(20):
            await store.write(ids, {"value": [np.full(100_000, number, np.uint8)]}, overwrite=True)
        assert (await store.stats()).bytes <= 2 * before
        lease = await store.claim("read", Want(rows=1))
        assert lease["value"][0][0] == 19
        await store.acknowledge(lease)
        assert (await store.stats()).bytes == 0

    @store_promise(ROWS)
    async def test_a_lease_keeps_what_it_shows_while_its_cells_are_written_again(self, store: Store) -> None:
        ids = await put_values(store, [np.zeros(20_000)])
        lease = await store.claim("read", Want(rows=1))
        for number in range(1, 4):
            await store.write(ids, {"value": [np.full(20_000, number)]}, overwrite=True)
        assert not lease["value"][0].any()
        await store.give_back(lease)
        assert (await store.claim("read", Want(rows=1)))["value"][0][0] == 3

    @store_promise(MIXED)
    async def test_an_error_changes_nothing(self, store: Store) -> None:
        first, second = await store.put([0, 1], {"value": [1, 2]}, versions=[3, 4])
        await store.close_groups([1])
        async with refused(store, "closed"):
            await store.put([0, 2, 1], {"value": [1, 2, 3]})
        async with refused(store, "not in the store"):
            await store.write([first, second + 1], {"score": [1.0, 1.0]})
        async with refused(store, "twice"):
            await store.write([first, first], {"score": [1.0, 2.0]})
        columns: Any
        for columns in ({}, {"value": []}, {"value": [1], "more": [1, 2]}):
            async with refused(store, "rows"):
                await store.put(0, columns)
            async with refused(store, "rows"):
                await store.write([first], columns)
        async with refused(store, "rows"):
            await store.write([first], {"score": [1.0, 2.0]})
        wrong: Any
        for wrong in ({"group_ids": [0, 2]}, {"versions": [1, 2]}, {"tokens": [1, 2]}):
            async with refused(store):
                await store.put(**{"group_ids": 0, "columns": {"value": [1]}, **wrong})
        for call in (store.claim("trian"), store.rewind("trian", 0)):
            async with refused(store, "no task"):
                await call
        async with refused(store, "by rows or by tokens"):
            await store.claim("score", Want(groups=1))
        assert (await store.snapshot()).rows[0].columns == {"value": 1}

    @store_promise(ROWS)
    async def test_numbers_of_arrays_are_numbers(self, store: Store) -> None:
        groups: Any = np.array([3, 4])
        versions: Any = np.array([5, 6])
        ids: Any = np.array(list(await store.put(groups, {"value": [1, 2]}, versions=versions, tokens=versions)))
        await store.write(ids, {"more": [1, 2]})
        await store.close_groups(groups)
        await store.put(groups[0] + 9, {"value": [3]}, versions=versions[0])
        lease = await store.claim("read", Want(rows=2))
        assert lease.versions == [5, 6] and lease.group_ids == [3, 4]

    # ---- leases

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
