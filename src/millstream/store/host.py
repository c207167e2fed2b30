"""A store of many processes on one machine: starts its coordinator in a process of its own, and again whenever that dies.

python -m millstream.store.host PLAN.json        what the process runs
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec
from msgspec import Struct

from millstream import folders
from millstream.errors import StoreError
from millstream.store import Reads
from millstream.store.client import Address, StoreClient
from millstream.store.coordinator import GRACE_S, Coordinator
from millstream.store.holder import Holder
from millstream.store.segments import memory_folder, memory_folders

STORES = "millstream-store-"
START_S = 30.0
SHORT_LIFE_S = 1.0
MAX_PAUSE_S = 5.0


class Plan(Struct, frozen=True, kw_only=True):
    """Everything a coordinator needs to be what it was."""

    tasks: dict[str, Reads]
    capacity_rows: int | None
    capacity_bytes: int | None
    host: str
    port: int
    token: str
    node: str
    memory: str
    """The folder of this node's segments."""
    journal: str
    """The folder of the journal."""
    is_temporary: bool = True
    """Whether that folder goes when the store is closed."""
    grace_s: float = GRACE_S

    @property
    def address(self) -> Address:
        return Address(host=self.host, port=self.port, token=self.token, node=self.node, folder=self.memory)


def make_plan(
    tasks: Mapping[str, Reads],
    *,
    capacity_rows: int | None = None,
    capacity_bytes: int | None = None,
    host: str = "127.0.0.1",
    node: str = "here",
    folder: Path | None = None,
    grace_s: float = GRACE_S,
) -> Plan:
    """`folder` is where the journal goes; by default a temporary one."""
    name = secrets.token_hex(6)
    journal = folders.make(STORES, _remove_memory, name=name) if folder is None else folder
    return Plan(
        tasks=dict(tasks),
        capacity_rows=capacity_rows,
        capacity_bytes=capacity_bytes,
        host=host,
        port=_free_port(host),
        token=secrets.token_hex(16),
        node=node,
        memory=str(memory_folder(name, node)),
        journal=str(journal),
        is_temporary=folder is None,
        grace_s=grace_s,
    )


def _remove_memory(journal: Path) -> None:
    """Of a store whose owner was killed, and whose coordinator could not tidy up."""
    name = journal.name.removeprefix(STORES).partition("-")[0]
    for folder in memory_folders(name):
        shutil.rmtree(folder, ignore_errors=True)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


async def run(plan: Plan, on_ready: threading.Event | None = None) -> None:
    """The coordinator of a plan, and the holder of its node, until cancelled."""
    holder = Holder(Path(plan.memory), plan.token)
    coordinator = Coordinator(
        plan.tasks,
        folder=Path(plan.journal),
        node=plan.node,
        token=plan.token,
        capacity_rows=plan.capacity_rows,
        capacity_bytes=plan.capacity_bytes,
        unlink=holder.unlink,
        names=holder.names,
        grace_s=plan.grace_s,
    )
    serving = await holder.serve(plan.host)
    coordinator.own_address = serving.sockets[0].getsockname()[:2]
    async with serving, await coordinator.serve(plan.host, plan.port):
        if on_ready is not None:
            on_ready.set()
        await asyncio.get_running_loop().create_future()


class SharedStore:
    """A running store. `address` is what processes connect with; the folder in memory goes when it is closed."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._is_closing = False
        self._file = Path(plan.journal) / "plan.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(plan))
        self.process = self._start()
        self._keeping = threading.Thread(target=self._keep, name="store", daemon=True)
        self._keeping.start()

    @property
    def address(self) -> Address:
        return self._plan.address

    async def connect(self, name: str | None = None) -> StoreClient:
        return await StoreClient.connect(self.address, name, give_up_s=START_S)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "millstream.store.host", str(self._file)], stdin=subprocess.PIPE)

    def _keep(self) -> None:
        began, pause_s = time.monotonic(), 0.0
        while (code := self.process.wait()) is not None and not self._is_closing:
            has_failed = code > 0 and time.monotonic() - began < SHORT_LIFE_S  # by itself: it was not killed
            pause_s = min(MAX_PAUSE_S, 2 * pause_s + 0.05) if has_failed else 0.0
            time.sleep(pause_s)  # what cannot live is not started again and again at full speed
            began = time.monotonic()
            self.process = self._start()

    def close(self) -> None:
        self._is_closing = True
        while self._keeping.is_alive():  # it may just be starting another one
            self.process.terminate()
            self._keeping.join(0.1)
        shutil.rmtree(self._plan.memory, ignore_errors=True)
        if self._plan.is_temporary:
            folders.remove(Path(self._plan.journal))

    def __enter__(self) -> SharedStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end_with_parent(plan: Plan) -> None:
    """The other end of our standard input is held by whoever started us, and by nobody else."""
    sys.stdin.buffer.read()
    shutil.rmtree(plan.memory, ignore_errors=True)
    os._exit(0)


def main(path: Path) -> None:
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=Plan)
        threading.Thread(target=_end_with_parent, args=(plan,), name="parent", daemon=True).start()
        asyncio.run(run(plan))
    except (KeyboardInterrupt, StoreError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
