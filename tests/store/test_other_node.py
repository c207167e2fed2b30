"""Rows in the memory of another node: read from its segment server, whose connection to the coordinator may be lost meanwhile."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millstream.errors import StoreError
from millstream.store import Reads, Want
from millstream.store.client import StoreClient
from millstream.store.coordinator import StorePlan
from millstream.store.host import make_plan
from support.store_load import ForkedStore

TASKS = {"train": Reads(("tokens",), by_group=False)}
LARGE = np.arange(20_000)
SERVER = """
import asyncio, sys, threading
from pathlib import Path
from millstream.store.segments import SegmentServer, SegmentServerAgent
folder, host, port, token = sys.argv[1:]
agent = SegmentServerAgent(
    SegmentServer(Path(folder), token), (host, int(port)), token=token, node="there", give_up_s=10
)
threading.Thread(target=lambda: (agent.is_connected.wait(), print("connected", flush=True)), daemon=True).start()
asyncio.run(agent.run(host))
"""


def segment_server(plan: StorePlan, folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SERVER, str(folder), plan.host, str(plan.port), plan.token]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@asynccontextmanager
async def rows_elsewhere(folder: Path) -> AsyncIterator[tuple[StoreClient, subprocess.Popen[str]]]:
    """A client of a store that was restarted and has two rows in the memory of another node, whose segment server is stopped
    and has not reconnected."""
    plan = make_plan(TASKS, folder=folder / "journal", disconnect_s=0.2)
    with ForkedStore(plan) as store, segment_server(plan, folder / "there") as server:
        try:
            assert server.stdout is not None
            assert await asyncio.to_thread(server.stdout.readline) == "connected\n"
            there = msgspec.structs.replace(store.address, node="there", folder=str(folder / "there"))
            producer, consumer = await StoreClient.connect(there), await store.connect()
            await producer.put([1, 2], {"tokens": [LARGE, 2 * LARGE]})
            server.send_signal(signal.SIGSTOP)
            store.process.kill()
            yield consumer, server
            await producer.close()
            await consumer.close()
        finally:
            server.kill()


def test_a_claim_waits_for_a_segment_server_that_reconnects(tmp_path: Path) -> None:
    async def program() -> None:
        async with rows_elsewhere(tmp_path) as (consumer, server):
            claiming = asyncio.create_task(consumer.claim("train", Want(rows=2)))
            assert (await consumer.stats()).rows == 2, "the coordinator is there again"
            await asyncio.sleep(0.2)
            assert not claiming.done()
            server.send_signal(signal.SIGCONT)
            lease = await asyncio.wait_for(claiming, 10)
            assert (lease["tokens"][0] == LARGE).all() and (lease["tokens"][1] == 2 * LARGE).all()
            await consumer.acknowledge(lease)

    asyncio.run(program())


def test_a_claim_of_rows_on_a_node_that_does_not_come_back_fails_by_its_name(tmp_path: Path) -> None:
    async def program() -> None:
        async with rows_elsewhere(tmp_path) as (consumer, _):
            with pytest.raises(StoreError, match="node there is gone"):
                await asyncio.wait_for(consumer.claim("train", Want(rows=2)), 10)

    asyncio.run(program())
