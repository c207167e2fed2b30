"""The store's promises, as tests that any implementation of `millstream.store.Store` can be held to. Needs pytest.

    from millstream.testing.store import StoreSuite

    class TestMyStore(StoreSuite):
        @asynccontextmanager
        async def open(self, tasks, capacity_rows=None, capacity_bytes=None):
            async with MyStore(tasks, capacity_rows=capacity_rows, capacity_bytes=capacity_bytes) as store:
                yield store

Every test opens a store of its own. A store on the virtual clock overrides `run`, too:

        def run(self, program):
            run_virtual(program)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from millstream.errors import StoreError, StoreTimeout, StreamEnded
from millstream.store import Lease, Reads, Store, StoreStats, Want
from millstream.store.policies import Candidate
from millstream.testing.cells import PLAIN, arrays, is_same, tensors

T = TypeVar("T")
GROUPS = {"score": Reads(("text",)), "train": Reads(("text", "score"), after=("score",))}
"""Two stages that work on whole groups."""
ROWS = {"read": Reads(("value",), by_group=False)}
"""One task that takes any row."""
MIXED = {
    "score": Reads(("value",), by_group=False),
    "train": Reads(("value", "score"), after=("score",)),
    "watch": Reads(("value",)),
}
"""Rows are scored one by one; groups are trained on, and watched meanwhile."""
Test = Callable[["StoreSuite"], None]


def longest_first(ready: Sequence[Candidate], want: Want) -> Sequence[int]:
    """A policy of one's own: those with the most tokens; fewer than two it leaves for later."""
    order = sorted(range(len(ready)), key=lambda index: -ready[index].tokens)
    return order[: want.rows or 1] if len(ready) > 1 else []


def failing(ready: Sequence[Candidate], want: Want) -> Sequence[int]:
    raise RuntimeError("no idea")


def out_of_range(ready: Sequence[Candidate], want: Want) -> Sequence[int]:
    return [len(ready)]


def promise(
    tasks: Mapping[str, Reads], *, capacity_rows: int | None = None, capacity_bytes: int | None = None
) -> Callable[[Callable[[Any, Store], Awaitable[None]]], Test]:
    """A test of a store for these tasks."""

    def make(test: Callable[[Any, Store], Awaitable[None]]) -> Test:
        def run(self: StoreSuite) -> None:
            async def program() -> None:
                async with asyncio.timeout(self.limit_s), self.open(tasks, capacity_rows, capacity_bytes) as store:
                    await test(self, store)

            self.run(program())

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__  # and not its arguments, which pytest would look for
        return run

    return make


async def put_values(store: Store, values: Sequence[Any], group_id: int = 0, **more: Any) -> list[int]:
    return list(await store.put(group_id, {"value": list(values)}, **more))


async def put_group(store: Store, group_id: int, texts: Sequence[str], **more: Any) -> list[int]:
    ids = list(await store.put(group_id, {"text": list(texts)}, **more))
    await store.close_groups([group_id], **({"partition": more["partition"]} if "partition" in more else {}))
    return ids


async def score(store: Store) -> Lease:
    """Do the first stage's work on one group."""
    lease = await store.claim("score")
    if lease.row_ids:
        await store.write(lease.row_ids, {"score": [1.0] * len(lease)})
    await store.acknowledge(lease)
    return lease


async def values_now(store: Store, task: str = "read", **more: Any) -> list[Any]:
    """Everything that is ready, acknowledged."""
    try:
        lease = await store.claim(task, Want(rows=10**6, patience_s=0, deadline_s=0.05), **more)
    except StoreTimeout:
        return []
    await store.acknowledge(lease)
    return lease["value"] if lease.row_ids else []


