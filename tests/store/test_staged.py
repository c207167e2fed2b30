"""Rows that one process packs and another puts, and columns that do not grow with their cells."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from msgspec.msgpack import encode

from millstream.errors import RowsLost, StoreError
from millstream.store import Reads, wire
from millstream.store.blocks import Block, Packing
from millstream.store.client import StoreClient
from millstream.store.host import SharedStore, make_plan
from millstream.store.journal import Journal, JournalRecord, apply_change, state_of
from millstream.store.rows import BlockSpec
from millstream.store.table import RowTable

COLUMNS = {"tokens": [np.arange(5, dtype=np.int32), np.arange(9, dtype=np.int32)], "reward": [0.5, 1.0]}


@pytest.fixture(scope="module")
def store() -> Iterator[SharedStore]:
    with SharedStore(make_plan({"train": Reads(("tokens", "reward"))}, disconnect_s=0.05)) as store:
        yield store


async def claimed(client: StoreClient, group_id: int) -> list[list[int]]:
    await client.close_groups([group_id])
    lease = await client.claim("train")
    assert lease.group_id == group_id
    tokens = [row.tolist() for row in lease["tokens"]]
    await client.acknowledge(lease)
    return tokens


def test_rows_that_one_client_has_packed_are_put_by_another_with_a_message_that_names_them(store: SharedStore) -> None:
    async def run() -> None:
        worker, driver = await store.connect("worker"), await store.connect("driver")
        rows = await worker.stage(COLUMNS, versions=3)
        assert rows.versions == [3, 3] and rows.tokens == [5, 9]
        assert rows.block.payload.data is None, "the payload is in a segment, however small it is"
        assert (await driver.stats()).rows == 0
        await driver.put_staged(1, rows)
        await worker.close()
        assert await claimed(driver, 1) == [list(range(5)), list(range(9))]
        await driver.close()

    asyncio.run(run())


def test_packed_rows_that_were_dropped_or_whose_process_is_gone_are_lost_and_the_rest_stays_usable(
    store: SharedStore,
) -> None:
    async def run() -> None:
        worker, driver = await store.connect("worker"), await store.connect("driver")
        dropped, orphaned, kept = [await worker.stage(COLUMNS) for _ in range(3)]
        driver.drop_staged(dropped)
        with pytest.raises(RowsLost, match="is gone"):
            await driver.put_staged(2, dropped)
        await driver.put_staged(3, kept)
        await worker.close()
        await asyncio.sleep(0.5)  # more than the time in which a client may reconnect
        with pytest.raises(RowsLost, match="is gone"):
            await driver.put_staged(4, orphaned)
        assert await claimed(driver, 3) == [list(range(5)), list(range(9))]
        assert (await driver.stats()).rows == 0
        await driver.close()

    asyncio.run(run())


def test_a_client_reads_the_rows_that_another_one_has_on_lease_by_their_ids(store: SharedStore) -> None:
    async def run() -> None:
        driver, rank = await store.connect("driver"), await store.connect("rank")
        long = np.arange(100_000, dtype=np.int32)  # in a segment; the other row is part of the messages
        ids = [
            *await driver.put(5, {"tokens": [long], "reward": [1.0]}),
            *await driver.put(5, {"tokens": [long[:3]], "reward": [2.0]}),
        ]
        await driver.close_groups([5])
        lease = await driver.claim("train")
        await driver.write(ids, {"advantages": [long[:2], long[:1]]})
        found = await rank.read(ids[::-1])
        assert [row["reward"] for row in found] == [2.0, 1.0]
        assert [len(row["advantages"]) for row in found] == [1, 2]
        assert np.array_equal(found[1]["tokens"], long)
        await driver.acknowledge(lease, step=1)
        assert len(await rank.read(ids)) == 2, "no checkpoint covers the step yet"
        await driver.cover(1)
        with pytest.raises(StoreError, match="is not in the store"):
            await rank.read(ids)
        await driver.close()
        await rank.close()

    asyncio.run(run())


def test_a_claim_may_leave_payloads_closed_where_the_small_columns_came_with_the_answer(store: SharedStore) -> None:
    async def run() -> None:
        worker, driver = await store.connect("worker"), await store.connect("driver")
        driver.open_only("train", ["reward"])
        rows = await worker.stage({"tokens": COLUMNS["tokens"]}, small={"reward": COLUMNS["reward"]})
        await driver.put_staged(6, rows)
        await driver.close_groups([6])
        lease = await driver.claim("train")
        assert lease.columns == {"reward": [0.5, 1.0]}
        assert [len(row["tokens"]) for row in await worker.read(lease.row_ids)] == [5, 9]
        await driver.acknowledge(lease)
        await driver.put(7, COLUMNS)
        assert await claimed(driver, 7) == [list(range(5)), list(range(9))], "one payload has both"
        await driver.close()
        await worker.close()

    asyncio.run(run())


def test_a_snapshot_may_leave_out_what_is_held_for_a_step_and_does_not_read_it(store: SharedStore) -> None:
    async def run() -> None:
        driver = await store.connect("driver")
        for group_id in (20, 21):
            rows = await driver.stage({"tokens": COLUMNS["tokens"]}, small={"reward": COLUMNS["reward"]})
            await driver.put_staged(group_id, rows)
        await driver.close_groups([20])
        await driver.acknowledge(await driver.claim("train"), step=9)
        whole, rest = await driver.snapshot(), await driver.snapshot(with_held=False)
        assert [row.group_id for row in whole.rows] == [20, 20, 21, 21] and len(whole.steps) == 2
        assert [row.group_id for row in rest.rows] == [21, 21] and not rest.steps
        assert (whole.is_closed, rest.is_closed) == ({20: True, 21: False}, {21: False})
        reply = await driver._connection.call(wire.ReadPartition("train", with_held=False))
        assert len(reply.granted.blocks) == 2, "the payload and the small columns of one group"
        await driver.drop_partition("train")
        await driver.restore(rest)
        assert (await driver.stats()).rows == 2
        await driver.drop_partition("train")
        await driver.close()

    asyncio.run(run())


def test_a_column_that_one_client_has_packed_is_written_by_another_unless_its_process_is_gone(
    store: SharedStore,
) -> None:
    async def run() -> None:
        scorer, driver = await store.connect("scorer"), await store.connect("driver")
        ids = await driver.put(8, COLUMNS)
        written, lost = [await scorer.stage_columns({"values": COLUMNS["tokens"]}) for _ in range(2)]
        assert written.payload.data is None, "its size does not depend on the cells"
        await driver.write_staged(ids, written)
        await scorer.close()
        await asyncio.sleep(0.5)  # more than the time in which a client may reconnect
        with pytest.raises(RowsLost, match="is gone"):
            await driver.write_staged(ids, lost, overwrite=True)
        assert [len(row["values"]) for row in await driver.read(ids)] == [5, 9]
        assert await claimed(driver, 8) == [list(range(5)), list(range(9))]
        await driver.close()

    asyncio.run(run())


def test_cells_of_one_value_each_take_the_room_of_that_value() -> None:
    def packed(length: int) -> Packing:
        lengths = (length, 0, 1)
        values = np.array([0.5, 1.0, -2.0], np.float32)
        return Packing({"advantages": [np.broadcast_to(v, (n,)) for v, n in zip(values, lengths, strict=True)]})

    assert packed(10_000).nbytes == packed(10).nbytes
    cells = Block(packed(10_000).to_bytes()).cells("advantages", 0, 3)
    expected = [np.full(10_000, 0.5, np.float32), np.zeros(0, np.float32), np.full(1, -2.0, np.float32)]
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(cells, expected, strict=True))
    assert [len(cell) for cell in Block(packed(10).to_bytes()).cells("advantages", 1, 2)] == [0, 1]


@pytest.mark.parametrize(
    ("small", "why"),
    [
        (BlockSpec(("tokens",), 1, None), "tokens twice"),
        (BlockSpec(("reward",), 101, None), "101 bytes at once"),
        (BlockSpec(("reward",), 100, None), "a store that has 150"),
    ],
)
def test_a_put_whose_small_columns_are_refused_changes_nothing(small: BlockSpec[None], why: str) -> None:
    table = RowTable({"train": Reads(("tokens", "reward"))}, capacity_bytes=100)

    def put(group_ids: list[int], nbytes: int, small: BlockSpec[None] | None) -> None:
        nums, block = [0] * len(group_ids), BlockSpec(("tokens",), nbytes, None)
        apply_change(table, wire.PutRows("train", group_ids, block, nums, nums, None, small), 0.0)

    def state() -> object:
        return state_of(table, {}, {}, [])

    put([0], 60, None)
    before = encode(state())
    with pytest.raises(StoreError, match=why):
        put([1, 1], 90, small)
    assert encode(state()) == before
    put([1], 40, BlockSpec(("reward",), 1, None))
    assert (table.num_rows, table.num_bytes) == (2, 101)


def test_a_journal_that_cannot_be_rewritten_stays_as_it_was_and_leaves_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal.msgpack")
    records = [JournalRecord("", number, 0.0, wire.FinishPartition("train")) for number in range(3)]
    journal.append(records[0])

    def fail(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    for name in ("os.write", "pathlib.Path.replace"):
        with monkeypatch.context() as broken, pytest.raises(OSError, match="No space"):
            broken.setattr(name, fail)
            journal.rewrite(records[1])
        assert [path.name for path in tmp_path.iterdir()] == ["journal.msgpack"]
    journal.append(records[2])
    assert [record.number for record in journal.read()] == [0, 2]
    journal.rewrite(records[1])
    assert [record.number for record in Journal(tmp_path / "journal.msgpack").read()] == [1]
    journal.close()
