"""What a coordinator does with clients that break the rules of the line, or that the line breaks for: spoken to directly."""

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

from millstream.errors import StoreError
from millstream.store import Reads, Want, wire
from millstream.store.blocks import Packing
from millstream.store.client import Address, StoreClient
from millstream.store.coordinator import Coordinator
from millstream.store.holder import Holder
from millstream.store.journal import Journal, Record
from millstream.store.table import BlockSpec, RowTable
from millstream.store.wire import Frames, Payload, Put, Reply, Request, Segment

TASKS = {"train": Reads(("x",), by_group=False)}
TOKEN = "secret"
GRACE_S = 0.2


class Caller:
    """A client that says what it is told to, and keeps what it hears."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.heard: dict[int, Any] = {}
        self.is_lost = False

    async def connect(self, name: str, token: str = TOKEN, waiting: list[int] | None = None) -> Caller:
        loop = asyncio.get_running_loop()
        self.line = Frames(self._on_message, self._on_lost)
        await loop.create_connection(lambda: self.line, "127.0.0.1", self._port)
        self.line.send(Request(0, [], wire.Hello(name, token, "here", None, waiting or [])))
        return self

    def _on_message(self, message: memoryview) -> None:
        reply = msgspec.msgpack.decode(message, type=Reply)
        self.heard[reply.number] = reply.body

    def _on_lost(self) -> None:
        self.is_lost = True

    async def ask(self, number: int, body: Any) -> Any:
        self.heard.pop(number, None)
        self.line.send(Request(number, [], body))
        async with asyncio.timeout(5):
            while number not in self.heard:
                await asyncio.sleep(0.005)
        return self.heard[number]

    def hang_up(self) -> None:
        self.line.abort()


@asynccontextmanager
async def serving(folder: Path, **limits: Any) -> AsyncIterator[tuple[Coordinator, int]]:
    holder = Holder(folder / "memory", TOKEN)
    holder.folder.mkdir(exist_ok=True)
    coordinator = Coordinator(
        TASKS,
        folder=folder / "journal",
        node="here",
        token=TOKEN,
        unlink=holder.unlink,
        names=holder.names,
        grace_s=GRACE_S,
        **limits,
    )
    server = await coordinator.serve("127.0.0.1", 0)
    async with server:
        yield coordinator, server.sockets[0].getsockname()[1]
    coordinator.close()


def put(*values: int) -> Put:
    data = bytes(Packing({"x": list(values)}).to_bytes())
    return Put(list(values), ["x"], Payload(len(data), data), None, None, "train", None)


def in_segment(name: str) -> Put:
    return Put([1], ["x"], Payload(100, None, Segment("here", name, 4096)), None, None, "train", None)


def test_a_stranger_is_not_heard_even_if_he_says_all_at_once(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (coordinator, port):
            friend = await Caller(port).connect("friend")
            await friend.ask(1, put(1, 2))
            stranger = await Caller(port).connect("stranger", token="guess")
            stranger.line.send(Request(1, [], wire.DropPartition("train")))
            silent = Caller(port)
            silent.line = Frames(silent._on_message, silent._on_lost)
            await asyncio.get_running_loop().create_connection(lambda: silent.line, "127.0.0.1", port)
            silent.line.send(Request(1, [], wire.DropPartition("train")))
            await asyncio.sleep(0.1)
            assert stranger.is_lost and silent.is_lost
            assert isinstance(stranger.heard[0], wire.Failed)
            assert coordinator.catalog.num_rows == 2

    asyncio.run(program())


def test_a_client_that_comes_back_after_it_was_taken_for_dead_is_not_obeyed_twice(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (coordinator, port):
            caller = await Caller(port).connect("a")
            first = await caller.ask(1, put(1))
            caller.hang_up()
            await asyncio.sleep(2 * GRACE_S)
            again = await (await Caller(port).connect("a", waiting=[1])).ask(1, put(1))
            assert again == first and coordinator.catalog.rows_put == 1

    asyncio.run(program())


def test_the_old_line_of_a_client_that_has_a_new_one_is_cut(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (coordinator, port):
            old = await Caller(port).connect("a")
            await old.ask(1, put(1))
            await (await Caller(port).connect("a")).ask(2, put(2))
            old.line.send(Request(1, [], put(1)))
            await asyncio.sleep(0.1)
            assert old.is_lost and coordinator.catalog.rows_put == 2

    asyncio.run(program())


def test_room_that_was_reserved_is_reserved_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path, capacity_rows=1) as (_, port):
            caller = await Caller(port).connect("a")
            first = await caller.ask(1, wire.Reserve(1, 100_000, 1.0))
            caller.hang_up()
            again = await (await Caller(port).connect("a", waiting=[1])).ask(1, wire.Reserve(1, 100_000, 1.0))
            assert isinstance(first, wire.Reserved) and again == first

    asyncio.run(program())


@pytest.mark.parametrize("name", ["../../victim", "0-1", "/etc/passwd", "1234abcd-7"])
def test_a_put_that_names_a_segment_it_was_not_given_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (coordinator, port):
            caller = await Caller(port).connect("a")
            answer = await caller.ask(1, in_segment(name))
            assert isinstance(answer, wire.Failed) and coordinator.catalog.num_rows == 0

    asyncio.run(program())


def test_two_clients_of_one_name_are_two(tmp_path: Path) -> None:
    async def program() -> None:
        async with serving(tmp_path) as (coordinator, port):
            address = Address(host="127.0.0.1", port=port, token=TOKEN, node="here", folder=str(tmp_path / "memory"))
            for value in (1, 2):
                client = await StoreClient.connect(address, "producer")
                await client.put(0, {"x": [value]})
                await client.close()
            assert coordinator.catalog.rows_put == 2

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
            (known,) = coordinator._clients.values()
            assert len(known.results) < 5
            waiting.cancel()
            with pytest.raises(StoreError, match="cannot be sent"):
                await client.put([2**70], {"x": [1]})
            await client.put(1, {"x": [1]})
            await client.close()

    asyncio.run(program())


def test_a_producer_does_not_keep_the_memory_of_segments_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.store.segments.MAX_IDLE_BYTES", 1 << 20)

    async def program() -> None:
        async with serving(tmp_path) as (_, port):
            address = Address(host="127.0.0.1", port=port, token=TOKEN, node="here", folder=str(tmp_path / "memory"))
            producer, consumer = await StoreClient.connect(address), await StoreClient.connect(address)
            for size in range(100_000, 140_000, 1_000):
                await producer.put(0, {"x": [np.zeros(size, np.uint8)]})
                await consumer.acknowledge(await consumer.claim("train", Want(rows=1)))
            for client in (producer, consumer):
                caches = (client._segments._written, client._segments._mapped)
                assert all(sum(map(len, cache.values())) <= 2 << 20 for cache in caches)
                await client.close()

    asyncio.run(program())


def test_losing_a_node_and_covering_a_step_afterwards_go_together() -> None:
    catalog = RowTable(TASKS)
    catalog.put([0], BlockSpec(("x",), 8, "far"), versions=None, tokens=None, partition="train", now=0.0)
    catalog.put([0], BlockSpec(("x",), 8, "near"), versions=None, tokens=None, partition="train", now=0.0)
    task = catalog.task("train")
    units = catalog.select(task, Want(rows=2), "train", is_all=True, choose=None)
    catalog.acknowledge(catalog.grant(task, units, "train", "me", Want(rows=2)).id, 3)
    assert len(catalog.lose(lambda block: block.payload == "far")) == 1
    catalog.cover(3, "train")
    assert catalog.num_rows == 0 and catalog.num_bytes == 0


def test_a_journal_that_is_damaged_in_the_middle_is_not_read_as_one_that_was_cut_short(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.msgpack")
    for number in range(3):
        journal.append(Record("a", number, 0.0, put(number)))
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
    journal.append(Record("a", 1, 0.0, put(1)))
    real = os.write

    def half(number: int, data: Any) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return real(number, data[: len(data) // 2])

    monkeypatch.setattr("os.write", half)
    with pytest.raises(OSError, match="No space"):
        journal.append(Record("a", 2, 0.0, put(2)))
    monkeypatch.undo()
    journal.append(Record("a", 3, 0.0, put(3)))
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
            assert (await client.claim("train", Want(rows=5, patience_s=0))).row_ids == list(small)
            await client.close()

    asyncio.run(program())
