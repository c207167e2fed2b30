"""Micro-batches out of the store: exact steps, balanced ranks, nothing lost; and torch's DataLoader over processes."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import random
import signal
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from millstream.clock import VirtualClock, run_virtual
from millstream.errors import StoreError, StoreTimeout
from millstream.store import Lease, Reads, Want
from millstream.store.client import StoreClient
from millstream.store.host import SharedStore, make_plan
from millstream.store.loader import MicroBatches, RankFeeder, RankStream, micro_batches, tokens_in
from millstream.store.loader_torch import MicroBatch, StoreDataset, as_batch
from millstream.store.memory import MemoryStore

BY_ROW = {"train": Reads(("tokens",), by_group=False)}
BY_GROUP = {"train": Reads(("tokens",))}


def run(program: Coroutine[Any, Any, None]) -> None:
    run_virtual(program)


def cells(lengths: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    return [np.full(length, index, np.int32) for index, length in enumerate(lengths)]


def skewed(count: int, seed: int = 0) -> list[int]:
    """Most are short, some are very long."""
    dice = random.Random(seed)
    return [min(2000, int(dice.lognormvariate(4, 1.2)) + 1) for _ in range(count)]


async def full(lengths: Sequence[int], tasks: dict[str, Reads] = BY_ROW, *, is_finished: bool = False) -> MemoryStore:
    store = MemoryStore(tasks, clock=VirtualClock())
    if lengths:
        await store.put(range(len(lengths)), {"tokens": cells(lengths)})
        await store.close_groups(range(len(lengths)))
    if is_finished:
        await store.finish()
    return store


async def step_of(batches: MicroBatches | RankStream) -> list[Lease]:
    return [lease async for lease in batches]


async def ready(store: MemoryStore) -> int:
    return (await store.stats()).by_stage["train"]["ready"]


def rows_in(leases: Sequence[Lease]) -> list[int]:
    return [row_id for lease in leases for row_id in lease.row_ids]


# ---- one rank --------------------------------------------------------------------------------------------------------


def test_a_step_has_exactly_its_rows_in_micro_batches_within_the_budget() -> None:
    async def program() -> None:
        store = await full(skewed(100))
        async with micro_batches(store, "train", tokens=1000, rows_per_step=32) as batches:
            seen: list[int] = []
            for step in range(3):
                leases = await step_of(batches)
                assert sum(map(len, leases)) == batches.taken == 32
                assert all(tokens_in(lease) <= 1000 or len(lease) == 1 for lease in leases) and len(leases) > 1
                seen += rows_in(leases)
                await batches.finish_step(step)
            assert len(set(seen)) == 96
            await store.cover(2)
            assert (await store.stats()).rows == 4

    run(program())


def test_the_first_micro_batch_comes_before_the_last_row_is_put() -> None:
    async def program() -> None:
        store, times = await full([]), list[float]()

        async def produce() -> None:
            for index in range(10):
                await asyncio.sleep(1)
                await store.put(index, {"tokens": cells([100])})

        async with asyncio.TaskGroup() as tasks, micro_batches(store, "train", tokens=200, rows_per_step=10) as batches:
            tasks.create_task(produce())
            async for _ in batches:
                times.append(asyncio.get_running_loop().time())
            await batches.finish_step()
        assert times == [2, 4, 6, 8, 10]

    run(program())


def test_the_last_micro_batch_of_a_step_does_not_wait_for_a_full_budget() -> None:
    async def program() -> None:
        store = await full([10] * 7)
        async with micro_batches(store, "train", tokens=40, rows_per_step=7) as batches:
            assert [len(lease) for lease in await step_of(batches)] == [4, 3]

    run(program())


def test_patience_takes_less_than_the_budget_and_a_deadline_raises() -> None:
    async def program() -> None:
        store = await full([10] * 2)
        async with micro_batches(store, "train", tokens=1000, rows_per_step=5, patience_s=3, deadline_s=20) as batches:
            assert len(await anext(batches)) == 2 and asyncio.get_running_loop().time() == 3
            with pytest.raises(StoreTimeout):
                await anext(batches)

    run(program())


@pytest.mark.parametrize("how", ["closed", "left", "cancelled"])
def test_nothing_is_lost_when_a_loader_is_ended_half_way(how: str) -> None:
    async def program() -> None:
        store = await full(skewed(40))

        async def consume() -> None:
            async with micro_batches(store, "train", tokens=500, rows_per_step=60) as batches:
                for _ in range(3):
                    await anext(batches)
                if how == "closed":
                    await batches.aclose()
                    assert await step_of(batches) == []
                elif how == "cancelled":
                    await step_of(batches)

        work = asyncio.create_task(consume())
        await asyncio.sleep(1)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        stats = await store.stats()
        assert (stats.leases, await ready(store)) == (0, 40)
        again = await store.claim("train", Want(rows=40))
        assert sorted(again.row_ids) == list(range(40))

    run(program())


def test_a_step_is_finished_only_when_it_has_its_rows() -> None:
    async def program() -> None:
        store = await full([10] * 20)
        async with micro_batches(store, "train", tokens=50, rows_per_step=10) as batches:
            await anext(batches)
            with pytest.raises(StoreError, match="5 of 10 rows"):
                await batches.finish_step(0)
            await step_of(batches)
            await batches.finish_step(0)

    run(program())


def test_a_step_is_short_only_when_the_stream_has_ended() -> None:
    async def program() -> None:
        store = await full([10] * 25, is_finished=True)
        async with micro_batches(store, "train", tokens=50, rows_per_step=20) as batches:
            assert sum(map(len, await step_of(batches))) == 20 and not batches.has_ended
            await batches.finish_step()
            assert sum(map(len, await step_of(batches))) == 5 and batches.has_ended
            await batches.finish_step()
            assert await step_of(batches) == [] and batches.has_ended
        assert (await store.stats()).rows == 0

    run(program())


def test_a_step_counts_whole_groups_and_those_that_were_closed_empty() -> None:
    async def program() -> None:
        store = MemoryStore(BY_GROUP, clock=VirtualClock())
        for group in range(9):
            await store.put(group, {"tokens": cells([10, 20, 30])})
        await store.close_groups(range(10))
        async with micro_batches(store, "train", tokens=120, groups_per_step=5) as batches:
            for _ in range(2):
                leases = await step_of(batches)
                groups = [{*lease.group_ids, *lease.empty_groups} for lease in leases]
                assert batches.taken == 5 and all(map(len, leases))
                assert all(len(lease) == 3 * len(some - {9}) for lease, some in zip(leases, groups, strict=True))
                await batches.finish_step()
        assert (await store.stats()).rows == 0

    run(program())


def test_rows_of_a_task_that_reads_groups_and_the_reverse_are_refused_and_given_back() -> None:
    async def program() -> None:
        store = MemoryStore(BY_GROUP, clock=VirtualClock())
        await store.put([0] * 8, {"tokens": cells([10] * 8)})
        await store.close_groups([0])
        async with micro_batches(store, "train", tokens=1000, rows_per_step=4) as batches:
            with pytest.raises(StoreError, match="say groups_per_step"):
                await anext(batches)
        assert await ready(store) == 8
        other = MemoryStore(BY_ROW, clock=VirtualClock())
        await other.put([0] * 8, {"tokens": cells([10] * 8)})
        async with micro_batches(other, "train", tokens=20, groups_per_step=4) as batches:
            with pytest.raises(StoreError, match="say rows_per_step"):
                await step_of(batches)
        assert await ready(other) == 8

    run(program())


def test_a_lease_that_has_ended_meanwhile_is_told_when_the_step_is_finished() -> None:
    async def program() -> None:
        store = await full([10] * 4)
        async with micro_batches(store, "train", tokens=20, rows_per_step=4) as batches:
            leases = await step_of(batches)
            await store.give_back(leases[0])
            with pytest.raises(StoreError, match="has ended"):
                await batches.finish_step()
        assert await ready(store) == 2, "the other one is acknowledged"

    run(program())


@pytest.mark.parametrize("wrong", [{}, {"rows_per_step": 1, "groups_per_step": 1}, {"rows_per_step": 1, "rank": 2}])
def test_a_step_without_one_size_or_a_rank_out_of_range_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"rows_per_step|ranks count from 0"):
        micro_batches(MemoryStore(BY_ROW), "train", tokens=10, **wrong)


# ---- many ranks ------------------------------------------------------------------------------------------------------


@given(rows=st.integers(0, 60), ranks=st.integers(1, 5), seed=st.integers(0, 5))
def test_ranks_that_read_by_themselves_take_a_step_exactly(rows: int, ranks: int, seed: int) -> None:
    async def program() -> None:
        store = await full(skewed(rows * 2, seed))
        taken: list[list[int]] = [[], []]

        async def train(rank: int) -> None:
            async with micro_batches(store, "train", tokens=400, rows_per_step=rows, rank=rank, ranks=ranks) as batches:
                for step in range(2):
                    async for lease in batches:
                        taken[step] += lease.row_ids
                        await asyncio.sleep(tokens_in(lease))
                    await batches.finish_step(step)

        await asyncio.gather(*map(train, range(ranks)))
        assert [len(some) for some in taken] == [rows, rows] and len({*taken[0], *taken[1]}) == 2 * rows

    run(program())


@given(ranks=st.integers(1, 6), seed=st.integers(0, 20), ahead=st.integers(1, 3), gap=st.sampled_from([0.0, 5.0, 50.0]))
def test_a_feeder_keeps_ranks_within_one_micro_batch_of_each_other(
    ranks: int, seed: int, ahead: int, gap: float
) -> None:
    async def program() -> None:
        lengths = skewed(120, seed)
        store = await full(lengths if not gap else [])
        steps: list[list[list[Lease]]] = []

        async def produce() -> None:
            for index, length in enumerate(lengths if gap else []):
                await asyncio.sleep(gap)
                await store.put(index, {"tokens": cells([length])})

        async def train(stream: RankStream) -> None:
            for step in range(2):
                if len(steps) == step:
                    steps.append([[] for _ in range(ranks)])
                async for lease in stream:
                    steps[step][stream.rank].append(lease)
                    await asyncio.sleep(tokens_in(lease))
                await stream.finish_step(step)

        async with RankFeeder(store, "train", ranks=ranks, tokens=600, rows_per_step=60, ahead=ahead) as feeder:
            await asyncio.gather(produce(), *(train(feeder.rank(rank)) for rank in range(ranks)))
        for step in steps:
            totals = [sum(map(tokens_in, leases)) for leases in step]
            largest = max(tokens_in(lease) for leases in step for lease in leases)
            assert max(totals) - min(totals) <= largest
            assert sum(len(lease) for leases in step for lease in leases) == 60
        assert len({row for step in steps for leases in step for row in rows_in(leases)}) == 120
        await store.cover(1)
        assert (await store.stats()).rows == 0

    run(program())


def test_a_rank_that_hangs_holds_nobody_up_beyond_its_queue() -> None:
    async def program() -> None:
        store = await full([10] * 40)
        had = {0: 0, 1: 0}

        async def train(stream: RankStream, seconds: float) -> None:
            async for _ in stream:
                had[stream.rank] += 1
                await asyncio.sleep(seconds)

        async with RankFeeder(store, "train", ranks=2, tokens=10, rows_per_step=40, ahead=2) as feeder:
            quick = asyncio.create_task(train(feeder.rank(0), 1))
            slow = asyncio.create_task(train(feeder.rank(1), 10**6))
            await asyncio.sleep(100)
            assert quick.done() and had == {0: 37, 1: 1}, "one in stream, two in its queue"
            slow.cancel()
        assert (await store.stats()).leases == 0 and await ready(store) == 40

    run(program())


def test_a_step_of_a_feeder_is_acknowledged_when_every_rank_has_finished_it() -> None:
    async def program() -> None:
        store = await full([10] * 8)
        async with RankFeeder(store, "train", ranks=2, tokens=20, rows_per_step=4) as feeder:
            first, second = feeder.rank(0), feeder.rank(1)
            with pytest.raises(StoreError, match="has not had all"):
                await first.finish_step(0)
            await asyncio.gather(step_of(first), step_of(second))
            waiting = asyncio.create_task(first.finish_step(0))
            await asyncio.sleep(1)
            assert not waiting.done() and (await store.stats()).by_stage["train"]["done"] == 0
            with pytest.raises(StoreError, match="finishes step 1, and rank 0 step 0"):
                await second.finish_step(1)
            await second.finish_step(0)
            await waiting
            assert (await store.stats()).by_stage["train"]["done"] == 4
            await anext(first)
        assert await ready(store) == 4, "the step that was begun has not happened"

    run(program())


def test_what_ends_a_feeder_reaches_every_rank() -> None:
    async def program() -> None:
        store = await full([10] * 2)
        async with RankFeeder(store, "train", ranks=2, tokens=10, rows_per_step=4, deadline_s=5) as feeder:
            outcomes = await asyncio.gather(*(step_of(feeder.rank(rank)) for rank in (0, 1)), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [StoreTimeout, StoreTimeout]
        assert await ready(store) == 2
        ended = await full([10] * 3, is_finished=True)
        async with RankFeeder(ended, "train", ranks=2, tokens=10, rows_per_step=4) as feeder:
            hands = [feeder.rank(0), feeder.rank(1)]
            assert sum(map(len, await asyncio.gather(*map(step_of, hands)))) == 3
            await asyncio.gather(*(stream.finish_step() for stream in hands))
            assert await asyncio.gather(*map(step_of, hands)) == [[], []] and hands[0].has_ended
        with pytest.raises(StoreError, match="closed"):
            await anext(hands[0])

    run(program())


# ---- torch's DataLoader ----------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedStore]:
    with SharedStore(make_plan(BY_ROW, folder=tmp_path, disconnect_s=0.5)) as store:
        yield store


def fill(store: SharedStore, lengths: Sequence[int], *, is_finished: bool = True) -> None:
    async def program() -> None:
        client = await store.connect()
        half = {"half": torch.ones(len(lengths), 2, dtype=torch.bfloat16)}
        await client.put(
            range(len(lengths)), {"tokens": cells(lengths), "text": list(map(str, lengths))} | half, versions=3
        )
        if is_finished:
            await client.finish()
        await client.close()

    asyncio.run(program())


def rows_left(store: SharedStore) -> int:
    async def program() -> int:
        client = await store.connect()
        stats = await client.stats()
        await client.close()
        return stats.rows

    return asyncio.run(program())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_data_loader_sees_every_row_once(shared: SharedStore, workers: int) -> None:
    lengths = skewed(60)
    fill(shared, lengths)
    data = StoreDataset(shared.address, "train", tokens=1000)
    loader: DataLoader[MicroBatch] = DataLoader(data, batch_size=None, num_workers=workers)
    seen: dict[int, int] = {}
    for batch in loader:
        assert isinstance(batch, MicroBatch) and set(batch["versions"]) == {3}
        for row_id, tokens, text, half in zip(
            batch["row_ids"], batch["tokens"], batch["text"], batch["half"], strict=True
        ):
            assert isinstance(tokens, torch.Tensor) and tokens.dtype == torch.int32 and text == str(len(tokens))
            assert half.dtype == torch.bfloat16 and half.tolist() == [1, 1]
            tokens += 1  # the caller's own
            seen[row_id] = seen.get(row_id, 0) + 1
    data.close()
    assert len(seen) == 60 and set(seen.values()) == {1}
    assert rows_left(shared) == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_of_a_data_loader_is_a_step(shared: SharedStore, workers: int) -> None:
    fill(shared, [10] * 50, is_finished=False)
    data = StoreDataset(shared.address, "train", tokens=60, rows_per_step=20)
    loader: DataLoader[MicroBatch] = DataLoader(
        data, batch_size=None, num_workers=workers, persistent_workers=workers > 0
    )
    steps = [[row for batch in loader for row in batch["row_ids"]] for _ in range(2)]
    assert [len(step) for step in steps] == [20, 20] and len({*steps[0], *steps[1]}) == 40
    data.close()
    assert rows_left(shared) == 10


def test_a_micro_batch_stays_on_lease_until_the_next_is_asked_for(shared: SharedStore) -> None:
    fill(shared, [10] * 40)
    data = StoreDataset(shared.address, "train", tokens=100)
    batches = iter(data)
    next(batches)
    assert rows_left(shared) == 40
    next(batches)
    assert rows_left(shared) == 30
    batches.close()  # type: ignore[attr-defined]
    assert sum(len(batch["row_ids"]) for batch in data) == 30, "the second one came back"
    careful = StoreDataset(shared.address, "train", tokens=100, behind=1)
    assert list(careful) == []
    data.close()
    careful.close()


@pytest.mark.timeout(120)
def test_what_a_killed_worker_had_on_lease_comes_back(shared: SharedStore) -> None:
    fill(shared, [10] * 100)
    data = StoreDataset(shared.address, "train", tokens=100)
    loader: DataLoader[MicroBatch] = DataLoader(data, batch_size=None, num_workers=1)
    batches: Any = iter(loader)
    seen = {row for _ in range(3) for row in next(batches)["row_ids"]}
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        while True:
            seen |= set(next(batches)["row_ids"])
    del batches
    again = {row for batch in data for row in batch["row_ids"]} if not _wait_for_leases(shared) else set[int]()
    data.close()
    assert seen | again == set(range(100)), "each row was seen at least once"


def _wait_for_leases(store: SharedStore) -> int:
    """Until the dead worker's are back."""

    async def program() -> int:
        client = await StoreClient.connect(store.address)
        for _ in range(100):
            if not (await client.stats()).leases:
                break
            await asyncio.sleep(0.1)
        leases = (await client.stats()).leases
        await client.close()
        return leases

    return asyncio.run(program())


