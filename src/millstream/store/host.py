"""A store of many processes on one machine: runs its coordinator in a child process, and restarts it whenever it dies.

python -m millstream.store.host PLAN.json        the command of the child process
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from millstream import folders
from millstream.decoding import decode_json
from millstream.errors import StoreError
from millstream.retry import BackOff
from millstream.store.base import Reads
from millstream.store.client import Address, StoreClient
from millstream.store.coordinator import Coordinator, StorePlan
from millstream.store.segments import link_disk, remove_segments, segment_folder, segment_folders
from millstream.store.sessions import DISCONNECT_S
from millstream.store.sharded import ShardedClient

STORES = "millstream-store-"
STORE_CONNECT_S = 30.0
MIN_SERVICE_S = 1.0
"""A coordinator that fails earlier than this is restarted with back-off."""
RESTART = BackOff(first_s=0.05, longest_s=5.0)


def make_plan(
    tasks: Mapping[str, Reads],
    *,
    capacity_rows: int | None = None,
    capacity_bytes: int | None = None,
    memory_bytes: int | None = None,
    spill: str | None = None,
    host: str = "127.0.0.1",
    node: str = "here",
    folder: Path | None = None,
    disconnect_s: float = DISCONNECT_S,
    shard: int = 0,
) -> StorePlan:
    """`folder`: of the journal; by default a temporary one. `memory_bytes`: of each node; further rows are on disk, in `spill`,
    by default the folder for temporary files. Raises `StoreError` if that cannot be written."""
    name = secrets.token_hex(6)
    memory = segment_folder(name, node)
    if memory_bytes is not None:
        spill = spill or tempfile.gettempdir()
        link_disk(memory, Path(spill))
    return StorePlan(
        tasks=dict(tasks),
        capacity_rows=capacity_rows,
        capacity_bytes=capacity_bytes,
        memory_bytes=memory_bytes,
        spill=spill,
        host=host,
        port=_free_port(host),
        token=secrets.token_hex(16),
        node=node,
        memory=str(memory),
        journal=str(folder or folders.make(STORES, _remove_memory, name=name)),
        is_temporary=folder is None,
        disconnect_s=disconnect_s,
        shard=shard,
    )


def _remove_memory(journal: Path) -> None:
    """The segments of a store whose owner and coordinator were killed."""
    name = journal.name.removeprefix(STORES).partition("-")[0]
    for folder in segment_folders(name):
        remove_segments(folder)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


async def run_coordinator(plan: StorePlan, on_ready: threading.Event | None = None) -> None:
    """Run the coordinator of a plan, and the segment server of its node, until cancelled."""
    async with Coordinator(plan).serving():
        if on_ready is not None:
            on_ready.set()
        await asyncio.get_running_loop().create_future()


class SharedStore:
    """A running store. Processes connect with `address`; `close` removes the folder of its segments."""

    def __init__(self, plan: StorePlan) -> None:
        self.plan = plan
        self._is_closing = False
        self._file = Path(plan.journal) / "plan.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(plan))
        self.process = self._start()
        self._watching = threading.Thread(target=self._restart_forever, name="store", daemon=True)
        self._watching.start()

    @property
    def address(self) -> Address:
        return _address(self.plan)

    async def connect(self, name: str | None = None) -> StoreClient:
        return await StoreClient.connect(self.address, name, give_up_s=STORE_CONNECT_S)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "millstream.store.host", str(self._file)], stdin=subprocess.PIPE)

    def _restart_forever(self) -> None:
        began, num_failures = time.monotonic(), 0
        while True:
            code = self.process.wait()
            if self.process.stdin is not None:
                self.process.stdin.close()
            if self._is_closing:
                return
            has_failed = code > 0 and time.monotonic() - began < MIN_SERVICE_S  # it was not killed
            num_failures = num_failures + 1 if has_failed else 0
            if num_failures:
                time.sleep(RESTART.wait_s(num_failures))
            began = time.monotonic()
            self.process = self._start()

    def close(self) -> None:
        self._is_closing = True
        while self._watching.is_alive():  # it may be restarting the process just now
            self.process.terminate()
            self._watching.join(0.1)
        remove_segments(Path(self.plan.memory))
        if self.plan.is_temporary:
            folders.remove(Path(self.plan.journal))

    def __enter__(self) -> SharedStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ShardedStore:
    """A running store of several coordinators: see `millstream.store.sharded`. Processes connect with `addresses`."""

    def __init__(self, tasks: Mapping[str, Reads], shards: int, **more: Any) -> None:
        """`more`: of `make_plan`. Capacities and bounds are of each coordinator."""
        self.shards = [SharedStore(make_plan(tasks, shard=number, **more)) for number in range(shards)]

    @property
    def addresses(self) -> list[Address]:
        return [shard.address for shard in self.shards]

    async def connect(self, name: str | None = None) -> ShardedClient:
        return await ShardedClient.connect(self.addresses, name, give_up_s=STORE_CONNECT_S)

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def __enter__(self) -> ShardedStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _address(plan: StorePlan) -> Address:
    return Address(host=plan.host, port=plan.port, token=plan.token, node=plan.node, folder=plan.memory)


async def connect_here(plan: StorePlan, name: str) -> StoreClient:
    """From another process of the machine."""
    return await StoreClient.connect(_address(plan), name)


def _end_with_parent(plan: StorePlan) -> None:
    """Exit when the parent does: it alone holds the other end of our standard input."""
    sys.stdin.buffer.read()
    remove_segments(Path(plan.memory))
    os._exit(0)


def coordinator_main(path: Path) -> None:
    try:
        plan = decode_json(path.read_bytes(), StorePlan)
        threading.Thread(target=_end_with_parent, args=(plan,), name="parent", daemon=True).start()
        asyncio.run(run_coordinator(plan))
    except (KeyboardInterrupt, StoreError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    coordinator_main(Path(sys.argv[1]))
