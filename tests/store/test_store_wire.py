"""The coordinator and its journal, with clients that break the protocol or lose their connection: raw messages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from millstream.decoding import decode_msgpack
from millstream.errors import RowsLost, StoreError
from millstream.rpc.frames import FrameProtocol
from millstream.store import Reads, Want, wire
from millstream.store.blocks import Packing
from millstream.store.client import Address, StoreClient
from millstream.store.coordinator import Coordinator, StorePlan
from millstream.store.journal import Journal, JournalRecord
from millstream.store.rows import BlockSpec
from millstream.store.table import RowTable
from millstream.store.wire import Payload, PutRows, Segment, StoreReply, StoreRequest

TASKS = {"train": Reads(("x",), by_group=False)}
TOKEN = "secret"
DISCONNECT_S = 0.2


class Caller:
    """A client that sends the given messages, and keeps the replies."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.replies: dict[int, Any] = {}
        self.is_lost = False

    async def connect(self, name: str, token: str = TOKEN, waiting: list[int] | None = None) -> Caller:
        loop = asyncio.get_running_loop()
        self.connection = FrameProtocol(self._on_message, self._on_lost)
        await loop.create_connection(lambda: self.connection, "127.0.0.1", self._port)
        self.connection.send(StoreRequest(0, [], wire.StoreHello(name, token, "here", None, waiting or [])))
        return self

    def _on_message(self, message: memoryview) -> None:
        reply = decode_msgpack(message, StoreReply)
        self.replies[reply.number] = reply.body

    def _on_lost(self) -> None:
        self.is_lost = True

    async def ask(self, number: int, body: Any) -> Any:
        self.replies.pop(number, None)
        self.connection.send(StoreRequest(number, [], body))
        async with asyncio.timeout(5):
            while number not in self.replies:
                await asyncio.sleep(0.005)
        return self.replies[number]

    def disconnect(self) -> None:
        self.connection.abort()


@asynccontextmanager
async def serving(folder: Path, **limits: Any) -> AsyncIterator[tuple[Coordinator, int]]:
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    plan = StorePlan(
        tasks=TASKS,
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        node="here",
        memory=str(memory),
        journal=str(folder / "journal"),
        disconnect_s=DISCONNECT_S,
        **limits,
    )
    coordinator = Coordinator(plan)
    async with coordinator.serving() as listening:
        yield coordinator, listening.sockets[0].getsockname()[1]


def put(*values: int) -> PutRows:
    data = bytes(Packing({"x": list(values)}).to_bytes())
    block = BlockSpec(("x",), len(data), Payload(len(data), data))
    return PutRows("train", list(values), block, [-1] * len(values), [1] * len(values))


def in_segment(name: str) -> PutRows:
    block = BlockSpec(("x",), 4096, Payload(100, None, Segment("here", name, 4096)))
    return PutRows("train", [1], block, [-1], [1])