async def stop(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def lasting(stats: StoreStats) -> StoreStats:
    """A report without what changes by itself."""
    return msgspec.structs.replace(stats, oldest_s=0.0, waiting=[])


@asynccontextmanager
async def refused(store: Store, match: str | None = None) -> AsyncIterator[None]:
    """What is inside raises `StoreError` and changes nothing."""
    before = lasting(await store.stats())
    with pytest.raises(StoreError, match=match):
        yield
    assert lasting(await store.stats()) == before


class StoreSuite:
    """Subclass it in a test file, and override `open`."""

    tick_s = 0.05
    """Within this time everything has happened that is going to happen by itself."""
    limit_s = 20.0
    """A test that takes longer hangs."""

    def open(
        self, tasks: Mapping[str, Reads], capacity_rows: int | None = None, capacity_bytes: int | None = None
    ) -> AbstractAsyncContextManager[Store]:
        """A new store for these tasks, closed at the end."""
        raise NotImplementedError("override `open`: an async context manager that yields a Store")

    def run(self, program: Coroutine[Any, Any, None]) -> None:
        """Run a test to its end."""
        asyncio.run(program)

    async def soon(self, waits: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin something, and let it come as far as it can."""
        task = asyncio.ensure_future(waits)
        await asyncio.sleep(self.tick_s)
        return task

    async def still_waits(self, task: asyncio.Future[Any]) -> bool:
        await asyncio.sleep(self.tick_s)
        return not task.done()

    # ---- rows, their ids, their cells --------------------------------------------------------------------------------

    @promise(ROWS)
    async def test_ids_of_rows_are_never_used_again(self, store: Store) -> None:
        seen: set[int] = set()
        for _ in range(3):
            ids = set(await put_values(store, [1, 2, 3]))
            assert len(ids) == 3 and not ids & seen
            seen |= ids
            lease = await store.claim("read", Want(rows=3))
            assert set(lease.row_ids) == ids
            await store.acknowledge(lease)

    @promise(ROWS)
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

    @promise(ROWS)
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

    @promise(ROWS)
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

    @promise(ROWS)
    async def test_plain_cells_come_out_as_they_went_in(self, store: Store) -> None:
        await self._come_out(store, PLAIN)

    @promise(ROWS)
    async def test_arrays_come_out_with_their_type_and_shape(self, store: Store) -> None:
        await self._come_out(store, arrays())

    @promise(ROWS)
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

    @promise(ROWS)
    async def test_every_kind_of_cell_comes_out_after_a_restore(self, store: Store) -> None:
        columns = {**PLAIN, **{f"array, {name}": cells for name, cells in arrays().items()}}
        await store.put(0, {"value": [0] * 4, **columns})
        saved = await store.snapshot()
        await store.drop_partition("train")
        await store.restore(saved)
        lease = await store.claim("read", Want(rows=4))
        for name, cells in columns.items():
            for index, cell in enumerate(cells):
                assert is_same(lease[name][index], cell), name

    @promise(ROWS)
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

    @promise(GROUPS)
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

    @promise(ROWS)
    async def test_a_cell_is_written_once_unless_asked_for_and_then_the_last_is_read(self, store: Store) -> None:
        first, second = await put_values(store, ["a", "b"])
        async with refused(store, "already"):
            await store.write([second, first], {"new": [0, 0], "value": ["x", "y"]})
        await store.write([second], {"value": ["c"], "new": [1]}, overwrite=True)
        await store.write([first], {"new": [5]})
        await store.write([second, first], {"new": [7, 6]}, overwrite=True)
        lease = await store.claim("read", Want(rows=2))
        assert lease["value"] == ["a", "c"] and lease["new"] == [6, 7]

    @promise(ROWS, capacity_bytes=1 << 20)
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

    @promise(ROWS)
    async def test_a_lease_keeps_what_it_shows_while_its_cells_are_written_again(self, store: Store) -> None:
        ids = await put_values(store, [np.zeros(20_000)])
        lease = await store.claim("read", Want(rows=1))
        for number in range(1, 4):
            await store.write(ids, {"value": [np.full(20_000, number)]}, overwrite=True)
        assert not lease["value"][0].any()
        await store.give_back(lease)
        assert (await store.claim("read", Want(rows=1)))["value"][0][0] == 3

    @promise(MIXED)
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

    @promise(ROWS)
    async def test_numbers_of_arrays_are_numbers(self, store: Store) -> None:
        groups: Any = np.array([3, 4])
        versions: Any = np.array([5, 6])
        ids: Any = np.array(list(await store.put(groups, {"value": [1, 2]}, versions=versions, tokens=versions)))
        await store.write(ids, {"more": [1, 2]})
        await store.close_groups(groups)
        await store.put(groups[0] + 9, {"value": [3]}, versions=versions[0])
        lease = await store.claim("read", Want(rows=2))
        assert lease.versions == [5, 6] and lease.group_ids == [3, 4]

    # ---- claims ------------------------------------------------------------------------------------------------------

    @promise(MIXED)
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

    @promise(MIXED)
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

    @promise(GROUPS)
    async def test_an_open_group_is_not_handed_out_and_a_closed_one_takes_no_more_rows(self, store: Store) -> None:
        await store.put(0, {"text": ["a"]})
        waiting = await self.soon(store.claim("score"))
        assert not waiting.done()
        await store.close_groups([0])
        assert len(await waiting) == 1
        async with refused(store, "closed"):
            await store.put(0, {"text": ["b"]})

    @promise(GROUPS)
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

    @promise(ROWS)
    async def test_a_claim_by_rows_or_by_tokens_ends_at_the_first_limit(self, store: Store) -> None:
        await store.put(0, {"value": list(range(8))}, tokens=[10, 20, 30, 40, 50, 500, 5, 5])
        assert (await store.claim("read", Want(rows=2)))["value"] == [0, 1]
        assert (await store.claim("read", Want(tokens=75)))["value"] == [2, 3]
        assert (await store.claim("read", Want(rows=5, tokens=60)))["value"] == [4]
        assert (await store.claim("read", Want(tokens=100)))["value"] == [5], "at least one, however long"
        assert (await store.claim("read", Want(rows=1, tokens=60, patience_s=0)))["value"] == [6]

    @promise(ROWS)
    async def test_tokens_are_counted_by_the_column_of_that_name(self, store: Store) -> None:
        await store.put(0, {"value": [0, 1, 2], "tokens": [np.zeros(3), np.zeros(4), np.zeros(5)]})
        assert (await store.claim("read", Want(tokens=7)))["value"] == [0, 1]
        await store.put(0, {"value": [3, 4], "tokens": [7, 8]})
        lease = await store.claim("read", Want(tokens=7, patience_s=0))
        assert lease["value"] == [2, 3, 4], "a number has no length: it is one token"

    @promise(GROUPS)
    async def test_whole_groups_are_never_split(self, store: Store) -> None:
        for group_id, size in enumerate((3, 3, 2, 5)):
            await put_group(store, group_id, ["x"] * size, tokens=[10] * size)
        assert (await store.claim("score", Want(rows=4))).group_ids == [0, 0, 0]
        assert (await store.claim("score", Want(tokens=50))).group_ids == [1, 1, 1, 2, 2]
        assert (await store.claim("score", Want(rows=2))).group_ids == [3] * 5, "at least one"

    @promise(GROUPS)
    async def test_a_claim_by_groups_gets_so_many(self, store: Store) -> None:
        for group_id in range(5):
            await put_group(store, group_id, ["x"] * (group_id + 1))
        lease = await store.claim("score", Want(groups=2))
        assert lease.group_ids == [0, 1, 1]
        assert (await store.claim("score", Want(groups=3, rows=4))).group_ids == [2, 2, 2]

    @promise(ROWS)
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

    @promise(ROWS)
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

    @promise(ROWS)
    async def test_a_claim_that_asks_for_nothing_is_an_error(self, store: Store) -> None:
        wrong: Any
        for wrong in ({}, {"rows": 0}, {"tokens": -1}, {"rows": 3, "groups": 0}):
            with pytest.raises(ValueError, match="at least 1"):
                await store.claim("read", Want(**wrong))

    # ---- policies ----------------------------------------------------------------------------------------------------

    @promise(MIXED)
    async def test_fifo_is_the_longest_ready_first(self, store: Store) -> None:
        for group_id in range(3):
            await store.put(group_id, {"value": [group_id]}, versions=9 - group_id)
        await store.close_groups([2])
        await store.close_groups([0, 1])
        assert (await store.claim("watch", Want(groups=3))).group_ids == [2, 0, 1]
        assert (await store.claim("score", Want(rows=3))).group_ids == [0, 1, 2]

    @promise(ROWS)
    async def test_oldest_version_first(self, store: Store) -> None:
        await store.put(0, {"value": list("abcdef")}, versions=[3, 1, 2, 1, 3, 0])
        want = Want(rows=4, policy="oldest_version")
        lease = await store.claim("read", want)
        assert lease["value"] == ["f", "b", "d", "c"] and lease.versions == [0, 1, 1, 2]

    @promise(GROUPS)
    async def test_the_version_of_a_group_is_the_oldest_of_its_rows(self, store: Store) -> None:
        for group_id, versions in enumerate(([5, 9], [7, 7], [8, 4])):
            await put_group(store, group_id, ["x", "y"], versions=versions)
        want = Want(groups=1, policy="oldest_version")
        assert [(await store.claim("score", want)).group_id for _ in range(3)] == [2, 0, 1]

    @promise(ROWS)
    async def test_balanced_gives_ranks_the_same_number_of_tokens(self, store: Store) -> None:
        rng = random.Random(0)
        lengths = [min(4000, int(rng.lognormvariate(5, 1.2)) + 1) for _ in range(1200)]
        await store.put(0, {"value": lengths}, tokens=lengths)
        totals, seen = [0] * 4, []
        for turn in range(120):
            lease = await store.claim("read", Want(rows=10, policy="balanced", rank=turn % 4))
            assert len(lease) == 10
            totals[turn % 4] += sum(lease["value"])
            seen += lease.row_ids
            await store.acknowledge(lease)
        assert len(set(seen)) == 1200, "every row went to one rank"
        assert max(totals) < 1.03 * min(totals), totals

    @promise(GROUPS)
    async def test_balanced_respects_the_limits(self, store: Store) -> None:
        rng = random.Random(1)
        for group_id in range(40):
            size = rng.randrange(1, 5)
            await put_group(store, group_id, ["x"] * size, tokens=[rng.randrange(1, 100) for _ in range(size)])
        for rank in range(6):
            lease = await store.claim("score", Want(rows=8, policy="balanced", rank=rank % 2))
            assert len(lease) <= 8

    @promise(ROWS)
    async def test_a_policy_of_ones_own_chooses_and_may_wait(self, store: Store) -> None:
        want = Want(rows=1, policy="millstream.testing.store:longest_first")
        await store.put(0, {"value": ["short", "longest", "long"]}, tokens=[1, 9, 5])
        assert (await store.claim("read", want))["value"] == ["longest"]
        assert (await store.claim("read", want))["value"] == ["long"]
        waiting = await self.soon(store.claim("read", want))
        assert not waiting.done(), "one alone it leaves"
        await store.put(0, {"value": ["medium"]}, tokens=[3])
        assert (await waiting)["value"] == ["medium"]

    @promise(ROWS)
    async def test_a_policy_that_fails_is_the_error_of_its_claim_and_of_nobody_else(self, store: Store) -> None:
        earlier = await self.soon(store.claim("read", Want(rows=2)))
        wrong = ("nowhere", "no.such.module:function", "millstream.testing.store:nothing")
        broken = ("millstream.testing.store:failing", "millstream.testing.store:out_of_range")
        versions = (5, 5)  # such a claim waits by itself
        waiting = [await self.soon(store.claim("read", Want(rows=1, policy=p, versions=versions))) for p in broken]
        later = await self.soon(store.claim("read", Want(rows=2)))
        await put_values(store, ["a"], versions=5)
        for task in waiting:
            with pytest.raises(StoreError, match="policy"):
                await task
        await put_values(store, ["b", "c", "d"])
        assert (await earlier)["value"] == ["a", "b"] and (await later)["value"] == ["c", "d"]
        await put_values(store, ["e"])
        for name in wrong:
            with pytest.raises(StoreError, match="no policy"):
                await store.claim("read", Want(rows=1, policy=name))
        assert await values_now(store) == ["e"]

    @promise(GROUPS)
    async def test_a_chooser_is_asked_again_when_woken_and_others_pass_it(self, store: Store) -> None:
        wanted: list[int] = []
        shown: list[tuple[int, ...]] = []

        def choose(ready: Sequence[int]) -> int | None:
            shown.append(tuple(ready))
            return next((group_id for group_id in ready if group_id in wanted), None)

        waiting = await self.soon(store.claim("score", choose=choose))
        for group_id in range(4):
            await put_group(store, group_id, ["x"])
        assert (await store.claim("score")).group_id == 0
        assert await self.still_waits(waiting)
        assert (await store.stats()).waiting_consumers["score"] == 1
        wanted.append(2)
        store.wake()
        assert (await waiting).group_id == 2
        assert shown[-1] == (1, 2, 3)

    @promise(GROUPS)
    async def test_a_chooser_may_be_cancelled_time_out_fail_or_end(self, store: Store) -> None:
        await put_group(store, 0, ["x"])
        with pytest.raises(StoreTimeout, match="score"):
            await store.claim("score", Want(groups=1, deadline_s=2 * self.tick_s), choose=lambda ready: None)
        await stop(await self.soon(store.claim("score", choose=lambda ready: None)))
        with pytest.raises(StoreError, match="not among"):
            await store.claim("score", choose=lambda ready: 17)

        def fail(ready: Sequence[int]) -> int:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await store.claim("score", choose=fail)
        lease = await store.claim("score", Want(groups=1, expires_s=2 * self.tick_s), choose=lambda ready: ready[0])
        again = await store.claim("score")
        assert again.group_id == lease.group_id == 0, "it expired"
        ending = await self.soon(store.claim("score", choose=lambda ready: None))
        await store.finish()
        with pytest.raises(StreamEnded):
            await ending

    @promise(ROWS)
    async def test_a_window_of_versions(self, store: Store) -> None:
        await store.put(0, {"value": list("abcd")}, versions=[1, 2, 3, 4])
        await store.put(0, {"value": ["without"]})
        assert (await store.claim("read", Want(rows=2, versions=(2, 3))))["value"] == ["b", "c"]
        waiting = await self.soon(store.claim("read", Want(rows=2, versions=(7, 9))))
        await store.put(0, {"value": list("efg")}, versions=[6, 7, 10])
        assert await self.still_waits(waiting)
        assert (await store.claim("read", Want(rows=1)))["value"] == ["a"], "others pass it"
        await store.put(0, {"value": ["h"]}, versions=9)
        assert (await waiting)["value"] == ["f", "h"]
        assert await values_now(store) == ["d", "without", "e", "g"]

    # ---- leases ------------------------------------------------------------------------------------------------------

    @promise(ROWS)
    async def test_what_is_on_lease_is_with_one_holder(self, store: Store) -> None:
        await put_values(store, range(10))
        leases = await asyncio.gather(*(store.claim("read", Want(rows=2)) for _ in range(5)))
        assert sorted(value for lease in leases for value in lease["value"]) == list(range(10))
        assert (await store.stats()).leases == 5
        assert await values_now(store) == []

    @promise(ROWS)
    async def test_what_is_given_back_comes_first_again(self, store: Store) -> None:
        await put_values(store, range(6))
        first = await store.claim("read", Want(rows=2))
        second = await store.claim("read", Want(rows=2))
        await store.give_back(second)
        await store.give_back(first)
        assert (await store.claim("read", Want(rows=6)))["value"] == [0, 1, 2, 3, 4, 5]

    @promise(ROWS)
    async def test_a_lease_that_has_ended_cannot_be_used(self, store: Store) -> None:
        for end in (store.acknowledge, store.give_back, store.drop):
            await put_values(store, [1])
            lease = await store.claim("read", Want(rows=1))
            await end(lease)
            for call in (store.acknowledge, store.give_back, store.drop, store.renew):
                async with refused(store, "has ended"):
                    await call(lease)
            await values_now(store)

    @promise(ROWS)
    async def test_a_lease_expires_and_goes_to_whoever_waits(self, store: Store) -> None:
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

    @promise(ROWS)
    async def test_a_lease_that_is_renewed_begins_anew_and_one_that_ended_does_not_expire(self, store: Store) -> None:
        await put_values(store, ["a"])
        lease = await store.claim("read", Want(rows=1, expires_s=6 * self.tick_s))
        for _ in range(4):
            await asyncio.sleep(2 * self.tick_s)
            await store.renew(lease)
        await store.acknowledge(lease)
        await asyncio.sleep(7 * self.tick_s)
        assert await values_now(store) == []

    @promise(MIXED)
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

    @promise(ROWS)
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

    @promise(ROWS)
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

    @promise(MIXED)
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

    @promise(MIXED)
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

    @promise(MIXED)
    async def test_dropped_rows_are_seen_by_nobody(self, store: Store) -> None:
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

    @promise(MIXED)
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

    # ---- waiting -----------------------------------------------------------------------------------------------------

    @promise(ROWS)
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

    @promise(ROWS)
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

    @promise(MIXED, capacity_rows=8)
    async def test_who_waits_for_ever_blocks_nobody_else(self, store: Store) -> None:
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

    @promise(ROWS)
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

    @promise(ROWS, capacity_rows=2)
    async def test_a_put_that_is_cancelled_just_as_there_is_room_holds_nobody_up(self, store: Store) -> None:
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

    # ---- bounds ------------------------------------------------------------------------------------------------------

    @promise(ROWS, capacity_rows=3)
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

    @promise(ROWS, capacity_bytes=1 << 20)
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

    @promise(ROWS, capacity_rows=4, capacity_bytes=1 << 20)
    async def test_what_can_never_fit_is_an_error(self, store: Store) -> None:
        async with refused(store, "5 rows"):
            await put_values(store, range(5))
        async with refused(store, "bytes"):
            await put_values(store, [np.zeros(2 << 20, np.uint8)])
        ids = await put_values(store, range(4))
        async with refused(store, "bytes"):
            await store.write(ids[:1], {"more": [np.zeros(2 << 20, np.uint8)]})

    @promise(ROWS, capacity_rows=2)
    async def test_a_put_has_a_deadline(self, store: Store) -> None:
        await put_values(store, [1, 2])
        with pytest.raises(StoreTimeout, match=r"no room for 1 rows.*2 rows"):
            await put_values(store, [3], deadline_s=2 * self.tick_s)
        after = await self.soon(put_values(store, [4]))
        assert await values_now(store) == [1, 2]
        await after
        assert await values_now(store) == [4]

    @promise(GROUPS, capacity_rows=2)
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

    @promise(ROWS, capacity_bytes=1 << 20)
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

    # ---- the end -----------------------------------------------------------------------------------------------------

    @promise(GROUPS)
    async def test_after_finish_a_claim_gets_what_is_left_and_then_ends(self, store: Store) -> None:
        await put_group(store, 0, ["a"])
        await store.finish()
        async with refused(store, "finished"):
            await store.put(1, {"text": ["b"]})
        first, second = await self.soon(store.claim("score")), await self.soon(store.claim("score"))
        assert (await first).group_id == 0
        with pytest.raises(StreamEnded):
            await second
        later = await self.soon(store.claim("train"))
        assert not later.done(), "the row may still be scored"
        await store.give_back(await first)
        await score(store)
        await store.acknowledge(await later)
        for task in GROUPS:
            with pytest.raises(StreamEnded):
                await store.claim(task)

    @promise(ROWS)
    async def test_what_comes_back_after_the_end_is_handed_out_again(self, store: Store) -> None:
        await put_values(store, ["a", "b"])
        lease = await store.claim("read", Want(rows=2))
        await store.finish()
        with pytest.raises(StreamEnded):
            await store.claim("read", Want(rows=1))
        await store.give_back(lease)
        lease = await store.claim("read", Want(rows=8))
        assert lease["value"] == ["a", "b"], "no more will come"
        await store.acknowledge(lease)
        with pytest.raises(StreamEnded):
            await store.claim("read", Want(rows=1))

    @promise(GROUPS)
    async def test_after_finish_a_claim_waits_for_what_can_still_become_ready(self, store: Store) -> None:
        for group_id in range(3):
            await put_group(store, group_id, ["x"])
        await score(store)
        await store.finish()
        waiting = await self.soon(store.claim("train", Want(groups=64)))
        assert not waiting.done(), "two groups are still to be scored"
        await score(store)
        await score(store)
        assert (await waiting).group_ids == [0, 1, 2]

    @promise(GROUPS)
    async def test_finish_ends_who_waits_and_an_empty_group_is_still_handed_out(self, store: Store) -> None:
        waiting = [await self.soon(store.claim(task)) for task in ("score", "score", "train")]
        await store.close_groups([3])
        assert (await waiting[0]).empty_groups == [3]
        await store.finish()
        with pytest.raises(StreamEnded):
            await waiting[1]
        await store.acknowledge(await waiting[0])
        assert (await waiting[2]).empty_groups == [3]
        await store.acknowledge(await waiting[2])
        assert (await store.stats()).groups == 0

    # ---- partitions --------------------------------------------------------------------------------------------------

    @promise(ROWS)
    async def test_partitions_are_separate(self, store: Store) -> None:
        for name in ("train", "eval"):
            await put_values(store, [name], partition=name)
        await store.finish(partition="eval")
        assert await values_now(store, partition="eval") == ["eval"]
        with pytest.raises(StreamEnded):
            await store.claim("read", Want(rows=1), partition="eval")
        await put_values(store, ["more"])
        assert await values_now(store) == ["train", "more"]

    @promise(GROUPS, capacity_rows=4)
    async def test_dropping_a_partition_frees_it_and_ends_who_waits_there(self, store: Store) -> None:
        await put_group(store, 0, ["a", "b"], partition="eval")
        await put_group(store, 0, ["c"])
        want = Want(groups=1, expires_s=10 * self.tick_s)
        lease = await store.claim("score", want, partition="eval")
        waiting = [
            await self.soon(store.claim("score", partition="eval")),
            await self.soon(store.claim("train", choose=lambda ready: None, partition="eval")),
        ]
        put = await self.soon(store.put(1, {"text": ["d", "e"]}))
        assert not put.done()
        assert await store.drop_partition("eval") == 2
        for task in waiting:
            with pytest.raises(StreamEnded):
                await task
        await put
        async with refused(store, "has ended"):
            await store.acknowledge(lease)
        await asyncio.sleep(12 * self.tick_s)
        stats = await store.stats()
        assert stats.rows == 3 and stats.leases == 0
        assert await store.drop_partition("eval") == 0
        assert (await store.claim("score"))["text"] == ["c"]

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    @promise(GROUPS)
    async def test_a_snapshot_holds_what_is_needed_and_frees_what_was_on_lease(self, store: Store) -> None:
        for group_id in range(3):
            await put_group(store, group_id, [f"{group_id}"], versions=group_id, tokens=[10 + group_id])
        await store.put(3, {"text": ["open"]})
        await score(store)
        await store.acknowledge(await store.claim("train"))
        await score(store)
        on_lease = await store.claim("score")
        saved = await store.snapshot()
        await store.write(on_lease.row_ids, {"score": [5.0]})
        async with self.open(GROUPS) as again:
            await again.restore(saved)
            stats = await again.stats()
            assert (stats.rows, stats.groups, stats.leases, stats.by_version) == (3, 3, 0, {1: 1, 2: 1, -1: 1})
            lease = await again.claim("score", Want(tokens=12))
            assert lease.row_ids == on_lease.row_ids and lease.versions == [2] and "score" not in lease.columns
            assert (await again.claim("train")).group_id == 1, "it was scored"
            await again.close_groups([3])
            assert (await again.claim("score"))["text"] == ["open"]
            async with refused(again, "empty"):
                await again.restore(saved)
            async with refused(again, "already"):
                await again.restore(saved, partition="other")

    @promise(ROWS)
    async def test_a_snapshot_knows_the_steps_that_are_not_covered(self, store: Store) -> None:
        await put_values(store, range(3))
        for step in range(3):
            await store.acknowledge(await store.claim("read", Want(rows=1)), step=step)
        await store.cover(0)
        saved = await store.snapshot()
        await store.drop_partition("train")
        await store.restore(saved)
        assert (await store.stats()).rows == 2
        assert await store.rewind("read", 1) == 1
        assert await values_now(store) == [2]
        await store.cover(1)
        assert (await store.stats()).rows == 0

    @promise(MIXED)
    async def test_a_snapshot_is_consistent_while_others_write(self, store: Store) -> None:
        async def produce() -> None:
            for number in range(60):
                ids = await store.put([number] * 2, {"value": [number] * 2, "big": [np.full(3000, number)] * 2})
                await store.write(ids, {"score": [number] * 2})
                await store.close_groups([number])

        async def consume() -> None:
            for _ in range(20):
                await store.drop(await store.claim("watch"))

        working = asyncio.gather(produce(), consume())
        while not working.done():
            saved = await store.snapshot()
            by_group: dict[int, list[dict[str, Any]]] = {}
            for row in saved.rows:
                by_group.setdefault(row.group_id, []).append(row.columns)
            assert by_group.keys() == saved.is_closed.keys()
            assert list(by_group) == list(range(min(by_group, default=0), max(by_group, default=-1) + 1))
            for group_id, rows in by_group.items():
                assert len(rows) == 2, "both rows or none"
                assert [columns.get("score") for columns in rows] in ([None] * 2, [group_id] * 2), "both cells or none"
                assert all((columns["big"] == group_id).all() for columns in rows)
                assert "score" in rows[0] or not saved.is_closed[group_id]
            await asyncio.sleep(0)
        await working
        async with self.open(MIXED) as again:
            await again.restore(await store.snapshot())
            assert await values_now(again, "watch") == [number for number in range(20, 60) for _ in range(2)]

    @promise(ROWS)
    async def test_a_snapshot_that_cannot_be_restored_changes_nothing(self, store: Store) -> None:
        await put_values(store, [1, 2])
        saved = await store.snapshot()
        await store.drop_partition("train")
        replace = msgspec.structs.replace
        for wrong in (
            replace(saved, acknowledged={"trian": ()}),
            replace(saved, is_closed={}),
            replace(saved, rows=(*saved.rows, saved.rows[0])),
            replace(saved, steps={saved.rows[0].row_id: {"trian": 1}}),
        ):
            async with refused(store):
                await store.restore(wrong)
        await store.restore(saved)
        assert await values_now(store) == [1, 2]

    # ---- what goes on ------------------------------------------------------------------------------------------------

    @promise(MIXED)
    async def test_stats_say_how_many_rows_of_what_version_are_at_what_stage(self, store: Store) -> None:
        await store.put([0, 0, 1, 1], {"value": [1, 2, 3, 4]}, versions=[1, 1, 2, 3])
        await store.put(2, {"value": [5]})
        await store.close_groups([0])
        await store.claim("score", Want(rows=1))
        await store.acknowledge(await store.claim("score", Want(rows=2)))
        stats = await store.stats()
        assert (stats.rows, stats.groups, stats.leases) == (5, 3, 1) and stats.bytes > 0
        assert stats.by_version == {1: 2, 2: 1, 3: 1, -1: 1}
        assert stats.by_stage == {
            "score": {"waiting": 0, "ready": 2, "leased": 1, "done": 2},
            "train": {"waiting": 5, "ready": 0, "leased": 0, "done": 0},
            "watch": {"waiting": 3, "ready": 2, "leased": 0, "done": 0},
        }
        assert (stats.rows_put, stats.rows_claimed, stats.rows_freed) == (5, 3, 0)
        await store.drop_partition("train")
        stats = await store.stats()
        assert (stats.rows, stats.groups, stats.bytes, stats.rows_freed) == (0, 0, 0, 5) and stats.by_version == {}

    @promise(GROUPS, capacity_rows=1)
    async def test_stats_name_who_waits_and_for_what_and_how_old_the_oldest_row_is(self, store: Store) -> None:
        await store.put(0, {"text": ["a"]})
        waiting = [
            await self.soon(store.claim("score", Want(groups=2, versions=(3, 4)))),
            await self.soon(store.claim("train", Want(tokens=100))),
            await self.soon(store.put(1, {"text": ["b"]})),
        ]
        stats = await store.stats()
        assert stats.waiting_consumers == {"score": 1, "train": 1} and stats.waiting_producers == 1
        assert [one.seconds for one in stats.waiting] == sorted((one.seconds for one in stats.waiting), reverse=True)
        told = [one.what for one in stats.waiting]
        assert "2 groups for score" in told[0] and "(3, 4)" in told[0]
        assert "100 tokens for train" in told[1] and "1 rows" in told[2]
        assert all(one.who and one.seconds > 0 for one in stats.waiting)
        assert stats.oldest_s >= 2 * self.tick_s
        for task in waiting:
            await stop(task)
        stats = await store.stats()
        assert stats.waiting == [] and stats.waiting_producers == 0 and set(stats.waiting_consumers.values()) == {0}

    @promise(GROUPS, capacity_rows=12)
    async def test_with_many_who_die_every_group_is_trained_on_exactly_once(self, store: Store) -> None:
        rng = random.Random(3)
        trained: list[int] = []

        async def produce(group_id: int) -> None:
            await asyncio.sleep(rng.random() * self.tick_s)
            await put_group(store, group_id, ["x"] * rng.randrange(1, 4))

        async def consume(task: str) -> None:
            with suppress(StreamEnded):
                while True:
                    lease = await store.claim(task, Want(groups=2, patience_s=self.tick_s / 10))
                    await asyncio.sleep(rng.random() * self.tick_s / 10)
                    if rng.random() < 0.3:
                        await store.give_back(lease)
                        continue
                    if task == "score":
                        await store.write(lease.row_ids, {"score": [0.0] * len(lease)}, overwrite=True)
                    else:
                        trained.extend(dict.fromkeys(lease.group_ids))
                    await store.acknowledge(lease)

        consumers = [asyncio.ensure_future(consume(task)) for task in GROUPS for _ in range(3)]
        await asyncio.gather(*(produce(group_id) for group_id in range(40)))
        await store.finish()
        await asyncio.gather(*consumers)
        assert sorted(trained) == list(range(40)) and (await store.stats()).rows == 0
