"""The store on Ray: the same promises, a coordinator that Ray starts again, nodes that come and leave. `make test-ray`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.store import Reads, Store, Want
from millstream.testing.store import StoreSuite
from support.store_load import ProcessGroup, check_ledgers, drain

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

from ray.cluster_utils import Cluster  # noqa: E402

from millstream.cluster.store import RayStore, connect  # noqa: E402
from millstream.store.client import Address  # noqa: E402
from millstream.store.coordinator import StorePlan  # noqa: E402

TASKS = {"train": Reads(("tokens",), by_group=False)}
MEMORY = 100 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    os.environ["RAY_TMPDIR"] = f"/tmp/ray-test-{os.getpid()}"
    os.environ["RAY_AUTH_MODE"] = "disabled"
    Path(os.environ["RAY_TMPDIR"]).mkdir(exist_ok=True)
    head = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "object_store_memory": MEMORY, "include_dashboard": False},
    )
    ray.init(address=head.address, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not know this folder
    yield head
    ray.shutdown()
    head.shutdown()


@pytest.mark.usefixtures("cluster")
class TestRay(StoreSuite):
    @asynccontextmanager
    async def open(
        self, tasks: Mapping[str, Reads], capacity_rows: int | None = None, capacity_bytes: int | None = None
    ) -> AsyncIterator[Store]:
        running = RayStore(tasks, capacity_rows=capacity_rows, capacity_bytes=capacity_bytes)
        client = await running.connect()
        try:
            yield client
        finally:
            await client.close()
            running.close()


class OnNode:
    """A process on a node of the cluster."""

    async def put(self, plan: StorePlan, keys: list[int], size: int) -> list[int]:
        store = await connect(plan)
        return list(await store.put(keys, {"tokens": [np.full(size, key, np.int64) for key in keys]}))

    async def read(self, plan: StorePlan, rows: int) -> list[tuple[int, int]]:
        """Key and length of rows, given back unread by others."""
        store = await connect(plan)
        lease = await store.claim("train", Want(rows=rows))
        found = [(int(cell[0]), len(cell)) for cell in lease["tokens"] if (cell == cell[0]).all()]
        await store.give_back(lease)
        return found


def on(node: Any) -> Any:
    return ray.remote(OnNode).options(num_cpus=0, resources={node: 0.001}).remote()


def test_twenty_kills_of_a_coordinator_that_ray_starts_again_lose_nothing(cluster: Cluster, tmp_path: Path) -> None:
    store, rng = RayStore(TASKS, capacity_rows=400), random.Random(0)
    plan = store.plan

    class AsShared:
        address = Address(host=plan.host, port=plan.port, token=plan.token, node=plan.node, folder=plan.memory)
        connect = staticmethod(store.connect)

    crew = ProcessGroup(AsShared, tmp_path)  # type: ignore[arg-type]
    time.sleep(1.0)
    for _ in range(20):
        pid = store.ask_pid()
        time.sleep(rng.uniform(0.05, 0.4))
        os.kill(pid, signal.SIGKILL)
    store.ask_pid()
    time.sleep(1.5)
    for name in crew.members:
        crew.kill(name)
    time.sleep(3.0)  # the dead are given back after their grace
    check_ledgers(tmp_path, *asyncio.run(drain(AsShared)))  # type: ignore[arg-type]
    store.close()


def num_files(folder: Path) -> int:
    return len(list(folder.glob("*/*")))


@pytest.mark.parametrize("memory_bytes", [None, 1])
def test_a_node_that_leaves_takes_what_lived_there_alone_and_the_store_says_which_rows(
    cluster: Cluster, tmp_path: Path, memory_bytes: int | None
) -> None:
    """In memory, and with all rows on disk."""
    node = cluster.add_node(num_cpus=1, resources={"far": 1}, object_store_memory=MEMORY)
    cluster.wait_for_nodes()
    store = RayStore(TASKS, memory_bytes=memory_bytes, spill=None if memory_bytes is None else str(tmp_path))

    async def program() -> None:
        client = await store.connect()
        far = on("far")
        here = list(await client.put([1, 2], {"tokens": [np.full(50_000, key, np.int64) for key in (1, 2)]}))
        there = await far.put.remote(store.plan, [3, 4, 5], 50_000)
        small = await far.put.remote(store.plan, [6], 10)
        assert num_files(tmp_path) == (0 if memory_bytes is None else 3), "a file for each put"
        assert await far.read.remote(store.plan, 6) == [
            (1, 50_000),
            (2, 50_000),
            (3, 50_000),
            (4, 50_000),
            (5, 50_000),
            (6, 10),
        ]
        lease = await client.claim("train", Want(rows=6))
        assert [int(cell.sum()) // len(cell) for cell in lease["tokens"]] == [1, 2, 3, 4, 5, 6], "fetched from its node"
        await client.give_back(lease)
        del far
        cluster.remove_node(node, allow_graceful=False)
        until = time.monotonic() + 60
        while not (lost := await client.lost()) and time.monotonic() < until:
            await asyncio.sleep(0.2)
        assert sorted(row.row_id for row in lost) == sorted(there)
        assert {row.group_id for row in lost} == {3, 4, 5}
        left = await client.claim("train", Want(rows=6, patience_s=0))
        assert left.row_ids == [*here, *small]
        await client.acknowledge(left)
        await client.close()

    asyncio.run(program())
    store.close()


def test_the_store_starts_within_a_second_or_two_of_ray_itself(cluster: Cluster) -> None:
    store = RayStore(TASKS)
    assert store.pid > 0
    store.close()
    assert not Path(store.plan.memory).exists(), "nothing stays in shared memory"
