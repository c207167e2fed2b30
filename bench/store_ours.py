"""Our side of `bench/store.py`: the store on Ray, writers and readers in processes of their own. Prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from millstream.cluster.store import RayStore, connect
from millstream.errors import StreamEnded
from millstream.store import Reads, Want
from millstream.store.client import StoreClient
from millstream.store.host import StorePlan
from store_workloads import Columns, checksum_of, private_bytes, run

TASKS = {"all": Reads((), by_group=False)}


class Reader:
    def __init__(self, plan: StorePlan) -> None:
        self._plan, self._client = plan, None

    async def _store(self) -> StoreClient:
        self._client = self._client or await connect(self._plan)
        return self._client

    async def read(self, partition: str, rows: int, names: Sequence[str]) -> tuple[float, int]:
        store = await self._store()
        began = time.perf_counter()
        lease = await store.claim("all", Want(rows=rows), partition=partition)
        checksum = sum(checksum_of(lease[name]) for name in names)
        seconds = time.perf_counter() - began
        await store.acknowledge(lease)
        return seconds, checksum

    async def drain(self, partition: str, rows: int, names: Sequence[str], total: int) -> int:
        store, seen = await self._store(), 0
        while seen < total:
            try:
                lease = await store.claim("all", Want(rows=rows), partition=partition)
            except StreamEnded:
                break
            for name in names:
                checksum_of(lease[name])
            await store.acknowledge(lease)
            seen += len(lease)
        return seen


class Writer:
    def __init__(self, plan: StorePlan) -> None:
        self._plan, self._client = plan, None

    async def put(self, partition: str, columns: Columns) -> float:
        self._client = self._client or await connect(self._plan)
        began = time.perf_counter()
        await self._client.put(0, columns, partition=partition)
        return time.perf_counter() - began

    async def stream(self, partition: str, batches: Sequence[Columns]) -> None:
        for columns in batches:
            await self.put(partition, columns)


class Ours:
    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._store = RayStore(TASKS)
        self._client = self._loop.run_until_complete(self._store.connect())

    def put(self, partition: str, columns: Columns) -> None:
        self._loop.run_until_complete(self._client.put(0, columns, partition=partition))

    def clear(self, partition: str) -> None:
        self._loop.run_until_complete(self._client.drop_partition(partition))

    def reader(self) -> Any:
        return ray.remote(Reader).options(num_cpus=0).remote(self._store.plan)

    def writer(self) -> Any:
        return ray.remote(Writer).options(num_cpus=0).remote(self._store.plan)

    def bytes_held(self) -> int:
        folder = Path(self._store.plan.memory)
        shared = sum(path.stat().st_blocks * 512 for path in folder.iterdir()) if folder.exists() else 0
        return private_bytes(self._store.ask_pid()) + shared


if __name__ == "__main__":
    repeat, resident, stream_batches = json.loads(sys.argv[1])
    print(json.dumps(run(Ours(), repeat=repeat, resident=resident, stream_batches=stream_batches)))
