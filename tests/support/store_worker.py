"""A producer or a consumer in a process of its own, with a ledger that outlives it: `python store_worker.py ROLE ADDRESS LEDGER EPOCH`.

Ledger lines are written before and after each operation, so that whoever reads them knows what must have happened and what may.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millstream.decoding import decode_json
from millstream.store import Want
from millstream.store.client import Address, StoreClient

ROWS = 4


class Ledger:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, keys: list[int], row_ids: Sequence[int] = ()) -> None:
        line = json.dumps({"what": what, "keys": keys, "row_ids": list(row_ids), "at": time.time()})
        os.write(self._file, line.encode() + b"\n")


def cells(key: int) -> np.ndarray[Any, Any]:
    """What belongs to a key: every third one is too large to travel with its request."""
    return np.full(20_000 if key % 3 == 0 else 16, key, np.int64)


async def produce(store: StoreClient, ledger: Ledger, epoch: int) -> None:
    number = 0
    while True:
        keys = [epoch * 1_000_000 + number * ROWS + row for row in range(ROWS)]
        ledger.write("putting", keys)
        ids = await store.put(keys, {"key": keys, "tokens": [cells(key) for key in keys]})
        ledger.write("put", keys, list(ids))
        number += 1


async def consume(store: StoreClient, ledger: Ledger) -> None:
    while True:
        lease = await store.claim("train", Want(rows=6, patience_s=0.1))
        keys = lease["key"]
        assert all(np.array_equal(found, cells(key)) for key, found in zip(keys, lease["tokens"], strict=True))
        ledger.write("got", keys, lease.row_ids)
        await store.acknowledge(lease)
        ledger.write("acknowledged", keys, lease.row_ids)


async def main(role: str, address: str, path: str, epoch: str) -> None:
    store = await StoreClient.connect(decode_json(address, Address))
    ledger = Ledger(Path(path))
    await (produce(store, ledger, int(epoch)) if role == "produce" else consume(store, ledger))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
