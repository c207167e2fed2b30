"""What a claim gets: columns, groups, limits, policies, choosers, windows of versions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from millstream.errors import StoreError, StoreTimeout, StreamEnded
from millstream.store import Store, Want
from millstream.store.policies import Candidate
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


def longest_first(ready: Sequence[Candidate], want: Want) -> Sequence[int]:
    """A user's policy: the rows with the most tokens; it waits while fewer than two are ready."""
    order = sorted(range(len(ready)), key=lambda index: -ready[index].tokens)
    return order[: want.rows or 1] if len(ready) > 1 else []


def failing(ready: Sequence[Candidate], want: Want) -> Sequence[int]:
    raise RuntimeError("no idea")


def out_of_range(ready: Sequence[Candidate], want: Want) -> Sequence[int]:
    return [len(ready)]


class ClaimPromises(StoreSuiteBase):
    # ---- sizes

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

    # ---- policies

    @store_promise(MIXED)
    async def test_fifo_is_the_longest_ready_first(self, store: Store) -> None:
        for group_id in range(3):
            await store.put(group_id, {"value": [group_id]}, versions=9 - group_id)
        await store.close_groups([2])
        await store.close_groups([0, 1])
        assert (await store.claim("watch", Want(groups=3))).group_ids == [2, 0, 1]
        assert (await store.claim("score", Want(rows=3))).group_ids == [0, 1, 2]

    @store_promise(ROWS)
    async def test_oldest_version_first(self, store: Store) -> None:
        await store.put(0, {"value": list("abcdef")}, versions=[3, 1, 2, 1, 3, 0])
        want = Want(rows=4, policy="oldest_version")
        lease = await store.claim("read", want)
        assert lease["value"] == ["f", "b", "d", "c"] and lease.versions == [0, 1, 1, 2]

    @store_promise(GROUPS)
    async def test_the_version_of_a_group_is_the_oldest_of_its_rows(self, store: Store) -> None:
        for group_id, versions in enumerate(([5, 9], [7, 7], [8, 4])):
            await put_group(store, group_id, ["x", "y"], versions=versions)
        want = Want(groups=1, policy="oldest_version")
        assert [(await store.claim("score", want)).group_id for _ in range(3)] == [2, 0, 1]

    @store_promise(ROWS)
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

    @store_promise(GROUPS)
    async def test_balanced_respects_the_limits(self, store: Store) -> None:
        rng = random.Random(1)
        for group_id in range(40):
            size = rng.randrange(1, 5)
            await put_group(store, group_id, ["x"] * size, tokens=[rng.randrange(1, 100) for _ in range(size)])
        for rank in range(6):
            lease = await store.claim("score", Want(rows=8, policy="balanced", rank=rank % 2))
            assert len(lease) <= 8

    @store_promise(ROWS)
    async def test_a_policy_of_ones_own_chooses_and_may_wait(self, store: Store) -> None:
        want = Want(rows=1, policy="millstream.testing.store.claims:longest_first")
        await store.put(0, {"value": ["short", "longest", "long"]}, tokens=[1, 9, 5])
        assert (await store.claim("read", want))["value"] == ["longest"]
        assert (await store.claim("read", want))["value"] == ["long"]
        waiting = await self.soon(store.claim("read", want))
        assert not waiting.done(), "one alone it leaves"
        await store.put(0, {"value": ["medium"]}, tokens=[3])
        assert (await waiting)["value"] == ["medium"]

    @store_promise(ROWS)
    async def test_a_policy_that_fails_is_the_error_of_its_claim_and_of_no_other(self, store: Store) -> None:
        earlier = await self.soon(store.claim("read", Want(rows=2)))
        wrong = ("nowhere", "no.such.module:function", "millstream.testing.store.claims:nothing")
        broken = ("millstream.testing.store.claims:failing", "millstream.testing.store.claims:out_of_range")
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

    @store_promise(GROUPS)
    async def test_a_chooser_is_asked_again_when_woken_and_others_pass_it(self, store: Store) -> None:
        wanted: list[int] = []
        shown: list[tuple[int, ...]] = []

        def choose(ready: Sequence[int]) -> int | None:
            shown.append(tuple(ready))
            return next((group_id for group_id in ready if group_id in wanted), None)

        waiting = await self.soon(store.claim("score", choose=choose))
        for group_id in range(4):
            await put_group(store, group_id, ["x"], versions=9 - group_id)
        assert (await store.claim("score")).group_id == 0
        assert await self.still_waits(waiting)
        assert (await store.stats()).waiting_consumers["score"] == 1
        wanted.append(2)
        store.wake()
        assert (await waiting).group_id == 2
        assert shown[-1] == (1, 2, 3), "the longest ready first, whatever their versions"

    @store_promise(GROUPS)
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

    @store_promise(ROWS)
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
