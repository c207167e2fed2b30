"""kill -9 to real processes, under load: nothing is lost, nothing is acknowledged twice."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millstream.errors import StoreError
from millstream.store import Reads, Want
from millstream.store.client import StoreClient
from millstream.store.host import SharedStore, make_plan
from support.store_worker import cells

WORKER = Path(__file__).parents[1] / "support/store_worker.py"
TASKS = {"train": Reads(("tokens",), by_group=False)}
KILLS = 20


@pytest.fixture
def store() -> Iterator[SharedStore]:
    with SharedStore(make_plan(TASKS, capacity_rows=400, disconnect_s=0.3)) as running:
        yield running


class ProcessGroup:
    """Producers and consumers that are started again whenever they are killed."""

    def __init__(self, store: SharedStore, folder: Path) -> None:
        self._address = msgspec.json.encode(store.address).decode()
        self._folder, self._epoch = folder, 0
        self.members = {name: self._start(name) for name in ("produce-1", "produce-2", "consume-1", "consume-2")}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        self._epoch += 1
        role = name.partition("-")[0]
        ledger = self._folder / f"{name}-{self._epoch}.jsonl"
        return subprocess.Popen([sys.executable, str(WORKER), role, self._address, str(ledger), str(self._epoch)])

    def kill(self, name: str) -> None:
        assert self.members[name].poll() is None, f"{name} had ended by itself"
        self.members[name].send_signal(signal.SIGKILL)
        self.members[name].wait()

    def replace(self, name: str) -> None:
        self.kill(name)
        self.members[name] = self._start(name)


def read(folder: Path) -> list[tuple[str, list[int], float]]:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in lines]
    return sorted(((one["what"], one["keys"], one["at"]) for one in found), key=lambda one: one[2])


async def drain(store: SharedStore) -> tuple[list[int], int, int]:
    """What is left, and how many rows were put and freed in the whole life of the store."""
    client, left, until = await store.connect(), list[int](), time.monotonic() + 30
    while True:
        try:
            lease = await client.claim("train", Want(rows=64, patience_s=0.5, deadline_s=2.0))
        except StoreError:
            if (await client.stats()).leases and time.monotonic() < until:
                continue  # of the dead, which are given back after their grace; on a busy machine that takes longer
            break
        for key, found in zip(lease["key"], lease["tokens"], strict=True):
            assert np.array_equal(found, cells(key))
        left += lease["key"]
        await client.acknowledge(lease)
    stats = await client.stats()
    await client.close()
    assert stats.rows == 0 and stats.leases == 0 and stats.bytes == 0
    return left, stats.rows_put, stats.rows_freed


async def until_it_serves(store: SharedStore) -> None:
    client = await store.connect()
    await client.stats()
    await client.close()


def check_ledgers(folder: Path, left: list[int], num_put: int, num_freed: int) -> None:
    entries = read(folder)
    putting = Counter(key for what, keys, _ in entries if what == "putting" for key in keys)
    confirmed = {key for what, keys, _ in entries if what == "put" for key in keys}
    got = {key for what, keys, _ in entries if what == "got" for key in keys}
    done = Counter([key for what, keys, _ in entries if what == "acknowledged" for key in keys] + left)
    assert len(confirmed) > 200, "there was no load"
    assert max(putting.values()) == 1 and max(done.values()) == 1, "nothing twice"
    assert confirmed <= got | set(left), "nothing lost: every row that was put was handed out"
    assert done.keys() <= putting.keys()
    assert num_freed == num_put, "every row left by being acknowledged"
    assert len(confirmed) <= num_put <= len(putting)
    when = {key: at for what, keys, at in entries if what == "acknowledged" for key in keys}
    assert not [key for what, keys, at in entries if what == "got" for key in keys if at > when.get(key, at) + 0.01]


@pytest.mark.parametrize("victim", ["a producer or a consumer with a lease", "the coordinator"])
def test_twenty_kills_under_load_lose_nothing_and_repeat_nothing(
    victim: str, store: SharedStore, tmp_path: Path
) -> None:
    crew, rng = ProcessGroup(store, tmp_path), random.Random(victim)
    time.sleep(1.0)
    for _ in range(KILLS):
        asyncio.run(until_it_serves(store))
        time.sleep(rng.uniform(0.05, 0.4) if victim == "the coordinator" else rng.uniform(0.4, 0.8))
        match victim:
            case "the coordinator":
                store.process.kill()
            case _:
                crew.replace(rng.choice(list(crew.members)))
    time.sleep(1.5)
    for name in crew.members:
        crew.kill(name)
    check_ledgers(tmp_path, *asyncio.run(drain(store)))


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
