"""Policies, choosers and windows of versions."""

from __future__ import annotations

import random
from collections.abc import Sequence

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


class PolicyPromises(StoreSuiteBase):
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
        want = Want(rows=1, policy="millstream.testing.store.policies:longest_first")
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
        wrong = ("nowhere", "no.such.module:function", "millstream.testing.store.policies:nothing")
        broken = ("millstream.testing.store.policies:failing", "millstream.testing.store.policies:out_of_range")
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
            await put_group(store, group_id, ["x"])
        assert (await store.claim("score")).group_id == 0
        assert await self.still_waits(waiting)
        assert (await store.stats()).waiting_consumers["score"] == 1
        wanted.append(2)
        store.wake()
        assert (await waiting).group_id == 2
        assert shown[-1] == (1, 2, 3)

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
