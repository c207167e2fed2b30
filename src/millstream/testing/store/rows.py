"""Rows, their ids and their cells."""

from __future__ import annotations

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