def test_a_client_with_a_wrong_token_is_ignored_even_if_it_sends_all_at_once(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (coordinator, port):
            known = await Caller(port).connect("known")
            await known.ask(1, put(1, 2))
            unknown = await Caller(port).connect("unknown", token="guess")
            unknown.connection.send(StoreRequest(1, [], wire.DropPartition("train")))
            silent = Caller(port)
            silent.connection = FrameProtocol(silent._on_message, silent._on_lost)
            await asyncio.get_running_loop().create_connection(lambda: silent.connection, "127.0.0.1", port)
            silent.connection.send(StoreRequest(1, [], wire.DropPartition("train")))
            await asyncio.sleep(0.1)
            assert unknown.is_lost and silent.is_lost
            assert isinstance(unknown.replies[0], wire.RequestFailed)
            assert coordinator.table.num_rows == 2

    asyncio.run(program())


def test_a_request_of_an_expired_client_that_reconnects_is_carried_out_once(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (coordinator, port):
            caller = await Caller(port).connect("a")
            first = await caller.ask(1, put(1))
            caller.disconnect()
            await asyncio.sleep(2 * DISCONNECT_S)
            again = await (await Caller(port).connect("a", waiting=[1])).ask(1, put(1))
            assert again == first and coordinator.table.rows_put == 1

    asyncio.run(program())


def test_the_old_connection_of_a_client_with_a_new_one_is_closed(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (coordinator, port):
            old = await Caller(port).connect("a")
            await old.ask(1, put(1))
            await (await Caller(port).connect("a")).ask(2, put(2))
            old.connection.send(StoreRequest(1, [], put(1)))
            await asyncio.sleep(0.1)
            assert old.is_lost and coordinator.table.rows_put == 2

    asyncio.run(program())


def test_room_that_was_reserved_is_reserved_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path, capacity_rows=1) as (_, port):
            caller = await Caller(port).connect("a")
            first = await caller.ask(1, wire.ReserveSegment(1, 100_000, 1.0))
            caller.disconnect()
            again = await (await Caller(port).connect("a", waiting=[1])).ask(1, wire.ReserveSegment(1, 100_000, 1.0))
            assert isinstance(first, wire.SegmentReserved) and again == first

    asyncio.run(program())


@pytest.mark.parametrize("name", ["../../victim", "0-1", "/etc/passwd", "1234abcd-7"])
def test_a_put_that_names_a_segment_it_was_not_given_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (coordinator, port):
            caller = await Caller(port).connect("a")
            answer = await caller.ask(1, in_segment(name))
            assert isinstance(answer, wire.RequestFailed) and coordinator.table.num_rows == 0

    asyncio.run(program())


def test_two_clients_of_one_name_are_two(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (coordinator, port):
            address = Address(host="127.0.0.1", port=port, token=TOKEN, node="here", folder=str(tmp_path / "memory"))
            for value in (1, 2):
                client = await StoreClient.connect(address, "producer")
                await client.put(0, {"x": [value]})
                await client.close()
            assert coordinator.table.rows_put == 2

    asyncio.run(program())


def test_a_policy_that_cannot_be_found_fails_the_claim_that_named_it(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (_, port):
            address = Address(host="127.0.0.1", port=port, token=TOKEN, node="here", folder=str(tmp_path / "memory"))
            client = await StoreClient.connect(address)
            await client.put(0, {"x": [1]})
            for policy in (":x", "nowhere:x", "millstream.store:nothing", "odd"):
                with pytest.raises(StoreError):
                    await asyncio.wait_for(client.claim("train", Want(rows=1, policy=policy)), 5)
            assert (await client.claim("train", Want(rows=1)))["x"] == [1]
            await client.close()

    asyncio.run(program())


def test_answers_do_not_pile_up_beside_a_claim_that_waits(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (coordinator, port):
            address = Address(host="127.0.0.1", port=port, token=TOKEN, node="here", folder=str(tmp_path / "memory"))
            client = await StoreClient.connect(address)
            waiting = asyncio.create_task(client.claim("train", Want(rows=1), partition="other"))
            for number in range(200):
                await client.put(number, {"x": [number]})
            (session,) = coordinator.sessions.by_name.values()
            assert len(session.results) < 5
            waiting.cancel()
            with pytest.raises(StoreError, match="cannot be sent"):
                await client.put([2**70], {"x": [1]})
            await client.put(1, {"x": [1]})
            await client.close()

    asyncio.run(program())


def test_a_producer_does_not_keep_the_memory_of_segments_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.store.segments.MAX_MAPPED_BYTES", 1 << 20)

    async def program() -> None:
        async with serving(tmp_path) as (_, port):
            address = Address(host="127.0.0.1", port=port, token=TOKEN, node="here", folder=str(tmp_path / "memory"))
            producer, consumer = await StoreClient.connect(address), await StoreClient.connect(address)
            for size in range(100_000, 140_000, 1_000):
                await producer.put(0, {"x": [np.zeros(size, np.uint8)]})
                await consumer.acknowledge(await consumer.claim("train", Want(rows=1)))
            for client in (producer, consumer):
                caches = (client._payloads.segments._written, client._payloads.segments._mapped)
                assert all(sum(map(len, cache.values())) <= 2 << 20 for cache in caches)
                await client.close()

    asyncio.run(program())


def test_losing_a_node_and_covering_a_step_afterwards_go_together() -> None:
    table = RowTable(TASKS)
    table.put([0], BlockSpec(("x",), 8, "far"), versions=[-1], tokens=[1], partition="train", now=0.0)
    table.put([0], BlockSpec(("x",), 8, "near"), versions=[-1], tokens=[1], partition="train", now=0.0)
    task = table.tasks.find("train")
    units = table.partition("train").ready["train"].select(Want(rows=2), None, is_all=True)
    table.acknowledge(table.grant(task, units, "train", "me", Want(rows=2)).id, 3)
    assert len(table.lose(lambda block: block.payload == "far")) == 1
    table.cover(3, "train")
    assert table.num_rows == 0 and table.num_bytes == 0


def test_a_journal_that_is_damaged_in_the_middle_is_not_read_as_one_that_was_cut_short(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.msgpack")
    for number in range(3):
        journal.append(JournalRecord("a", number, 0.0, put(number)))
    journal.close()
    data = bytearray((tmp_path / "journal.msgpack").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "journal.msgpack").write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        list(Journal(tmp_path / "journal.msgpack").read())


def test_a_record_that_cannot_be_written_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal.msgpack")
    journal.append(JournalRecord("a", 1, 0.0, put(1)))
    real = os.write

    def half(number: int, data: Any) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return real(number, data[: len(data) // 2])

    monkeypatch.setattr("os.write", half)
    with pytest.raises(OSError, match="No space"):
        journal.append(JournalRecord("a", 2, 0.0, put(2)))
    monkeypatch.undo()
    journal.append(JournalRecord("a", 3, 0.0, put(3)))
    assert [record.number for record in Journal(tmp_path / "journal.msgpack").read()] == [1, 3]


def test_rows_whose_segments_went_with_the_machine_are_named_and_not_handed_out(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (_, port):
            address = Address(host="127.0.0.1", port=port, token=TOKEN, node="here", folder=str(tmp_path / "memory"))
            client = await StoreClient.connect(address)
            large = await client.put(0, {"x": [np.zeros(100_000)]})
            small = await client.put(0, {"x": [np.ones(3)]})
            await client.close()
        for path in (tmp_path / "memory").iterdir():
            path.unlink()
        async with serving(tmp_path) as (_, port):
            client = await StoreClient.connect(msgspec.structs.replace(address, port=port))
            assert [row.row_id for row in await client.lost()] == list(large)
            with pytest.raises(RowsLost, match=f"row {large[0]} of group 0 was lost with node here"):
                await client.read(large)
            assert (await client.claim("train", Want(rows=5, patience_s=0))).row_ids == list(small)
            await client.close()

    asyncio.run(program())
