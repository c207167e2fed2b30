"""The store against the number of nodes and of coordinators: local processes, or nodes of a Ray cluster on this machine.

    python bench/store.py --nodes 1,2,4,8 [--ray]              payloads: every node has a producer, a consumer, a segment server
    python bench/store.py --clients 1,2,4,8 [--shards 1,2,4]   metadata: operations/s of the coordinators

Every byte that a consumer gets is read. Where there are fewer cores than processes, the CPU time by GB and by operation says
what more cores would give.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from internals import (
    Reads,
    SegmentServer,
    SegmentServerAgent,
    ShardedClient,
    ShardedStore,
    SharedStore,
    StoreAddress,
    StoreClient,
    StorePlan,
    StoreTimeout,
    Want,
    make_plan,
    segment_folder,
    shard_of,
)
from report import Row, alone, say

TASKS = {"train": Reads(("tokens",), by_group=False)}
ROWS, ROW_BYTES = 16, 512 << 10  # of a put: 8 MiB
NODE_BYTES = 256 << 20  # rows that wait, for each node
START_S = 60.0  # in which processes start and connect
LOOPS = 4  # of a client that measures the coordinator: as many requests are under way at once
TICKS = os.sysconf("SC_CLK_TCK")


Client = ShardedClient | StoreClient


class Work(TypedDict):
    """What one process did."""

    role: str
    bytes: int
    operations: int
    cpu_s: float
    wall_s: float
    line_bytes: int  # between it and the coordinator


# ---- one process -----------------------------------------------------------------------------------------------------


async def produce(client: Client, partition: str, until: float) -> tuple[int, int]:
    """Bytes, and operations."""
    columns, operations = {"tokens": [np.full(ROW_BYTES, row, np.uint8) for row in range(ROWS)]}, 0
    while time.perf_counter() < until:
        try:
            await client.put(range(ROWS), columns, partition=partition, deadline_s=until - time.perf_counter() + 0.01)
        except StoreTimeout:
            break
        operations += 1
    return operations * ROWS * ROW_BYTES, operations


async def consume(client: Client, partition: str, until: float) -> tuple[int, int]:
    found, operations = 0, 0
    while (left := until - time.perf_counter()) > 0:
        try:
            lease = await client.claim("train", Want(rows=ROWS, deadline_s=left), partition=partition)
        except StoreTimeout:
            break
        for cell in lease["tokens"]:
            np.bitwise_xor.reduce(cell.view(np.uint64))
            found += cell.nbytes
        await client.acknowledge(lease)
        operations += 2
    return found, operations


async def small(client: Client, partition: str, until: float) -> tuple[int, int]:
    """Put, claim and acknowledge one row, again and again, `LOOPS` of it at once."""

    async def loop() -> int:
        columns: dict[str, list[Any]] = {"tokens": [np.arange(64, dtype=np.int32)], "reward": [1.0]}
        operations = 0
        while time.perf_counter() < until:
            await client.put(0, columns, partition=partition)
            await client.acknowledge(await client.claim("train", Want(rows=1), partition=partition))
            operations += 3
        return operations

    return 0, sum(await asyncio.gather(*(loop() for _ in range(LOOPS))))


ROLES: dict[str, Callable[[Client, str, float], Coroutine[Any, Any, tuple[int, int]]]] = {
    "producer": produce,
    "consumer": consume,
    "client": small,
}


async def work(client: Client, role: str, partition: str, seconds: float) -> Work:
    before, cpu, began = line_bytes(client), time.process_time(), time.perf_counter()
    found, operations = await ROLES[role](client, partition, began + seconds)
    return Work(
        role=role,
        bytes=found,
        operations=operations,
        cpu_s=time.process_time() - cpu,
        wall_s=time.perf_counter() - began,
        line_bytes=line_bytes(client) - before,
    )


def line_bytes(store: Client) -> int:
    """What the kernel has sent and received on the connections to the coordinators (`struct tcp_info`)."""
    if isinstance(store, ShardedClient):
        return sum(map(line_bytes, store._shards))
    protocol = store._connection._connection
    assert protocol is not None and protocol.transport is not None
    line: socket.socket = protocol.transport.get_extra_info("socket")
    acked, received = struct.unpack_from("=QQ", line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 120)
    return int(acked + received)


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


# ---- nodes that are processes of this machine ------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")


def node_address(plan: StorePlan, node: str) -> StoreAddress:
    folder = segment_folder(Path(plan.memory).name.split("-")[1], node)
    return StoreAddress(host=plan.host, port=plan.port, token=plan.token, node=node, folder=str(folder))


def serve_node(plan: StorePlan, node: str, connected: Any) -> None:
    """`connected`: a barrier, passed once the coordinator, which is still starting, knows this node."""

    async def main() -> None:
        server = SegmentServer(Path(node_address(plan, node).folder), plan.token)
        agent = SegmentServerAgent(server, (plan.host, plan.port), token=plan.token, node=node, give_up_s=START_S)
        running = asyncio.create_task(agent.run(plan.host))
        await asyncio.to_thread(agent.is_connected.wait, START_S)
        await asyncio.to_thread(connected.wait, START_S)
        await running

    asyncio.run(main())


def run_client(
    addresses: list[StoreAddress], role: str, partition: str, seconds: float, barrier: Any, results: Any
) -> None:
    async def main() -> Work:
        client = await ShardedClient.connect(addresses, role)
        barrier.wait()
        try:
            return await work(client, role, partition, seconds)
        finally:
            await client.close()

    results.put(asyncio.run(main()))


Job = tuple[list[StoreAddress], str, str]
"""The coordinators, the role, the partition."""


def run_jobs(jobs: Sequence[Job], seconds: float, watched: dict[str, list[int]]) -> tuple[list[Work], dict[str, float]]:
    """What the processes of these jobs did, and the CPU seconds of other processes in that time, by role."""
    barrier, results = FORK.Barrier(len(jobs) + 1), FORK.Queue()
    processes = [FORK.Process(target=run_client, args=(*job, seconds, barrier, results)) for job in jobs]
    for process in processes:
        process.start()
    barrier.wait(START_S)
    before = {role: sum(map(cpu_of, pids)) for role, pids in watched.items()}
    found = [results.get(timeout=START_S + seconds) for _ in jobs]
    spent = {role: sum(map(cpu_of, pids)) - before[role] for role, pids in watched.items()}
    for process in processes:
        process.join()
    return found, spent


@contextmanager
def segment_servers(plan: StorePlan, nodes: Sequence[str]) -> Any:
    """Their process ids, once the coordinator knows all of them."""
    connected = FORK.Barrier(len(nodes) + 1)
    servers = [FORK.Process(target=serve_node, args=(plan, node, connected)) for node in nodes]
    for server in servers:
        server.start()
    try:
        connected.wait(START_S)
        yield [server.pid for server in servers]
    finally:
        for server, node in zip(servers, nodes, strict=True):
            server.terminate()
            server.join()
            SegmentServer(Path(node_address(plan, node).folder), "").remove()


def local_nodes(num: int, seconds: float, *, is_near: bool) -> tuple[list[Work], dict[str, float]]:
    nodes = [f"node{number}" for number in range(num)]
    place = segment_folder("bench", "head").parent
    capacity = min(num * NODE_BYTES, shutil.disk_usage(place).free // 4)
    say(f"segments in {place}, at most {capacity >> 20} MiB of them with rows")
    plan = make_plan(TASKS, capacity_bytes=capacity, node="head")
    with SharedStore(plan) as store, segment_servers(plan, nodes) as pids:
        shift = 0 if is_near else 1
        jobs = [([node_address(plan, node)], "producer", node) for node in nodes]
        jobs += [
            ([node_address(plan, node)], "consumer", nodes[(number + shift) % num]) for number, node in enumerate(nodes)
        ]
        return run_jobs(jobs, seconds, {"coordinator": [store.process.pid], "segment server": pids})


def node_rows(counts: Sequence[int], seconds: float, *, on_ray: bool) -> list[Row]:
    """Payload bandwidth against the number of nodes."""
    rows = []
    for is_near in (True, False):
        for num in counts:
            if num == 1 and not is_near:
                continue
            say(f"--- {num} nodes, rows of {'its own' if is_near else 'another'} node")
            if on_ray:
                from store_nodes_ray import ray_nodes  # Ray is an extra

                found, spent = ray_nodes(num, seconds, is_near=is_near)
            else:
                found, spent = local_nodes(num, seconds, is_near=is_near)
            rows += _bandwidth(f"{num} nodes, rows of {'its own' if is_near else 'another'} node", found, spent)
    return rows


def _bandwidth(name: str, found: Sequence[Work], spent: dict[str, float]) -> list[Row]:
    consumers = [one for one in found if one["role"] == "consumer"]
    read, wall = sum(one["bytes"] for one in consumers), max(one["wall_s"] for one in found)
    put = sum(one["bytes"] for one in found if one["role"] == "producer")
    cpu = {role: sum(one["cpu_s"] for one in found if one["role"] == role) for role in ("producer", "consumer")} | spent
    operations, line = sum(one["operations"] for one in found), sum(one["line_bytes"] for one in found)
    return [
        alone(name, "read GB/s, all nodes", read / wall / 1e9),
        alone(name, "read GB/s, of the slowest consumer", min(one["bytes"] for one in consumers) / wall / 1e9),
        *(
            alone(name, f"{role}: CPU s/GB", seconds / ((put if role == "producer" else read) / 1e9))
            for role, seconds in cpu.items()
        ),
        alone(name, "coordinator: bytes on its lines for a MB of payload", line / (read / 1e6), digits=0),
        alone(name, "coordinator: operations/s", operations / wall, digits=0),
    ]


# ---- the coordinator -------------------------------------------------------------------------------------------------


def partition_on(shard: int, num_shards: int, number: int) -> str:
    """A name for the partition of a client, on this coordinator."""
    names = (f"client {number} {attempt}" for attempt in itertools.count())
    return next(name for name in names if shard_of(name, num_shards) == shard)


def coordinator_rows(counts: Sequence[int], shards: Sequence[int], seconds: float) -> list[Row]:
    """Operations a second: small puts, claims and acknowledgements, each client in its own partition."""
    rows = []
    for num_shards, num in itertools.product(shards, counts):
        name = f"coordinators: {num_shards}, clients: {num}"
        say(f"--- {name}")
        with ShardedStore(TASKS, num_shards) as store:
            jobs = [
                (store.addresses, "client", partition_on(number % num_shards, num_shards, number))
                for number in range(num)
            ]
            found, spent = run_jobs(jobs, seconds, {"coordinator": [one.process.pid for one in store.shards]})
        operations, wall = sum(one["operations"] for one in found), max(one["wall_s"] for one in found)
        rows += [
            alone(name, "operations/s", operations / wall, digits=0),
            alone(
                name, "coordinator: CPU microseconds an operation", 1e6 * spent["coordinator"] / operations, digits=1
            ),
            alone(name, "coordinator: share of a core, each", spent["coordinator"] / wall / num_shards),
            alone(
                name,
                "clients: CPU microseconds an operation",
                1e6 * sum(w["cpu_s"] for w in found) / operations,
                digits=1,
            ),
        ]
    return rows
