"""The store's promises, against the in-memory one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.clock import run_virtual
from millstream.errors import StoreError, StreamEnded
from millstream.store import Lease, Reads
from millstream.store.memory import MemoryStore

TASKS = {"score": Reads(("text",)), "train": Reads(("text", "score"), after=("score",))}


def store(capacity: int = 100) -> MemoryStore:
    return MemoryStore(TASKS, capacity_rows=capacity)


def run(program: Coroutine[Any, Any, None]) -> None:
    run_virtual(program)


async def add_group(store: MemoryStore, group_id: int, size: int = 2) -> list[int]:
    rows = [await store.put(group_id, {"text": f"{group_id}.{i}"}) for i in range(size)]
    store.close_group(group_id)
    return rows


async def score(store: MemoryStore) -> Lease:
    lease = await store.claim("score")
    for row in lease.rows:
        store.write(row.row_id, {"score": 1.0})
    store.acknowledge(lease)
    return lease


def test_a_task_sees_a_group_once_its_columns_are_there_and_only_once() -> None:
    async def program() -> None:
        s = store()
        waiting = asyncio.ensure_future(s.claim("train"))
        await add_group(s, 7)
        await asyncio.sleep(1)
        assert not waiting.done(), "the score column is missing"
        await score(s)
        lease = await waiting
        assert [row.columns["text"] for row in lease.rows] == ["7.0", "7.1"]
        assert all(row.columns["score"] == 1.0 for row in lease.rows)
        s.acknowledge(lease)
        assert s.stats().rows == 0, "freed when every task is done"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(s.claim("train"), 1)

    run(program())


def test_an_open_group_is_not_handed_out_and_a_closed_one_takes_no_more_rows() -> None:
    async def program() -> None:
        s = store()
        await s.put(0, {"text": "a"})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(s.claim("score"), 1)
        s.close_group(0)
        assert len((await s.claim("score")).rows) == 1
        with pytest.raises(StoreError, match="closed"):
            await s.put(0, {"text": "b"})

    run(program())


def test_what_is_given_back_or_expires_is_handed_out_again() -> None:
    async def program() -> None:
        s = store()
        await add_group(s, 0)
        first = await s.claim("score")
        s.give_back(first)
        second = await s.claim("score", expires_s=5)
        third = await asyncio.wait_for(s.claim("score"), 10)
        assert first.group_id == second.group_id == third.group_id == 0
        with pytest.raises(StoreError, match="has ended"):
            s.acknowledge(second)
        s.acknowledge(third)
        with pytest.raises(StoreError, match="has ended"):
            s.acknowledge(third)

    run(program())


def test_a_cancelled_claim_loses_nothing_even_if_it_had_been_served() -> None:
    async def program() -> None:
        s = store()
        claim = asyncio.ensure_future(s.claim("score"))
        await asyncio.sleep(0)
        await add_group(s, 0)
        claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claim
        assert (await asyncio.wait_for(s.claim("score"), 1)).group_id == 0

    run(program())


def test_producers_wait_while_the_store_is_full_and_go_on_when_rows_are_freed() -> None:
    async def program() -> None:
        s = store(capacity=2)
        await add_group(s, 0)
        late = asyncio.ensure_future(add_group(s, 1, size=1))
        await asyncio.sleep(1)
        assert not late.done() and s.stats().waiting_producers == 1
        await score(s)
        s.acknowledge(await s.claim("train"))
        await late
        assert s.stats().rows == 1

    run(program())


def test_a_dropped_group_is_seen_by_nobody() -> None:
    async def program() -> None:
        s = store()
        await add_group(s, 0)
        s.drop(await s.claim("score"))
        assert s.stats().rows == 0 and s.stats().groups == 0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(s.claim("train"), 1)

    run(program())


def test_a_chooser_may_wait_and_is_asked_again_when_woken() -> None:
    async def program() -> None:
        s = store()
        wanted: list[int] = []
        claim = asyncio.ensure_future(s.claim("score", lambda ready: next((g for g in ready if g in wanted), None)))
        await add_group(s, 0)
        await add_group(s, 1)
        await asyncio.sleep(1)
        assert not claim.done()
        wanted.append(1)
        s.wake()
        assert (await claim).group_id == 1

    run(program())


def test_after_finish_a_claim_gets_what_is_left_and_then_ends() -> None:
    async def program() -> None:
        s = store()
        await add_group(s, 0)
        s.finish()
        first = asyncio.ensure_future(s.claim("score"))
        second = asyncio.ensure_future(s.claim("score"))
        assert (await first).group_id == 0
        with pytest.raises(StreamEnded):
            await second

    run(program())


def test_misuse_is_an_error_and_never_another_rows_data() -> None:
    async def program() -> None:
        s = store()
        (row,) = await add_group(s, 0, size=1)
        with pytest.raises(StoreError, match="written once"):
            s.write(row, {"text": "again"})
        with pytest.raises(StoreError, match="not in the store"):
            s.write(row + 1, {"score": 1.0})
        with pytest.raises(StoreError, match="no task"):
            await s.claim("trian")
        s.drop(await s.claim("score"))
        (new,) = await add_group(s, 1, size=1)
        assert new != row, "ids are never used again"

    run(program())


def test_a_snapshot_holds_what_is_unconsumed_and_frees_what_was_on_lease() -> None:
    async def program() -> None:
        s = store()
        for group_id in range(3):
            await add_group(s, group_id)
        await s.put(3, {"text": "open"})
        await score(s)
        s.acknowledge(await s.claim("train"))
        on_lease = await s.claim("score")
        saved = s.snapshot()
        s.write(on_lease.rows[0].row_id, {"score": 5.0})

        again = store()
        again.restore(saved)
        assert again.stats().groups == 3
        assert (await again.claim("score")).group_id == on_lease.group_id
        assert (await again.claim("score")).group_id == 2
        again.close_group(3)
        lease = await again.claim("score")
        assert lease.group_id == 3 and "score" not in lease.rows[0].columns
        with pytest.raises(StoreError, match="empty"):
            again.restore(saved)

    run(program())


@given(
    num_groups=st.integers(1, 12),
    capacity=st.integers(4, 12),
    num_consumers=st.integers(1, 4),
    deaths=st.floats(0, 0.5),
    seed=st.integers(0, 1000),
)
def test_with_many_producers_and_consumers_that_die_every_group_is_trained_exactly_once(
    num_groups: int, capacity: int, num_consumers: int, deaths: float, seed: int
) -> None:
    import random

    rng = random.Random(seed)

    async def program() -> None:
        s = store(capacity)
        trained: list[int] = []

        async def produce(group_id: int) -> None:
            await asyncio.sleep(rng.random())
            await add_group(s, group_id, size=1)

        async def consume(task: str) -> None:
            while True:
                lease = await s.claim(task)
                await asyncio.sleep(rng.random())
                if rng.random() < deaths:
                    s.give_back(lease)
                    continue
                if task == "score":
                    for row in lease.rows:
                        s.write(row.row_id, {"score": 0.0})
                else:
                    trained.append(lease.group_id)
                s.acknowledge(lease)

        consumers = [asyncio.ensure_future(consume(task)) for task in TASKS for _ in range(num_consumers)]
        await asyncio.gather(*(produce(group_id) for group_id in range(num_groups)))
        while len(trained) < num_groups:
            await asyncio.sleep(1)
        await asyncio.sleep(10)
        assert sorted(trained) == list(range(num_groups))
        assert s.stats().rows == 0
        for consumer in consumers:
            consumer.cancel()

    run(program())
