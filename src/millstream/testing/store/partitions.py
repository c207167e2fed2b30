"""The end of a stream, partitions, snapshots and statistics."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from millstream.errors import StreamEnded
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


class PartitionPromises(StoreSuiteBase):
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
