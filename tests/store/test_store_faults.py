"""kill -9 to real processes, under load: nothing is lost, nothing is acknowledged twice."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millstream.errors import StoreError
from millstream.store import Reads, Want
from millstream.store.client import StoreClient
from millstream.store.host import SharedStore, make_plan
from support.store_load import ForkedStore, ProcessGroup, check_ledgers, drain
from support.store_worker import cells

TASKS = {"train": Reads(("tokens",), by_group=False)}
KILLS = 20


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[SharedStore]:
    bound = getattr(request, "param", None)
    with ForkedStore(make_plan(TASKS, capacity_rows=400, memory_bytes=bound, disconnect_s=0.3)) as running:
        yield running


async def until_it_serves(store: SharedStore) -> None:
    client = await store.connect()
    await client.stats()
    await client.close()


@pytest.mark.parametrize(
    ("victim", "store"),
    [("a producer or a consumer with a lease", None), ("the coordinator", 2_000_000)],
    indirect=["store"],
)
def test_twenty_kills_under_load_lose_nothing_and_repeat_nothing(
    victim: str, store: SharedStore, tmp_path: Path
) -> None:
    """In memory, and with some rows in memory and most on disk."""
    crew, rng = ProcessGroup(store, tmp_path), random.Random(victim)
    time.sleep(0.3)
    for _ in range(KILLS):
        asyncio.run(until_it_serves(store))
        time.sleep(rng.uniform(0.02, 0.15) if victim == "the coordinator" else rng.uniform(0.05, 0.2))
        match victim:
            case "the coordinator":
                store.process.kill()
            case _:
                crew.replace(rng.choice(list(crew.members)))
    time.sleep(0.5)
    for name in crew.members:
        crew.kill(name)
    check_ledgers(tmp_path, *asyncio.run(drain(store)))


class Sleeping(SharedStore):
    """Its coordinator is a process that does nothing until its pipe closes."""

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE)


def test_the_pipe_of_a_coordinator_that_has_ended_is_closed() -> None:
    with Sleeping(make_plan(TASKS)) as store:
        first = store.process
        first.kill()
        until = time.monotonic() + 30
        while store.process is first and time.monotonic() < until:
            time.sleep(0.01)
        second = store.process
        assert second is not first, "it was replaced"
        assert first.stdin is not None and first.stdin.closed
    assert second.stdin is not None and second.stdin.closed


def test_a_consumer_that_hangs_with_its_line_open_loses_its_lease_when_it_expires(store: SharedStore) -> None:
    async def program() -> None:
        hanging, other = await store.connect(), await store.connect()
        await other.put([1, 2], {"tokens": [cells(1), cells(2)]})
        lease = await hanging.claim("train", Want(rows=2, expires_s=0.3))
        again = await asyncio.wait_for(other.claim("train", Want(rows=2)), 5)
        assert again.row_ids == lease.row_ids
        with pytest.raises(StoreError, match="has ended"):
            await hanging.acknowledge(lease)
        await other.acknowledge(again)
        for client in (hanging, other):
            await client.close()

    asyncio.run(program())


def test_a_view_stays_what_it_was_when_its_rows_are_long_gone(store: SharedStore) -> None:
    """Segments are used again for other rows, but not while somebody looks at them."""

    async def program() -> None:
        client = await store.connect()
        await client.put(0, {"tokens": [np.full(50_000, 7, np.int64)]})
        lease = await client.claim("train", Want(rows=1))
        kept = lease["tokens"][0][100:200]
        await client.acknowledge(lease)
        del lease
        for number in range(20):
            await client.put(0, {"tokens": [np.full(50_000, number + 100, np.int64)]})
            await client.acknowledge(await client.claim("train", Want(rows=1)))
        assert (kept == 7).all()
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 1
        await client.close()

    asyncio.run(program())


@pytest.mark.parametrize("guess", ["guess", "", "\u00e9"])
def test_a_stranger_without_the_token_is_turned_away(store: SharedStore, guess: str) -> None:
    async def program() -> None:
        address = msgspec.structs.replace(store.address, token=guess)
        with pytest.raises(StoreError, match="token"):
            await StoreClient.connect(address)

    asyncio.run(program())


def test_a_journal_that_was_cut_short_or_rewritten_leads_to_the_same_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program() -> None:
        plan = make_plan(TASKS, folder=tmp_path, disconnect_s=0.3)
        with SharedStore(plan) as store:
            client = await store.connect()
            await client.put(0, {"tokens": [cells(1), cells(3)]})
            held = await client.claim("train", Want(rows=1))
            store.process.kill()
            store.process.wait()
            with (tmp_path / "journal.msgpack").open("ab") as file:
                file.write((1000).to_bytes(4, "little") + b"half a record")
            lease = await client.claim("train", Want(rows=1))
            assert lease["tokens"][0][0] == 3
            await client.acknowledge(held)
            await client.acknowledge(lease)
            assert (await client.stats()).rows_freed == 2
            await client.close()

    asyncio.run(program())
