"""Ranks that read their rows from the store by themselves: the driver sends which rows, never the rows."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs

from millstream.clock import RealClock
from millstream.config import load
from millstream.errors import LearnerError
from millstream.events import LearnerRestarted
from millstream.events.sinks import MemorySink
from millstream.learner.fsdp import FsdpLearner
from millstream.learner.messages import StoreAccess, rows_message
from millstream.learner.remote_scorer import RemoteScorer, publish_setup
from millstream.pipeline.schema import sizes_of
from millstream.rpc.process import LocalLauncher
from millstream.run import build
from millstream.run.checkpoint import CheckpointConfig
from millstream.run.config import RunConfig
from millstream.run.replay import ReplayedLearner
from millstream.store import Reads
from millstream.store.client import StoreClient
from millstream.store.host import SharedStore, make_plan
from millstream.types import StoredRow, TrainRow, scaled_advantages
from millstream.weights.transfer.publisher import WeightsPublisher
from support.checkpoints import checkpoints_in
from support.rank_cases import CASES, batch
from support.runs import ROOT

CASE = CASES[0]
SCALE = (0.25, 1.5)
COLUMNS = ("tokens", "loss_mask", "logprobs", "advantages")


@pytest.fixture(scope="module")
def store() -> Iterator[SharedStore]:
    with SharedStore(make_plan({"train": Reads(COLUMNS)})) as store:
        yield store


def access_of(store: SharedStore) -> StoreAccess:
    return StoreAccess("millstream.store.host:connect_here", store.plan)


def ranks(num: int, store: SharedStore | None) -> FsdpLearner:
    access = None if store is None else access_of(store)
    learner = build.build_learner(
        load(ROOT / "recipes/demo.toml", RunConfig, ["engine.process=true", f"rollout.temperature={CASE.temperature}"]),
        CASE.new_model(),
        None,
        learner=structs.replace(CASE.learner, ranks=num),
        recipe=CASE.recipe(),
        num_steps=5,
        store=lambda: access,
    )
    assert isinstance(learner, FsdpLearner) and learner.reads_store == (store is not None)
    return learner


async def put(client: StoreClient, group_id: int, rows: Sequence[TrainRow]) -> list[StoredRow]:
    """As a rollout worker and the driver do."""
    long = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    small = sizes_of(long["tokens"], long["loss_mask"])
    await client.put_staged(group_id, await client.stage(long, small=small))
    await client.close_groups([group_id])
    lease = await client.claim("train")
    await client.acknowledge(lease, step=group_id + 1)  # no checkpoint covers it
    return [
        StoredRow(row_id=row_id, label=row.label, scale=SCALE, **{name: small[name][i] for name in small})
        for i, (row_id, row) in enumerate(zip(lease.row_ids, rows, strict=True))
    ]


async def train(learner: Any, micro_batches: Sequence[Sequence[TrainRow]]) -> dict[str, torch.Tensor]:
    await learner.begin_batch()
    for rows in micro_batches:
        await learner.accumulate(rows)
    await learner.step()
    return {name: value.clone() for name, value in (await learner.weights()).items()}


def sent(rows: Sequence[TrainRow]) -> list[TrainRow]:
    return [structs.replace(row, advantages=scaled_advantages(row.advantages, *SCALE)) for row in rows]


@pytest.mark.parametrize("num", [1, 2])
def test_ranks_that_read_the_store_give_the_weights_of_ranks_that_are_sent_the_rows_bit_for_bit(
    num: int, store: SharedStore
) -> None:
    async def run(own: SharedStore | None) -> tuple[dict[str, torch.Tensor], Any]:
        learner, client = ranks(num, own), await store.connect("driver")
        try:
            rows = [await put(client, 10 * num + i, some) if own else sent(some) for i, some in enumerate(batch(3))]
            return await train(learner, rows), learner.log_ratios()
        finally:
            await learner.close()
            await client.close()

    (read, read_ratios), (given, given_ratios) = asyncio.run(run(store)), asyncio.run(run(None))
    first = dict(CASE.new_model().named_parameters())
    assert any(not torch.equal(given[name], first[name].detach()) for name in first), "something was trained"
    assert all(torch.equal(read[name], given[name]) for name in given)
    assert len(read_ratios) and np.array_equal(read_ratios, given_ratios, equal_nan=True)


def test_a_rank_that_is_killed_is_replaced_by_one_that_reads_the_rows_again_and_a_row_that_is_gone_ends_the_learner(
    store: SharedStore, tmp_path: Path
) -> None:
    sink = MemorySink()

    async def run(*, is_killed: bool, group_id: int) -> dict[str, torch.Tensor]:
        checkpoints = checkpoints_in(tmp_path, sink, CheckpointConfig())
        learner = ReplayedLearner(lambda: ranks(1, store), checkpoints, clock=RealClock(), sink=sink)
        client = await store.connect("driver")
        try:
            await learner.ready()
            rows = [await put(client, group_id + number, batch(number)[0]) for number in range(2)]
            await train(learner, rows[:1])
            if is_killed:
                assert isinstance(learner.inner, FsdpLearner)
                os.kill(learner.inner.ranks.pids[0], signal.SIGKILL)
            found = await train(learner, rows[1:])
            if is_killed:
                await client.cover(1_000)
                with pytest.raises(LearnerError, match=f"row {rows[0][0].row_id} is not in the store"):
                    await learner.accumulate(rows[0])
            return found
        finally:
            await learner.close()
            await client.close()

    killed, whole = asyncio.run(run(is_killed=True, group_id=100)), asyncio.run(run(is_killed=False, group_id=2000))
    assert all(torch.equal(killed[name], whole[name]) for name in whole)
    (restarted,) = [event for event in sink.events if isinstance(event, LearnerRestarted)]
    assert restarted.num_batches_replayed == 1 and restarted.num_rows == 8


def test_a_scorer_that_reads_the_store_packs_the_column_of_one_that_is_sent_the_rows(
    store: SharedStore, tmp_path: Path
) -> None:
    def publish() -> Any:
        weights = WeightsPublisher(tmp_path / "weights", node="", ways=["shared"])
        return publish_setup(CASE.new_model, lambda: weights, device="cpu")

    async def run() -> None:
        remote = RemoteScorer(publish, LocalLauncher(is_warm=True), store=lambda: access_of(store))
        client = await store.connect("driver")
        try:
            rows = batch(5)[0]
            stored = await put(client, 5000, rows)
            (packed,) = await remote.score_stored(stored, "reference")
            assert packed.block.payload.data is None, "it is on the scorer's node"
            ids = [row.row_id for row in stored]
            assert packed.row_ids == ids
            await client.write_staged(ids, packed.block)
            written, expected = await client.read(ids), await remote.score(rows)
            assert all(np.array_equal(row["reference"], own) for row, own in zip(written, expected, strict=True))
        finally:
            await remote.close()
            await client.close()

    asyncio.run(run())


def test_the_message_that_names_rows_does_not_grow_with_them() -> None:
    def size(num_tokens: int) -> int:
        advantage = np.broadcast_to(np.float32(0.5), (num_tokens,))
        sizes = {"num_tokens": num_tokens, "num_trained": 9, "num_shared": 1}
        row = StoredRow(row_id=7, **sizes, prompt=b"", advantages=advantage, label="x")
        return len(msgspec.msgpack.encode(rows_message([row, structs.replace(row, scale=SCALE)])))

    assert size(10_000) == size(10) < 60
