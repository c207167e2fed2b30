"""Waiting claims and puts, the bounds of the store, the end of a stream, partitions, snapshots and statistics."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from millstream.errors import StoreError, StoreTimeout, StreamEnded
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


class StreamPromises(StoreSuiteBase):
    # ---- waiting, and bounds

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

    # ---- partitions

    @store_promise(GROUPS)
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

    @store_promise(ROWS)
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

    @store_promise(GROUPS)
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

    @store_promise(GROUPS)
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

    @store_promise(ROWS)
    async def test_partitions_are_separate(self, store: Store) -> None:
        for name in ("train", "eval"):
            await put_values(store, [name], partition=name)
        await store.finish(partition="eval")
        assert await values_now(store, partition="eval") == ["eval"]
        with pytest.raises(StreamEnded):
            await store.claim("read", Want(rows=1), partition="eval")
        await put_values(store, ["more"])
        assert await values_now(store) == ["train", "more"]

    @store_promise(GROUPS, capacity_rows=4)
    async def test_dropping_a_partition_frees_it_and_ends_who_waits_there(self, store: Store) -> None:
        await put_group(store, 0, ["a", "b"], partition="eval")
        await put_group(store, 0, ["c"], partition=self.beside)
        want = Want(groups=1, expires_s=10 * self.tick_s)
        lease = await store.claim("score", want, partition="eval")
        waiting = [
            await self.soon(store.claim("score", partition="eval")),
            await self.soon(store.claim("train", choose=lambda ready: None, partition="eval")),
        ]
        put = await self.soon(store.put(1, {"text": ["d", "e"]}, partition=self.beside))
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
        assert (await store.claim("score", partition=self.beside))["text"] == ["c"]

    @store_promise(GROUPS)
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

    @store_promise(ROWS)
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

    @store_promise(MIXED)
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

    @store_promise(ROWS)
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

    @store_promise(MIXED)
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

    @store_promise(GROUPS, capacity_rows=1)
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
        waits = [one.what for one in stats.waiting]
        assert "2 groups for score" in waits[0] and "(3, 4)" in waits[0]
        assert "100 tokens for train" in waits[1] and "1 rows" in waits[2]
        assert all(one.who and one.seconds > 0 for one in stats.waiting)
        assert stats.oldest_s >= 2 * self.tick_s
        for task in waiting:
            await stop(task)
        stats = await store.stats()
        assert stats.waiting == [] and stats.waiting_producers == 0 and set(stats.waiting_consumers.values()) == {0}

    @store_promise(GROUPS, capacity_rows=12)
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
