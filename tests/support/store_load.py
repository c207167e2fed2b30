"""Producers and consumers of a store in processes, and the check of what they have written down."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from millstream.errors import StoreError
from millstream.store import Want
from millstream.store.host import SharedStore
from support.commands import Command
from support.store_worker import cells

WORKER = Path(__file__).parent / "store_worker.py"


class ForkedStore(SharedStore):
    """Its coordinator is forked from the tests' warm process: it is there at once, also after a kill."""

    program: Sequence[str] = ("-m", "millstream.store.host")

    def _start(self) -> Command:  # type: ignore[override]
        return Command([sys.executable, *self.program, str(self._file)], 1, 2, has_stdin=True)


class ProcessGroup:
    """Producers and consumers that are started again whenever they are killed."""

    def __init__(self, store: SharedStore, folder: Path) -> None:
        self._address = msgspec.json.encode(store.address).decode()
        self._folder, self._epoch = folder, 0
        self.members = {name: self._start(name) for name in ("produce-1", "produce-2", "consume-1", "consume-2")}

    def _start(self, name: str) -> Command:
        self._epoch += 1
        role = name.partition("-")[0]
        ledger = self._folder / f"{name}-{self._epoch}.jsonl"
        return Command([sys.executable, str(WORKER), role, self._address, str(ledger), str(self._epoch)], 1, 2)

    def kill(self, name: str) -> None:
        assert self.members[name].poll() is None, f"{name} had ended by itself"
        self.members[name].kill()
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