def test_a_micro_batch_travels_as_one_stretch_of_bytes() -> None:
    lease = Lease(
        lease_id=1,
        task="train",
        row_ids=[4, 5],
        group_ids=[0, 1],
        versions=[2, 2],
        columns={"tokens": cells([3, 4]), "reward": [np.float32(0.5), np.float32(1)], "text": ["a", "b"]},
    )
    batch = as_batch(lease)
    back = pickle.loads(pickle.dumps(batch))
    assert isinstance(back, MicroBatch) and isinstance(copy.copy(batch), MicroBatch) and list(back) == list(batch)
    assert all(torch.equal(a, b) for a, b in zip(back["tokens"], batch["tokens"], strict=True))
    assert back["text"] == ["a", "b"] and back["row_ids"] == [4, 5] and list(map(float, back["reward"])) == [0.5, 1]
    with pytest.raises(StoreError, match="row_ids"):
        as_batch(Lease(lease_id=1, task="t", row_ids=[1], group_ids=[1], versions=[0], columns={"row_ids": [1]}))


def test_a_store_is_reached_through_a_function_that_connects() -> None:
    async def connect() -> MemoryStore:
        return await full([10] * 6, is_finished=True)

    data = StoreDataset(connect, "train", tokens=20)
    assert [len(batch["row_ids"]) for batch in data] == [2, 2, 2]
    data.close()
    with pytest.raises(ZeroDivisionError):
        next(iter(StoreDataset(lambda: 1 / 0, "train", tokens=20)))  # type: ignore[arg-type,return-value]


def test_cells_of_a_kind_that_cannot_be_packed_travel_by_pickle() -> None:
    odd = MicroBatch({"row_ids": [0, 1], "odd": [torch.ones(1), torch.ones(1, dtype=torch.int8)]})
    back = pickle.loads(pickle.dumps(odd))
    assert isinstance(back, MicroBatch) and [cell.dtype for cell in back["odd"]] == [torch.float32, torch.int8]


@pytest.mark.filterwarnings("error")
def test_small_tensors_come_back_from_another_process_as_the_readers_own(shared: SharedStore) -> None:
    async def program() -> None:
        client = await shared.connect()
        await client.put(0, {"tokens": [torch.ones(3)], "reward": [torch.tensor(0.5)]})
        lease = await client.claim("train", Want(rows=1))
        lease["tokens"][0].add_(1)
        assert lease["tokens"][0].tolist() == [2, 2, 2] and lease["reward"][0].item() == 0.5
        await client.close()

    asyncio.run(program())
